"""Token ids -> text, piece by piece, cut at the first stop string. The tokenizers library's streaming decoder holds
back bytes that aren't a whole character yet; what could be the beginning of a stop string is held back here, until it
is one or can't be one. Nothing else in the engine knows text."""
from tokenizers.decoders import DecodeStream

class OutputText:
    """The text of one request: `append` ids as they come, `flush` at the end; `text` is what may be shown so far."""
    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self.text, self.is_stopped, self._held, self._stop = "", False, "", stop
        self._tokenizer, self._decoder = tokenizer and tokenizer._tokenizer, DecodeStream(skip_special_tokens=True)
    def append(self, token_id: int) -> None:
        """Decode one more token. If a stop string appears, sets `is_stopped` and shows only what comes before."""
        if self._tokenizer is not None and not self.is_stopped:
            self._hold(self._decoder.step(self._tokenizer, token_id) or "")
            undecided = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
            self._show(len(self._held) - (0 if self.is_stopped else max(undecided, default=0)))
    def flush(self, token_ids: list[int]) -> None:
        """No more tokens will come (`token_ids` are all there were): show what was held back, without the bytes of a
        last character that never got whole."""
        if self._tokenizer is not None and not self.is_stopped:
            whole, decoded = self._tokenizer.decode(token_ids, skip_special_tokens=True), self.text + self._held
            self._hold(whole[len(decoded):].rstrip("\ufffd") if whole.startswith(decoded) else "")
            self._show(len(self._held))
    def _hold(self, piece: str) -> None:
        self._held += piece
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self._held, self.is_stopped = self._held[:min(found)], True
    def _show(self, num_chars: int) -> None:
        self.text, self._held = self.text + self._held[:num_chars], self._held[num_chars:]

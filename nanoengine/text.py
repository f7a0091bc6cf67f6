"""Token ids -> text, piece by piece, cut at the first stop string. The tokenizers library's streaming decoder holds
back bytes that aren't a whole character yet; what could be the beginning of a stop string is held back here."""
from tokenizers.decoders import DecodeStream

class OutputText:
    """`append` ids, `flush` at the end: `text` is what may be shown so far, up to the stop string once `is_stopped`."""
    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self.text, self.is_stopped, self._held, self._stop = "", False, "", stop
        self._tokenizer, self._decoder = tokenizer and tokenizer._tokenizer, DecodeStream(skip_special_tokens=True)
    def append(self, token_id: int) -> None:
        if self._tokenizer is not None and not self.is_stopped:
            try:
                piece = self._decoder.step(self._tokenizer, token_id)
            except Exception:       # bytes that were shown make no character with these: begin anew
                self._decoder = DecodeStream(skip_special_tokens=True)
                piece = self._decoder.step(self._tokenizer, token_id)
            self._add(piece or "")
    def flush(self, token_ids: list[int]) -> None:
        """No more will come (`token_ids` are all): show what was held back, but for the bytes of half a character."""
        if self._tokenizer is not None and not self.is_stopped:
            whole, decoded = self._tokenizer.decode(token_ids, skip_special_tokens=True), self.text + self._held
            self._add(whole[len(decoded):].rstrip("\ufffd") if whole.startswith(decoded) else "", is_last=True)
    def _add(self, piece: str, is_last: bool = False) -> None:
        held = self._held + piece
        found = [at for at in map(held.find, self._stop) if at >= 0]
        undecided = [n for stop in self._stop for n in range(1, len(stop)) if held.endswith(stop[:n]) and not is_last]
        end = min(found) if found else len(held) - max(undecided, default=0)
        self.text, self._held, self.is_stopped = self.text + held[:end], held[end:], bool(found)

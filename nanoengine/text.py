"""Token ids -> text, piece by piece, cut at the first stop string.

The tokenizers library's streaming decoder holds back bytes that aren't a whole character yet. What could be the
beginning of a stop string is held back here, until it is one or can't be one. Nothing else in the engine knows text.
"""

from tokenizers.decoders import DecodeStream


class OutputText:
    """The text of one request. `append` ids as they come; `text` is what may be shown so far."""

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self.stop = stop
        self.text, self._held, self.is_stopped = "", "", False
        self._tokenizer = tokenizer and tokenizer._tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)

    def append(self, token_id: int) -> None:
        """Decode one more token. Sets `is_stopped`, and shows only what comes before, if a stop string appeared."""
        if self._tokenizer is None or self.is_stopped:
            return
        self._held += self._decoder.step(self._tokenizer, token_id) or ""
        found = [at for at in map(self._held.find, self.stop) if at >= 0]
        if found:
            self._held, self.is_stopped = self._held[:min(found)], True
        self._show(len(self._held) - (0 if self.is_stopped else self._num_undecided()))

    def flush(self, token_ids: list[int]) -> None:
        """No more tokens will come (`token_ids` are all there were): show what was held back, without the bytes of a
        last character that never got whole."""
        if self._tokenizer is not None and not self.is_stopped:
            whole, decoded = self._tokenizer.decode(token_ids, skip_special_tokens=True), self.text + self._held
            if whole.startswith(decoded):
                self._held += whole[len(decoded):].rstrip("\ufffd")
        self._show(len(self._held))

    def _show(self, num_chars: int) -> None:
        self.text, self._held = self.text + self._held[:num_chars], self._held[num_chars:]

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max((n for stop in self.stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)

"""Who computes how many tokens in the next step. Nothing here knows tensors, text or devices.

Running sequences come first, oldest first, each with as many uncomputed tokens as the budget allows: one if
it is generating, many if its prompt isn't done or it comes back after a preemption. What is left admits
waiting ones in order of arrival. If a running one needs a block and none is free, the youngest is preempted.
"""

from collections import deque

from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Chunk, Sequence, Status

class Scheduler:
    """Every unfinished sequence is in exactly one of `waiting` and `running`, both in order of arrival.
    max_num_seqs: rows of the persistent batch. max_num_batched_tokens: the budget of one step."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager, self.max_num_batched_tokens = block_manager, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))      # a stack; row 0 is given first
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, one-token ones first; their sequences get the blocks they will write to.
        The tokens count as computed from now on: the device runs steps in the order of their launch. An empty
        list means that there is nothing to compute: the engine is idle, or only waits for results."""
        chunks, budget, num_preemptions = [], self.max_num_batched_tokens, self.num_preemptions
        for sequence in list(self.running):
            num_tokens = min(sequence.num_uncomputed, budget)
            while sequence.status is Status.RUNNING and not self.block_manager.allocate(
                    sequence, sequence.num_computed + num_tokens):
                self._preempt_youngest()                            # perhaps this very one
            if num_tokens and sequence.status is Status.RUNNING:
                chunks.append(self._chunk(sequence, num_tokens))
                budget -= num_tokens
        # After a preemption the pool is full, and the victim's token may be in flight: nobody is admitted.
        while self.waiting and self.free_rows and budget and self.num_preemptions == num_preemptions:
            sequence = self.waiting[0]
            hits = self.block_manager.find_prefix(sequence.token_ids)
            if not self.block_manager.allocate(sequence, sequence.num_tokens, hits):
                break
            self.running.append(self.waiting.popleft())
            sequence.status, sequence.row = Status.RUNNING, self.free_rows.pop()
            sequence.num_computed = len(hits) * self.block_manager.block_size
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed
            num_tokens = min(sequence.num_uncomputed, budget)
            chunks.append(self._chunk(sequence, num_tokens, is_new_row=True))
            budget -= num_tokens
        return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)

    def _chunk(self, sequence: Sequence, num_tokens: int, is_new_row: bool = False) -> Chunk:
        draws_token = num_tokens == sequence.num_uncomputed
        chunk = Chunk(sequence, sequence.num_computed, num_tokens, draws_token, is_new_row)
        sequence.num_computed += num_tokens
        sequence.num_in_flight += draws_token
        return chunk

    def _preempt_youngest(self) -> None:
        victim = self.running[-1]
        self._stop_running(victim)
        victim.status, victim.num_computed = Status.WAITING, 0
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.block_manager.free(sequence)
        self.free_rows.append(sequence.row)
        sequence.row = None

    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Take in a finished step: `token_ids[i]` is what chunk i drew (ignored if it drew nothing). Returns
        the sequences that got a token; those that end with it have a `finish_reason`. Tokens of sequences
        that ended meanwhile are dropped: the step was launched before their end was known."""
        advanced = []
        for chunk, token_id in zip(chunks, token_ids, strict=True):
            sequence = chunk.sequence
            if sequence.status is Status.FINISHED:
                continue
            self.block_manager.register(sequence, chunk.start, chunk.end)
            if chunk.draws_token:
                sequence.num_in_flight -= 1
                sequence.token_ids.append(token_id)
                advanced.append(sequence)
                if token_id in sequence.stop_token_ids:
                    self.finish(sequence, "stop")
                elif len(sequence.token_ids) >= sequence.max_num_tokens:
                    self.finish(sequence, "length")
        return advanced

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in whatever state it is; its blocks and row are free at once."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

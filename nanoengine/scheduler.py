"""Who computes how many tokens in the next step.

One token budget per step. Running sequences come first, oldest first, each with as many of its uncomputed tokens as
the budget allows: one if it is generating, many if its prompt isn't done, all of them if it comes back after a
preemption. What is left admits waiting sequences in order of arrival. If a running sequence needs a block and none is
free, the youngest running one gives all its blocks back and waits, to be recomputed later. Results are taken in by
`update`, possibly after later steps were scheduled. Nothing here knows tensors, text or devices.
"""

from collections import deque

from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Chunk, Sequence, Status


class Scheduler:
    """Every unfinished sequence is in exactly one of `waiting` and `running`, both in order of arrival.

    max_num_seqs: rows of the persistent batch. max_num_batched_tokens: the budget of one step.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))      # a stack; row 0 is given first
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks and give their sequences the blocks they will write to.

        One-token chunks come first: attention treats them as a batch of their own. The tokens count as computed from
        now on, since the device runs steps in the order in which they are launched. An empty list means that there is
        nothing to compute: the engine is idle, or only waits for results.
        """
        num_preemptions = self.num_preemptions
        chunks = self._schedule_running()
        if self.num_preemptions == num_preemptions:     # else the pool is full, and a victim's token is in flight
            budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
            chunks += self._admit_waiting(budget)
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        return chunks

    def _schedule_running(self) -> list[Chunk]:
        chunks, budget = [], self.max_num_batched_tokens
        for sequence in list(self.running):
            num_tokens = min(sequence.num_uncomputed, budget)
            if num_tokens == 0 or sequence.status is not Status.RUNNING:    # preempted for an older one just now
                continue
            while not self.block_manager.allocate(sequence, sequence.num_computed + num_tokens):
                if self._preempt_youngest() is sequence:
                    return chunks
            chunks.append(self._chunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def _admit_waiting(self, budget: int) -> list[Chunk]:
        chunks = []
        while self.waiting and self.free_rows and budget:
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
        return chunks

    @staticmethod
    def _chunk(sequence: Sequence, num_tokens: int, is_new_row: bool = False) -> Chunk:
        draws_token = num_tokens == sequence.num_uncomputed
        chunk = Chunk(sequence, sequence.num_computed, num_tokens, draws_token, is_new_row)
        sequence.num_computed += num_tokens
        sequence.num_in_flight += draws_token
        return chunk

    def _preempt_youngest(self) -> Sequence:
        victim = self.running.pop()
        self._release(victim)
        victim.status, victim.num_computed = Status.WAITING, 0
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Take in a finished step: `token_ids[i]` is what chunk i drew (ignored if it drew nothing).

        Returns the sequences that got a token; those that end with it have a `finish_reason`. Tokens of sequences
        that ended meanwhile are dropped: the step was launched before their end was known.
        """
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
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def _release(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        self.free_rows.append(sequence.row)
        sequence.row = None

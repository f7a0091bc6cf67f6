"""Who computes how many tokens in the next step: running sequences first, oldest first, as the budget allows; the rest
of it admits waiting ones, in order of arrival. If a running one needs a block and none is free, the youngest waits."""
from collections import deque
from itertools import islice
from nanoengine.block_manager import BlockManager
from nanoengine.sequence import Chunk, Sequence, Status

class Scheduler:
    """Every unfinished sequence is in exactly one of `waiting` and `running`, both in order of arrival."""
    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager, self.max_num_batched_tokens = block_manager, max_num_batched_tokens     # budget of a step
        self.waiting, self.running, self.num_preemptions = deque(), [], 0
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))      # of the persistent batch; row 0 is given first
    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
    def schedule(self) -> list[Chunk]:
        """The next step's chunks (or none), one-token ones first, and of these the longest: a GPU begins in this order.
        Sequences get the blocks they will write to, and the tokens count as computed: steps run in order of launch."""
        chunks, budget, victim = [], self.max_num_batched_tokens, None
        for sequence in (*self.running, *islice(self.waiting, len(self.free_rows))):
            is_new_row = sequence.status is Status.WAITING
            if is_new_row:
                if victim or not budget:        # after a preemption the pool is full, and a token may be in flight
                    break
                hits = self.block_manager.find_prefix(sequence.token_ids)
                if not self.block_manager.allocate(sequence, sequence.num_tokens, hits):
                    break
                self.running.append(self.waiting.popleft())
                sequence.status, sequence.row = Status.RUNNING, self.free_rows.pop()
                sequence.num_computed = len(hits) * self.block_manager.block_size
                if sequence.num_cached_tokens is None:
                    sequence.num_cached_tokens = sequence.num_computed
            end = sequence.num_computed + min(sequence.num_uncomputed, budget)
            while sequence.status is Status.RUNNING and not self.block_manager.allocate(sequence, end):
                victim = self.running[-1]                           # perhaps this very one
                self.finish(victim, None)                           # for now
                victim.status, victim.num_computed = Status.WAITING, 0
                self.waiting.appendleft(victim)
                self.num_preemptions += 1
            start, draws_token = sequence.num_computed, end == sequence.num_tokens
            if end > start and sequence.status is Status.RUNNING:
                chunks.append(Chunk(sequence, start, end - start, draws_token, is_new_row))
                sequence.num_computed, sequence.num_in_flight = end, sequence.num_in_flight + draws_token
                budget -= end - start
        return sorted(chunks, key=lambda chunk: -chunk.end if chunk.num_tokens == 1 else 0)
    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Take in a finished step: `token_ids[i]` is what chunk i drew, if any. Returns the sequences that got one;
        those that end with it have a `finish_reason`. Tokens of sequences that ended meanwhile are dropped."""
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
    def finish(self, sequence: Sequence, reason: str | None) -> None:
        """End a sequence in whatever state it is; its blocks and row are free at once."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.block_manager.free(sequence)
            self.free_rows.append(sequence.row)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason, sequence.row = Status.FINISHED, reason, None

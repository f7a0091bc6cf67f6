"""A random walk over the deciding half, beside a device that is nothing but an array.

The device keeps what a rank keeps (history, block tables) and learns of the world only through StepInputs. A slot of
its KV cache holds a hash of all tokens up to its own, made of the hash in the slot before, as real keys and values are
made of what came before. The token drawn after a prefix is a function of that hash. So a chunk that reads one wrong
slot draws wrong tokens, and a sequence that is computed again draws the same ones.

NANOENGINE_WALKS=20000 walks further, and at random; without it the same 400 walks are taken each time.
NANOENGINE_NO_SHRINK=1 stops at the first failure, for those who only ask whether there is one.
"""

import os
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanoengine.block_manager import BlockManager
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence, Status
from nanoengine.step_input import StepInput, flatten

PHASES = [Phase.generate] if os.environ.get("NANOENGINE_NO_SHRINK") else [Phase.generate, Phase.shrink]
NUM_WALKS = int(os.environ.get("NANOENGINE_WALKS", 400))
VOCAB = 7
EMPTY = 1               # the hash of no tokens
NEVER_WRITTEN = -1


def extend(prefix_hash, token_id):
    return (prefix_hash * 1_000_003 + token_id + 1) % (2**61 - 1)


def drawn_after(prefix_hash):
    return (prefix_hash >> 7) % VOCAB


# --- The world


@dataclass
class Request:
    arrival: int            # before this step
    prompt: list
    max_tokens: int
    stop: frozenset
    abort: int | None       # before this step


@dataclass
class World:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    is_late: bool           # a step's result is taken in after the next step was launched
    caching: bool
    modulus: int            # of the blocks' keys: small ones collide
    requests: list


@st.composite
def worlds(draw):
    block_size = draw(st.sampled_from([1, 4, 2, 1, 3, 8, 16]))
    shape = st.tuples(
        st.sampled_from([0, 0, 1, 4]),                          # steps since the last arrival
        st.sampled_from("abbc"),                                # a: a's text; b: b's text; c: the last prompt again
        st.integers(0, 3 * block_size + 1),                     # how much of the text
        st.integers(0, 4),                                      # own tokens after it
        st.integers(1, 16),                                     # max_tokens
        st.sampled_from([(), (), (), (0,)]),                    # stop tokens
        st.sampled_from([None] * 12 + [2, 4, 7, 12, 0]))        # aborted so many steps after its arrival
    shapes = draw(st.lists(shape, min_size=draw(st.sampled_from([1, 3, 6, 8])), max_size=10))
    requests, arrival = [], 0
    for i, (gap, text, length, own, max_tokens, stop, abort) in enumerate(shapes):
        arrival += gap
        text = {"a": [3, 1, 4, 1, 5, 2, 6], "b": [2, 2, 2]}.get(text)
        prompt = ((text * 20)[:length] + [(i + k) % VOCAB for k in range(own)] or [i % VOCAB]) if text else (
            list(requests[-1].prompt) if requests else [5])
        aborted = None if abort is None else arrival + abort
        requests.append(Request(arrival, prompt, max_tokens, frozenset(stop), aborted))
    # As the engine refuses what needs more blocks than there are; the last token drawn needs no place.
    largest = max(-(-(len(r.prompt) + r.max_tokens - 1) // block_size) for r in requests)
    return World(
        block_size=block_size, num_blocks=largest + draw(st.sampled_from([0, 1, 2, 6])),
        max_num_seqs=draw(st.sampled_from([4, 8, 6, 3, 2, 1])),
        budget=draw(st.sampled_from([40, 13, 8, 40, 5, 3, 2, 1])), is_late=draw(st.booleans()),
        caching=draw(st.sampled_from([True, True, True, False])),
        modulus=draw(st.sampled_from([2**64, 2**64, 3, 1])), requests=requests)


class Oracle:
    """The tokens of a request to the permitted length, the hash of each prefix, and the output that is promised."""

    def __init__(self, request):
        self.tokens, self.hashes, prefix_hash = list(request.prompt), [], EMPTY
        for position in range(len(request.prompt) + request.max_tokens - 1):
            prefix_hash = extend(prefix_hash, self.tokens[position])
            self.hashes.append(prefix_hash)
            if position + 1 == len(self.tokens):
                self.tokens.append(drawn_after(prefix_hash))
        output = self.tokens[len(request.prompt):]
        ends = [i + 1 for i, token_id in enumerate(output) if token_id in request.stop]
        self.output = output[:ends[0]] if ends else output
        self.finish_reason = "stop" if ends else "length"
        self.hashes = np.array(self.hashes, np.int64)


class Device:
    """Runs steps in the order in which they are launched."""

    def __init__(self, world, max_len):
        self.block_size, self.no_draw = world.block_size, max_len
        self.store = np.full(world.num_blocks * world.block_size, NEVER_WRITTEN, np.int64)
        self.history = np.full((world.max_num_seqs, max_len + 1), NEVER_WRITTEN, np.int64)
        self.tables = np.zeros((world.max_num_seqs, -(-max_len // world.block_size) + 1), np.int64)

    def run(self, step, oracles):
        """Returns one token per chunk (None if it draws nothing). `oracles[i]` is what chunk i must have read."""
        for new in step.new_rows:
            self.history[new.row] = NEVER_WRITTEN
            self.history[new.row, :len(new.token_ids)] = new.token_ids
            self.tables[new.row] = -1
            self.tables[new.row, :len(new.block_ids)] = new.block_ids
        flat = flatten(step, self.block_size, self.no_draw)
        tokens = self.history[flat.token_rows, flat.positions].tolist()
        slots = flat.slot_mapping.tolist()
        self.tables[flat.token_rows, flat.positions // self.block_size] = flat.slot_mapping // self.block_size
        assert len(set(slots)) == len(slots), "two tokens of one step are written to one slot"
        begin, drawn = 0, []
        for row, start, end, last, draws_at, oracle in zip(
                flat.rows.tolist(), step.starts.tolist(), flat.context_lens.tolist(), flat.last_indices.tolist(),
                flat.draw_positions.tolist(), oracles, strict=True):
            position = np.arange(end)
            read = self.tables[row, position // self.block_size] * self.block_size + position % self.block_size
            prefix_hash = int(self.store[read[start - 1]]) if start else EMPTY
            for i in range(begin, last + 1):
                prefix_hash = extend(prefix_hash, tokens[i])
                self.store[slots[i]] = prefix_hash
            begin = last + 1
            assert (self.store[read] == oracle.hashes[:end]).all(), "a chunk reads what isn't its own prefix"
            assert self.history[row, :end].tolist() == oracle.tokens[:end]
            drawn.append(None if draws_at == self.no_draw else drawn_after(prefix_hash))
            if draws_at != self.no_draw and self.history[row, draws_at] == NEVER_WRITTEN:
                self.history[row, draws_at] = drawn[-1]
        assert begin == len(slots)
        return drawn


# --- The walk


class Walk:
    def __init__(self, world, seen):
        self.world, self.seen = world, seen
        manager = BlockManager(world.num_blocks, world.block_size, world.caching)
        if world.modulus < 2**64:
            whole_key = manager._key
            manager._key = lambda content: whole_key(content) % world.modulus
        self.manager = manager
        self.scheduler = Scheduler(manager, world.max_num_seqs, world.budget)
        self.oracles = [Oracle(request) for request in world.requests]
        self.sequences = [Sequence(i, r.prompt, SamplingParams(), 0, len(r.prompt) + r.max_tokens, r.stop)
                          for i, r in enumerate(world.requests)]
        self.device = Device(world, max(sequence.max_num_tokens for sequence in self.sequences))
        self.content_hashes = {0: EMPTY}        # content id -> the hash of that prefix
        self.held = {}                          # request -> tokens that its table must hold since its admission
        self.in_flight = []                     # launched steps whose result isn't taken in: (chunks, drawn)

    def run(self):
        requests, now = self.world.requests, 0
        bound = requests[-1].arrival + 3 * sum(s.max_num_tokens for s in self.sequences) + 3
        while now <= requests[-1].arrival or self.scheduler.waiting or self.scheduler.running or any(
                chunks for chunks, _ in self.in_flight):
            assert now < bound, "no progress"
            for i, request in enumerate(requests):
                if request.arrival == now:
                    self.scheduler.add(self.sequences[i])
                if request.abort == now and self.sequences[i].status is not Status.FINISHED:
                    self.abort(self.sequences[i])
            self.launch()
            while len(self.in_flight) > self.world.is_late:
                self.take_in(*self.in_flight.pop(0))
            now += 1
        assert self.scheduler.schedule() == []
        assert self.manager.num_free_blocks == self.world.num_blocks
        assert sorted(self.scheduler.free_rows) == list(range(self.world.max_num_seqs))
        for sequence, oracle in zip(self.sequences, self.oracles):
            assert sequence.status is Status.FINISHED
            if sequence.finish_reason != "abort":
                assert (sequence.output_token_ids, sequence.finish_reason) == (oracle.output, oracle.finish_reason)

    def abort(self, sequence):
        self.seen[f"abort while {sequence.status.name.lower()}, {sequence.num_in_flight} in flight"] += 1
        self.scheduler.finish(sequence, "abort")
        assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
        assert sequence.block_table == [] and sequence.row is None
        self.check_pool()

    def launch(self):
        scheduler, running, waiting = self.scheduler, list(self.scheduler.running), list(self.scheduler.waiting)
        before = {s.request_id: (s.num_computed, s.num_uncomputed) for s in running}
        num_preemptions = scheduler.num_preemptions
        chunks = scheduler.schedule()
        preempted = scheduler.num_preemptions - num_preemptions
        self.seen["preemptions"] += preempted
        self.seen["two preempted in one step"] += preempted > 1
        self.seen["mixed steps"] += any(c.num_tokens > 1 for c in chunks) and any(c.num_tokens == 1 for c in chunks)
        for chunk in chunks:
            self.check_chunk(chunk, before)
        assert sum(chunk.num_tokens for chunk in chunks) <= self.world.budget
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        assert [c.num_tokens > 1 for c in chunks] == sorted(c.num_tokens > 1 for c in chunks)
        self.check_pool()
        # The oldest one goes on unless it only waits for its last token; an empty machine takes somebody in.
        if running and before[running[0].request_id][1]:
            assert running[0] in [chunk.sequence for chunk in chunks]
        if waiting and not running:
            assert chunks and chunks[0].sequence in waiting
        if not chunks:
            assert not waiting and not running or any(s.num_in_flight for s in (*running, *waiting))
            self.in_flight.append(([], []))
            return
        step = StepInput.from_chunks(chunks, self.world.block_size)
        oracles = [self.oracles[chunk.sequence.request_id] for chunk in chunks]
        drawn = self.device.run(step, oracles)
        assert [token_id is not None for token_id in drawn] == [chunk.draws_token for chunk in chunks]
        self.in_flight.append((chunks, drawn))

    def check_chunk(self, chunk, before):
        sequence = chunk.sequence
        assert sequence.status is Status.RUNNING and chunk.num_tokens >= 1
        assert sequence.num_computed == chunk.end
        assert len(sequence.token_ids) + sequence.num_in_flight <= sequence.max_num_tokens
        known = sequence.num_tokens - chunk.draws_token     # tokens that existed when the step was chosen
        assert chunk.end <= known and chunk.draws_token == (chunk.end == known)
        if chunk.is_new_row:
            assert sequence.request_id not in before
            assert chunk.start % self.world.block_size == 0 and chunk.start < len(sequence.token_ids) == known
            assert sequence.num_cached_tokens < sequence.num_prompt_tokens
            self.held[sequence.request_id] = known
            self.seen["hit blocks"] += chunk.start // self.world.block_size
            self.seen["comes back through hits"] += chunk.start > 0 and len(sequence.output_token_ids) > 0
        else:
            assert chunk.start == before[sequence.request_id][0]
        self.seen["chunks that draw nothing"] += not chunk.draws_token

    def take_in(self, chunks, drawn):
        live = [c.sequence for c in chunks if c.draws_token and c.sequence.status is not Status.FINISHED]
        self.seen["surplus tokens"] += sum(c.draws_token and c.sequence.finish_reason == "stop" for c in chunks)
        self.seen["tokens of preempted sequences"] += sum(s.status is Status.WAITING for s in live)
        lens = [len(sequence.token_ids) for sequence in live]
        advanced = self.scheduler.update(chunks, [VOCAB + 1 if token_id is None else token_id for token_id in drawn])
        assert advanced == live
        for sequence, n in zip(live, lens):
            oracle = self.oracles[sequence.request_id]
            assert sequence.token_ids == oracle.tokens[:n + 1]
            assert (sequence.finish_reason is not None) == (sequence.output_token_ids == oracle.output)
        self.check_pool()

    def check_pool(self):
        scheduler, manager, bs = self.scheduler, self.manager, self.world.block_size
        running, waiting = scheduler.running, scheduler.waiting
        tables = Counter(block_id for s in self.sequences for block_id in s.block_table)
        assert tables == {i: b.ref_count for i, b in enumerate(manager.blocks) if b.ref_count}
        assert set(manager.free_blocks).isdisjoint(tables)
        assert set(manager.free_blocks) | set(tables) == set(range(self.world.num_blocks))
        assert len(running) <= self.world.max_num_seqs
        order = [s.request_id for s in (*running, *waiting)]
        assert order == sorted(set(order)), "both queues, one after the other, are in order of arrival"
        for sequence in self.sequences:
            assert (sequence in running) == (sequence.status is Status.RUNNING)
            assert sequence not in waiting or (sequence.status, sequence.num_computed) == (Status.WAITING, 0)
            if sequence.status is Status.RUNNING:
                held = max(self.held.get(sequence.request_id, 0), sequence.num_computed)
                assert len(sequence.block_table) == -(-held // bs)
                assert len(set(sequence.block_table)) == len(sequence.block_table)
            else:
                assert sequence.block_table == [] and sequence.row is None
        rows = [s.row for s in running]
        assert sorted(rows + scheduler.free_rows) == list(range(self.world.max_num_seqs))
        self.check_cache()

    def check_cache(self):
        """What can be found is written, and is what it says. Equal content ids, equal prefixes."""
        manager, bs = self.manager, self.world.block_size
        if not self.world.caching:
            assert manager.index == {} and all(block.key is None for block in manager.blocks)
            return
        assert len(manager.index) <= self.world.num_blocks
        assert all(manager.blocks[block_id].key == key for key, block_id in manager.index.items())
        full = [(block.content_id, i) for i, block in enumerate(manager.blocks) if block.key is not None]
        for content_id, block_id in sorted(full):
            block = manager.blocks[block_id]
            parent_id, *token_ids = block.content
            assert len(token_ids) == bs
            if content_id not in self.content_hashes:
                prefix_hash = self.content_hashes[parent_id]
                for token_id in token_ids:
                    prefix_hash = extend(prefix_hash, token_id)
                self.content_hashes[content_id] = prefix_hash
            assert self.device.store[(block_id + 1) * bs - 1] == self.content_hashes[content_id]


def test_random_walks_end_with_the_right_tokens_and_never_break_the_pool():
    seen = Counter()

    @settings(max_examples=NUM_WALKS, deadline=None, derandomize="NANOENGINE_WALKS" not in os.environ, database=None,
              print_blob=True, phases=PHASES, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))
    @given(worlds())
    def walk(world):
        seen["walks"] += 1
        Walk(world, seen).run()

    walk()
    # The walks must have met what they are for. Three to ten times as many of each were counted in 400 walks.
    for event, least in {"walks": 300, "preemptions": 100, "hit blocks": 300, "comes back through hits": 20,
                         "mixed steps": 300, "chunks that draw nothing": 1000, "surplus tokens": 20,
                         "tokens of preempted sequences": 40, "abort while waiting, 0 in flight": 20,
                         "abort while running, 0 in flight": 20, "abort while running, 1 in flight": 20}.items():
        assert seen[event] >= least * min(1, NUM_WALKS / 400), (event, dict(seen))

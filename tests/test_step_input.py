"""Steps as plain data, with every number written out by hand."""

import numpy as np
import pytest

from nanoengine.block_manager import BlockManager
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Chunk, Sequence
from nanoengine.step_input import StepInput, flatten

NO_DRAW = 999


def sequence_in_row(row, table, num_tokens, params=SamplingParams(), seed=0, first=10):
    sequence = Sequence(row, list(range(first, first + num_tokens)), params, seed, max_num_tokens=1000)
    sequence.row, sequence.block_table = row, table
    return sequence


def step_of(*chunks, block_ids):
    """A StepInput of (row, start, num_tokens, draws a token?)."""
    rows, starts, num_tokens, draws = zip(*chunks)
    return StepInput([], np.array(rows, np.int32), np.array(starts, np.int32), np.array(num_tokens, np.int32),
                     np.array(draws, bool), np.array(block_ids, np.int32), [])


def lists(flat):
    return {name: getattr(flat, name) if isinstance(getattr(flat, name), int) else getattr(flat, name).tolist()
            for name in flat._fields}


# --- From chunks to a StepInput


def test_a_new_sequence_s_step_holds_its_tokens_settings_and_blocks():
    params = SamplingParams(temperature=0.5)
    sequence = sequence_in_row(3, [7, 2, 5], 10, params, seed=77)
    step = StepInput.from_chunks([Chunk(sequence, 0, 10, True, True)], block_size=4)
    (new,) = step.new_rows
    assert (new.row, new.token_ids.tolist(), new.block_ids) == (3, list(range(10, 20)), [])
    assert new.params is params and new.seed == 77
    assert (step.rows.tolist(), step.starts.tolist(), step.num_tokens.tolist()) == ([3], [0], [10])
    assert step.draws_token.tolist() == [True]
    assert step.block_ids.tolist() == [7, 2, 5]
    assert step.special == []


def test_a_known_row_sends_no_tokens_and_only_the_block_that_it_writes():
    sequence = sequence_in_row(3, [7, 2, 5], 11)
    step = StepInput.from_chunks([Chunk(sequence, 10, 1, True, False)], block_size=4)
    assert step.new_rows == []
    assert (step.starts.tolist(), step.block_ids.tolist()) == ([10], [5])


@pytest.mark.parametrize("start, num_tokens, blocks", [
    (0, 1, [7]), (0, 4, [7]), (0, 5, [7, 2]), (3, 1, [7]), (3, 2, [7, 2]), (4, 4, [2]), (3, 6, [7, 2, 5]),
    (7, 1, [2]), (8, 1, [5]), (11, 1, [5]), (2, 10, [7, 2, 5])])
def test_a_chunk_sends_the_blocks_that_it_touches_and_no_other(start, num_tokens, blocks):
    sequence = sequence_in_row(0, [7, 2, 5], 12)
    step = StepInput.from_chunks([Chunk(sequence, start, num_tokens, False, False)], block_size=4)
    assert step.block_ids.tolist() == blocks


def test_a_first_chunk_of_a_long_prompt_doesn_t_send_the_blocks_behind_it():
    """The scheduler has given the whole prompt its blocks; they travel with the chunks that write them."""
    sequence = sequence_in_row(0, [7, 2, 5], 12)
    step = StepInput.from_chunks([Chunk(sequence, 0, 6, False, True)], block_size=4)
    assert step.new_rows[0].block_ids == [] and step.block_ids.tolist() == [7, 2]
    assert step.new_rows[0].token_ids.tolist() == list(range(10, 22))


def test_a_new_row_with_a_cached_prefix_sends_the_prefix_s_blocks_once():
    sequence = sequence_in_row(1, [7, 2, 5, 9], 14)
    step = StepInput.from_chunks([Chunk(sequence, 8, 6, True, True)], block_size=4)
    assert step.new_rows[0].block_ids == [7, 2]
    assert step.new_rows[0].token_ids.tolist() == list(range(10, 24))
    assert step.block_ids.tolist() == [5, 9]


def test_block_size_one_sends_a_block_per_token():
    sequence = sequence_in_row(0, [7, 2, 5, 9], 4)
    assert StepInput.from_chunks([Chunk(sequence, 1, 3, True, False)], 1).block_ids.tolist() == [2, 5, 9]
    step = StepInput.from_chunks([Chunk(sequence, 2, 1, False, True)], 1)
    assert step.new_rows[0].block_ids == [7, 2] and step.block_ids.tolist() == [5]


def test_chunks_blocks_follow_one_another_in_the_order_of_the_chunks():
    a, b, c = (sequence_in_row(row, table, 12) for row, table in [(2, [7, 2, 5]), (0, [1, 4]), (5, [9])])
    chunks = [Chunk(b, 6, 1, True, False), Chunk(a, 3, 6, True, False), Chunk(c, 0, 3, True, True)]
    step = StepInput.from_chunks(chunks, 4)
    assert step.rows.tolist() == [0, 2, 5]
    assert step.starts.tolist() == [6, 3, 0]
    assert step.num_tokens.tolist() == [1, 6, 3]
    assert step.block_ids.tolist() == [4, 7, 2, 5, 9]
    assert [new.row for new in step.new_rows] == [5]


def test_special_names_the_chunks_that_draw_with_more_than_temperature():
    plain, greedy = SamplingParams(temperature=0.7), SamplingParams(temperature=0, top_k=5)
    chunks = [Chunk(sequence_in_row(row, [row], 3, params), 0, 3, draws, True) for row, (params, draws) in enumerate([
        (plain, True), (SamplingParams(top_k=5), True), (greedy, True), (SamplingParams(top_p=0.5), False),
        (SamplingParams(top_p=0.5), True), (SamplingParams(min_p=0.1), True)])]
    assert StepInput.from_chunks(chunks, 4).special == [1, 4, 5]


def test_a_step_s_arrays_are_int32():
    step = StepInput.from_chunks([Chunk(sequence_in_row(0, [0, 1], 8), 0, 8, True, True)], 4)
    for array in (step.rows, step.starts, step.num_tokens, step.block_ids, step.new_rows[0].token_ids):
        assert array.dtype == np.int32
    assert step.draws_token.dtype == bool


def test_a_step_doesn_t_change_when_its_sequences_do():
    """It may still be on its way to a peer when the sequence gets its next token or loses its blocks."""
    sequence = sequence_in_row(1, [7, 2, 5], 10)
    step = StepInput.from_chunks([Chunk(sequence, 4, 6, True, True)], block_size=4)
    sequence.token_ids.append(99)
    sequence.block_table.clear()
    assert step.new_rows[0].token_ids.tolist() == list(range(10, 20))
    assert step.new_rows[0].block_ids == [7] and step.block_ids.tolist() == [2, 5]


# --- From a StepInput to flat arrays


def test_one_prompt():
    flat = flatten(step_of((3, 0, 10, True), block_ids=[7, 2, 5]), 4, NO_DRAW)
    assert lists(flat) == {
        "token_rows": [3] * 10,
        "positions": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        "slot_mapping": [28, 29, 30, 31, 8, 9, 10, 11, 20, 21],
        "rows": [3],
        "context_lens": [10],
        "draw_positions": [10],
        "last_indices": [9],
        "cu_seqlens_q": [0, 10],
        "cu_seqlens_k": [0, 10],
        "num_decodes": 0,
        "max_seqlen_q": 10,
        "max_seqlen_k": 10}


def test_two_decodes():
    """Row 4 writes token 10 into its third block, 5; row 1 writes token 3, the last of its first block, 9."""
    flat = flatten(step_of((4, 10, 1, True), (1, 3, 1, True), block_ids=[5, 9]), 4, NO_DRAW)
    assert lists(flat) == {
        "token_rows": [4, 1],
        "positions": [10, 3],
        "slot_mapping": [22, 39],
        "rows": [4, 1],
        "context_lens": [11, 4],
        "draw_positions": [11, 4],
        "last_indices": [0, 1],
        "cu_seqlens_q": [0],
        "cu_seqlens_k": [0],
        "num_decodes": 2,
        "max_seqlen_q": 1,
        "max_seqlen_k": 11}


def test_the_module_s_example():
    """Three chunks, num_tokens [1, 3, 2], starts [6, 0, 4]. Row 2's chunk is inside a prompt: it draws nothing."""
    flat = flatten(step_of((0, 6, 1, True), (1, 0, 3, True), (2, 4, 2, False), block_ids=[4, 1, 3]), 4, NO_DRAW)
    assert lists(flat) == {
        "token_rows": [0, 1, 1, 1, 2, 2],
        "positions": [6, 0, 1, 2, 4, 5],
        "slot_mapping": [18, 4, 5, 6, 12, 13],
        "rows": [0, 1, 2],
        "context_lens": [7, 3, 6],
        "draw_positions": [7, 3, NO_DRAW],
        "last_indices": [0, 3, 5],
        "cu_seqlens_q": [0, 3, 5],
        "cu_seqlens_k": [0, 3, 9],
        "num_decodes": 1,
        "max_seqlen_q": 3,
        "max_seqlen_k": 7}


def test_a_chunk_that_begins_and_ends_within_blocks():
    """Tokens 3..8 of a table [7, 2, 5]: one slot of 7, all of 2, one of 5; then tokens 2, 3 of another's block 0."""
    flat = flatten(step_of((0, 3, 6, False), (6, 2, 2, True), block_ids=[7, 2, 5, 0]), 4, NO_DRAW)
    assert lists(flat) == {
        "token_rows": [0, 0, 0, 0, 0, 0, 6, 6],
        "positions": [3, 4, 5, 6, 7, 8, 2, 3],
        "slot_mapping": [31, 8, 9, 10, 11, 20, 2, 3],
        "rows": [0, 6],
        "context_lens": [9, 4],
        "draw_positions": [NO_DRAW, 4],
        "last_indices": [5, 7],
        "cu_seqlens_q": [0, 6, 8],
        "cu_seqlens_k": [0, 9, 13],
        "num_decodes": 0,
        "max_seqlen_q": 6,
        "max_seqlen_k": 9}


def test_a_chunk_behind_a_cached_prefix():
    """Eight tokens are cached; the chunk computes 8..13 and sees all fourteen."""
    flat = flatten(step_of((2, 8, 6, True), block_ids=[5, 9]), 4, NO_DRAW)
    assert flat.positions.tolist() == [8, 9, 10, 11, 12, 13]
    assert flat.slot_mapping.tolist() == [20, 21, 22, 23, 36, 37]
    assert flat.context_lens.tolist() == [14] and flat.draw_positions.tolist() == [14]
    assert flat.cu_seqlens_q.tolist() == [0, 6] and flat.cu_seqlens_k.tolist() == [0, 14]
    assert (flat.max_seqlen_q, flat.max_seqlen_k) == (6, 14)


def test_block_size_one():
    flat = flatten(step_of((1, 2, 1, True), (0, 1, 3, True), block_ids=[8, 2, 5, 9]), 1, NO_DRAW)
    assert flat.positions.tolist() == [2, 1, 2, 3]
    assert flat.slot_mapping.tolist() == [8, 2, 5, 9]
    assert flat.context_lens.tolist() == [3, 4]
    assert flat.cu_seqlens_q.tolist() == [0, 3] and flat.cu_seqlens_k.tolist() == [0, 4]


def test_an_undrawn_one_token_chunk_is_a_decode_too():
    flat = flatten(step_of((0, 8, 1, False), (1, 0, 2, True), block_ids=[3, 6]), 4, NO_DRAW)
    assert flat.num_decodes == 1
    assert flat.draw_positions.tolist() == [NO_DRAW, 2]
    assert flat.cu_seqlens_q.tolist() == [0, 2]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_flatten_equals_a_loop_over_tokens(block_size):
    """Any chunks: against the definition of a slot, one token at a time."""
    draw = np.random.default_rng(block_size)
    for _ in range(50):
        rows = draw.permutation(9)[:5].tolist()
        tables = {row: draw.permutation(100)[:-(-60 // block_size)].tolist() for row in rows}
        sizes = sorted([1, *draw.integers(1, 30, 4).tolist()], key=lambda n: n > 1)
        chunks = [Chunk(sequence_in_row(row, table, 60), int(draw.integers(30)), n, bool(draw.integers(2)), False)
                  for (row, table), n in zip(tables.items(), sizes)]
        flat = flatten(StepInput.from_chunks(chunks, block_size), block_size, NO_DRAW)
        tokens = [(c.sequence.row, p, c.sequence.block_table[p // block_size] * block_size + p % block_size)
                  for c in chunks for p in range(c.start, c.end)]
        assert list(zip(flat.token_rows.tolist(), flat.positions.tolist(), flat.slot_mapping.tolist())) == tokens
        assert [tokens[i][1] for i in flat.last_indices] == [c.end - 1 for c in chunks]
        assert flat.context_lens.tolist() == [c.end for c in chunks]
        longer = [c for c in chunks if c.num_tokens > 1]
        assert np.diff(flat.cu_seqlens_q).tolist() == [c.num_tokens for c in longer]
        assert np.diff(flat.cu_seqlens_k).tolist() == [c.end for c in longer]
        assert flat.num_decodes == len(chunks) - len(longer)


# --- Through the scheduler


def ranks_tables(tables, step, block_size):
    """What a rank makes of the steps: row -> block table."""
    for new in step.new_rows:
        tables[new.row] = list(new.block_ids)
    block_ids = step.block_ids.tolist()
    for row, start, num_tokens in zip(step.rows.tolist(), step.starts.tolist(), step.num_tokens.tolist()):
        first, last = start // block_size, (start + num_tokens - 1) // block_size
        own, block_ids = block_ids[:last - first + 1], block_ids[last - first + 1:]
        tables[row][first:] = own
    assert block_ids == []
    return tables


def test_a_hit_and_a_cold_prompt_in_one_step_both_have_complete_tables():
    """Case 40. b repeats a's eight first tokens and c is new; a goes on, and d's prompt is cut by the budget."""
    scheduler = Scheduler(BlockManager(20, 4), 4, 21)
    def add(name, prompt):
        scheduler.add(Sequence(name, prompt, SamplingParams(), 0, len(prompt) + 9))
    add("a", list(range(10)))
    chunks = scheduler.schedule()
    first = StepInput.from_chunks(chunks, 4)
    scheduler.update(chunks, [10])
    add("b", [*range(8), 50, 51, 52, 53, 54])
    add("c", list(range(60, 66)))
    add("d", list(range(70, 90)))
    chunks = scheduler.schedule()
    second = StepInput.from_chunks(chunks, 4)
    assert (second.rows.tolist(), second.starts.tolist()) == ([0, 1, 2, 3], [10, 8, 0, 0])
    assert second.num_tokens.tolist() == [1, 5, 6, 9]
    assert second.draws_token.tolist() == [True, True, True, False]
    assert [(new.row, new.block_ids) for new in second.new_rows] == [(1, [0, 1]), (2, []), (3, [])]
    assert second.block_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    tables = ranks_tables(ranks_tables({}, first, 4), second, 4)
    assert tables == {0: [0, 1, 2], 1: [0, 1, 3, 4], 2: [5, 6], 3: [7, 8, 9]}
    flat = flatten(second, 4, NO_DRAW)
    assert flat.slot_mapping.tolist() == [10, 12, 13, 14, 15, 16, 20, 21, 22, 23, 24, 25, *range(28, 37)]
    assert flat.context_lens.tolist() == [11, 13, 6, 9]
    assert flat.cu_seqlens_q.tolist() == [0, 5, 11, 20] and flat.cu_seqlens_k.tolist() == [0, 13, 19, 28]


def test_a_row_s_next_owner_sends_its_own_tokens_and_prefix():
    """The ranks are told of no end: a new row replaces what the row held."""
    scheduler = Scheduler(BlockManager(20, 4), 1, 32)
    a = Sequence("a", list(range(9)), SamplingParams(), 1, 12)
    b = Sequence("b", [*range(8), 77, 78], SamplingParams(), 2, 12)
    scheduler.add(a), scheduler.add(b)
    chunks = scheduler.schedule()
    tables = ranks_tables({}, StepInput.from_chunks(chunks, 4), 4)
    scheduler.update(chunks, [9])
    scheduler.finish(a, "abort")
    step = StepInput.from_chunks(scheduler.schedule(), 4)
    (new,) = step.new_rows
    assert (new.row, new.token_ids.tolist(), new.block_ids, new.seed) == (0, [*range(8), 77, 78], [0, 1], 2)
    assert ranks_tables(tables, step, 4) == {0: b.block_table} == {0: [0, 1, 3]}

"""Promises of the Scheduler, driven with made-up tokens on blocks of four. No model.

`a, b, c` arrive in this order. A plan is the step's chunks as (name, start, num_tokens, draws a token?).
"""

import pytest

from nanoengine.block_manager import BlockManager
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Sequence, Status

PROMPTS = {"a": 100, "b": 200, "c": 300, "d": 400, "e": 500, "f": 600}


def make(num_blocks=16, block_size=4, max_num_seqs=4, budget=32, caching=True):
    return Scheduler(BlockManager(num_blocks, block_size, caching), max_num_seqs, budget)


def add(scheduler, name, prompt, max_tokens=20, stop=()):
    """`prompt` is a list of token ids, or a length: then the ids are the sequence's own (100, 101, ... for a)."""
    if isinstance(prompt, int):
        prompt = [PROMPTS[name] + i for i in range(prompt)]
    sequence = Sequence(name, prompt, SamplingParams(), 0, len(prompt) + max_tokens, frozenset(stop))
    scheduler.add(sequence)
    return sequence


def plan(chunks):
    return [(chunk.sequence.request_id, chunk.start, chunk.num_tokens, chunk.draws_token) for chunk in chunks]


def names(sequences):
    return "".join(sequence.request_id for sequence in sequences)


def has_unfinished(scheduler):
    return bool(scheduler.waiting or scheduler.running)


def free_order(scheduler):
    return list(scheduler.block_manager.free_blocks)


def made_up(chunks):
    """The token at position p of sequence x is 1000 + p (so that a recomputation gives the same)."""
    return [1000 + chunk.end for chunk in chunks]


def step(scheduler):
    """One step whose result is known at once. Returns its plan."""
    chunks = scheduler.schedule()
    scheduler.update(chunks, made_up(chunks))
    return plan(chunks)


# --- One sequence


def test_a_prompt_is_computed_whole_and_then_one_token_per_step():
    scheduler = make()
    a = add(scheduler, "a", 5, max_tokens=3)
    assert (a.status, a.row, a.num_tokens, a.num_uncomputed) == (Status.WAITING, None, 5, 5)
    assert step(scheduler) == [("a", 0, 5, True)]
    assert (a.status, a.row, a.block_table) == (Status.RUNNING, 0, [0, 1])
    assert a.token_ids == [100, 101, 102, 103, 104, 1005]
    assert step(scheduler) == [("a", 5, 1, True)]
    assert step(scheduler) == [("a", 6, 1, True)]
    assert a.output_token_ids == [1005, 1006, 1007]
    assert (a.status, a.finish_reason, a.row, a.block_table) == (Status.FINISHED, "length", None, [])
    assert not has_unfinished(scheduler)
    # Tokens 0..6 were computed, the eighth never: two blocks, the last one freed first, behind the unused ones.
    assert free_order(scheduler) == [*range(2, 16), 1, 0]


def test_an_idle_scheduler_schedules_nothing():
    scheduler = make()
    assert has_unfinished(scheduler) is False
    assert scheduler.schedule() == []
    assert scheduler.update([], []) == []


def test_a_long_prompt_is_computed_in_chunks_and_draws_only_at_its_end():
    """Case 5: prompt 40, budget 8."""
    scheduler = make(budget=8)
    a = add(scheduler, "a", 40)
    prompt = list(a.token_ids)
    ends = []
    for start in (0, 8, 16, 24):
        chunks = scheduler.schedule()
        assert plan(chunks) == [("a", start, 8, False)]
        ends.append(chunks[0].end)
        assert scheduler.update(chunks, [77]) == []         # it drew nothing, so 77 is ignored
        assert a.token_ids == prompt
        assert len(a.block_table) == 10
    assert ends == [8, 16, 24, 32]
    chunks = scheduler.schedule()
    assert plan(chunks) == [("a", 32, 8, True)] and chunks[0].end == 40
    assert scheduler.update(chunks, [5]) == [a]
    assert a.token_ids == prompt + [5]
    assert (a.num_prompt_tokens, a.num_computed) == (40, 40)


def test_a_chunk_never_passes_the_end_of_the_tokens():
    scheduler = make(budget=8)
    add(scheduler, "a", 11)
    assert [step(scheduler) for _ in range(3)] == [
        [("a", 0, 8, False)], [("a", 8, 3, True)], [("a", 11, 1, True)]]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("past_block", [-1, 0, 1])
@pytest.mark.parametrize("outputs", [1, 2, "bs", "bs+1"])
def test_a_table_holds_exactly_the_blocks_of_the_computed_tokens(block_size, past_block, outputs):
    """Case 7. Once the prompt is in, a table never runs ahead; the last token drawn needs no place."""
    num_prompt = max(1, block_size + past_block)
    max_tokens = {"bs": block_size, "bs+1": block_size + 1}.get(outputs, outputs)
    needed = -(-(num_prompt + max_tokens - 1) // block_size)
    scheduler = make(num_blocks=needed, block_size=block_size, budget=64)
    a = add(scheduler, "a", num_prompt, max_tokens)
    num_steps = 0
    while has_unfinished(scheduler):
        chunks = scheduler.schedule()
        assert len(chunks) == 1
        assert len(a.block_table) == -(-a.num_computed // block_size)
        scheduler.update(chunks, made_up(chunks))
        num_steps += 1
    assert num_steps == max_tokens == len(a.output_token_ids)
    assert scheduler.num_preemptions == 0
    assert scheduler.block_manager.num_free_blocks == needed


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 100])
def test_a_sequence_as_large_as_the_pool_runs_to_its_end_alone(budget):
    """Case 12: nine tokens and four new ones; the last one's KV is never needed, so three blocks are enough."""
    scheduler = make(num_blocks=3, budget=budget)
    a = add(scheduler, "a", 9, max_tokens=4)
    for _ in range(9 + 4):
        step(scheduler)
    assert a.finish_reason == "length" and len(a.output_token_ids) == 4
    assert scheduler.num_preemptions == 0


def test_a_stop_token_ends_the_sequence_and_is_its_last_token():
    scheduler = make()
    a = add(scheduler, "a", 3, stop=[1004])
    step(scheduler)
    assert a.finish_reason is None
    chunks = scheduler.schedule()
    assert scheduler.update(chunks, [1004]) == [a]
    assert a.output_token_ids == [1003, 1004]
    assert (a.status, a.finish_reason) == (Status.FINISHED, "stop")
    assert scheduler.block_manager.num_free_blocks == 16


def test_a_stop_token_in_the_prompt_is_no_end():
    scheduler = make()
    a = add(scheduler, "a", [9, 9, 9], max_tokens=2, stop=[9])
    step(scheduler)
    assert a.finish_reason is None and a.output_token_ids == [1003]


def test_a_stop_token_at_the_limit_counts_as_stop():
    scheduler = make()
    a = add(scheduler, "a", 3, max_tokens=1, stop=[1003])
    step(scheduler)
    assert a.finish_reason == "stop"


# --- Several sequences


def test_generating_and_new_sequences_share_a_step():
    scheduler = make()
    add(scheduler, "a", 5)
    assert step(scheduler) == [("a", 0, 5, True)]
    add(scheduler, "b", 6)
    assert step(scheduler) == [("a", 5, 1, True), ("b", 0, 6, True)]
    add(scheduler, "c", 3)
    assert step(scheduler) == [("a", 6, 1, True), ("b", 6, 1, True), ("c", 0, 3, True)]


def test_the_first_sequence_gets_a_token_in_every_step_while_others_arrive():
    """Case 13."""
    scheduler = make(num_blocks=64, max_num_seqs=32, budget=32)
    a = add(scheduler, "a", 5, max_tokens=30)
    step(scheduler)
    for i in range(20):
        add(scheduler, "b", [i] * 9)
        num_before = len(a.output_token_ids)
        step(scheduler)
        assert len(a.output_token_ids) == num_before + 1


def test_what_the_budget_leaves_starts_the_next_prompt():
    """Case 4: the budget fits the first and half of the second, which owns its blocks and goes on in the next step."""
    scheduler = make(budget=8)
    add(scheduler, "a", 5)
    b = add(scheduler, "b", 6)
    assert step(scheduler) == [("a", 0, 5, True), ("b", 0, 3, False)]
    assert b.block_table == [2, 3] and b.output_token_ids == []
    assert step(scheduler) == [("a", 5, 1, True), ("b", 3, 3, True)]
    assert b.output_token_ids == [1006]


def test_running_sequences_have_the_budget_before_waiting_ones_oldest_first():
    scheduler = make(budget=6)
    add(scheduler, "a", 8)
    add(scheduler, "b", 7)
    add(scheduler, "c", 2)
    assert step(scheduler) == [("a", 0, 6, False)]
    assert step(scheduler) == [("a", 6, 2, True), ("b", 0, 4, False)]
    assert step(scheduler) == [("a", 8, 1, True), ("b", 4, 3, True), ("c", 0, 2, True)]


def test_running_sequences_share_one_budget():
    """a takes one of eight tokens, so the next chunk of b's prompt has seven."""
    scheduler = make(budget=8)
    add(scheduler, "a", 5)
    add(scheduler, "b", 20)
    assert [step(scheduler) for _ in range(3)] == [
        [("a", 0, 5, True), ("b", 0, 3, False)],
        [("a", 5, 1, True), ("b", 3, 7, False)],
        [("a", 6, 1, True), ("b", 10, 7, False)]]


def test_a_budget_smaller_than_the_number_of_running_sequences_makes_the_youngest_wait():
    scheduler = make(budget=2)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=2)
    assert step(scheduler) == [("a", 0, 1, True), ("b", 0, 1, True)]
    assert step(scheduler) == [("a", 1, 1, True), ("b", 1, 1, True)]
    assert step(scheduler) == [("c", 0, 1, True)]
    assert step(scheduler) == [("c", 1, 1, True)]
    assert not has_unfinished(scheduler)


def test_one_token_chunks_come_first_in_a_step():
    scheduler = make()
    add(scheduler, "a", 6)
    add(scheduler, "b", 1)
    add(scheduler, "c", 5)
    add(scheduler, "d", 1)
    assert step(scheduler) == [("b", 0, 1, True), ("d", 0, 1, True), ("a", 0, 6, True), ("c", 0, 5, True)]


def test_of_one_token_chunks_the_longest_context_comes_first():
    """Equal ones in order of arrival, like prompts; what a step drew still reaches the sequence that it belongs to."""
    scheduler = make(max_num_seqs=5)
    for name, length in zip("abcd", (3, 6, 5, 6)):
        add(scheduler, name, length)
    chunks = scheduler.schedule()
    assert [(name, length) for name, _, length, _ in plan(chunks)] == [("a", 3), ("b", 6), ("c", 5), ("d", 6)]
    scheduler.update(chunks, [10, 11, 12, 13])
    add(scheduler, "e", 4)
    chunks = scheduler.schedule()
    assert plan(chunks) == [
        ("b", 6, 1, True), ("d", 6, 1, True), ("c", 5, 1, True), ("a", 3, 1, True), ("e", 0, 4, True)]
    scheduler.update(chunks, [21, 23, 22, 20, 24])
    assert [s.output_token_ids for s in scheduler.running] == [[10, 20], [11, 21], [12, 22], [13, 23], [24]]
    assert names(scheduler.running) == "abcde"


def test_a_one_token_chunk_of_a_longer_prompt_comes_first_too_and_draws_nothing():
    scheduler = make(budget=7)
    add(scheduler, "a", 6)
    add(scheduler, "b", 6)
    chunks = scheduler.schedule()
    assert plan(chunks) == [("b", 0, 1, False), ("a", 0, 6, True)]
    assert names(scheduler.running) == "ab"
    scheduler.update(chunks, [77, 5])
    assert [s.output_token_ids for s in scheduler.running] == [[5], []]


def test_never_more_sequences_than_rows_hold_blocks():
    """Case 10: two rows, six prompts."""
    scheduler = make(max_num_seqs=2)
    sequences = [add(scheduler, name, 5, max_tokens=3) for name in "abcdef"]
    for _ in range(9):
        chunks = scheduler.schedule()
        assert len(chunks) == 2 == len(scheduler.running)
        assert sum(bool(sequence.block_table) for sequence in sequences) == 2
        assert sorted(sequence.row for sequence in scheduler.running) == [0, 1]
        scheduler.update(chunks, made_up(chunks))
    assert not has_unfinished(scheduler)
    assert [s.output_token_ids for s in sequences] == [[1005, 1006, 1007]] * 6


def test_a_row_is_given_again_when_its_sequence_ends():
    scheduler = make(max_num_seqs=3)
    a, b, c = (add(scheduler, name, 2) for name in "abc")
    step(scheduler)
    assert [s.row for s in (a, b, c)] == [0, 1, 2]
    d = add(scheduler, "d", 2)
    step(scheduler)
    assert d.row is None and d.block_table == []
    scheduler.finish(b, "abort")
    chunks = scheduler.schedule()
    assert d.row == 1 and b.row is None
    assert [chunk.is_new_row for chunk in chunks] == [False, False, True]


def test_only_the_first_chunk_of_a_sequence_is_a_new_row():
    scheduler = make(budget=4)
    add(scheduler, "a", 6)
    new = []
    for _ in range(3):
        chunks = scheduler.schedule()
        new += [chunk.is_new_row for chunk in chunks]
        scheduler.update(chunks, made_up(chunks))
    assert new == [True, False, False]


def test_waiting_sequences_are_admitted_in_order_of_arrival():
    """b doesn't fit, c would, but c came later."""
    scheduler = make(num_blocks=4)
    a = add(scheduler, "a", 5, max_tokens=3)
    step(scheduler)
    b, c = add(scheduler, "b", 9), add(scheduler, "c", 1)
    assert step(scheduler) == [("a", 5, 1, True)]
    assert (b.block_table, c.block_table) == ([], [])
    assert names(scheduler.waiting) == "bc"
    assert step(scheduler) == [("a", 6, 1, True)]
    assert a.status is Status.FINISHED
    assert step(scheduler) == [("c", 0, 1, True), ("b", 0, 9, True)]


# --- Prefix hits


def test_a_second_equal_prompt_computes_only_what_is_behind_the_shared_blocks():
    scheduler = make()
    a = add(scheduler, "a", 10)
    step(scheduler)
    b = add(scheduler, "b", list(a.token_ids[:10]))
    assert step(scheduler) == [("a", 10, 1, True), ("b", 8, 2, True)]
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 1, 3])
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)


@pytest.mark.parametrize("num_full", [1, 2])
def test_an_equal_prompt_of_full_blocks_still_computes_its_last_block(num_full):
    """Case 1, sent twice."""
    scheduler = make()
    a = add(scheduler, "a", 4 * num_full, max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(a.token_ids[:4 * num_full]))
    assert step(scheduler) == [("b", 4 * num_full - 4, 4, True)]


@pytest.mark.parametrize("num_full", [1, 2])
def test_equal_prompts_in_one_step_are_both_computed_whole(num_full):
    """Case 1, twice in one batch."""
    scheduler = make()
    prompt = list(range(4 * num_full))
    a, b = add(scheduler, "a", prompt), add(scheduler, "b", prompt)
    assert step(scheduler) == [("a", 0, 4 * num_full, True), ("b", 0, 4 * num_full, True)]
    assert set(a.block_table).isdisjoint(b.block_table)


@pytest.mark.parametrize("takes_in_at_once, second_start", [(True, 8), (False, 0)])
def test_blocks_are_hit_only_when_their_step_is_taken_in(takes_in_at_once, second_start):
    """Case 2: two prompts share twelve tokens and arrive together; the first one is chunked.

    Step 2 is the first with room for b. If step 1's result is in, b hits the two blocks that step 1 wrote (not the
    third, which is written in step 2 itself); if step 1 is still in flight, b hits nothing.
    """
    scheduler = make(budget=10)
    shared = list(range(12))
    a, b = add(scheduler, "a", shared + [50, 51]), add(scheduler, "b", shared + [60])
    first = scheduler.schedule()
    assert plan(first) == [("a", 0, 10, False)]
    assert b.block_table == []
    if takes_in_at_once:
        scheduler.update(first, made_up(first))
    second = scheduler.schedule()
    if takes_in_at_once:
        assert plan(second) == [("a", 10, 4, True), ("b", 8, 5, True)]
        assert b.block_table[:2] == a.block_table[:2]
        assert b.block_table[2] not in a.block_table
    else:
        assert plan(second) == [("a", 10, 4, True), ("b", 0, 6, False)]
        assert set(a.block_table).isdisjoint(b.block_table)


def test_a_generated_text_is_found_by_the_prompt_that_repeats_it():
    scheduler = make()
    a = add(scheduler, "a", 5, max_tokens=8)
    while has_unfinished(scheduler):
        step(scheduler)
    # 13 tokens, of which the last has no KV: three full blocks.
    b = add(scheduler, "b", a.token_ids + [7])
    assert step(scheduler) == [("b", 12, 2, True)]
    assert b.num_cached_tokens == 12


def test_without_prefix_caching_every_prompt_is_computed_whole():
    scheduler = make(caching=False)
    a = add(scheduler, "a", 10)
    step(scheduler)
    b = add(scheduler, "b", list(a.token_ids[:10]))
    assert step(scheduler) == [("a", 10, 1, True), ("b", 0, 10, True)]
    assert b.num_cached_tokens == 0


def test_hits_leave_more_of_the_budget():
    """Looked up before the budget is applied: b needs two tokens of a budget of three."""
    scheduler = make(budget=16)
    a = add(scheduler, "a", 14, max_tokens=1)
    step(scheduler)
    scheduler.max_num_batched_tokens = 3
    add(scheduler, "b", list(a.token_ids[:14]))
    assert step(scheduler) == [("b", 12, 2, True)]


# --- Preemption


def full_pool():
    """Four blocks; a and b have seven prompt tokens each and take two of them. After two steps both are full."""
    scheduler = make(num_blocks=4)
    a, b = add(scheduler, "a", 7, max_tokens=3), add(scheduler, "b", 7, max_tokens=5)
    assert step(scheduler) == [("a", 0, 7, True), ("b", 0, 7, True)]
    assert step(scheduler) == [("a", 7, 1, True), ("b", 7, 1, True)]
    assert (a.block_table, b.block_table, free_order(scheduler)) == ([0, 1], [2, 3], [])
    return scheduler, a, b


def test_the_youngest_gives_its_blocks_to_an_older_one_and_waits():
    scheduler, a, b = full_pool()
    assert step(scheduler) == [("a", 8, 1, True)]
    assert a.finish_reason == "length"                  # so a's blocks, 3 among them, are free again
    assert (b.status, b.row, b.block_table, b.num_computed) == (Status.WAITING, None, [], 0)
    assert b.output_token_ids == [1007, 1008]           # nothing that was drawn is lost
    assert scheduler.num_preemptions == 1
    # b gave 3 back before 2, and a took 3; b's first block is still there.
    assert free_order(scheduler) == [2, 3, 1, 0]


def test_a_preempted_sequence_comes_back_through_its_own_cached_blocks():
    """It has nine tokens. Block 2 still holds the first four; the other five are computed again, and one is drawn."""
    scheduler, a, b = full_pool()
    step(scheduler)
    assert step(scheduler) == [("b", 4, 5, True)]
    assert b.block_table == [2, 3, 1]
    assert b.num_cached_tokens == 0                     # as at the first admission
    assert step(scheduler) == [("b", 9, 1, True)]
    assert step(scheduler) == [("b", 10, 1, True)]
    assert b.output_token_ids == [1007, 1008, 1009, 1010, 1011] and b.finish_reason == "length"


def test_a_preempted_sequence_comes_back_under_a_budget_smaller_than_its_length():
    """Case 3: hits first, then the budget; the last chunk ends with the tokens."""
    scheduler, a, b = full_pool()
    step(scheduler)
    scheduler.max_num_batched_tokens = 3
    chunks = scheduler.schedule()
    assert plan(chunks) == [("b", 4, 3, False)] and chunks[0].is_new_row
    assert b.block_table == [2, 3, 1]
    scheduler.update(chunks, [77])
    assert [step(scheduler) for _ in range(2)] == [[("b", 7, 2, True)], [("b", 9, 1, True)]]
    assert b.output_token_ids == [1007, 1008, 1009, 1010]


def test_without_prefix_caching_a_preempted_sequence_computes_everything_again():
    scheduler = make(num_blocks=4, caching=False)
    add(scheduler, "a", 7, max_tokens=3), add(scheduler, "b", 7, max_tokens=3)
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_preemptions == 1
    assert step(scheduler) == [("b", 0, 9, True)]


def test_the_youngest_waits_itself_if_it_is_the_one_that_needs_a_block():
    """Three blocks: a has two places left in its second block, b fills its only one."""
    scheduler = make(num_blocks=3)
    a, b = add(scheduler, "a", 5, max_tokens=4), add(scheduler, "b", 4)
    step(scheduler)
    assert (a.block_table, b.block_table, free_order(scheduler)) == ([0, 1], [2], [])
    assert step(scheduler) == [("a", 5, 1, True)]
    assert names(scheduler.running) == "a" and names(scheduler.waiting) == "b"
    assert b.output_token_ids == [1004]
    assert free_order(scheduler) == [2]
    assert step(scheduler) == [("a", 6, 1, True)]       # b needs two blocks and one is free
    assert step(scheduler) == [("a", 7, 1, True)]       # a ends
    # Block 2 was b's own; at least the last of its five tokens is computed.
    assert step(scheduler) == [("b", 4, 1, True)]


def four_of_one_block_size(num_blocks=8):
    """Block size 1: each of a, b, c, d needs a block in each step; after two steps eight are taken."""
    scheduler = make(num_blocks=num_blocks, block_size=1)
    sequences = [add(scheduler, name, 1, max_tokens=4) for name in "abcd"]
    assert step(scheduler) == [(name, 0, 1, True) for name in "abcd"]
    assert scheduler.block_manager.num_free_blocks == num_blocks - 4
    return scheduler, sequences


def test_two_preempted_in_one_step_come_back_in_order_of_arrival():
    scheduler, (a, b, c, d) = four_of_one_block_size()
    step(scheduler)
    add(scheduler, "e", 1, max_tokens=2)
    # a takes one of d's two blocks, b the other one; c needs one too and is the youngest by now.
    assert step(scheduler) == [("a", 2, 1, True), ("b", 2, 1, True)]
    assert names(scheduler.running) == "ab" and names(scheduler.waiting) == "cde"
    assert scheduler.num_preemptions == 2
    for sequence in (c, d):
        assert (sequence.status, sequence.num_computed, sequence.block_table) == (Status.WAITING, 0, [])
    assert len({a.row, b.row}) == 2 and c.row is d.row is None
    while has_unfinished(scheduler):
        step(scheduler)
        assert names([*scheduler.running, *scheduler.waiting]) in "abcde"
    assert [s.output_token_ids for s in (a, b, c, d)] == [[1001, 1002, 1003, 1004]] * 4


def test_a_preempted_sequence_is_before_those_that_have_never_run():
    scheduler, a, b = full_pool()
    add(scheduler, "c", 1)
    step(scheduler)
    assert names(scheduler.waiting) == "bc"


def test_a_shared_block_stays_with_the_older_one_when_the_younger_is_preempted():
    """a and b share block 0. b is preempted, and gives back only its own second block."""
    scheduler = make(num_blocks=3)
    shared = [1, 2, 3, 4]
    a = add(scheduler, "a", shared + [5, 6], max_tokens=4)
    step(scheduler)
    b = add(scheduler, "b", shared + [7])
    assert step(scheduler) == [("a", 6, 1, True), ("b", 4, 1, True)]
    assert (a.block_table, b.block_table) == ([0, 1], [0, 2])
    step(scheduler)
    assert step(scheduler) == [("a", 8, 1, True)]
    assert a.finish_reason == "length" and b.block_table == []
    assert step(scheduler) == [("b", 4, 3, True)]
    assert b.block_table[0] == 0


# --- Results that come late: step n + 1 is scheduled before step n is taken in


def late(scheduler, previous):
    """Schedules, then takes in the previous step. Returns this step's chunks and the sequences that got a token."""
    chunks = scheduler.schedule()
    return chunks, scheduler.update(previous, made_up(previous))


def test_the_next_step_is_scheduled_before_the_token_is_known():
    scheduler = make()
    a = add(scheduler, "a", 5)
    first, advanced = late(scheduler, [])
    assert plan(first) == [("a", 0, 5, True)] and advanced == []
    assert (a.num_in_flight, a.num_tokens, len(a.token_ids)) == (1, 6, 5)
    second, advanced = late(scheduler, first)
    assert plan(second) == [("a", 5, 1, True)] and advanced == [a]
    assert (a.num_in_flight, a.num_tokens, a.output_token_ids) == (1, 7, [1005])
    third, advanced = late(scheduler, second)
    assert plan(third) == [("a", 6, 1, True)]
    assert a.output_token_ids == [1005, 1006]


def test_no_step_is_scheduled_beyond_the_last_permitted_token():
    scheduler = make()
    a = add(scheduler, "a", 3, max_tokens=2)
    first, _ = late(scheduler, [])
    second, _ = late(scheduler, first)
    assert plan(second) == [("a", 3, 1, True)]
    assert a.num_uncomputed == 0
    third, advanced = late(scheduler, second)
    assert third == [] and advanced == [a]              # only the result was missing
    assert a.output_token_ids == [1003, 1004] and a.finish_reason == "length"
    assert not has_unfinished(scheduler)


def test_one_token_asked_for_is_one_step():
    scheduler = make()
    a, b = add(scheduler, "a", 3, max_tokens=1), add(scheduler, "b", 3, max_tokens=2)
    first, _ = late(scheduler, [])
    second, _ = late(scheduler, first)
    assert plan(second) == [("b", 3, 1, True)]
    assert (a.finish_reason, b.finish_reason) == ("length", None)


def test_the_surplus_token_behind_a_stop_token_is_dropped():
    scheduler = make()
    a = add(scheduler, "a", 3, stop=[1003])
    b = add(scheduler, "b", 3)
    first, _ = late(scheduler, [])
    second, advanced = late(scheduler, first)
    assert plan(second) == [("a", 3, 1, True), ("b", 3, 1, True)]       # launched before the end was known
    assert advanced == [a, b] and a.finish_reason == "stop"
    third, advanced = late(scheduler, second)
    assert plan(third) == [("b", 4, 1, True)]
    assert advanced == [b]
    assert a.output_token_ids == [1003] and b.output_token_ids == [1003, 1004]


def test_late_results_give_the_same_tokens_as_immediate_ones():
    outputs = []
    for is_late in (False, True):
        scheduler = make(num_blocks=7, max_num_seqs=3, budget=6)
        sequences = [add(scheduler, name, n, max_tokens=m, stop=[1013]) for name, n, m in
                     [("a", 9, 7), ("b", 5, 9), ("c", 13, 4), ("d", 2, 9)]]
        previous = []
        for _ in range(100):
            if is_late:
                previous, _ = late(scheduler, previous)
            else:
                step(scheduler)
        assert not has_unfinished(scheduler)
        outputs.append([(s.output_token_ids, s.finish_reason) for s in sequences])
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == ([1009, 1010, 1011, 1012, 1013], "stop")


def full_pool_in_flight():
    """As `full_pool`, but the second step is still in flight. b's second block was filled by it."""
    scheduler = make(num_blocks=4)
    a, b = add(scheduler, "a", 7, max_tokens=3), add(scheduler, "b", 7, max_tokens=5, stop=[999])
    step(scheduler)
    second = scheduler.schedule()
    assert plan(second) == [("a", 7, 1, True), ("b", 7, 1, True)]
    return scheduler, a, b, second


def test_a_token_in_flight_of_a_preempted_sequence_is_still_appended():
    scheduler, a, b, second = full_pool_in_flight()
    third = scheduler.schedule()
    assert plan(third) == [("a", 8, 1, True)]
    assert (b.status, b.num_in_flight, b.num_computed) == (Status.WAITING, 1, 0)
    assert names(scheduler.waiting) == "b"
    assert scheduler.update(second, [1008, 1008]) == [a, b]
    assert b.output_token_ids == [1007, 1008] and b.num_in_flight == 0
    assert b.status is Status.WAITING
    # The second block was filled by the step in flight, but it's a's by now: not findable as b's.
    assert a.block_table == [0, 1, 3]
    assert scheduler.block_manager.find_prefix(b.token_ids) == [2]
    assert scheduler.schedule() == []                   # a waits for its last token, b for blocks
    scheduler.update(third, [1009])
    assert a.finish_reason == "length"
    assert step(scheduler) == [("b", 4, 5, True)]


def test_a_preempted_sequence_can_end_with_its_token_in_flight():
    scheduler, a, b, second = full_pool_in_flight()
    scheduler.schedule()
    assert scheduler.update(second, [1008, 999]) == [a, b]
    assert (b.status, b.finish_reason) == (Status.FINISHED, "stop")
    assert b.output_token_ids == [1007, 999]
    assert names(scheduler.waiting) == "" and names(scheduler.running) == "a"
    assert free_order(scheduler) == [2]


def test_a_twin_in_flight_is_not_readmitted_in_the_step_that_preempts_it():
    """Equal prompts: b's blocks are a's twins, so b would hit a's and fit again at once. But its newest token is in
    flight, and the ranks would be sent a row that lacks it."""
    scheduler = make(num_blocks=6)
    prompt = list(range(11))
    a, b = add(scheduler, "a", prompt, max_tokens=9), add(scheduler, "b", prompt, max_tokens=9)
    step(scheduler)
    second = scheduler.schedule()
    assert plan(second) == [("a", 11, 1, True), ("b", 11, 1, True)]
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4, 5])
    third = scheduler.schedule()
    assert plan(third) == [("a", 12, 1, True)]
    assert b.num_in_flight == 1 and b.status is Status.WAITING
    assert free_order(scheduler) == [4, 3]
    scheduler.update(second, [1012, 1012])
    fourth = scheduler.schedule()
    # 13 tokens: blocks 0, 1, 2 of a hold the first twelve, one is computed.
    assert plan(fourth) == [("a", 13, 1, True), ("b", 12, 1, True)]
    assert b.block_table == [0, 1, 2, 4]
    assert fourth[1].sequence.token_ids == [*prompt, 1011, 1012]


def test_a_mid_chunk_sequence_can_be_preempted_and_starts_again():
    scheduler = make(num_blocks=5, budget=5)
    add(scheduler, "a", 4, max_tokens=6)
    b = add(scheduler, "b", 13, max_tokens=2)
    assert step(scheduler) == [("b", 0, 1, False), ("a", 0, 4, True)]
    second = scheduler.schedule()
    assert plan(second) == [("a", 4, 1, True)]          # b's prompt had the four other blocks
    assert scheduler.num_preemptions == 1
    scheduler.update(second, made_up(second))
    assert (b.num_computed, b.num_in_flight, b.output_token_ids) == (0, 0, [])
    for _ in range(20):
        step(scheduler)
    assert b.output_token_ids == [1013, 1014]


# --- Abort


def two_running():
    scheduler = make(budget=16)
    a, b = add(scheduler, "a", 5, max_tokens=4), add(scheduler, "b", 6, max_tokens=4)
    step(scheduler)
    return scheduler, a, b


def finishes_alone(scheduler, sequence):
    """The other one is unaffected: it gets all its tokens, in one step each."""
    while has_unfinished(scheduler):
        chunks = scheduler.schedule()
        assert [chunk.sequence for chunk in chunks] == [sequence]
        scheduler.update(chunks, made_up(chunks))
    n = sequence.num_prompt_tokens
    assert sequence.output_token_ids == [1000 + n, 1001 + n, 1002 + n, 1003 + n]
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    assert sorted(scheduler.free_rows) == [0, 1, 2, 3]


def test_abort_while_waiting():
    scheduler, a, b = two_running()
    scheduler.finish(b, "abort")
    c = add(scheduler, "c", 5)
    scheduler.finish(c, "abort")
    assert (c.status, c.finish_reason, names(scheduler.waiting)) == (Status.FINISHED, "abort", "")
    finishes_alone(scheduler, a)


def test_abort_while_running_gives_the_blocks_back_at_once():
    scheduler, a, b = two_running()
    scheduler.finish(a, "abort")
    assert (a.status, a.finish_reason, a.row, a.block_table) == (Status.FINISHED, "abort", None, [])
    assert free_order(scheduler) == [*range(4, 16), 1, 0]
    assert a.output_token_ids == [1005]                 # what it had stays readable
    finishes_alone(scheduler, b)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_second_abort_changes_nothing(is_running):
    """Case 26, abort twice."""
    scheduler, a, b = two_running()
    c = a if is_running else add(scheduler, "c", 5)
    scheduler.finish(c, "abort")
    before = (free_order(scheduler), list(scheduler.free_rows), names(scheduler.running), names(scheduler.waiting))
    scheduler.finish(c, "abort")
    assert (c.status, c.finish_reason) == (Status.FINISHED, "abort")
    assert before == (free_order(scheduler), scheduler.free_rows, names(scheduler.running), names(scheduler.waiting))
    if is_running:
        finishes_alone(scheduler, b)


def test_abort_in_the_middle_of_a_prompt():
    scheduler = make(budget=8)
    a, b = add(scheduler, "a", 4, max_tokens=4), add(scheduler, "b", 20)
    step(scheduler)
    assert b.num_computed == 4
    scheduler.finish(b, "abort")
    assert b.block_table == [] and scheduler.block_manager.num_free_blocks == 15
    finishes_alone(scheduler, a)


def test_abort_with_a_token_in_flight_drops_it():
    scheduler, a, b = two_running()
    second = scheduler.schedule()
    scheduler.finish(a, "abort")
    assert a.block_table == [] and scheduler.block_manager.num_free_blocks == 14
    third = scheduler.schedule()
    assert plan(third) == [("b", 7, 1, True)]
    index = dict(scheduler.block_manager.index)
    assert plan(second) == [("b", 6, 1, True), ("a", 5, 1, True)]
    assert scheduler.update(second, [1007, 1006]) == [b]
    assert a.output_token_ids == [1005] and a.finish_reason == "abort"
    assert scheduler.block_manager.index == index       # nothing of a's was registered after the fact
    assert scheduler.update(third, [1008]) == [b]
    finishes_alone(scheduler, b)


def test_blocks_freed_while_their_step_is_in_flight_are_not_findable():
    scheduler = make()
    a = add(scheduler, "a", 9)
    first = scheduler.schedule()
    scheduler.finish(a, "abort")
    scheduler.update(first, [1009])
    assert scheduler.block_manager.index == {}
    assert scheduler.block_manager.find_prefix(a.token_ids + [1]) == []


def test_abort_of_a_preempted_sequence_with_a_token_in_flight():
    scheduler, a, b, second = full_pool_in_flight()
    third = scheduler.schedule()
    scheduler.finish(b, "abort")
    assert names(scheduler.waiting) == ""
    assert scheduler.update(second, [1008, 1008]) == [a]
    assert b.output_token_ids == [1007]
    scheduler.update(third, [1009])
    assert a.finish_reason == "length" and scheduler.block_manager.num_free_blocks == 4


def test_a_row_of_an_aborted_sequence_can_be_given_while_its_step_is_in_flight():
    scheduler = make(max_num_seqs=1)
    a = add(scheduler, "a", 5)
    first = scheduler.schedule()
    scheduler.finish(a, "abort")
    b = add(scheduler, "b", 3)
    second = scheduler.schedule()
    assert plan(second) == [("b", 0, 3, True)] and b.row == 0
    assert scheduler.update(first, [1005]) == []
    assert scheduler.update(second, [1003]) == [b]
    assert (a.output_token_ids, b.output_token_ids) == ([], [1003])


def test_every_chunk_of_a_step_needs_its_result():
    scheduler = make()
    add(scheduler, "a", 3), add(scheduler, "b", 3)
    chunks = scheduler.schedule()
    with pytest.raises(ValueError):
        scheduler.update(chunks, [1])

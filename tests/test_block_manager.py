"""Promises of the BlockManager, shown on blocks of four tokens. No model, no scheduler."""

import random

import pytest

from nanoengine.block_manager import BlockManager
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence

ONE_TO_EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def sequence_of(*token_ids):
    return Sequence("r", list(token_ids), SamplingParams(), seed=0, max_num_tokens=1000)


def allocated(manager, *token_ids, hits=()):
    """A sequence of these tokens that has got its blocks."""
    sequence = sequence_of(*token_ids)
    assert manager.allocate(sequence, len(token_ids), list(hits)) is True
    return sequence


def computed(manager, *token_ids):
    """A sequence of these tokens that looked for its prefix, got its blocks, and has computed everything."""
    hits = manager.find_prefix(list(token_ids))
    sequence = allocated(manager, *token_ids, hits=hits)
    manager.register(sequence, len(hits) * manager.block_size, len(token_ids))
    return sequence


def free_order(manager):
    return list(manager.free_blocks)


def index_of(manager):
    """The prefix index, with the block's own tokens in place of the hash."""
    assert all(manager.blocks[block_id].key == key for key, block_id in manager.index.items())
    return {manager.blocks[block_id].content[1:]: block_id for block_id in manager.index.values()}


def ref_counts(manager):
    return [block.ref_count for block in manager.blocks]


def everything(manager):
    return (free_order(manager), dict(manager.index),
            [(b.ref_count, b.key, b.content, b.content_id) for b in manager.blocks])


# --- Blocks and their number


@pytest.mark.parametrize("block_size, num_tokens, num_blocks", [
    (4, 0, 0), (4, 1, 1), (4, 3, 1), (4, 4, 1), (4, 5, 2), (4, 8, 2), (4, 10, 3),
    (1, 0, 0), (1, 1, 1), (1, 7, 7), (16, 15, 1), (16, 16, 1), (16, 17, 2)])
def test_tokens_take_the_smallest_number_of_blocks_that_holds_them(block_size, num_tokens, num_blocks):
    assert BlockManager(20, block_size).num_blocks_for(num_tokens) == num_blocks


def test_a_new_pool_is_all_free_and_finds_nothing():
    manager = BlockManager(5, 4)
    assert manager.num_blocks == 5 and manager.num_free_blocks == 5
    assert free_order(manager) == [0, 1, 2, 3, 4]
    assert manager.index == {}
    assert manager.find_prefix(ONE_TO_EIGHT) == []


def test_ten_tokens_take_three_blocks_in_the_order_of_the_free_list():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, *range(10))
    assert sequence.block_table == [0, 1, 2]
    assert free_order(manager) == [3, 4]
    assert ref_counts(manager) == [1, 1, 1, 0, 0]


def test_a_table_grows_only_when_its_last_block_is_full():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, 1, 2, 3)
    for num_tokens, table in [(4, [0]), (5, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])]:
        assert manager.allocate(sequence, num_tokens) is True
        assert sequence.block_table == table
    assert free_order(manager) == [3, 4]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_outputs", [1, 2, "bs", "bs+1"])
@pytest.mark.parametrize("past_block", [-1, 0, 1])
def test_growing_token_by_token_holds_exactly_the_blocks_that_are_needed(block_size, num_outputs, past_block):
    """Case 7: prompts of bs-1, bs, bs+1 tokens (block size 1: 1, 1, 2) and some outputs."""
    num_outputs = {"bs": block_size, "bs+1": block_size + 1}.get(num_outputs, num_outputs)
    num_prompt = max(1, block_size + past_block)
    manager = BlockManager(40, block_size)
    sequence = allocated(manager, *range(num_prompt))
    for num_tokens in range(num_prompt, num_prompt + num_outputs):
        assert manager.allocate(sequence, num_tokens) is True
        assert len(sequence.block_table) == -(-num_tokens // block_size)
    assert sorted(sequence.block_table + free_order(manager)) == list(range(40))


# --- The order of reuse


def test_a_sequence_gives_its_last_block_back_first():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, *range(10))
    manager.free(sequence)
    assert sequence.block_table == []
    assert free_order(manager) == [3, 4, 2, 1, 0]
    assert ref_counts(manager) == [0, 0, 0, 0, 0]


def test_freed_blocks_are_reused_oldest_first():
    manager = BlockManager(5, 4)
    a, b, c = allocated(manager, 1, 2), allocated(manager, 3, 4, 5, 6, 7), allocated(manager, 8)
    assert (a.block_table, b.block_table, c.block_table) == ([0], [1, 2], [3])
    manager.free(b)
    manager.free(a)
    assert free_order(manager) == [4, 2, 1, 0]
    assert allocated(manager, *range(20, 29)).block_table == [4, 2, 1]
    manager.free(c)
    assert free_order(manager) == [0, 3]
    assert allocated(manager, *range(20, 25)).block_table == [0, 3]
    assert free_order(manager) == []


def test_a_used_prefix_outlives_its_end():
    """Freed last block first, so a small newcomer costs the longest prefix only its end."""
    manager = BlockManager(3, 4)
    manager.free(computed(manager, *range(12)))
    assert free_order(manager) == [2, 1, 0]
    allocated(manager, 99)
    assert manager.find_prefix(list(range(13))) == [0, 1]
    allocated(manager, 98)
    assert manager.find_prefix(list(range(13))) == [0]


def test_a_hit_moves_a_block_to_the_end_of_the_free_list_once_it_is_freed_again():
    manager = BlockManager(3, 4)
    for first in (10, 20, 30):
        manager.free(computed(manager, *range(first, first + 4)))
    assert free_order(manager) == [0, 1, 2]
    # 10..13 is used again: block 0 as a hit, and block 1 (the oldest left) for the token after it.
    again = computed(manager, 10, 11, 12, 13, 14)
    assert again.block_table == [0, 1]
    manager.free(again)
    assert free_order(manager) == [2, 1, 0]


# --- Finding prefixes


def test_full_blocks_are_found_again_and_partial_ones_are_not():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, *range(1, 11))
    manager.register(sequence, 0, 10)
    assert index_of(manager) == {(1, 2, 3, 4): 0, (5, 6, 7, 8): 1}
    assert manager.blocks[2].key is None
    assert manager.find_prefix(list(range(1, 20))) == [0, 1]


def test_blocks_are_not_found_before_they_are_registered():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, *range(1, 11))
    assert manager.index == {} and manager.find_prefix(list(range(1, 20))) == []
    manager.register(sequence, 0, 4)
    assert manager.find_prefix(list(range(1, 20))) == [0]


def test_chunks_register_the_blocks_that_they_fill():
    manager = BlockManager(5, 4)
    sequence = allocated(manager, *range(12))
    for start, end, blocks in [(0, 3, []), (3, 4, [0]), (4, 5, [0]), (5, 11, [0, 1]), (11, 12, [0, 1, 2])]:
        manager.register(sequence, start, end)
        assert sorted(manager.index.values()) == blocks
    assert index_of(manager) == {(0, 1, 2, 3): 0, (4, 5, 6, 7): 1, (8, 9, 10, 11): 2}


def test_registering_in_chunks_or_at_once_gives_the_same_index():
    whole, chunked = BlockManager(5, 4), BlockManager(5, 4)
    whole.register(allocated(whole, *range(12)), 0, 12)
    sequence = allocated(chunked, *range(12))
    for start, end in [(0, 5), (5, 6), (6, 12)]:
        chunked.register(sequence, start, end)
    assert everything(whole) == everything(chunked)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_full", [1, 2])
def test_at_least_one_token_is_left_to_compute(block_size, num_full):
    """Case 1: a prompt of exactly k blocks, sent again, may use only k - 1 of them."""
    manager = BlockManager(8, block_size)
    prompt = list(range(num_full * block_size))
    first = computed(manager, *prompt)
    assert manager.find_prefix(prompt) == first.block_table[:num_full - 1]
    assert manager.find_prefix(prompt + [77]) == first.block_table[:num_full]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3], [1, 2, 3, 4]])
def test_short_prompts_find_nothing(token_ids):
    manager = BlockManager(5, 4)
    computed(manager, *ONE_TO_EIGHT)
    assert manager.find_prefix(token_ids) == []


def test_finding_changes_nothing():
    manager = BlockManager(5, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    before = everything(manager)
    assert manager.find_prefix(ONE_TO_EIGHT + [9]) == [0, 1]
    assert everything(manager) == before


def test_a_block_is_found_only_behind_its_own_prefix():
    manager = BlockManager(8, 4)
    computed(manager, 1, 2, 3, 4, 5, 6, 7, 8)
    assert manager.find_prefix([9, 9, 9, 9, 5, 6, 7, 8, 0]) == []
    assert manager.find_prefix([5, 6, 7, 8, 5, 6, 7, 8, 0]) == []
    assert manager.find_prefix([1, 2, 3, 4, 9, 9, 9, 9, 0]) == [0]


def test_equal_tokens_behind_different_prefixes_are_different_blocks_and_both_are_found():
    manager = BlockManager(8, 4)
    a = computed(manager, 1, 1, 1, 1, 5, 6, 7, 8)
    b = computed(manager, 2, 2, 2, 2, 5, 6, 7, 8)
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3])
    assert manager.blocks[1].key != manager.blocks[3].key
    assert manager.blocks[1].content_id != manager.blocks[3].content_id
    assert manager.find_prefix([1, 1, 1, 1, 5, 6, 7, 8, 0]) == [0, 1]
    assert manager.find_prefix([2, 2, 2, 2, 5, 6, 7, 8, 0]) == [2, 3]


def test_a_prompt_of_one_repeated_token_finds_each_block_once():
    manager = BlockManager(8, 4)
    computed(manager, *[7] * 12)
    assert manager.find_prefix([7] * 12) == [0, 1]
    assert manager.find_prefix([7] * 30) == [0, 1, 2]


def test_the_search_ends_at_the_first_gap():
    """Block 1 is reused, so block 2 behind it can't be reached, though nobody has reused it."""
    manager = BlockManager(6, 4)
    sequence = computed(manager, *range(12))
    other = allocated(manager, 99, hits=[])
    assert other.block_table == [3]
    sequence.block_table[:] = [0, 2, 1]         # freed from the end: 1 first, then 2, then 0
    manager.free(sequence)
    assert free_order(manager) == [4, 5, 1, 2, 0]
    allocated(manager, *range(50, 59))          # takes 4, 5, 1
    assert manager.find_prefix(list(range(13))) == [0]


def test_a_reused_block_is_no_longer_found_and_has_no_key():
    manager = BlockManager(2, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    assert manager.find_prefix(ONE_TO_EIGHT + [9]) == [0, 1]
    other = allocated(manager, 9)
    assert other.block_table == [1]
    assert index_of(manager) == {(1, 2, 3, 4): 0}
    assert manager.blocks[1].key is None and manager.blocks[1].content == ()
    assert manager.find_prefix(ONE_TO_EIGHT + [9]) == [0]


def test_freed_blocks_still_give_hits():
    manager = BlockManager(4, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT, 9))
    assert free_order(manager) == [3, 2, 1, 0]
    again = computed(manager, *ONE_TO_EIGHT, 10)
    assert again.block_table == [0, 1, 3]
    assert free_order(manager) == [2]
    assert ref_counts(manager) == [1, 1, 0, 1]


def test_without_prefix_caching_nothing_is_ever_found():
    manager = BlockManager(4, 4, enable_prefix_caching=False)
    sequence = computed(manager, *ONE_TO_EIGHT)
    assert manager.index == {} and all(block.key is None for block in manager.blocks)
    manager.free(sequence)
    assert manager.find_prefix(ONE_TO_EIGHT + [9]) == []
    assert free_order(manager) == [2, 3, 1, 0]


def test_registering_a_sequence_without_blocks_does_nothing():
    """It was preempted while its step was in flight: its blocks may be someone else's by now."""
    manager = BlockManager(4, 4)
    sequence = allocated(manager, *ONE_TO_EIGHT)
    manager.free(sequence)
    before = everything(manager)
    manager.register(sequence, 0, 8)
    assert everything(manager) == before


# --- Sharing


def test_a_shared_block_is_counted_once_per_table_and_freed_with_the_last():
    manager = BlockManager(6, 4)
    a = computed(manager, *ONE_TO_EIGHT, 9)
    b = computed(manager, *ONE_TO_EIGHT, 10)
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 1, 3])
    assert ref_counts(manager) == [2, 2, 1, 1, 0, 0]
    manager.free(a)
    assert ref_counts(manager) == [1, 1, 0, 1, 0, 0]
    assert free_order(manager) == [4, 5, 2]
    manager.free(b)
    assert ref_counts(manager) == [0] * 6
    assert free_order(manager) == [4, 5, 2, 3, 1, 0]


def test_hits_come_first_in_the_table_and_new_blocks_behind_them():
    manager = BlockManager(6, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    sequence = sequence_of(*ONE_TO_EIGHT, 9, 10, 11, 12, 13)
    assert manager.allocate(sequence, 13, [0, 1]) is True
    assert sequence.block_table == [0, 1, 2, 3]
    assert free_order(manager) == [4, 5]


def test_hits_alone_may_be_all_that_is_needed():
    manager = BlockManager(2, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    sequence = sequence_of(*ONE_TO_EIGHT)
    assert manager.allocate(sequence, 8, [0, 1]) is True
    assert sequence.block_table == [0, 1]
    assert free_order(manager) == [] and ref_counts(manager) == [1, 1]


def test_a_hit_on_a_free_block_is_not_counted_as_a_new_block_too():
    """Three tokens' blocks are needed, two are free, and one of these is the hit: one block short."""
    manager = BlockManager(3, 4)
    manager.free(computed(manager, 1, 2, 3, 4))
    holder = allocated(manager, 99)
    assert holder.block_table == [1]
    assert free_order(manager) == [2, 0]
    sequence = sequence_of(*ONE_TO_EIGHT, 9)
    assert manager.find_prefix(sequence.token_ids) == [0]
    before = everything(manager)
    assert manager.allocate(sequence, 9, [0]) is False
    assert everything(manager) == before and sequence.block_table == []
    assert manager.allocate(sequence, 8, [0]) is True
    assert sequence.block_table == [0, 2]


def test_a_hit_that_is_in_use_costs_no_free_block():
    manager = BlockManager(3, 4)
    holder = computed(manager, 1, 2, 3, 4)
    assert free_order(manager) == [1, 2]
    sequence = allocated(manager, *ONE_TO_EIGHT, 9, hits=[0])
    assert sequence.block_table == [0, 1, 2] and holder.block_table == [0]
    assert free_order(manager) == [] and ref_counts(manager) == [2, 1, 1]


def test_a_free_hit_is_not_handed_out_as_a_new_block_of_the_same_allocation():
    """Block 0 is the oldest free block and the hit: it must leave the free list before new ones are taken."""
    manager = BlockManager(2, 4)
    holder = allocated(manager, 99)
    manager.free(computed(manager, 1, 2, 3, 4))
    manager.free(holder)
    assert free_order(manager) == [1, 0]
    sequence = allocated(manager, 1, 2, 3, 4, 5, hits=[1])
    assert sequence.block_table == [1, 0]
    assert index_of(manager) == {(1, 2, 3, 4): 1}


@pytest.mark.parametrize("num_tokens", [13, 20, 400])
def test_a_failed_allocation_changes_nothing(num_tokens):
    manager = BlockManager(4, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    holder = allocated(manager, 99)
    before = everything(manager)
    new = sequence_of(*ONE_TO_EIGHT, *range(num_tokens - 8))
    assert manager.allocate(new, num_tokens, [0, 1]) is False
    assert manager.allocate(holder, num_tokens + 4) is False
    assert new.block_table == [] and holder.block_table == [2]
    assert everything(manager) == before


def test_the_last_free_block_can_be_taken():
    manager = BlockManager(3, 4)
    sequence = allocated(manager, *range(12))
    assert free_order(manager) == [] and manager.num_free_blocks == 0
    assert manager.allocate(sequence, 12) is True
    assert manager.allocate(sequence, 13) is False
    assert sequence.block_table == [0, 1, 2]


# --- Twins: equal content in two blocks


def twins(num_blocks=8):
    """Two sequences that computed the same eight tokens side by side, so that neither found the other's blocks."""
    manager = BlockManager(num_blocks, 4)
    first, second = allocated(manager, *ONE_TO_EIGHT, 9), allocated(manager, *ONE_TO_EIGHT, 9)
    manager.register(first, 0, 9)
    manager.register(second, 0, 9)
    return manager, first, second


def test_twins_share_key_and_content_id_and_the_index_keeps_the_first():
    manager, first, second = twins()
    assert (first.block_table, second.block_table) == ([0, 1, 2], [3, 4, 5])
    assert index_of(manager) == {(1, 2, 3, 4): 0, (5, 6, 7, 8): 1}
    for one, other in [(0, 3), (1, 4)]:
        assert manager.blocks[one].key == manager.blocks[other].key is not None
        assert manager.blocks[one].content_id == manager.blocks[other].content_id
    assert manager.find_prefix([*ONE_TO_EIGHT, 0]) == [0, 1]


def test_the_child_of_a_twin_is_found_behind_the_first():
    """Only the second one goes on: its block 5 carries the chain on, as if its prefix stood in blocks 0 and 1."""
    manager, first, second = twins()
    second.token_ids += [10, 11, 12]
    manager.register(second, 9, 12)
    assert manager.find_prefix([*ONE_TO_EIGHT, 9, 10, 11, 12, 0]) == [0, 1, 5]
    # ... and not at the start of a prompt or behind another prefix.
    assert manager.find_prefix([9, 10, 11, 12, 0]) == []
    assert manager.find_prefix([5, 6, 7, 8, 9, 10, 11, 12, 0]) == []


def test_a_reused_twin_leaves_the_first_findable():
    manager, first, second = twins(num_blocks=6)
    manager.free(second)
    assert allocated(manager, *range(50, 59)).block_table == [5, 4, 3]
    assert index_of(manager) == {(1, 2, 3, 4): 0, (5, 6, 7, 8): 1}
    assert manager.find_prefix([*ONE_TO_EIGHT, 0]) == [0, 1]


def test_a_reused_first_costs_a_miss_and_never_a_wrong_block():
    manager, first, second = twins(num_blocks=6)
    manager.free(first)
    other = allocated(manager, *range(50, 62))
    assert other.block_table == [2, 1, 0]
    manager.register(other, 0, 12)
    assert 0 not in manager.find_prefix([*ONE_TO_EIGHT, 0]) and 1 not in manager.find_prefix([*ONE_TO_EIGHT, 0])
    assert manager.find_prefix(list(range(50, 63))) == [2, 1, 0]
    manager.free(second)
    manager.free(other)
    assert len(manager.index) <= 6


def test_the_twin_of_a_reused_block_can_be_reused_too():
    manager, first, second = twins(num_blocks=6)
    manager.free(first)
    manager.free(allocated(manager, *range(50, 62)))
    manager.free(second)
    assert free_order(manager) == [0, 1, 2, 5, 4, 3]
    everybody = allocated(manager, *range(70, 94))
    assert everybody.block_table == [0, 1, 2, 5, 4, 3]
    assert manager.index == {}
    manager.register(everybody, 0, 24)
    assert manager.find_prefix(list(range(70, 95))) == [0, 1, 2, 5, 4, 3]


def test_content_computed_again_after_its_block_was_reused_is_found_again():
    manager = BlockManager(3, 4)
    manager.free(computed(manager, *ONE_TO_EIGHT))
    manager.free(allocated(manager, *range(50, 62)))        # reuses all three
    assert manager.index == {} and free_order(manager) == [0, 1, 2]
    again = computed(manager, *ONE_TO_EIGHT)
    assert again.block_table == [0, 1]
    assert manager.find_prefix([*ONE_TO_EIGHT, 9]) == [0, 1]


def test_an_orphaned_child_is_not_found_behind_another_parent():
    """Block 0, the parent, is reused; block 1 keeps its content and key but can't be reached any more."""
    manager = BlockManager(4, 4)
    sequence = computed(manager, *ONE_TO_EIGHT)
    sequence.block_table.reverse()                          # so that block 0 is freed first
    manager.free(sequence)
    assert free_order(manager) == [2, 3, 0, 1]
    other = computed(manager, *range(50, 62))
    assert other.block_table == [2, 3, 0]
    assert manager.find_prefix([*ONE_TO_EIGHT, 9]) == []
    assert manager.find_prefix([5, 6, 7, 8, 9]) == []
    assert manager.find_prefix([50, 51, 52, 53, 5, 6, 7, 8, 9]) == [2]
    manager.free(other)
    again = computed(manager, *ONE_TO_EIGHT)                # the content once more, in other blocks
    assert manager.find_prefix([*ONE_TO_EIGHT, 9]) == again.block_table


# --- Hash collisions


@pytest.fixture
def colliding(monkeypatch):
    monkeypatch.setattr(BlockManager, "_key", staticmethod(lambda content: 42))


def test_with_one_hash_for_everything_the_answer_is_a_miss_and_never_wrong(colliding):
    manager = BlockManager(8, 4)
    computed(manager, 1, 2, 3, 4)
    assert manager.find_prefix([1, 2, 3, 4, 0]) == [0]
    assert manager.find_prefix([5, 6, 7, 8, 0]) == []
    assert manager.find_prefix([1, 2, 3, 4, 1, 2, 3, 4, 0]) == [0]      # not block 0 twice
    assert manager.find_prefix([5, 6, 7, 8, 1, 2, 3, 4, 0]) == []


def test_with_one_hash_for_everything_a_second_block_is_not_found_without_its_prefix(colliding):
    manager = BlockManager(8, 4)
    computed(manager, 1, 2, 3, 4, 5, 6, 7, 8)
    assert manager.find_prefix([5, 6, 7, 8, 0]) == []
    assert manager.find_prefix([9, 9, 9, 9, 5, 6, 7, 8, 0]) == []
    assert manager.find_prefix([1, 2, 3, 4, 5, 6, 7, 8, 0]) in ([], [0], [0, 1])


def test_colliding_blocks_are_no_twins(colliding):
    manager = BlockManager(8, 4)
    computed(manager, 1, 2, 3, 4)
    computed(manager, 5, 6, 7, 8)
    assert manager.blocks[0].content_id != manager.blocks[1].content_id


@pytest.mark.parametrize("modulus", [1, 2, 5])
def test_every_hit_holds_the_prompt_s_own_tokens_whatever_the_hash(monkeypatch, modulus):
    """Random prompts of two token ids; a note of what each block really holds is kept beside the manager."""
    monkeypatch.setattr(BlockManager, "_key", staticmethod(lambda content: sum(content[1:]) % modulus))
    manager, holds, draw, num_hits = BlockManager(12, 2), {}, random.Random(modulus), 0
    live = []
    for _ in range(600):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 9))]
        hits = manager.find_prefix(prompt)
        num_hits += len(hits)
        for i, block_id in enumerate(hits):
            assert holds[block_id] == prompt[:2 * i + 2]
        sequence = sequence_of(*prompt)
        if manager.allocate(sequence, len(prompt), hits):
            for i, block_id in enumerate(sequence.block_table):
                holds[block_id] = prompt[:2 * i + 2]
            manager.register(sequence, 2 * len(hits), len(prompt))
            live.append(sequence)
        while live and (manager.num_free_blocks < 5 or draw.random() < 0.3):
            manager.free(live.pop(draw.randrange(len(live))))
        assert len(manager.index) <= modulus
    assert num_hits > 20


# --- Bounds


def test_the_index_is_never_larger_than_the_pool_over_a_thousand_prompts():
    """Case 6. One prompt in four is an old one, and still gives hits long after its blocks were freed."""
    manager, draw, old, num_hits = BlockManager(16, 4), random.Random(0), [], 0
    for _ in range(1000):
        if old and draw.random() < 0.25:
            prompt = draw.choice(old[-3:])
        else:
            prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 30))]
            old.append(prompt)
        hits = manager.find_prefix(prompt)
        num_hits += len(hits)
        sequence = computed(manager, *prompt)
        assert len(manager.index) <= 16
        assert set(free_order(manager)).isdisjoint(sequence.block_table)
        manager.free(sequence)
        assert manager.num_free_blocks == 16
    assert num_hits > 200


def test_keys_depend_on_the_tokens_their_order_and_the_parent():
    keys = {BlockManager._key((parent, *tokens)) for tokens in [(1, 2), (2, 1), (1, 3), (258, 0), (2, 1, 0)]
            for parent in (0, 1, 2**62)}
    assert len(keys) == 15
    assert BlockManager._key((7, 1, 2)) == BlockManager._key((7, 1, 2))

"""The same tokens on every rung: batched, chunked, preempted, cached, asynchronous, in blocks of every size.

Everything is compared with the oracle of tiny.py, token for token.
"""

import itertools
from collections import Counter

import pytest

import tiny
from nanoengine import SamplingParams
from tiny import assert_same_tokens, drain, engine, known_distribution, oracle_for, random_ids

BLOCK_SIZES = (1, 4, 16)


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def check(folder, prompts, params, outputs, label=""):
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    assert len(outputs) == len(prompts)
    for number, (prompt, one, output) in enumerate(zip(prompts, params, outputs)):
        assert list(output.prompt_token_ids) == prompt
        assert_same_tokens(output, oracle_for(folder, prompt, one), f"{label} prompt {number}:")


# ---- the ladder: families x settings x async x prefix cache x block size, twice on each engine

LONG = random_ids(100, 18)
PROMPTS = [
    LONG,  # 18: longer than the budget of 16
    LONG[:12] + [1, 2, 3],  # shares 12 tokens, whole blocks of 1 and of 4
    LONG[:12] + [1, 2, 3],  # the same again in one batch
    random_ids(101, 1),
    LONG[:8],  # whole blocks, and a prefix of others
    LONG[:16],  # a whole block of 16
    random_ids(102, 13),
]
LENGTHS = [6, 9, 9, 12, 12, 8, 10]  # at most 23 tokens with KV each; 146 in all
SETTINGS = {
    "roomy": lambda block_size: {},
    "budget 16": lambda block_size: {"max_num_batched_tokens": 16},
    "few blocks": lambda block_size: {"num_kvcache_blocks": {1: 24, 4: 8, 16: 3}[block_size]},
    "two rows": lambda block_size: {"max_num_seqs": 2},
}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ladder(checkpoint, family, setting, is_async, has_cache, block_size):
    folder, params = checkpoint(family), [greedy(length) for length in LENGTHS]
    options = {
        "kvcache_block_size": block_size,
        "async_scheduling": is_async,
        "enable_prefix_caching": has_cache,
        **SETTINGS[setting](block_size),
    }
    with engine(folder, **options) as llm:
        for call in ("first", "second"):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            check(folder, PROMPTS, params, outputs, f"{call} call,")
            assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)
            if not has_cache:
                assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert not llm.has_unfinished() and llm.step() == []
        assert (llm.scheduler.num_preemptions > 0) == (setting == "few blocks")
    if has_cache and setting == "roomy":
        hits = [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]  # all but the last token
        assert [output.num_cached_tokens for output in outputs] == hits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_everything_scarce_at_once(checkpoint, family):
    folder, params = checkpoint(family), [greedy(length) for length in LENGTHS]
    options = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 5, "max_num_seqs": 3}
    for is_async, has_cache in itertools.product((True, False), repeat=2):
        with engine(folder, async_scheduling=is_async, enable_prefix_caching=has_cache, **options) as llm:
            for _ in range(2):
                check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))
            assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 8, 32, 64, 256])
def test_every_block_size(checkpoint, block_size):
    """Case 39."""
    folder, params = checkpoint("llama"), [greedy(length) for length in LENGTHS]
    with engine(folder, kvcache_block_size=block_size) as llm:
        for _ in range(2):
            check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))


def test_a_pool_in_any_order(checkpoint):
    """Case 39: requests of many lengths that come and go leave the free list shuffled."""
    folder = checkpoint("llama")
    prompts = [random_ids(200 + n, 1 + 7 * n % 23) for n in range(24)]
    params = [greedy(1 + 5 * n % 9) for n in range(24)]
    for options in ({}, {"enable_prefix_caching": False}):
        with engine(folder, num_kvcache_blocks=20, max_num_batched_tokens=24, **options) as llm:
            for _ in range(2):
                check(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))


# ---- prefix cache


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_prompt_of_whole_blocks_still_computes_a_token(checkpoint, block_size, num_blocks):
    """Case 1: sent twice, then twice in one batch."""
    folder, prompt = checkpoint("qwen3"), random_ids(110, num_blocks * block_size)
    for is_async in (True, False):
        with engine(folder, kvcache_block_size=block_size, async_scheduling=is_async) as llm:
            for prompts in ([prompt], [prompt], [prompt, prompt]):
                outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
                check(folder, prompts, greedy(6), outputs)
            assert [output.num_cached_tokens for output in outputs] == [(num_blocks - 1) * block_size] * 2
        with engine(folder, kvcache_block_size=block_size, async_scheduling=is_async) as llm:
            check(folder, [prompt] * 2, greedy(6), llm.generate([prompt] * 2, greedy(6), use_tqdm=False))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("budget", [3, 4, 8, 17, 41, 60])
def test_no_hit_on_blocks_that_are_not_written_yet(checkpoint, budget, is_async):
    """Case 2: the first of two prompts with a common prefix is chunked."""
    folder, common = checkpoint("llama"), random_ids(120, 36)
    prompts = [common + [1, 2, 3, 4], common + [5, 6], common + [1, 2, 3, 9], common]
    with engine(folder, max_num_batched_tokens=budget, async_scheduling=is_async) as llm:
        check(folder, prompts, greedy(5), llm.generate(prompts, greedy(5), use_tqdm=False))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 10, 12])
def test_a_preempted_sequence_hits_its_own_blocks_under_a_small_budget(checkpoint, num_blocks, is_async):
    """Case 3."""
    folder, prompts = checkpoint("qwen2"), [random_ids(130 + n, 9 + n) for n in range(4)]
    options = {"num_kvcache_blocks": num_blocks, "max_num_batched_tokens": 6, "async_scheduling": is_async}
    with engine(folder, **options) as llm:
        outputs = llm.generate(prompts, greedy(14), use_tqdm=False)
        check(folder, prompts, greedy(14), outputs)
        assert [output.num_cached_tokens for output in outputs] == [0] * 4  # its own blocks aren't a hit
        check(folder, prompts, greedy(14), llm.generate(prompts, greedy(14), use_tqdm=False))
        assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_blocks", range(6, 14))
def test_twins_preempt_each_other(checkpoint, num_blocks, is_async):
    """A victim's blocks are its twin's as well, so it would find them at once if it were let in."""
    folder, prompts = checkpoint("llama"), [random_ids(135, 9)] * 4 + [random_ids(136, 8)] * 2
    with engine(folder, num_kvcache_blocks=num_blocks, async_scheduling=is_async) as llm:
        for _ in range(2):
            check(folder, prompts, greedy(14), llm.generate(prompts, greedy(14), use_tqdm=False))


@pytest.mark.parametrize("is_async", [True, False])
def test_first_come_first_served_whoever_is_preempted(checkpoint, is_async):
    folder, prompts = checkpoint("llama"), [random_ids(137 + n, 5) for n in range(8)]
    with engine(folder, num_kvcache_blocks=9, async_scheduling=is_async) as llm:
        added = [llm.add_request(prompt, greedy(12)) for prompt in prompts]
        outputs = drain(llm)
        assert llm.scheduler.num_preemptions > 0
    assert [output.request_id for output in outputs] == added
    check(folder, prompts, greedy(12), outputs)


@pytest.mark.parametrize("is_async", [True, False])
def test_hit_and_cold_prompts_in_one_step(checkpoint, is_async):
    """Case 40."""
    folder, known = checkpoint("llama"), random_ids(140, 21)
    prompts = [random_ids(141, 30), known + [3], random_ids(142, 9), known, known[:17] + random_ids(143, 9)]
    with engine(folder, async_scheduling=is_async) as llm:
        llm.generate([known], greedy(3), use_tqdm=False)
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
    check(folder, prompts, greedy(8), outputs)
    assert [output.num_cached_tokens for output in outputs] == [0, 20, 0, 20, 16]


def test_an_answer_is_a_prefix_of_the_next_prompt(checkpoint):
    """A conversation: prompt and answer of one turn are found by the next."""
    folder, prompt = checkpoint("qwen3"), random_ids(150, 10)
    with engine(folder) as llm:
        (first,) = llm.generate([prompt], greedy(11), use_tqdm=False)
        follow_up = prompt + list(first.token_ids) + random_ids(151, 5)
        (second,) = llm.generate([follow_up], greedy(6), use_tqdm=False)
    check(folder, [follow_up], greedy(6), [second])
    assert second.num_cached_tokens == 20  # 20 of 21 tokens have KV: the last one was never fed


def test_equal_blocks_after_different_prefixes_are_not_confused(checkpoint):
    folder, tail = checkpoint("llama"), random_ids(160, 8)
    prompts = [random_ids(161 + n, 4) + tail + [7] for n in range(4)] + [tail + [7], tail + tail + [7]]
    with engine(folder) as llm:
        for prompt in prompts:  # one after the other: every block is there to be mistaken
            check(folder, [prompt], greedy(5), llm.generate([prompt], greedy(5), use_tqdm=False))
        check(folder, prompts, greedy(5), llm.generate(prompts, greedy(5), use_tqdm=False))


# ---- chunks and budgets


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("budget", range(1, 12))
def test_the_budget_fits_one_prompt_and_part_of_the_second(checkpoint, budget, block_size, is_async):
    """Case 4: in steps of every width, and never a step without progress."""
    folder, prompts = checkpoint("llama"), [random_ids(170, 5), random_ids(171, 7)]
    options = {"kvcache_block_size": block_size, "async_scheduling": is_async}
    with engine(folder, max_num_batched_tokens=budget, **options) as llm:
        for prompt in prompts:
            llm.add_request(prompt, greedy(4))
        outputs = drain(llm, limit=40)
    outputs.sort(key=lambda output: len(output.prompt_token_ids))
    check(folder, prompts, greedy(4), outputs)


def test_a_prompt_of_40_under_a_budget_of_8_takes_five_steps(checkpoint):
    """Case 5."""
    folder, prompt = checkpoint("llama"), random_ids(180, 40)
    given = list(prompt)
    with engine(folder, max_num_batched_tokens=8, async_scheduling=False) as llm:
        llm.add_request(given, greedy(1))
        steps = [llm.step() for _ in range(5)]
        assert not llm.has_unfinished()
    assert [len(step) for step in steps] == [0, 0, 0, 0, 1]
    check(folder, [prompt], greedy(1), steps[4])
    assert given == prompt


@pytest.mark.parametrize("is_async", [True, False])
def test_no_token_from_an_unfinished_chunk(checkpoint, is_async):
    """Case 5, longer outputs: a token drawn too early would shift all that follow."""
    folder, prompts = checkpoint("qwen2"), [random_ids(181, 40), random_ids(182, 25)]
    with engine(folder, max_num_batched_tokens=8, async_scheduling=is_async) as llm:
        check(folder, prompts, greedy(10), llm.generate(prompts, greedy(10), use_tqdm=False))


@pytest.mark.parametrize("is_async", [True, False])
def test_no_token_is_computed_that_nobody_needs(checkpoint, is_async):
    """Length limits are known ahead: no step past max_tokens, and the last token is never fed."""
    with engine(checkpoint("llama"), async_scheduling=is_async) as llm:
        steps = []
        llm.on_step = lambda chunks, launch: steps.append(sum(chunk.num_tokens for chunk in chunks))
        llm.generate([random_ids(183, 10), random_ids(184, 3)], [greedy(7), greedy(4)], use_tqdm=False)
    assert steps == [13, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pool_of_exactly_the_blocks_needed(checkpoint, block_size):
    """Case 7: ceil((prompt + output - 1) / block_size) blocks are enough; what needs one more is refused."""
    folder = checkpoint("llama")
    edges = {1, block_size, block_size + 1, max(1, block_size - 1)}
    for prompt_len, max_tokens in itertools.product(sorted(edges), sorted(edges | {2})):
        prompt, needed = random_ids(190, prompt_len), -(-(prompt_len + max_tokens - 1) // block_size)
        with engine(folder, kvcache_block_size=block_size, num_kvcache_blocks=needed) as llm:
            for _ in range(2):
                outputs = llm.generate([prompt], greedy(max_tokens), use_tqdm=False)
                check(folder, [prompt], greedy(max_tokens), outputs)
            with pytest.raises(ValueError, match=rf"\b{needed + 1}\b") as caught:
                llm.add_request(prompt, greedy(max_tokens + block_size))
            assert str(needed) in str(caught.value)


def test_the_oldest_request_gets_a_token_in_every_step(checkpoint):
    """Case 13: a new prompt before each of 20 steps."""
    folder, prompt = checkpoint("llama"), random_ids(195, 6)
    others = [random_ids(300 + n, 20) for n in range(20)]
    with engine(folder, max_num_batched_tokens=12, async_scheduling=False) as llm:
        first = llm.add_request(prompt, greedy(21))
        outputs = llm.step()
        for number, other in enumerate(others):
            llm.add_request(other, greedy(3), request_id=f"other-{number}")
            outputs += llm.step()
        ended = {output.request_id: output for output in outputs}
        assert first in ended, "21 steps gave fewer than 21 tokens"
        ended.update((output.request_id, output) for output in drain(llm))
    check(folder, [prompt], greedy(21), [ended[first]])
    check(folder, others, greedy(3), [ended[f"other-{number}"] for number in range(20)])


# ---- sampling


def sampled(seed, max_tokens=10, **changes):
    return SamplingParams(temperature=0.9, max_tokens=max_tokens, seed=seed, ignore_eos=True, **changes)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_a_seeded_request_gives_the_same_tokens_everywhere(checkpoint, family, is_async):
    """Case 23 but for ranks: alone, among 7 others (seeded or not), chunked, preempted."""
    folder, prompt = checkpoint(family), random_ids(400, 22)
    params = sampled(2**40 + 17, top_k=50, top_p=0.95, min_p=0.01)
    others = [random_ids(401 + n, 3 + 4 * n) for n in range(7)]
    their_params = [sampled(n if n % 2 else None, max_tokens=12, top_k=n) for n in range(7)]
    for options in ({}, {"max_num_batched_tokens": 8}, {"num_kvcache_blocks": 12}, {"max_num_seqs": 3}):
        with engine(folder, async_scheduling=is_async, **options) as llm:
            for place in (None, 0, 3, 7):
                prompts, all_params = [prompt], [params]
                if place is not None:
                    prompts = others[:place] + [prompt] + others[place:]
                    all_params = their_params[:place] + [params] + their_params[place:]
                outputs = llm.generate(prompts, all_params, use_tqdm=False)
                seeded = [n for n, one in enumerate(all_params) if one.seed is not None]
                pick = [[values[n] for n in seeded] for values in (prompts, all_params, outputs)]
                check(folder, *pick, label=f"{options}, place {place},")


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
        {"top_k": 1},
        {"top_k": 128},
        {"top_k": 1000},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_seeded_draws_equal_the_oracle(checkpoint, filters):
    folder, prompts = checkpoint("llama"), [random_ids(420 + n, 4 + n) for n in range(4)]
    seeds = (0, 1, 2**32, 2**63 - 1)
    params = [
        SamplingParams(temperature=temperature, max_tokens=8, seed=seed, ignore_eos=True, **filters)
        for seed, temperature in zip(seeds, (0.5, 1.0, 1.7, 0.9))
    ]
    with engine(folder) as llm:
        check(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))


def test_seeds_differ_and_unseeded_requests_differ(checkpoint):
    folder, prompt = checkpoint("llama"), random_ids(430, 6)
    for seeds in ([1, 2, 3, 2**32 + 1], [None] * 4):
        with engine(folder) as llm:
            outputs = llm.generate([prompt] * 4, [sampled(seed, 12) for seed in seeds], use_tqdm=False)
        assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_the_engines_seed_decides_unseeded_requests(checkpoint):
    folder, prompts = checkpoint("llama"), [random_ids(440 + n, 6) for n in range(3)]

    def run(seed):
        with engine(folder, seed=seed) as llm:
            outputs = llm.generate(prompts, sampled(None), use_tqdm=False)
        return [tuple(output.token_ids) for output in outputs]

    assert run(5) == run(5) != run(6)


@pytest.mark.parametrize("is_async", [True, False])
def test_greedy_rows_are_untouched_by_sampled_neighbours(checkpoint, is_async):
    """Case 21: temperatures [0, 1, 0]."""
    folder, prompts = checkpoint("qwen3"), [random_ids(450 + n, 7) for n in range(3)]
    hot = SamplingParams(temperature=1.0, top_k=3, max_tokens=10, ignore_eos=True)
    with engine(folder, async_scheduling=is_async) as llm:
        outputs = llm.generate(prompts, [greedy(10), hot, greedy(10)], use_tqdm=False)
        both = llm.generate(prompts[::2], greedy(10), use_tqdm=False)
    check(folder, prompts[::2], greedy(10), outputs[::2])
    check(folder, prompts[::2], greedy(10), both)


def test_a_tiny_temperature_is_greedy(checkpoint):
    """Case 21: 1e-10 must not overflow into inf - inf."""
    folder, prompts = checkpoint("llama"), [random_ids(460 + n, 7) for n in range(3)]
    fields = {"temperature": 1e-10, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    cold = [SamplingParams(**fields, top_p=top_p) for top_p in (1.0, 0.9, 0.5)]
    with engine(folder) as llm:
        outputs = llm.generate(prompts, cold, use_tqdm=False)
    check(folder, prompts, greedy(8), outputs)


def test_huge_logits_stay_finite(checkpoint):
    """Case 21: logits of +-1e4."""

    def enlarge(state):
        state["lm_head.weight"] *= 2000.0

    folder, prompts = checkpoint("llama", edit=enlarge), [random_ids(470 + n, 7) for n in range(6)]
    assert tiny.reference_logits(folder, prompts[0]).abs().max().item() > 1e4
    temperatures = (0.0, 1e-10, 0.01, 1.0, 100.0, 1e4)
    fields = {"max_tokens": 8, "seed": 1, "ignore_eos": True, "top_p": 0.99, "min_p": 0.001}
    params = [SamplingParams(temperature=temperature, **fields) for temperature in temperatures]
    with engine(folder) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [8] * 6
    assert all(0 <= token < 128 for output in outputs for token in output.token_ids)
    for prompt, output in zip(prompts[:3], outputs):  # far apart: the temperature is nothing beside them
        assert_same_tokens(output, oracle_for(folder, prompt, greedy(8)))


HALF_THIRD_FIFTH = known_distribution([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "filters, allowed",
    [
        ({}, {0, 1, 2}),
        ({"top_p": 0.6}, {0, 1}),  # the crossing token is kept
        ({"top_p": 0.5}, {0}),  # reached exactly
        ({"top_p": 0.499}, {0}),
        ({"top_p": 0.1}, {0}),  # at least one token
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # top-k first: 0.5 of 0.8 is 0.625
        ({"top_k": 2, "top_p": 0.63}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),  # of the largest, 0.5: 0.25 and more
        ({"min_p": 0.7}, {0}),
    ],
    ids=str,
)
def test_filters_on_a_known_distribution(checkpoint, filters, allowed):
    """Case 22, end to end."""
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, **filters)
    with engine(checkpoint("llama", edit=HALF_THIRD_FIFTH)) as llm:
        outputs = llm.generate([[1], [2]], params, use_tqdm=False)
    assert {token for output in outputs for token in output.token_ids} == allowed


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_distribution(checkpoint, temperature):
    weights = [p ** (1 / temperature) for p in (0.5, 0.3, 0.2)]
    params = SamplingParams(temperature=temperature, max_tokens=50, ignore_eos=True)
    with engine(checkpoint("llama", edit=HALF_THIRD_FIFTH)) as llm:
        outputs = llm.generate([[1]] * 40, params, use_tqdm=False)
    counts = Counter(token for output in outputs for token in output.token_ids)
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = (2000 * share * (1 - share)) ** 0.5
        assert abs(counts[token] - 2000 * share) < 4 * deviation

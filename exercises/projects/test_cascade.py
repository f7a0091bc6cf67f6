"""Open project `cascade`: rows that share their first blocks attend to these together. The easiest first.

The tokens must be those of the engine without the option, whatever else goes on in a step.
"""

import math

import pytest
import torch
from conftest import checkpoint  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine import LLM, SamplingParams, attention, step_input
from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.sequence import Chunk, Sequence
from nanoengine.step_input import FlatStep, StepInput
from tiny import drain, engine, random_ids

torch.set_num_threads(1)


def chunk(table, start, num_tokens=1):
    """A chunk of a sequence whose blocks are `table`."""
    sequence = Sequence("", [1] * (start + num_tokens), SamplingParams(), 0, 1 << 20)
    sequence.block_table, sequence.row = list(table), 0
    return Chunk(sequence, start, num_tokens, True, False)


def shared_by(*chunks, block_size=4, min_tokens=8):
    return [(list(i), n) for i, n in step_input.shared_prefixes(chunks, block_size, min_tokens)]


# ---- who shares what: plain Python


def test_the_handout_s_example():
    chunks = [chunk([7, 2, 5, 9], 13), chunk([7, 2, 5, 3], 14), chunk([7, 4], 6), chunk([7, 2, 5, 6], 12)]
    assert shared_by(*chunks) == [([0, 1, 3], 3)]


def test_as_many_blocks_as_all_of_them_share():
    assert shared_by(chunk([7, 2, 5, 9], 13), chunk([7, 2, 8, 3], 13), chunk([7, 2, 5, 6], 13)) == [([0, 1, 2], 2)]


def test_groups_are_apart_and_in_the_order_of_their_first_chunks():
    chunks = [chunk([1, 2, 10], 9), chunk([3, 4, 11], 9), chunk([1, 2, 12], 8), chunk([3, 4, 13], 11), chunk([5, 6], 7)]
    assert shared_by(*chunks) == [([0, 2], 2), ([1, 3], 2)]


def test_a_row_that_shares_less_than_the_least_doesn_t_spoil_the_group():
    chunks = [chunk([1, 9, 9, 9], 15), chunk([1, 2, 3, 5], 15), chunk([1, 2, 3, 6], 15)]
    assert shared_by(*chunks, min_tokens=12) == [([1, 2], 3)]
    assert shared_by(*chunks, min_tokens=4) == [([0, 1, 2], 1)]


def test_the_least_is_counted_in_whole_blocks():
    chunks = [chunk([1, 2, 5], 9), chunk([1, 2, 6], 9)]
    assert [bool(shared_by(*chunks, min_tokens=n)) for n in (1, 4, 5, 8, 9, 1000)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("start, blocks", [(8, 2), (9, 2), (11, 2), (12, 3), (13, 3)])
def test_only_blocks_that_were_full_before_this_step(start, blocks):
    """The token at position 11 fills block 2 in this step: it is the row's own, whatever the tables say."""
    assert shared_by(chunk([1, 2, 3, 4], 14), chunk([1, 2, 3, 5], start)) == [([0, 1], blocks)]
    assert shared_by(chunk([1, 2, 3, 4], 14), chunk([1, 2], 7)) == []


def test_nobody_shares_alone_and_longer_chunks_don_t_take_part():
    assert shared_by() == shared_by(chunk([1, 2, 3], 9)) == []
    assert shared_by(chunk([1, 2, 3], 9), chunk([1, 2, 4], 8, 2)) == []
    assert shared_by(chunk([1, 2, 3], 9), chunk([1, 2, 5], 9), chunk([1, 2, 4], 8, 2)) == [([0, 1], 2)]


def test_the_step_carries_it_if_it_is_asked_for():
    chunks = [chunk([1, 2, 3], 9), chunk([1, 2, 4], 8)]
    for options, expected in (((), []), ((None,), []), ((12,), []), ((8,), [([0, 1], 2)])):
        assert list(StepInput.from_chunks(chunks, 4, *options).shared) == expected


# ---- two parts of a softmax


def halves(scale_of_scores, cut=5):
    """(q, k, v), and what attention gives, in float64: 3 queries of size 8, 12 keys."""
    q, k, v = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 12, 13))
    v, k = v[:, :12], k * scale_of_scores
    expected = (q.double() @ k.double().mT * 0.5).softmax(-1) @ v.double()
    parts = [attention.attend(q, k[:, part], v[:, part], None, 0.5) for part in (slice(cut), slice(cut, None))]
    return parts, expected, (q, k, v)


def test_attend_gives_the_mean_and_the_log_of_what_it_is_divided_by():
    _, expected, (q, k, v) = halves(1.0)
    out, lse = attention.attend(q, k, v, None, 0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, (q @ k.mT * 0.5).exp().sum(-1, keepdim=True).log(), rtol=1e-5, atol=1e-5)


def test_attend_with_a_mask_is_attend_to_what_is_seen():
    _, _, (q, k, v) = halves(1.0)
    seen = torch.arange(12) < 7
    for got, expected in zip(attention.attend(q, k, v, seen, 0.5), attention.attend(q, k[:, :7], v[:, :7], None, 0.5)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 5, 11])
@pytest.mark.parametrize("size", [0.0, 1.0, 1000.0])
def test_merging_two_parts_is_attention_to_all(size, cut):
    """With scores of +-1e3 and more one part has all the weight: nothing may overflow."""
    (one, other), expected, _ = halves(size, cut)
    for first, second in ((one, other), (other, one)):
        torch.testing.assert_close(attention.merge(*first, *second).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_mean_of_two_keys_and_one_of_six():
    """Equal scores: the weights are 2 / 8 and 6 / 8."""
    two, six = torch.tensor([[1.0]]), torch.tensor([[5.0]])
    merged = attention.merge(two, torch.tensor([[math.log(2)]]), six, torch.tensor([[math.log(6)]]))
    assert merged.item() == pytest.approx((2 * 1 + 6 * 5) / 8)


# ---- equal to plain attention


PICKS = {getattr(torch.ops.aten, name) for name in ("index_select", "index", "gather", "take", "embedding")}


class Reads(TorchDispatchMode):
    """Counts the elements that are picked out of a tensor as large as a `world`'s cache."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in PICKS and out.is_floating_point() and args[0].numel() >= 1000 * 4 * 2 * 8:
            Reads.num_elements += out.numel()
        return out


def world(rows, behind=(), num_heads=6, num_kv_heads=2, dtype=torch.float32, block_size=4):
    """A step over a cache full of NaN but where the contexts are. rows: (first blocks, context_len) of one-token
    chunks; behind: (context_len, num_tokens) of longer ones. Other blocks are the row's own. Returns arguments of
    `paged_attention`, and the step."""
    generator = torch.Generator().manual_seed(0)
    lens = [n for _, n in rows] + [n for n, _ in behind]
    longest, new = max(-(-n // block_size) for n in lens), iter(range(100, 999))
    firsts = [list(first) for first, _ in rows] + [[] for _ in behind]
    tables = torch.tensor([first[:longest] + [next(new) for _ in range(longest - len(first))] for first in firsts])
    k, v = torch.full((2, 1000, block_size, num_kv_heads, 8), math.nan, dtype=dtype)
    for table, n in zip(tables, lens):
        slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()[:n]
        for cache in (k, v):
            cache.flatten(0, 1)[slots] = torch.randn(n, num_kv_heads, 8, generator=generator).to(dtype)
    order = torch.randperm(len(lens) + 3, generator=generator)[: len(lens)]  # rows of the batch
    block_tables = torch.full((len(lens) + 3, longest), 999, dtype=torch.int32)
    block_tables[order] = tables.int()
    nums = [n for _, n in behind]
    q = torch.randn(len(rows) + sum(nums), num_heads, 8, generator=generator).to(dtype)
    bounds = [torch.tensor([0, *x]).cumsum(0) for x in (nums, lens[len(rows) :])]
    maxima = max([1, *nums]), max(lens)
    step = FlatStep(None, None, None, torch.tensor(lens), None, order, None, *bounds, len(rows), *maxima)
    return (q, k, v, block_tables, 0.3), step


def attended(args, step, shared=()):
    """Attention, and how many elements it read."""
    attention.set_context(step, shared)
    try:
        with torch.inference_mode(), Reads():
            Reads.num_elements = 0
            return attention.paged_attention(*args), Reads.num_elements
    finally:
        attention.reset_context()


COMMON, OTHER = list(range(10)), list(range(20, 26))  # blocks
WORLDS = {
    "all share": ([(COMMON, n) for n in (41, 44, 45, 60)], [([0, 1, 2, 3], 10)]),
    "two groups, mixed": ([(COMMON, 47), (OTHER, 25), (COMMON, 41), (OTHER, 33)], [([0, 2], 10), ([1, 3], 6)]),
    "some don't": ([([], 3), (COMMON, 47), ([], 70), (COMMON, 50), ([], 1)], [([1, 3], 10)]),
    "fewer than are equal": ([(COMMON, 41), (COMMON, 59)], [([0, 1], 3)]),
    "one key of its own": ([(COMMON, 41)] * 2, [([0, 1], 10)]),
}


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("behind", [(), ((9, 4), (30, 30), (12, 2))], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", WORLDS)
def test_equal_to_plain_attention(name, behind, heads, monkeypatch):
    rows, shared = WORLDS[name]
    args, step = world(rows, behind, *heads)
    expected, _ = attended(args, step)
    assert not expected.isnan().any()
    for most in (attention.MOST_PADDED, 24, 1):
        monkeypatch.setattr(attention, "MOST_PADDED", most)
        torch.testing.assert_close(attended(args, step, shared)[0], expected, rtol=1e-5, atol=1e-5)


def test_16_bits_are_merged_in_32():
    (args, step), (exact, _) = (world(*WORLDS["all share"][:1], dtype=d) for d in (torch.bfloat16, torch.float32))
    shared = WORLDS["all share"][1]
    out = attended(args, step, shared)[0]
    assert out.dtype == torch.bfloat16
    expected = attended([x.float() if x.is_floating_point() else x for x in args[:4]] + [0.3], step)[0]
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)


def test_shared_keys_are_read_once():
    """16 rows, 400 shared tokens and 4 of their own: 400 + 64 keys instead of 6,464."""
    args, step = world([(range(100), 404)] * 16)
    num_elements = [attended(args, step, shared)[1] for shared in ((), [(list(range(16)), 100)])]
    assert num_elements[0] >= 2 * 6464 * 2 * 8 and 0 < num_elements[1] <= 2 * 500 * 2 * 8


# ---- the engine's tokens

PREFIX, SECOND = random_ids(1, 35), random_ids(2, 21)
TAILS = [[5], random_ids(3, 4), random_ids(4, 9), [], random_ids(5, 2)]
PROMPTS = [PREFIX + tail for tail in TAILS] + [SECOND + tail for tail in TAILS[:3]] + [random_ids(6, 30), [9]]
LENGTHS = [9, 14, 6, 11, 12, 10, 8, 13, 14, 12]
SETTINGS = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 12},
    "few blocks": {"num_kvcache_blocks": 88},
    "three rows": {"max_num_seqs": 3},
}


def params(max_tokens, **changes):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **changes})


ALL = [params(n) for n in LENGTHS[:-2]] + [params(n, temperature=0.8, seed=n) for n in LENGTHS[-2:]]


def watch(llm):
    """The groups of every step that it launches from now on, with the number of chunks: [(num_chunks, shared)]."""
    steps, call = [], llm._ranks.call

    def watched(method, *args):
        steps.extend((len(step.rows), step.shared) for step in args if method == "run")
        return call(method, *args)

    llm._ranks.call = watched
    return steps


def run(llm, prompts=PROMPTS, all_params=ALL):
    """First the prefixes alone, then all."""
    llm.generate([PREFIX, SECOND], params(2), use_tqdm=False)
    return [output.token_ids for output in llm.generate(prompts, all_params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(checkpoint):  # noqa: F811
    """plain(family) -> the tokens of an engine without the option, made once."""
    made = {}

    def get(family):
        if family not in made:
            with engine(checkpoint(family)) as llm:
                steps = watch(llm)
                made[family] = run(llm)
                assert steps and not any(shared for _, shared in steps)
        return made[family]

    return get


RUNS = [("llama", setting, is_async) for setting in SETTINGS for is_async in (False, True)]


@pytest.mark.parametrize("family, setting, is_async", [*RUNS, ("qwen2", "roomy", True), ("qwen3", "few blocks", True)])
def test_the_same_tokens(checkpoint, plain, family, setting, is_async):  # noqa: F811
    for block_size, min_tokens in ((4, 24), (1, 1), (16, 16), (4, 8))[0 if family == "llama" else 3:]:
        options = {"kvcache_block_size": block_size, "async_scheduling": is_async, **SETTINGS[setting]}
        if setting == "few blocks":
            options["num_kvcache_blocks"] = {1: 88, 4: 22, 16: 6}[block_size]
        with engine(checkpoint(family), cascade_min_tokens=min_tokens, **options) as llm:
            steps = watch(llm)
            assert run(llm) == plain(family)
            assert (llm.scheduler.num_preemptions > 0) == (setting == "few blocks")
        sizes = [sum(len(chunks) for chunks, _ in shared) for _, shared in steps]
        assert max(sizes) >= 2 and all(n * block_size >= min_tokens for _, shared in steps for _, n in shared)
        if setting == "roomy" and min_tokens <= 16:
            assert max(len(shared) for _, shared in steps) == 2  # both prefixes in one step
            assert any(0 < size < num_chunks for (num_chunks, _), size in zip(steps, sizes))  # and rows without one


def test_a_step_reads_the_prefix_once(checkpoint):  # noqa: F811
    """6 rows with 32 shared tokens and 4 or 5 of their own, in the engine: less than half as much is read."""
    num_elements = []
    for options in ({}, {"cascade_min_tokens": 32}):
        with engine(checkpoint("llama"), num_kvcache_blocks=1000, async_scheduling=False, **options) as llm:
            llm.generate([PREFIX], params(2), use_tqdm=False)
            for n in range(6):
                llm.add_request(PREFIX + [n], params(9))
            llm.step()
            with Reads():
                Reads.num_elements = 0
                llm.step()
                num_elements.append(Reads.num_elements)
    assert 0 < num_elements[1] < num_elements[0] / 2


def test_a_prefix_that_no_two_rows_share_is_left_alone(checkpoint, plain):  # noqa: F811
    with engine(checkpoint("llama"), cascade_min_tokens=40) as llm:
        steps = watch(llm)
        assert run(llm) == plain("llama")
    assert not any(shared for _, shared in steps)


def test_rows_come_and_go(checkpoint):  # noqa: F811
    """A group grows when a row arrives, shrinks when one ends or is aborted; a single row is none."""
    prompts, sizes = [PREFIX + [n] for n in range(4)], []
    for options in ({}, {"cascade_min_tokens": 32}):
        with engine(checkpoint("llama"), async_scheduling=False, **options) as llm:
            llm.generate([PREFIX], params(2), use_tqdm=False)
            steps, outputs = watch(llm), []
            for number, (prompt, length) in enumerate(zip(prompts, (16, 9, 50, 12))):
                llm.add_request(prompt, params(length), str(number))
                outputs += llm.step() + llm.step()
            llm.abort("2")
            outputs += drain(llm)
        sizes.append([sum(len(chunks) for chunks, _ in shared) for _, shared in steps])
        outputs = {output.request_id: output.token_ids for output in outputs}
        if options:
            assert outputs == expected
        expected = outputs
    assert not any(sizes[0])
    assert [size for n, size in enumerate(sizes[1]) if n == 0 or size != sizes[1][n - 1]] == [0, 2, 3, 4, 3, 2, 0]


def test_two_ranks_give_the_same_tokens(checkpoint, plain):  # noqa: F811
    options = {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 4, "num_kvcache_blocks": 256}
    with LLM(str(checkpoint("llama")), cascade_min_tokens=8, tensor_parallel_size=2, **options) as llm:
        steps = watch(llm)
        assert run(llm) == plain("llama")
    assert any(shared for _, shared in steps)


# ---- options


@pytest.mark.parametrize("value", [0, -4, True, 1.5, "8", [8]], ids=repr)
def test_a_number_of_tokens_or_none(value):
    with pytest.raises(ValueError, match="cascade_min_tokens=.*integer >= 1, or None"):
        EngineConfig.from_options({"cascade_min_tokens": value})


def test_off_by_default_and_known_by_nearly_its_name():
    assert EngineConfig.from_options({}).cascade_min_tokens is None
    with pytest.raises(TypeError, match="did you mean 'cascade_min_tokens'"):
        EngineConfig.from_options({"cascade_min_token": 8})


def test_without_the_prefix_cache_nothing_is_shared(checkpoint):  # noqa: F811
    with pytest.raises(ValueError, match="cascade_min_tokens=8.*enable_prefix_caching"):
        LLM(str(checkpoint("llama")), device="cpu", cascade_min_tokens=8, enable_prefix_caching=False)


def test_the_gpu_s_kernels_don_t_know_it(checkpoint, monkeypatch):  # noqa: F811
    from nanoengine.model_runner import resolve

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(device="cuda", cascade_min_tokens=8)
    with pytest.raises(ValueError, match="cascade_min_tokens=8.*device='cpu'"):
        resolve(config, ModelConfig.from_folder(checkpoint("llama")))

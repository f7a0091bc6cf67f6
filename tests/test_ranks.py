"""Two and three ranks give one rank's tokens: the ladder again, on the CPU, with processes that talk through gloo.

An engine of several ranks takes seconds to start, so few are started, each with its own mixture of family, ties,
biases, block size, budget, pool and scheduling; every test runs on each. Everything is compared with the oracle of
tiny.py, which is what one rank is compared with too.
"""

import json
import os
import pickle
import time
from pathlib import Path

import pytest

import tiny
from nanoengine import SamplingParams, rpc
from smollm2 import smollm2_folder
from test_rpc import THREE_WAYS, SmallChannel, children_of, greedy, needs_proc, poison_caches, start
from tiny import assert_same_tokens, drain, oracle_for, random_ids

DEFAULTS = {"kvcache_block_size": None, "num_kvcache_blocks": None}
BIASES = {"attention_bias": True, "mlp_bias": True}  # of o_proj and down_proj too: to be added once, not once per rank
FEW_BLOCKS = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 16}
SCARCE = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 5, "max_num_seqs": 3}
SYNC = {"async_scheduling": False}

# name: number of ranks, family, checkpoint options, engine options
ENGINES = {
    "llama, defaults": (2, "llama", {}, DEFAULTS),
    "llama, biases, few blocks, sync": (2, "llama", {"tied": True, **BIASES}, {**FEW_BLOCKS, **SYNC}),
    "qwen2, tied, blocks of 7, no cache, sync": (
        2,
        "qwen2",
        {"tied": True},
        {"kvcache_block_size": 7, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **SYNC},
    ),
    "qwen2, all scarce": (2, "qwen2", {}, SCARCE),
    "qwen3, blocks of 1, sync": (2, "qwen3", {}, {"kvcache_block_size": 1, **SYNC}),
    "qwen3, tied, few blocks": (2, "qwen3", {"tied": True}, FEW_BLOCKS),
    "llama, three ranks": (3, "llama", {**THREE_WAYS, **BIASES}, FEW_BLOCKS),
}


@pytest.fixture(scope="module", params=ENGINES)
def ranks(request, checkpoint):
    """(engine, folder, options) of one of ENGINES."""
    size, family, fields, options = ENGINES[request.param]
    folder = checkpoint(family, **fields)
    with pytest.MonkeyPatch.context() as patch:
        if size == 3:
            patch.setattr(rpc, "Channel", SmallChannel)
        llm = start(folder, size, **options)
    with llm:
        poison_caches(llm)
        yield llm, folder, options


def check(folder, prompts, params, outputs, label=""):
    assert len(outputs) == len(prompts) == len(params)
    for number, (prompt, one, output) in enumerate(zip(prompts, params, outputs)):
        assert list(output.prompt_token_ids) == prompt
        assert_same_tokens(output, oracle_for(folder, prompt, one), f"{label} prompt {number}:")


LONG = random_ids(100, 18)
PROMPTS = [
    LONG,  # longer than the smaller budgets
    LONG[:12] + [1, 2, 3],
    LONG[:12] + [1, 2, 3],
    random_ids(101, 1),
    LONG[:8],
    LONG[:16],
    random_ids(102, 13),
]
LENGTHS = [6, 9, 9, 12, 12, 8, 10]


def test_greedy_tokens_equal_one_ranks(ranks):
    """Chunked, preempted, with prefix hits: whatever the engine's options bring about, and twice."""
    llm, folder, options = ranks
    params, preempted = [greedy(length) for length in LENGTHS], llm.scheduler.num_preemptions
    for call in ("first", "second"):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        check(folder, PROMPTS, params, outputs, f"{call} call,")
    assert not llm.has_unfinished() and llm.step() == []
    is_small = options.get("num_kvcache_blocks") == 8
    assert (llm.scheduler.num_preemptions > preempted) == is_small
    if not is_small:
        size, has_cache = llm.config.kvcache_block_size, llm.config.enable_prefix_caching
        hits = [(len(prompt) - 1) // size * size * has_cache for prompt in PROMPTS]
        assert [output.num_cached_tokens for output in outputs] == hits


def test_seeded_draws_equal_one_ranks(ranks):
    """Cases 22 and 23: each filter, alone and among others, seeded or not."""
    llm, folder, _ = ranks
    filters = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}, {}]
    seeds = [0, 1, 2**32, 2**63 - 1, 2**40 + 17, None]
    params = [
        SamplingParams(temperature=0.9, max_tokens=10, seed=seed, ignore_eos=True, **some)
        for seed, some in zip(seeds, filters)
    ] + [greedy(10)]
    prompts = [random_ids(400 + n, 3 + 3 * n) for n in range(7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    alone = llm.generate(prompts[4:5], params[4:5], use_tqdm=False)
    seeded = [n for n, one in enumerate(params) if one.seed is not None or one.temperature == 0]
    check(folder, *([values[n] for n in seeded] for values in (prompts, params, outputs)), label="together,")
    check(folder, prompts[4:5], params[4:5], alone, "alone,")


def test_arrivals_and_aborts(ranks):
    """Rows and blocks change hands while steps are in flight."""
    llm, folder, _ = ranks
    prompts = [random_ids(500 + n, 4 + 2 * n) for n in range(6)]
    outputs = []
    for number, prompt in enumerate(prompts):
        llm.add_request(prompt, greedy(8), request_id=str(number))
        outputs += llm.step() + llm.step()
        if number % 3 == 2:
            assert llm.abort(str(number))
            llm.add_request(prompt[::-1], greedy(6), request_id=str(number))
    ended = {output.request_id: output for output in outputs + drain(llm) if output.finish_reason != "abort"}
    kept = [0, 1, 3, 4]
    check(folder, [prompts[n] for n in kept], [greedy(8)] * 4, [ended[str(n)] for n in kept])
    check(folder, [prompts[n][::-1] for n in (2, 5)], [greedy(6)] * 2, [ended[str(n)] for n in (2, 5)], "reversed,")


def test_a_step_sends_only_differences(ranks, monkeypatch):
    """A decode step's message holds no history: it doesn't grow with what the sequences have behind them."""
    llm, folder, options = ranks
    channel, sizes = llm._ranks.channel, []
    send = channel.send

    def send_and_weigh(message, *args):
        sizes.append(len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        return send(message, *args)

    monkeypatch.setattr(channel, "send", send_and_weigh)
    llm.generate([random_ids(600, 4)], greedy(1), use_tqdm=False)
    sizes.clear()
    llm.generate([random_ids(601, 4)], greedy(20), use_tqdm=False)
    decodes = sizes[1:]
    assert len(decodes) == 19 and max(decodes) - min(decodes) <= 16 and max(decodes) < 1500


@needs_proc
def test_peers_sleep_while_they_wait(ranks):
    """A fifth of a second of idleness costs no rank half of that in processor time."""

    def cpu_seconds(pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    llm = ranks[0]
    llm.generate([[1]], greedy(3), use_tqdm=False)
    pids = [os.getpid(), *children_of(os.getpid())]
    assert len(pids) == llm.config.tensor_parallel_size
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(0.2)
    assert max(cpu_seconds(pid) - then for pid, then in zip(pids, before)) < 0.1


# ---- what can't be split (case 35)


@pytest.mark.parametrize(
    "size, fields",
    [
        (3, {"num_attention_heads": 4, "num_key_value_heads": 4}),
        (4, {"num_key_value_heads": 2}),
        (2, {"num_key_value_heads": 1}),
        (2, {"vocab_size": 129}),
        (2, {"intermediate_size": 97}),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_before_anything_starts(checkpoint, tmp_path, monkeypatch, size, fields):
    """The folder holds no weights, and there are no ranks to start."""
    folder = tiny.copy_checkpoint(checkpoint("llama"), tmp_path / "odd", config=fields)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("nanoengine.llm_engine.Ranks", None)
    name = next(iter(fields))
    number = json.loads((folder / "config.json").read_text())[name]
    with pytest.raises(ValueError, match=rf"{name}\D*\b{number}\b.*tensor_parallel_size\D*\b{size}\b"):
        start(folder, size)


# ---- a real model


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_smollm2_on_three_ranks(is_async):
    """9 heads, 3 KV heads: three ranks are what it can be split over."""
    folder = smollm2_folder()
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n"]
    params = [
        greedy(16),
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=8, max_tokens=16, ignore_eos=True),
    ]
    options = {"max_num_batched_tokens": 8, "num_kvcache_blocks": 24, "async_scheduling": is_async}
    with start(folder, 3, **options) as llm:
        poison_caches(llm)
        outputs = llm.generate(texts, params, use_tqdm=False)
        prompts = [llm.tokenizer.encode(text) for text in texts]
    check(folder, prompts, params, outputs)

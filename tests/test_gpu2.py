"""Two GPUs as one (NCCL, graphs with collectives in them). Run with `pytest -m gpu2` on a machine with two."""

import os
import signal
import threading
import time

import pytest
import torch
from tiny import assert_same_tokens, oracle_for, random_ids

import bench
from nanoengine import LLM, SamplingParams

pytestmark = pytest.mark.gpu2
PROMPTS = [random_ids(900 + n, 3 + 11 * n) for n in range(9)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen"
    bench.make_random_model("qwen3-0.6b", folder)
    return folder


def run(folder, prompts, params, **options):
    with LLM(folder, max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.3, **options) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        second = llm.generate(prompts, params, use_tqdm=False)      # prefix hits, graphs again
        assert [o.token_ids for o in first] == [o.token_ids for o in second] or options.get("dtype") != "float32"
        return first


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_two_ranks_draw_the_oracles_tokens(checkpoint, family):
    folder = checkpoint(family)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for options in ({}, {"max_num_batched_tokens": 16, "kvcache_block_size": 4, "num_kvcache_blocks": 64}):
        outputs = run(folder, PROMPTS, greedy, dtype="float32", tensor_parallel_size=2, **options)
        for prompt, output in zip(PROMPTS, outputs):
            assert_same_tokens(output, oracle_for(folder, prompt, greedy))


def test_two_ranks_draw_what_one_draws_with_a_seed(checkpoint):
    params = [SamplingParams(temperature=0.8, max_tokens=24, seed=n, ignore_eos=True, top_k=5 * (n % 2)) for n in range(9)]
    one, two = (run(checkpoint("qwen3"), PROMPTS, params, dtype="float32", tensor_parallel_size=n) for n in (1, 2))
    assert sum(a.token_ids == b.token_ids for a, b in zip(one, two)) >= 8       # a near-tie may differ


def test_scores_of_two_ranks_are_those_of_one_within_rounding(qwen):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = run(qwen, PROMPTS, greedy, tensor_parallel_size=2)
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).cuda()
    gaps = []
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1:-1]
        chosen = logits.gather(1, torch.tensor(output.token_ids, device="cuda")[:, None])[:, 0]
        gaps.append(((logits.max(dim=1).values - chosen) / logits.std(dim=1)).max().item())
    print("largest gap to the best score, in standard deviations:", max(gaps))
    assert max(gaps) < 0.25


def test_a_killed_peer_is_noticed_within_seconds(qwen):
    llm = LLM(qwen, max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.3, tensor_parallel_size=2)
    process = llm._ranks._peers[0][0]
    threading.Timer(1, os.kill, (process.pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed"):
        while True:
            llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - begin < 11
    assert not process.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)

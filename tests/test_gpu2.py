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


OPTIONS = {"qwen3": {}, "qwen2": {"async_scheduling": False},
           "llama": {"max_num_batched_tokens": 16, "kvcache_block_size": 4, "num_kvcache_blocks": 64}}

def two(folder, **options):
    return LLM(folder, max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.3, tensor_parallel_size=2, **options)


@pytest.mark.parametrize("family", OPTIONS)
def test_two_ranks_draw_the_oracles_tokens(checkpoint, family):
    """Greedy, and with seeds and filters; twice, so that graphs and prefix hits are met in any case."""
    folder = checkpoint(family)
    kinds = [dict(temperature=0)] * 9, [dict(temperature=0.8, seed=n, top_k=5 * (n % 2)) for n in range(9)]
    with two(folder, dtype="float32", **OPTIONS[family]) as llm:
        for kind in (*kinds, kinds[0]):
            params = [SamplingParams(max_tokens=24, ignore_eos=True, **some) for some in kind]
            for prompt, one, output in zip(PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False)):
                assert_same_tokens(output, oracle_for(folder, prompt, one))


def test_scores_of_two_ranks_are_those_of_one_within_rounding(qwen):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with two(qwen) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
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
    llm = two(qwen)
    [(_, process, _)] = llm._ranks._peers.values()
    threading.Timer(1, os.kill, (process.pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed"):
        while True:
            llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - begin < 11
    assert not process.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)

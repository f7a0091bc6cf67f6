"""Two GPUs as one (NCCL, graphs with collectives in them). Run with `pytest -m gpu2` on a machine with two."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import assert_same_tokens, oracle_for, random_ids

import bench
from nanoengine import LLM, SamplingParams, rpc
from nanoengine.group import Group

pytestmark = pytest.mark.gpu2
PROMPTS = [random_ids(900 + n, 3 + 11 * n) for n in range(9)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Shapes of Qwen3-0.6B; attention counts for more than in plain random weights, which repeat a token."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    bench.make_random_model("qwen3-0.6b", folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            tensor *= 3 if "q_norm" in name else 4 if "o_proj" in name else 1
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


OPTIONS = {"qwen3": {}, "qwen2": {"async_scheduling": False},
           "llama": {"max_num_batched_tokens": 17, "kvcache_block_size": 4, "num_kvcache_blocks": 64}}

def two(folder, shares_memory=True, **options):
    """With graphs that hold the collectives; sums over memory that both GPUs read, or by NCCL."""
    settings = dict(max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.3, tensor_parallel_size=2)
    llm = LLM(folder, **settings | options)
    runner = llm._ranks.runner
    assert runner.graphs.captured.keys() == {1, 2, 4, 8, 16} and (runner.group.bases is not None) == shares_memory
    return llm


def check(llm, folder, params):
    for prompt, one, output in zip(PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False)):
        assert_same_tokens(output, oracle_for(folder, prompt, one))


@pytest.mark.parametrize("family", OPTIONS)
def test_two_ranks_draw_the_oracles_tokens(checkpoint, family):
    """Greedy, and with seeds and filters; twice, so that graphs and prefix hits are met in any case."""
    folder = checkpoint(family)
    kinds = [dict(temperature=0)] * 9, [dict(temperature=0.8, seed=n, top_k=5 * (n % 2)) for n in range(9)]
    with two(folder, dtype="float32", **OPTIONS[family]) as llm:
        for kind in (*kinds, kinds[0]):
            check(llm, folder, [SamplingParams(max_tokens=24, ignore_eos=True, **some) for some in kind])


def serve_without_shared_memory(*args):
    Group.share_memory = lambda *_: None
    rpc.serve(*args)


def test_sums_by_nccl_where_memory_cannot_be_shared(checkpoint, monkeypatch):
    folder = checkpoint("qwen3")
    monkeypatch.setattr(rpc, "serve", serve_without_shared_memory)
    monkeypatch.setattr(Group, "share_memory", lambda *_: None)
    with two(folder, shares_memory=False, dtype="float32") as llm:
        for _ in range(2):
            check(llm, folder, [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)] * 9)


def test_scores_of_two_ranks_are_those_of_one_within_rounding(qwen):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with two(qwen) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).cuda()

    def gaps(prompt, token_ids):
        ids, chosen = (torch.tensor(x, device="cuda") for x in ([prompt + token_ids], token_ids))
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1:-1]
        return (logits.max(dim=1).values - logits.gather(1, chosen[:, None])[:, 0]) / logits.std(dim=1)

    own = torch.stack([gaps(output.prompt_token_ids, output.token_ids) for output in outputs])
    altered = torch.stack([gaps([1 + output.prompt_token_ids[0], *output.prompt_token_ids[1:]], output.token_ids)
                           for output in outputs])
    print(f"largest gap to the best score, in standard deviations: {own.max():.4f}; with another first token in the "
          f"prompt, mean: {altered.mean():.2f}")
    assert altered.mean() > 0.5     # or the model is too dull to tell
    assert own.max() < 0.25


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


@pytest.mark.parametrize("delay", [6, 14])
def test_a_peer_is_killed_while_the_engine_starts(qwen, delay):
    """Loading, measuring or capturing graphs: as many graphs as there can be, so that it takes long."""
    def kill():
        [peer] = multiprocessing.active_children()
        os.kill(peer.pid, signal.SIGKILL)

    killer, begin = threading.Timer(delay, kill), time.monotonic()
    killer.start()
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed"):
        LLM(qwen, max_model_len=512, max_num_seqs=512, tensor_parallel_size=2, gpu_memory_utilization=0.3,
            cuda_graph_batch_sizes=list(range(1, 513)))
    assert delay - 0.1 < time.monotonic() - begin < delay + 10
    killer.join()
    assert multiprocessing.active_children() == []

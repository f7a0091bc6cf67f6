"""Buckets, capture order and padding of CUDA graphs, on any machine: the device's part is played by stand-ins.

Whether a real graph computes what an eager step does is tested in test_gpu.py.
"""

import contextlib
import logging
import math
from types import SimpleNamespace

import pytest
import torch

from nanoengine import SamplingParams, kernels, model_runner
from nanoengine.config import EngineConfig
from nanoengine.cuda_graph import CudaGraphs, batch_sizes
from nanoengine.group import Group
from nanoengine.model_runner import ModelRunner
from nanoengine.step_input import FlatStep
from tiny import assert_same_tokens, engine, oracle_for, random_ids

PADDING = [9, 0, 64, 0, 32]


@pytest.fixture
def device_events(monkeypatch):
    """torch.cuda's graph calls become entries of this list; nothing else happens."""
    events = []

    @contextlib.contextmanager
    def graph(cuda_graph, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"  # another thread may run an engine, or end one
        events.append(("capture", pool))
        yield
        events.append(("captured", pool))

    class StandIn:
        def replay(self):
            events.append(("replay", self))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return events


def capture(batch_sizes, events):
    def decode(inputs):
        events.append(("decode", inputs.shape[1]))
        assert inputs.T.tolist() == [PADDING] * inputs.shape[1]
        return inputs.sum(), inputs

    return CudaGraphs(decode, batch_sizes, PADDING, torch.device("cpu"))


@pytest.mark.parametrize("max_num_seqs", [*range(1, 18), 20, 40, 100, 256, 511, 512, 513, 1000])
def test_every_batch_has_the_smallest_bucket_that_holds_it(device_events, max_num_seqs):
    """Case 9. Only batches above 512 have none."""
    sizes = batch_sizes(max_num_seqs)
    assert sizes[-1] == min(max_num_seqs, 512) and sizes[0] == 1
    graphs = capture(sizes, device_events)
    for num_seqs in range(1, max_num_seqs + 1):
        expected = min((size for size in sizes if size >= num_seqs), default=None)
        assert graphs.bucket(num_seqs) == expected
        if expected is not None:
            assert num_seqs <= expected < max(2 * num_seqs, num_seqs + 16)  # bounded padding
    assert graphs.bucket(max_num_seqs + 1) is None


def test_largest_first_from_one_pool_each_run_before_its_capture(device_events):
    capture([1, 2, 5], device_events)
    expected = []
    for size in (5, 2, 1):
        run = ("decode", size)
        expected += [run, ("capture", "the pool"), run, ("captured", "the pool")]
    assert device_events == expected


def test_a_replay_reads_the_inputs_that_it_is_given(device_events):
    graphs = capture([2, 4], device_events)
    inputs = torch.arange(20).view(5, 4)
    total, seen = graphs.replay(4, inputs)
    assert device_events[-1][0] == "replay"
    assert torch.equal(seen, inputs) and seen.data_ptr() != inputs.data_ptr()  # copied to where the graph reads


@pytest.mark.parametrize(
    "max_num_seqs, chosen, captured",
    [(8, None, [1, 2, 4, 8]), (20, (64, 4, 4), [4, 20]), (4, (8,), [4]), (40, (1, 2), [1, 2])],
)
def test_chosen_sizes_are_sorted_and_no_larger_than_the_largest_batch(max_num_seqs, chosen, captured):
    assert batch_sizes(max_num_seqs, chosen) == captured


@pytest.mark.parametrize("reason", ["enforce_eager", "no Triton", "capture failed"])
def test_without_graphs_steps_are_eager(monkeypatch, caplog, reason):
    def fail(*_):
        raise torch.OutOfMemoryError("4 GiB are missing")

    monkeypatch.setattr(kernels, "has_triton", lambda x: reason != "no Triton")
    monkeypatch.setattr(model_runner, "CudaGraphs", fail)
    runner = stand_in_runner(enforce_eager=reason == "enforce_eager")
    with caplog.at_level(logging.WARNING, "nanoengine"):
        for sizes in ([8], [1, 2, 4, 8]):       # as `allocate` is called twice
            ModelRunner._capture(runner, sizes)
            assert runner.graphs is None
    assert [("4 GiB are missing" in text, "eager" in text) for text in caplog.messages] == (
        [(True, True)] if reason == "capture failed" else []
    )


def test_with_peers_a_failed_capture_is_an_error(monkeypatch):
    """They wait in the collectives of their own capture: falling back would leave them there."""
    def fail(*_):
        raise torch.OutOfMemoryError("4 GiB are missing")

    monkeypatch.setattr(kernels, "has_triton", lambda x: True)
    monkeypatch.setattr(model_runner, "CudaGraphs", fail)
    with pytest.raises(torch.OutOfMemoryError, match="4 GiB"):
        ModelRunner._capture(stand_in_runner(Group(0, 2)), [8])


def stand_in_runner(group=Group(), **config):
    return SimpleNamespace(
        config=EngineConfig(**config),
        group=group,
        device=SimpleNamespace(type="cuda"),
        kv_cache=None,
        graphs=None,
        padding=PADDING,
        _decode=None,
    )


class PlainGraphs:
    """As CudaGraphs, but a replay computes the live rows by plain attention; padding rows yield rubbish."""

    def __init__(self, runner, size):
        self.runner, self.size, self.num_live = runner, size, []

    def bucket(self, num_seqs):
        return self.size if num_seqs <= self.size else None

    def replay(self, size, inputs):
        runner, is_live = self.runner, inputs[0] != self.runner.spare_row
        assert inputs.shape == (5, size) and inputs[:, ~is_live].T.tolist() == [runner.padding] * int((~is_live).sum())
        assert is_live.long().diff().max() <= 0  # live rows first
        rows = inputs[0, is_live]
        self.num_live.append(len(rows))
        none_left = torch.zeros(1, dtype=torch.int64)
        step = FlatStep(*inputs[:, is_live], rows, None, none_left, None, len(rows), 1, 1)
        drawn, logits = runner._compute(step)
        token_ids = torch.full((size,), 10**6, dtype=drawn.dtype)
        all_logits = torch.full((size, logits.shape[1]), math.nan)
        token_ids[is_live], all_logits[is_live] = drawn, logits
        return token_ids, all_logits


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "min_p": 0.01}], ids=["plain", "filtered"])
def test_a_batch_that_shrinks_is_padded_by_rows_that_touch_nothing(checkpoint, filters, is_async):
    """Case 8: from 8 to 5 in a bucket of 8; then 9, which is larger than the bucket, down to 1."""
    folder = checkpoint("qwen3")
    with engine(folder, max_num_seqs=9, async_scheduling=is_async) as llm:
        runner = llm._ranks.runner
        assert runner.padding == [9, 0, 256 * 4, 0, 128]  # the spare row, the spare block, no context, no position
        runner.graphs = graphs = PlainGraphs(runner, 8)
        for lengths in ([4, 4, 4] + [10] * 5, [3, 4, 5, 6, 7, 8, 9, 10, 11]):
            prompts = [random_ids(900 + n, 2 + 3 * n) for n in range(len(lengths))]
            params = [
                SamplingParams(temperature=0.7, seed=n, max_tokens=length, ignore_eos=True, **filters)
                for n, length in enumerate(lengths)
            ]
            padded = []
            llm.on_step = lambda chunks, launch: padded.append(launch.num_padding_rows)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, one, output in zip(prompts, params, outputs):
                assert_same_tokens(output, oracle_for(folder, prompt, one))
            expected = [0] * 3 + [3] * 6 if len(lengths) == 8 else [0, 0, *range(8)]
            assert padded == [0, *expected]  # the first step holds the prompts
    assert graphs.num_live == [8] * 3 + [5] * 6 + [*range(8, 0, -1)]

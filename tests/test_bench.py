"""bench.py: the models it makes, the work it draws, the limit it computes, and a whole run on the CPU.

Most tests replace the engine by a scripted one, so that the figures can be worked out by hand.
"""
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import bench

ROOT = pathlib.Path(bench.__file__).resolve().parent


class StepRecord(NamedTuple):
    num_seqs: int
    num_tokens: int
    num_context_tokens: int
    num_padding_rows: int = 0
    kv_blocks_used: int = 1
    kv_blocks_total: int = 4
    seconds: float = 0.002


class ScriptedLLM:
    """Answers token 7 as often as asked; logs one prefill step, then decode steps with one padding row."""
    made = []

    def __init__(self, model, **options):
        self.model, self.options, self.calls, self.on_step = model, options, [], None
        self.scheduler = SimpleNamespace(block_manager=SimpleNamespace(num_blocks=4, num_free_blocks=3))
        ScriptedLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True

    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append((prompts, params))
        if self.on_step is not None:
            self.on_step([SimpleNamespace(num_tokens=len(p), end=len(p)) for p in prompts],
                         SimpleNamespace(num_padding_rows=0))
            for _ in range(max(p.max_tokens for p in params) - 1):
                self.on_step([SimpleNamespace(num_tokens=1, end=len(p)) for p in prompts],
                             SimpleNamespace(num_padding_rows=1))
        return [SimpleNamespace(token_ids=[7] * p.max_tokens) for p in params]


@pytest.fixture
def scripted(monkeypatch):
    """The scripted engine in place of nanoengine, and made-up rates: 1 GB/s, 1 GFLOP/s."""
    ScriptedLLM.made = []
    module = SimpleNamespace(LLM=ScriptedLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nanoengine", module)
    monkeypatch.setattr(bench, "measure_rates", lambda device, dtype: ("a device", 1e9, 1e9))
    return ScriptedLLM


# ---- random models

def test_transformers_loads_the_tiny_random_model_with_no_name_missing_or_left_over(tmp_path):
    from transformers import AutoModelForCausalLM
    bench.make_random_model("tiny", tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert torch.all(model.model.norm.weight == 1)
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("name", bench.CONFIGS)
def test_every_random_models_names_and_shapes_are_those_of_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM
    config = dict(bench.CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert bench.tensor_shapes(bench.CONFIGS[name]) == theirs


def test_a_large_model_is_sharded_with_an_index_that_transformers_follows(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    monkeypatch.setattr(bench, "SHARD_BYTES", 50_000)
    monkeypatch.setitem(bench.CONFIGS, "tiny", bench.CONFIGS["tiny"] | {"tie_word_embeddings": False})
    bench.make_random_model("tiny", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(bench.tensor_shapes(bench.CONFIGS["tiny"]))
    assert len(set(index["weight_map"].values())) == len(list(tmp_path.glob("*.safetensors"))) > 1
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_tensor_larger_than_the_block_continues_with_the_blocks_start():
    block = torch.arange(5).bfloat16()
    tensor = bench.random_tensor((4, 3), block, offset=8)
    assert tensor.tolist() == [[3, 4, 0], [1, 2, 3], [4, 0, 1], [2, 3, 4]]


def test_a_kept_folder_is_reused_and_another_models_folder_is_refused(tmp_path):
    bench.make_random_model("tiny", tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    bench.make_random_model("tiny", tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(SystemExit, match="holds another model"):
        bench.make_random_model("smollm2-135m", tmp_path)


def test_an_unknown_random_model_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(SystemExit, match="random:qwen4: unknown.*qwen3-0.6b"):
        bench.make_random_model("qwen4", tmp_path)


# ---- the work

def headline(seed=0, repetition=0, bound=10_000):
    return bench.headline_work(256, (100, 1024), (100, 1024), bound, seed, repetition)


def test_the_headline_is_the_customary_work():
    work = headline()
    assert work == headline()
    assert sum(work.output_lens) == 133_966
    assert len(work.prompts) == 256
    assert {min(map(min, work.prompts)), max(map(max, work.prompts))} == {0, 9_999}
    assert all(100 <= len(p) <= 1024 for p in work.prompts)
    assert headline(seed=1) != work


def test_a_repetition_keeps_the_lengths_and_shares_no_16_token_beginning():
    first, second = headline(), headline(repetition=1)
    assert list(map(len, first.prompts)) == list(map(len, second.prompts))
    assert first.output_lens == second.output_lens
    assert not {tuple(p[:16]) for p in first.prompts} & {tuple(p[:16]) for p in second.prompts}


def test_sweep_prompts_are_deterministic_and_fresh_per_batch_and_repetition():
    works = [bench.fixed_work("sweep", batch, 128, 257, 512, 0, repetition)
             for batch in (1, 8) for repetition in (0, 1)]
    assert works[0] == bench.fixed_work("sweep", 1, 128, 257, 512, 0, 0)
    beginnings = [tuple(prompt[:16]) for work in works for prompt in work.prompts]
    assert len(set(beginnings)) == len(beginnings) == 18
    assert works[3].output_lens == [257] * 8


# ---- the limit

SMALL = dict(hidden_size=10, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=4,
             intermediate_size=20, vocab_size=50)
# By hand: a layer has q, o 2·10·12, k, v 2·10·4, mlp 3·10·20 = 920 parameters; the head has 500.


def test_the_limit_of_a_decode_step_is_its_bytes_when_bandwidth_is_scarce():
    limit = bench.Limit.of(SMALL, element_bytes=2, bandwidth=100.0, flop_rate=1e12)
    assert (limit.weights, limit.head) == (1840, 500)
    assert (limit.kv_bytes, limit.pair_flops) == (2 * 2 * 4 * 2, 4 * 2 * 3 * 4)
    step = StepRecord(num_seqs=3, num_tokens=3, num_context_tokens=30)
    assert limit.seconds(step) == pytest.approx((2340 * 2 + 30 * 32) / 100)


def test_the_limit_of_a_decode_step_is_its_operations_when_the_matrix_rate_is_scarce():
    limit = bench.Limit.of(SMALL, element_bytes=2, bandwidth=1e12, flop_rate=100.0)
    step = StepRecord(num_seqs=3, num_tokens=3, num_context_tokens=30)
    assert limit.seconds(step) == pytest.approx((2 * 3 * 2340 + 30 * 96) / 100)


def pairs(chunks):
    return sum(n * c - n * (n - 1) // 2 for n, c in chunks)


@pytest.mark.parametrize("chunks, exact", [
    ([(6, 6)], True), ([(6, 6), (6, 6)], True), ([(1, 9), (1, 4)], True),
    ([(5, 20)], False), ([(2, 2), (9, 9), (1, 40)], False)])
def test_prefill_attention_is_exact_for_equal_whole_prompts_and_never_counted_too_high(chunks, exact):
    limit = bench.Limit(weights=0, head=0, kv_bytes=0, pair_flops=1, element_bytes=2, bandwidth=1, flop_rate=1)
    counted = limit.seconds(StepRecord(len(chunks), sum(n for n, _ in chunks), sum(c for _, c in chunks)))
    assert counted == pairs(chunks) if exact else counted < pairs(chunks)


def test_the_limits_that_issue_3_states_for_the_0_6b_shapes_come_out():
    limit = bench.Limit.of(bench.CONFIGS["qwen3-0.6b"], 2, 4.3e12, 790e12)
    for batch, stated_ms in {1: 0.28, 8: 0.33, 64: 0.71, 256: 2.03}.items():
        steps = [StepRecord(batch, batch, batch * (128 + i)) for i in range(257)]
        assert sum(map(limit.seconds, steps)) / 257 * 1e3 == pytest.approx(stated_ms, rel=0.02)


# ---- whole runs

def test_a_headline_run_reports_the_figures_of_the_engines_steps(scripted, capsys):
    bench.main("--model random:tiny --device cpu --num-requests 3 --input-len 5 5 --output-len 3 3 "
               "--json".split())
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    [run] = result["runs"]
    assert (run["requests"], run["input_tokens"], run["output_tokens"], run["steps"]) == (3, 15, 9, 3)
    assert 0 < run["step_ms_p50"] <= run["step_ms_p95"] < 1000 * run["seconds"]
    assert run["padding_share"] == pytest.approx(2 / (2 + 6))  # the prefill step is not asked
    limit = bench.Limit.of(bench.CONFIGS["tiny"], 4, 1e9, 1e9)
    expected = limit.seconds(StepRecord(3, 15, 15)) + 2 * limit.seconds(StepRecord(3, 3, 15))
    assert run["limit_seconds"] == pytest.approx(expected)
    assert run["limit_share"] == pytest.approx(expected / run["seconds"])
    assert result["startup_seconds"] > 0


def test_the_options_reach_the_engine_and_the_model_folder_is_gone_afterwards(scripted):
    bench.main("--model random:tiny --device cpu --num-requests 1 --max-num-seqs 9 --no-async --enforce-eager "
               "--cuda-graph-batch-sizes 1 4 --max-model-len 9999 --kvcache-block-size 16".split())
    [llm] = scripted.made
    assert not pathlib.Path(llm.model).exists()
    assert llm.closed
    expected = dict(max_num_seqs=9, async_scheduling=False, enforce_eager=True, cuda_graph_batch_sizes=[1, 4],
                    max_model_len=4096, kvcache_block_size=16, device="cpu", dtype="auto",
                    tensor_parallel_size=1, seed=0, gpu_memory_utilization=0.9, max_num_batched_tokens=None)
    assert llm.options == expected


def test_a_sweep_runs_every_batch_in_every_repetition_with_fresh_prompts(scripted):
    result = bench.main("--model random:tiny --device cpu --sweep --batches 1 2 --repeat 2".split())
    assert [(run["work"], run["repetition"]) for run in result["runs"]] == [
        ("sweep 1", 0), ("sweep 2", 0), ("sweep 1", 1), ("sweep 2", 1)]
    assert all(run["ms_per_token"] == pytest.approx(run["seconds"] * 1e3 / 257) for run in result["runs"])
    prompts = [tuple(prompt) for prompts, _ in scripted.made[0].calls for prompt in prompts]
    assert len(set(prompts)) == len(prompts)
    _, params = scripted.made[0].calls[-1]
    assert params[0] == SimpleNamespace(temperature=0.6, max_tokens=257, ignore_eos=True)


def test_an_engine_that_returns_too_few_tokens_is_an_error(scripted, monkeypatch):
    nothing = SimpleNamespace(token_ids=[])
    monkeypatch.setattr(scripted, "generate", lambda self, prompts, *_, **__: [nothing] * len(prompts))
    with pytest.raises(RuntimeError, match="asked for 128 tokens, got 0"):
        bench.main("--model random:tiny --device cpu --num-requests 1".split())


def test_work_longer_than_max_model_len_is_refused_with_the_numbers(scripted):
    with pytest.raises(SystemExit, match="needs 2048 tokens.*max_model_len is 1024"):
        bench.main("--model random:tiny --device cpu --max-model-len 1024".split())


def test_a_plot_is_written(scripted, tmp_path):
    pytest.importorskip("matplotlib")
    bench.main(f"--model random:tiny --device cpu --num-requests 2 --plot {tmp_path / 'steps.png'}".split())
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(scripted, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main("--model random:tiny --device cpu --plot steps.png".split())
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not scripted.made


@pytest.mark.parametrize("batch", [1, 3])
def test_transformers_runs_the_same_work_alone_and_in_padded_batches(batch, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure_rates", lambda device, dtype: ("a device", 1e9, 1e9))
    bench.main(f"--engine transformers --hf-batch {batch} --model random:tiny --device cpu --num-requests 4 "
               "--input-len 2 9 --output-len 2 9 --json".split())
    [run] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert run["output_tokens"] > 0
    assert run["tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])


def nanoengine_is_there():
    try:
        from nanoengine import LLM  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.skipif(not nanoengine_is_there(), reason="nanoengine cannot be imported")
def test_the_command_line_works_end_to_end_on_a_cpu():
    command = [sys.executable, "bench.py", "--model", "random:tiny", "--device", "cpu", "--num-requests", "8",
               "--input-len", "10", "40", "--output-len", "5", "20", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    [run] = result["runs"]
    assert run["requests"] == 8
    assert 0 < run["limit_share"] < 1
    assert run["steps"] >= 19
    assert 0 < run["step_ms_p50"] <= run["step_ms_p95"]


# ---- profile

def test_kernels_are_grouped_by_name():
    groups = {"flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>": "attention",
              "decode_attention_kernel": "attention", "nvjet_tst_128x64": "matrix products",
              "cublasLt::splitKreduce_kernel": "matrix products", "matvec_kernel": "matrix products",
              "sample_kernel": "sampling", "Memcpy DtoH (Device -> Pinned)": "copies",
              "rms_norm_kernel": bench.REST}
    assert {name: bench.group_of(name) for name in groups} == groups


def test_a_profile_counts_overlap_once_and_calls_the_rest_of_a_step_idle():
    events = [{"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1000}]
    for step in range(10):  # of 100 us: gemm 0-50, attention 40-70 beside it, sampling 80-90, in step 6 80-96
        for name, start, duration in (("gemm", 0, 50), ("flash", 40, 30), ("sample", 80, 10 + 6 * (step == 6)),
                                      ("gemm", 97, 0)):
            events.append({"cat": "kernel", "name": name, "ts": 100 * step + start, "dur": duration})
    events[-2]["dur"] = 500  # after the last step's end: doesn't count
    groups, kernels, idle = bench.profile_table(events, count=10)
    assert groups == pytest.approx({"matrix products": 0.05, "attention": 0.03, "sampling": 0.011,
                                    "idle": 0.019, "wall": 0.1})
    assert kernels["flash"] == pytest.approx(0.03)
    assert idle == pytest.approx([0.02, 0.02, 0.02, 0.014, 0.02, 0.02])  # whatever lies between the ends of two "flash"


def test_the_profiler_covers_count_full_decode_steps_after_the_skipped_ones():
    calls = []
    profiler = SimpleNamespace(start=lambda: calls.append(("start", len(log))),
                               stop=lambda: calls.append(("stop", len(log))))
    log = bench.ProfiledSteps(profiler, batch=2, skip=3, count=4)
    for step in [StepRecord(2, 20, 20)] + [StepRecord(2, 2, 30)] * 9 + [StepRecord(1, 1, 30)]:
        log.append(step)
    assert calls == [("start", 4), ("stop", 8)]
    assert log.num_full == 9


def test_profile_without_a_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parse_args("--profile --device cpu".split())
    assert "--profile needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("options, said", [
    ("--num-requests 0", "--num-requests must be at least 1, not 0"), ("--repeat -1", "--repeat must be at least 1, not -1"),
    ("--sweep --batches 4 0", "--batches must be at least 1, not [4, 0]"), ("--hf-batch 0", "--hf-batch must be"),
    ("--input-len 50 10", "--input-len 50 10: it must be MIN MAX"), ("--output-len 0 3", "--output-len 0 3"),
    ("--device tpu", "invalid choice: 'tpu'"), ("--device cuda", "there is no CUDA device"),
    ("--engine transformers --tensor-parallel-size 2", "--tensor-parallel-size needs --engine nanoengine"),
    ("--plot /nowhere/at/all.png", "--plot /nowhere/at/all.png: there is no such folder")])
def test_wrong_options_are_refused_before_anything_is_measured(options, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.parse_args(options.split())
    assert said in capsys.readouterr().err

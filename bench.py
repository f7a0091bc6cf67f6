"""How fast nanoengine is, beside the limit that the machine sets.

    python bench.py                                        # headline, random weights shaped like Qwen3-0.6B
    python bench.py --sweep --batches 1 8 64 256           # decode: 128 tokens in, 257 out
    python bench.py --profile --batches 64                 # where a decode step's GPU time goes
    python bench.py --model random:tiny --num-requests 8   # on a laptop's CPU

The *limit* of a step is what no engine can beat on this machine: the larger of (weights once + keys and
values of the context) / copy bandwidth and operations / matrix rate. Both rates are measured before the
engine starts, on a GPU in a process of their own, so that start-up time pays for the engine's own CUDA context.
Reading an untied input embedding, writing keys and values, norms and sampling count as free. The limit of a
run is the sum over the engine's own steps.
"""
import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch

# ---- random models -----------------------------------------------------------------------------------------

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, num_key_value_heads=8,
             vocab_size=151_936, max_position_embeddings=40_960, rope_theta=1_000_000, rms_norm_eps=1e-6,
             eos_token_id=151_645, bos_token_id=151_643)
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=64, num_key_value_heads=3,
             vocab_size=49_152, max_position_embeddings=8_192, rope_theta=100_000, rms_norm_eps=1e-5,
             eos_token_id=0, bos_token_id=0)
SAME = dict(hidden_act="silu", attention_bias=False, torch_dtype="bfloat16", initializer_range=0.02)
CONFIGS = {
    "qwen3-0.6b": SAME | QWEN3 | dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
                                      intermediate_size=3072, tie_word_embeddings=True),
    "qwen3-8b": SAME | QWEN3 | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
                                    intermediate_size=12_288, tie_word_embeddings=False),
    "smollm2-135m": SAME | LLAMA | dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                                        intermediate_size=1536, tie_word_embeddings=True),
    "tiny": SAME | QWEN3 | dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=512,
                                max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1,
                                bos_token_id=0),
}
SHARD_BYTES = 4 << 30
BLOCK_ELEMENTS = 16_777_259  # a prime just above 2**24, so that rows of a tiled matrix differ in their offset


def tensor_shapes(config):
    """Name → shape of every tensor of a Llama or Qwen3 checkpoint, in file order."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            parts |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def make_random_model(name, folder):
    """Write config.json and bf16 safetensors of the shape `name` into `folder`, unless an earlier call did.

    Drawing 8 billion normals would take minutes on a CPU: one block of them is tiled, and each tensor starts
    at another place in it.
    """
    if name not in CONFIGS:
        raise SystemExit(f"--model random:{name}: unknown; choose from {', '.join(CONFIGS)}")
    config = CONFIGS[name] | {"_name_or_path": f"random:{name}"}
    config_file = os.path.join(folder, "config.json")
    if os.path.exists(config_file):
        with open(config_file) as file:
            if json.load(file) == config:
                return
        raise SystemExit(f"--keep {folder}: holds another model; choose an empty or new folder")
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    block = (torch.randn(BLOCK_ELEMENTS, generator=generator) * config["initializer_range"]).bfloat16()
    shards, shard_bytes = [[]], 0
    shapes = tensor_shapes(config)
    for tensor, shape in shapes.items():
        if shard_bytes + 2 * math.prod(shape) > SHARD_BYTES and shards[-1]:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += 2 * math.prod(shape)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        suffix = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
        file = f"model{suffix}.safetensors"
        weights = {tensor: random_tensor(shapes[tensor], block, offset=(number * 1_000 + i) * 7_919)
                   for i, tensor in enumerate(names)}
        save_file(weights, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = 2 * sum(map(math.prod, shapes.values()))
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    with open(config_file, "w") as file:  # last: its presence says that the folder is complete
        json.dump(config, file, indent=1)


def random_tensor(shape, block, offset):
    """Ones for a norm (one dimension), else `block` repeated from `offset` on."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=block.dtype)
    tensor = torch.empty(math.prod(shape), dtype=block.dtype)
    done, offset = 0, offset % len(block)
    while done < len(tensor):
        piece = block[offset:offset + len(tensor) - done]
        tensor[done:done + len(piece)] = piece
        done, offset = done + len(piece), 0
    return tensor.view(shape)


# ---- the work ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Work:
    name: str
    repetition: int
    prompts: list  # of lists of token ids
    output_lens: list


def headline_work(num_requests, input_len, output_len, bound, seed, repetition):
    """The customary draw (Python's `random`, lengths and ids interleaved; with seed 0: 133,966 tokens out).

    A repetition keeps the lengths and shifts every id, so that no prompt begins like one in the prefix cache.
    """
    rng = random.Random(seed)
    prompts = [[(rng.randint(0, 10_000) + 37 * repetition) % bound for _ in range(rng.randint(*input_len))]
               for _ in range(num_requests)]
    return Work("headline", repetition, prompts, [rng.randint(*output_len) for _ in range(num_requests)])


def fixed_work(name, batch, input_len, output_len, bound, seed, repetition):
    """`batch` requests of equal lengths; the ids follow from name, batch, seed and repetition."""
    rng = random.Random(f"{name} {batch} {seed} {repetition}")
    prompts = [[rng.randrange(bound) for _ in range(input_len)] for _ in range(batch)]
    return Work(f"{name} {batch}", repetition, prompts, [output_len] * batch)


# ---- the limit ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Limit:
    """What a step must read and compute, and how fast the device can: `seconds(step)`."""
    weights: int          # parameters of the layers, each used for every token
    head: int             # parameters of the LM head, used once per sequence
    kv_bytes: int         # keys and values of one token
    pair_flops: int       # one query token meeting one key token, all layers
    element_bytes: int
    bandwidth: float      # bytes/s
    flop_rate: float      # operations/s

    @classmethod
    def of(cls, config, element_bytes, bandwidth, flop_rate):
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        per_layer = hidden * (2 * heads + 2 * kv_heads) * head_dim + 3 * hidden * config["intermediate_size"]
        return cls(weights=layers * per_layer, head=config["vocab_size"] * hidden,
                   kv_bytes=2 * layers * kv_heads * head_dim * element_bytes,
                   pair_flops=4 * layers * heads * head_dim,
                   element_bytes=element_bytes, bandwidth=bandwidth, flop_rate=flop_rate)

    def seconds(self, step):
        """The least time for a StepRecord (num_seqs, num_tokens, num_context_tokens are read).

        A chunk of n tokens that ends at context c has n·c - n·(n-1)/2 query-key pairs. Only the sums of n and
        c are known here; the result is exact for decode steps and equal whole prompts, and never too large.
        """
        tokens, context = step.num_tokens, step.num_context_tokens
        pairs = context + tokens * (tokens / step.num_seqs - 1) / 2
        read = (self.weights + self.head) * self.element_bytes + context * self.kv_bytes
        operations = 2 * (self.weights * tokens + self.head * step.num_seqs) + pairs * self.pair_flops
        return max(read / self.bandwidth, operations / self.flop_rate)


def measure_rates(device, dtype):
    """(device name, bytes/s of a copy, read and written ones counted, operations/s of a matrix product)."""
    on_gpu = device.startswith("cuda")
    copy_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4) if on_gpu else 256 << 20
    size, loops = (8192, 10) if on_gpu else (1024, 2)
    source = torch.ones(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_seconds = median_seconds(lambda: target.copy_(source), loops, on_gpu)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    product_seconds = median_seconds(lambda: torch.mm(a, b), loops, on_gpu)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return name, 2 * copy_bytes / copy_seconds, 2 * size ** 3 / product_seconds


def median_seconds(call, loops, on_gpu):
    """Seconds per call, the median of 5 rounds of `loops` calls, after one round that isn't counted."""
    rounds = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(loops):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / loops)
    return statistics.median(rounds[1:])


def in_own_process(function, *args):
    """The result of a call in a fresh process, whose CUDA context and memory are gone when it ends."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ---- runs --------------------------------------------------------------------------------------------------

class TransformersEngine:
    """transformers' own `generate` on left-padded groups of `batch` prompts, with the calls a run makes."""

    def __init__(self, model, device, dtype, batch):
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self.model.generation_config.eos_token_id = None  # ignore_eos
        self.batch, self.on_step = batch, None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        del self.model

    def generate(self, prompts, params, use_tqdm=False):
        outputs = []
        for start in range(0, len(prompts), self.batch):
            group, device = prompts[start:start + self.batch], self.model.device
            wanted = [p.max_tokens for p in params[start:start + self.batch]]
            width = max(map(len, group))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in group], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=device)
            made = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(wanted), pad_token_id=0,
                                       do_sample=True, temperature=params[start].temperature, top_k=0,
                                       top_p=1.0)
            new = made[:, width:].tolist()
            outputs += [SimpleNamespace(token_ids=row[:n]) for row, n in zip(new, wanted)]
        return outputs


class StepRecord(NamedTuple):
    num_seqs: int
    num_tokens: int
    num_context_tokens: int     # keys read, summed over chunks
    num_padding_rows: int
    kv_blocks_used: int
    kv_blocks_total: int
    seconds: float              # since the step before was taken in


def recorder(llm, steps):
    """A function for `llm.on_step` that appends a StepRecord to `steps` for each step taken in from now on."""
    last = time.perf_counter()

    def on_step(chunks, launch):
        nonlocal last
        manager, before = llm.scheduler.block_manager, last
        last = time.perf_counter()
        steps.append(StepRecord(
            len(chunks), sum(chunk.num_tokens for chunk in chunks), sum(chunk.end for chunk in chunks),
            launch.num_padding_rows, manager.num_blocks - manager.num_free_blocks, manager.num_blocks, last - before))
    return on_step


def generate(llm, params_class, work, steps=None):
    """(seconds, output tokens, step records) of one `generate` call over `work`."""
    params = [params_class(temperature=0.6, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    steps = [] if steps is None else steps
    llm.on_step = recorder(llm, steps)
    start = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.on_step = None
    lens = [len(output.token_ids) for output in outputs]
    if lens != work.output_lens:
        raise RuntimeError(f"{work.name}: asked for {sum(work.output_lens)} tokens, got {sum(lens)}")
    return seconds, sum(lens), steps


def report(work, seconds, output_tokens, steps, limit):
    """The figures of one run as a dictionary; prints them. `steps` is empty for transformers."""
    run = {"work": work.name, "repetition": work.repetition, "requests": len(work.prompts),
           "input_tokens": sum(map(len, work.prompts)), "output_tokens": output_tokens, "seconds": seconds,
           "tokens_per_s": output_tokens / seconds, "ms_per_token": seconds * 1e3 / max(work.output_lens)}
    per_token = "" if work.name == "headline" else f", {run['ms_per_token']:.3f} ms per token"
    print(f"{work.name} #{work.repetition}: {run['input_tokens']:,} tokens in, {output_tokens:,} out, "
          f"{seconds:.2f} s, {run['tokens_per_s']:,.0f} tokens/s{per_token}")
    if not steps:
        return run
    milliseconds = sorted(step.seconds * 1e3 for step in steps)
    decodes = [step for step in steps if step.num_tokens == step.num_seqs]
    padding = sum(step.num_padding_rows for step in decodes)
    limit_seconds = sum(map(limit.seconds, steps))
    run |= {"steps": len(steps), "step_ms_p50": milliseconds[len(steps) // 2],
            "step_ms_p95": milliseconds[len(steps) * 95 // 100],
            "padding_share": padding / max(1, padding + sum(step.num_seqs for step in decodes)),
            "limit_seconds": limit_seconds, "limit_tokens_per_s": output_tokens / limit_seconds,
            "limit_ms_per_token": limit_seconds * 1e3 / max(work.output_lens),
            "limit_share": limit_seconds / seconds}
    print(f"    {len(steps):,} steps, ms p50 {run['step_ms_p50']:.3f}, p95 {run['step_ms_p95']:.3f}; "
          f"padding {run['padding_share']:.1%} of decode rows; {run['limit_share']:.1%} of the limit "
          f"({limit_seconds:.3f} s, {run['limit_tokens_per_s']:,.0f} tokens/s, "
          f"{run['limit_ms_per_token']:.3f} ms per token)")
    return run


# ---- profile -----------------------------------------------------------------------------------------------

# Looked up in this order: flash-attn's names contain "cutlass" and "splitkv" too. What matches none is REST.
REST = "norm, rope, activation, other"
GROUPS = {"attention": ("decode_attention", "flash", "attention", "fmha"), "sampling": ("sampl", "argmax"),
          "all-reduce": ("nccl",), "copies": ("memcpy", "memset"),
          "matrix products": ("gemm", "gemv", "cutlass", "nvjet", "xmma", "splitk", "matvec")}


class ProfiledSteps(list):
    """A step log that has `profiler` run while full decode steps number `skip` to `skip + count` complete."""

    def __init__(self, profiler, batch, skip=26, count=64):
        self.profiler, self.batch, self.skip, self.count, self.num_full = profiler, batch, skip, count, 0

    def append(self, step):
        super().append(step)
        if step.num_seqs != self.batch or step.num_tokens != self.batch:
            return
        self.num_full += 1
        if self.num_full == self.skip:
            self.profiler.start()
        elif self.num_full == self.skip + self.count:
            self.profiler.stop()


def group_of(kernel):
    name = kernel.lower()
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), REST)


def profile_table(events, count):
    """(group → ms per step with "idle" and "wall", kernel → ms per step, idle ms of each), from a Chrome trace.

    A kernel that ran about `count` times ran once per step: its ends cut the trace into steps, and the first
    three, disturbed by the profiler's own start, are left out. Idle is what no kernel or copy covers.
    """
    work = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events
                  if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    numbers = Counter(name for _, _, name in work)
    ends = next(([end for _, end, name in work if name == marker] for marker in numbers
                 if abs(numbers[marker] - count) <= 2), None)
    if ends is None:
        raise RuntimeError(f"no kernel ran once per step ({count} steps): {numbers.most_common(5)}")
    begin, finish, num_steps = ends[3], ends[-1], len(ends) - 4
    groups, kernels, idle, covered = defaultdict(float), defaultdict(float), [0.0] * num_steps, begin
    for start, end, name in work:
        start, end = max(start, begin), min(end, finish)
        if start < end:
            groups[group_of(name)] += end - start
            kernels[name] += end - start
            idle[bisect(ends, start) - 4] += max(0.0, start - covered) / 1e3
            covered = max(covered, end)
    groups["idle"], groups["wall"] = sum(idle) * 1e3, finish - begin
    return ({group: us / 1e3 / num_steps for group, us in groups.items()},
            {kernel: us / 1e3 / num_steps for kernel, us in kernels.items()}, idle)


def profile(llm, params_class, batch, bound, seed):
    """Profile 60 decode steps at `batch` sequences of about 256 tokens; prints a table, returns it.

    The profiler makes gaps of its own. So the same steps are done once more without it: what they take beyond the
    time in which kernels and copies were at work is idle too, and no more than that.
    """
    # Without these a second start of the profiler can crash beside CUDA graphs; torch sets them for its own.
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    log = ProfiledSteps(profiler, batch)
    generate(llm, params_class, fixed_work("profile", batch, 200, 120, bound, seed, 0), log)
    if log.num_full < log.skip + log.count:
        raise SystemExit(f"--profile: only {log.num_full} steps decoded all {batch} sequences at once; "
                         "lower --batches or raise --max-num-seqs")
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(trace)
        with open(trace) as file:
            groups, kernels, idle = profile_table(json.load(file)["traceEvents"], log.count)
    steps = generate(llm, params_class, fixed_work("profile", batch, 200, 120, bound, seed, 1))[2]
    full = [step.seconds * 1e3 for step in steps if step.num_seqs == step.num_tokens == batch]
    unprofiled = statistics.median(full[log.skip:log.skip + log.count])
    busy = groups["wall"] - groups["idle"]
    print(f"profile, batch {batch}: ms per step and share")
    for group in sorted(groups, key=groups.get):
        print(f"    {group:32} {groups[group]:8.3f} {groups[group] / groups['wall']:7.1%}")
    print(f"    idle in a step: median {statistics.median(idle):.3f}, longest {max(idle):.3f} ms\n"
          f"    busy {busy:.3f} ms; without the profiler such a step took {unprofiled:.3f} ms: "
          f"{max(0, 1 - busy / unprofiled):.1%} idle\n    largest kernels:")
    for kernel in sorted(kernels, key=kernels.get, reverse=True)[:12]:
        print(f"    {kernels[kernel]:8.3f}  {group_of(kernel):16.16}  {kernel[:80]}")
    return {"batch": batch, "ms_per_step": groups, "idle_ms": idle, "unprofiled_step_ms": unprofiled}


# ---- plot --------------------------------------------------------------------------------------------------

def plot(path, steps, limit):
    """Four strips over the steps of all runs: sequences, tokens, KV blocks in use, ms beside the limit."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(4, sharex=True, figsize=(10, 9))
    strips = {"sequences": [s.num_seqs for s in steps], "tokens": [s.num_tokens for s in steps],
              "KV blocks used, %": [100 * s.kv_blocks_used / s.kv_blocks_total for s in steps],
              "ms": [s.seconds * 1e3 for s in steps]}
    for axis, (label, values) in zip(axes, strips.items()):
        axis.plot(values, linewidth=0.8, label="measured")
        axis.set_ylabel(label)
    axes[1].set_yscale("log")
    axes[3].plot([limit.seconds(s) * 1e3 for s in steps], linewidth=0.8, label="limit")
    axes[3].legend()
    axes[3].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot written to {path}")


# ---- command line ------------------------------------------------------------------------------------------

def parse_args(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", default="random:qwen3-0.6b", help=f"folder, hub id, or random:NAME ({', '.join(CONFIGS)})")
    add("--keep", metavar="DIR", help="make the random model here and leave it, or reuse it")
    add("--engine", choices=("nanoengine", "transformers"), default="nanoengine")
    add("--hf-batch", type=int, default=1, help="prompts per padded batch of --engine transformers")
    work = parser.add_argument_group("work (headline if neither --sweep nor --profile is given)")
    work.add_argument("--headline", action="store_true", help="random lengths, all requests at once")
    work.add_argument("--sweep", action="store_true", help="128 tokens in, 257 out, at each of --batches")
    work.add_argument("--profile", action="store_true", help="GPU time of decode steps at each of --batches")
    work.add_argument("--num-requests", type=int, default=256, help="of the headline")
    for option in ("--input-len", "--output-len"):
        work.add_argument(option, type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"),
                          help="of the headline")
    work.add_argument("--batches", type=int, nargs="+", default=(1, 8, 64, 256))
    work.add_argument("--repeat", type=int, default=1, help="times, each with fresh prompts")
    work.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("engine options, passed on to LLM(...)")
    engine.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    engine.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    engine.add_argument("--tensor-parallel-size", type=int, default=1)
    engine.add_argument("--max-model-len", type=int, default=4096, help="capped to what the model allows")
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--kvcache-block-size", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    engine.add_argument("--cuda-graph-batch-sizes", type=int, nargs="+")
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--no-async", action="store_true", help="async_scheduling=False")
    add("--json", action="store_true", help="print everything as one JSON object, the last line")
    add("--plot", metavar="FILE.png", help="per step: sequences, tokens, KV use, ms beside the limit")
    args = parser.parse_args(argv)
    args.headline |= not (args.sweep or args.profile)
    args.device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if args.profile and (args.engine != "nanoengine" or not args.device.startswith("cuda")):
        parser.error("--profile needs a CUDA device and --engine nanoengine")
    for option in ("num_requests", "batches", "repeat", "hf_batch", "tensor_parallel_size"):
        values = getattr(args, option)
        if min(values if option == "batches" else [values]) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, not {values}")
    for option, (low, high) in {"--input-len": args.input_len, "--output-len": args.output_len}.items():
        if not 1 <= low <= high:
            parser.error(f"{option} {low} {high}: it must be MIN MAX, with 1 <= MIN <= MAX")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no CUDA device")
    if args.engine == "transformers" and args.tensor_parallel_size > 1:
        parser.error("--tensor-parallel-size needs --engine nanoengine")
    if args.plot and not os.path.isdir(os.path.dirname(args.plot) or "."):
        parser.error(f"--plot {args.plot}: there is no such folder")
    if args.plot and args.engine != "nanoengine":
        parser.error("--plot needs --engine nanoengine: transformers reports no steps")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.keep and not args.model.startswith("random:"):
        parser.error(f"--keep is for --model random:NAME, not {args.model}")
    return args


@contextlib.contextmanager
def model_folder(args):
    """What to load: the model as named, or a folder with a random one, removed at the end without --keep."""
    if not args.model.startswith("random:"):
        yield args.model
        return
    with contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        make_random_model(args.model.removeprefix("random:"), folder)
        yield folder


def read_config(model):
    """config.json of a folder or a hub id."""
    path = os.path.join(model, "config.json")
    if not os.path.isdir(model):
        from huggingface_hub import hf_hub_download
        path = hf_hub_download(model, "config.json")
    with open(path) as file:
        return json.load(file)


def start_engine(args, model, dtype, max_model_len):
    """(engine, its class of sampling parameters, seconds from the constructor's call to a first token)."""
    if args.engine == "transformers":
        torch.manual_seed(args.seed)
        params_class = SimpleNamespace
        start = time.perf_counter()
        llm = TransformersEngine(model, args.device, dtype, args.hf_batch)
    else:
        from nanoengine import LLM, SamplingParams as params_class
        names = ("dtype", "device", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "seed",
                 "kvcache_block_size", "gpu_memory_utilization", "cuda_graph_batch_sizes", "enforce_eager")
        options = {name: getattr(args, name) for name in names}
        start = time.perf_counter()
        llm = LLM(model, max_model_len=max_model_len, async_scheduling=not args.no_async, **options)
    llm.generate([[1]], [params_class(temperature=0.6, max_tokens=1, ignore_eos=True)], use_tqdm=False)
    return llm, params_class, time.perf_counter() - start


def time_rpc(llm):
    """A list that gets the seconds of every message to the peers from now on (waiting for their last one included)."""
    send, seconds = llm._ranks.channel.send, []

    def timed_send(*arguments):
        start = time.perf_counter()
        send(*arguments)
        seconds.append(time.perf_counter() - start)

    llm._ranks.channel.send = timed_send
    return seconds


def works(args, bound):
    """Every piece of work that the command line asks for, in order."""
    for repetition in range(args.repeat):
        if args.headline:
            yield headline_work(args.num_requests, args.input_len, args.output_len, bound, args.seed,
                                repetition)
        for batch in args.batches if args.sweep else ():
            yield fixed_work("sweep", batch, 128, 257, bound, args.seed, repetition)


def main(argv=None):
    args = parse_args(argv)
    result = {"model": args.model, "engine": args.engine, "options": vars(args), "runs": [], "profiles": []}
    with model_folder(args) as model:
        config, ranks, on_gpu = read_config(model), args.tensor_parallel_size, args.device.startswith("cuda")
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = getattr(torch, args.dtype if args.dtype != "auto" else stored if on_gpu else "float32")
        measure = in_own_process if on_gpu else lambda function, *values: function(*values)
        device, bandwidth, flop_rate = measure(measure_rates, args.device, dtype)
        print(f"{args.model} with {args.engine} on {device}: copies {bandwidth / 1e9:,.0f} GB/s, "
              f"matrix products {flop_rate / 1e12:,.2f} TFLOP/s")
        result |= {"device": device, "bandwidth": bandwidth, "flop_rate": flop_rate}
        limit = Limit.of(config, dtype.itemsize, bandwidth * ranks, flop_rate * ranks)
        max_model_len = min(args.max_model_len, config.get("max_position_embeddings", args.max_model_len))
        longest = max(args.headline * (args.input_len[1] + args.output_len[1]), args.sweep * (128 + 257),
                      args.profile * (200 + 120))
        if longest > max_model_len:
            raise SystemExit(f"the work needs {longest} tokens per request, max_model_len is "
                             f"{max_model_len}: raise --max-model-len or lower --input-len and --output-len")
        bound = min(10_000, config["vocab_size"])
        llm, params_class, result["startup_seconds"] = start_engine(args, model, dtype, max_model_len)
        all_steps = []
        with llm:
            print(f"start-up, LLM(...) to the first token: {result['startup_seconds']:.2f} s")
            generate(llm, params_class, fixed_work("warm-up", 8, 128, 16, bound, args.seed, 0))
            rpc = time_rpc(llm) if ranks > 1 else None
            for work in works(args, bound):
                seconds, output_tokens, steps = generate(llm, params_class, work)
                result["runs"].append(report(work, seconds, output_tokens, steps, limit))
                all_steps += steps
            if rpc:
                p50, p99 = statistics.median(rpc) * 1e6, sorted(rpc)[int(0.99 * len(rpc))] * 1e6
                print(f"RPC per step: median {p50:.0f} us, p99 {p99:.0f} us of {len(rpc)}")
                result["rpc_us"] = [p50, p99]
            for batch in args.batches if args.profile else ():
                result["profiles"].append(profile(llm, params_class, batch, bound, args.seed))
    if args.plot:
        plot(args.plot, all_steps, limit)
    if args.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()

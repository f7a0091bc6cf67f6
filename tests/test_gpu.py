"""On a GPU: the fast paths equal what defines them, and memory is taken and given back as promised.

"Equal" is what design.md section 6 says: float32 token for token with the oracle; bf16 bit for bit where the padded
batch and the buffers are the same, else each token near the best by teacher forcing. Where numbers depend on shapes the
model is Qwen3-0.6B or SmolLM2-135M with random weights (bench.py makes it), elsewhere a tiny one.
"""

import contextlib
import gc
import logging
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import tiny
from nanoengine import LLM, SamplingParams, attention, kernels
from nanoengine.attention import paged_attention, plain_attention, reset_context, set_context
from nanoengine.cuda_graph import CudaGraphs
from nanoengine.decoder import Decoder
from nanoengine.step_input import FlatStep, StepInput, flatten
from tiny import assert_same_tokens, oracle_for, random_ids

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BIG, MIDDLE = "qwen3-0.6b", "smollm2-135m"  # of bench.CONFIGS
ROOT = Path(__file__).parents[1]


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def check(folder, prompts, params, outputs):
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    assert len(outputs) == len(prompts)
    for number, (prompt, one, output) in enumerate(zip(prompts, params, outputs)):
        assert_same_tokens(output, oracle_for(folder, prompt, one), f"prompt {number}:")


def float32_engine(folder, **options):
    """tiny.engine on the GPU: a cache full of NaN, 256 blocks of 16 tokens, graphs up to its 8 rows."""
    settings = {
        "device": DEVICE,
        "dtype": "float32",
        "kvcache_block_size": 16,
        "max_num_seqs": 8,
        "cuda_graph_batch_sizes": (1, 2, 4, 8),
    }
    return tiny.engine(folder, **settings | options)


@pytest.fixture
def replays(monkeypatch):
    """The size of every graph replayed, in order."""
    sizes, replay = [], CudaGraphs.replay

    def counted(graphs, size, inputs):
        sizes.append(size)
        return replay(graphs, size, inputs)

    monkeypatch.setattr(CudaGraphs, "replay", counted)
    return sizes


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """random_model(name) -> folder of a model of bench.py's, made once. Not to be edited."""
    root = tmp_path_factory.mktemp("random")

    def get(name):
        bench.make_random_model(name, str(root / name))
        return root / name

    return get


@pytest.fixture(scope="module")
def bf16_engine(checkpoint, random_model):
    """bf16_engine("tiny" or "big") -> an engine that all tests here share: 256 rows, all graphs, NaN in the cache."""
    made = {}

    def get(name):
        if name not in made:
            folder = checkpoint("qwen3", dtype=torch.bfloat16) if name == "tiny" else random_model(BIG)
            made[name] = LLM(
                folder,
                device=DEVICE,
                dtype="bfloat16",
                max_model_len=512 if name == "tiny" else 2048,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                num_kvcache_blocks=300,
                kvcache_block_size=256,
            )
            tiny.poison_cache(made[name])
        return made[name]

    yield get
    for llm in made.values():
        llm.close()
    made.clear()
    release()


def release():
    """Give back to the driver what no tensor holds."""
    gc.collect()
    torch.cuda.empty_cache()


def used_memory():
    free, total = torch.cuda.mem_get_info()
    return total - free


# ---- attention: flash-attn and the decode kernel beside the plain definition

SHAPES = {"qwen3-0.6b": (16, 8, 128), "smollm2": (9, 3, 64)}  # num_heads, num_kv_heads, head_dim
CHUNKS = {  # (start, num_tokens) of each chunk, and chunk -> (other, n): it begins with the other's first n blocks
    "fresh": ([(0, 5), (0, 256), (0, 257), (0, 700)], {}),
    "later": ([(3, 200), (256, 256), (300, 17), (1000, 100), (511, 2)], {}),
    "prefix hits": ([(0, 600), (512, 40), (256, 300), (512, 88)], {1: (0, 2), 2: (0, 1), 3: (0, 2)}),
    "decodes first": ([(0, 1), (255, 1), (256, 1), (999, 1), (0, 300), (256, 70)], {}),
    "decodes of shared blocks": (
        [(530, 1), (512, 1), (512, 50), (256, 256), (0, 900)],
        {0: (4, 2), 1: (4, 2), 2: (4, 2), 3: (4, 1)},
    ),
}


def paged_step(chunks, shared, shape, block_size=256):
    """(q, k_cache, v_cache, block_tables, context) of a bf16 step; the cache is NaN but for keys that the chunks may see.

    The context is made as the model runner makes it, with rows in no order and, beyond each table, the spare block.
    """
    (num_heads, num_kv_heads, head_dim), rng = shape, np.random.default_rng(0)
    torch.manual_seed(0)
    starts, lens = np.array(chunks).T
    num_blocks = -(-(starts + lens) // block_size)
    spare = int(num_blocks.sum())
    tables = np.split(rng.permutation(spare), np.cumsum(num_blocks)[:-1])
    for chunk, (other, n) in shared.items():
        tables[chunk][:n] = tables[other][:n]
    cache_shape = (2, spare + 1, block_size, num_kv_heads, head_dim)
    caches = torch.full(cache_shape, math.nan, dtype=torch.bfloat16, device=DEVICE)
    rows = rng.permutation(len(chunks) + 2)[: len(chunks)]
    block_tables = torch.full((len(chunks) + 2, num_blocks.max() + 1), spare, dtype=torch.int32, device=DEVICE)
    for row, table, end in zip(rows, tables, starts + lens):
        block_tables[int(row), : len(table)] = torch.as_tensor(table, device=DEVICE).int()
        position = np.arange(end)
        slots = torch.as_tensor(table[position // block_size] * block_size + position % block_size, device=DEVICE)
        caches.flatten(1, 2)[:, slots] = torch.randn(2, int(end), num_kv_heads, head_dim, device=DEVICE).bfloat16()
    written = [table[first // block_size :] for table, first in zip(tables, starts)]
    flat = flatten(
        StepInput([], rows, starts, lens, np.ones(len(chunks), bool), np.concatenate(written), []), block_size, 0
    )

    def to_device(array):
        return torch.as_tensor(array, dtype=torch.int64, device=DEVICE)

    context = FlatStep(*map(to_device, flat[:9]), *flat[9:])
    q = torch.randn(int(lens.sum()), num_heads, head_dim, device=DEVICE).bfloat16()
    return q, *caches, block_tables, context


@pytest.mark.parametrize("chunks, shared", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flash_attention_equals_the_plain_one(shape, chunks, shared, monkeypatch):
    """Token for token within 2e-2: a wrong mask at one token would hide in a norm over all."""
    reason = attention.reason_against_flash(torch.empty(0, device=DEVICE).device, torch.bfloat16, shape[2], 256)
    if reason is not None:
        pytest.skip(f"no flash-attn, as {reason}")
    flash, num_queries = attention.flash_forward, []

    def counted(q, *args, **options):
        num_queries.append(len(q))
        return flash(q, *args, **options)

    monkeypatch.setattr(attention, "flash_forward", counted)
    q, k_cache, v_cache, block_tables, context = paged_step(chunks, shared, shape)
    scale = shape[2] ** -0.5
    set_context(context)
    try:
        out = paged_attention(q, k_cache, v_cache, block_tables, scale)
    finally:
        reset_context()
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert num_queries == [sum(n for _, n in chunks if n > 1)]
    for dtype in (torch.float32, torch.bfloat16):
        expected = plain_attention(*(x.to(dtype) for x in (q, k_cache, v_cache)), block_tables, scale, context).double()
        errors = ((out.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).cpu()
        assert expected.isfinite().all()
        assert (errors < 2e-2).all(), f"{dtype}: {errors.max():.2e} at token {errors.argmax()}"  # NaN fails too


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "bfloat16"}, "attention: flash-attn for prefill"),
        ({"dtype": "bfloat16", "kvcache_block_size": 16}, "16 is no multiple of 256"),
        ({"dtype": "float32"}, "float32"),
    ],
)
def test_the_choice_of_attention_is_logged_once(checkpoint, caplog, options, message):
    """Case 36; and the default block size follows from it."""
    if attention.flash_forward is None:
        pytest.skip("flash-attn isn't installed")
    with caplog.at_level(logging.INFO, "nanoengine"):
        with LLM(checkpoint("qwen3"), device=DEVICE, num_kvcache_blocks=4, enforce_eager=True, **options) as llm:
            assert llm.config.kvcache_block_size == (256 if options == {"dtype": "bfloat16"} else 16)
    (logged,) = [text for text in caplog.messages if text.startswith("attention:")]
    assert message in logged


# ---- float32: the oracle's tokens

PREFIX = random_ids(500, 34)
PROMPTS = [
    PREFIX,
    PREFIX[:32] + [1, 2, 3],  # shares two blocks of 16
    PREFIX[:20] + [4],  # one
    random_ids(501, 1),
    random_ids(502, 16),
    random_ids(503, 17),
    random_ids(504, 40),
]
LENGTHS = [18, 24, 20, 30, 22, 12, 9]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plain_attention_and_no_kernels(checkpoint, family, monkeypatch, replays):
    monkeypatch.setattr(kernels, "has_triton", lambda x: False)
    folder, params = checkpoint(family), [greedy(n) for n in LENGTHS]
    with float32_engine(folder) as llm:
        for _ in range(2):
            check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))
        assert llm._ranks.runner.graphs is None
    assert not replays


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("setting", ["roomy", "scarce"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_kernels_and_graphs(checkpoint, family, setting, is_async, replays):
    """Batched; on the second call with prefix hits; if blocks and budget are scarce, chunked and preempted too."""
    folder, params = checkpoint(family), [greedy(n) for n in LENGTHS]
    options = {"num_kvcache_blocks": 14, "max_num_batched_tokens": 16} if setting == "scarce" else {}
    with float32_engine(folder, async_scheduling=is_async, **options) as llm:
        assert llm._ranks.runner.graphs is not None
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            check(folder, PROMPTS, params, outputs)
        assert (llm.scheduler.num_preemptions > 0) == (setting == "scarce")
        assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks
    if setting == "roomy":
        assert [output.num_cached_tokens for output in outputs] == [32, 32, 16, 0, 0, 16, 32]
        assert set(replays) == {1, 2, 4, 8}
    assert replays


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_seeded_draws_are_those_of_the_cpu(checkpoint, family, replays):
    """Noise of the kernel, of the filtered draw beside it and of the CPU's plain lines is one."""
    filters = [{}, {"top_k": 5}, {}, {"top_p": 0.7}, {}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}]
    params = [
        SamplingParams(temperature=0.4 + 0.2 * n, max_tokens=12, seed=(2**63 - 1) >> 9 * n, ignore_eos=True, **some)
        for n, some in enumerate(filters)
    ]
    folder = checkpoint(family)
    with float32_engine(folder) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    with tiny.engine(folder) as llm:
        on_cpu = llm.generate(PROMPTS, params, use_tqdm=False)
    check(folder, PROMPTS, params, outputs)
    for prompt, one, output, expected in zip(PROMPTS, params, outputs, on_cpu):
        if min(oracle_for(folder, prompt, one).margins) > tiny.MARGIN:
            assert output.token_ids == expected.token_ids
    assert replays


def test_batches_larger_than_the_largest_graph_run_eagerly(checkpoint, replays):
    folder, params = checkpoint("llama"), [greedy(n) for n in LENGTHS]
    with float32_engine(folder, cuda_graph_batch_sizes=(2, 4)) as llm:
        sizes = []
        llm.on_step = lambda chunks, launch: sizes.append(len(chunks))
        check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))
    assert max(sizes[1:]) > 4 and set(replays) == {2, 4}
    assert len(replays) == sum(size <= 4 for size in sizes[1:])  # the first step holds the prompts


# ---- graph = eager, bit for bit

Compared = namedtuple("Compared", "num_seqs size differs error")


@pytest.fixture
def beside_eager(monkeypatch):
    """beside_eager(runner) -> the list of `Compared`, one for each replay from now on.

    Each replay's step is computed twice, eagerly and by the graph, from the same padded inputs and buffers; before
    either, what it must write is erased.
    """

    def start(runner):
        compared, replay = [], CudaGraphs.replay

        def both(graphs, size, inputs):
            on_device = inputs.to(runner.device)
            rows, _, slots, _, draw_positions = on_device
            is_live, kv = rows != runner.spare_row, runner.kv_cache.flatten(2, 3)  # [2, layers, slots, heads, dim]
            results = []
            for compute in (lambda: runner._decode(on_device), lambda: replay(graphs, size, inputs)):
                kv[:, :, slots] = math.nan
                runner.history[rows, draw_positions] = -1
                token_ids, logits = compute()
                drawn = runner.history[rows[is_live], draw_positions[is_live]]
                results.append((token_ids, logits, kv[:, :, slots[is_live]], drawn))
            names, (eager, graph) = ("token ids", "logits", "keys and values", "history"), results
            differs = [name for name, a, b in zip(names, eager, graph) if not torch.equal(a, b)]
            if not torch.equal(graph[0][is_live], graph[3]):
                differs.append("history from token ids")
            error = (graph[1].double() - eager[1].double()).norm() / eager[1].double().norm()
            compared.append(Compared(int(is_live.sum()), size, differs, float(error)))
            return graph[:2]

        monkeypatch.setattr(CudaGraphs, "replay", both)
        return compared

    return start


def decode_params(temperature, number, max_tokens):
    seed = 1000 + number if temperature else None
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["tiny", "big"])
def test_graph_equals_eager_for_every_batch_size(bf16_engine, beside_eager, name, temperature):
    """Case 8. 40 requests, each one token longer than the one before: every batch from 40 down to 1; then 256."""
    llm = bf16_engine(name)
    longest, vocab_size = llm.config.max_model_len, min(llm.model_config.vocab_size, 10_000)
    compared = beside_eager(llm._ranks.runner)
    for num_requests, seed in ((40, 600), (256, 700)):
        lens = np.random.default_rng(seed).integers(1, 100 if num_requests == 40 else 20, num_requests)
        lens[[5, 20]] = longest // 4, longest // 2  # contexts that are split
        lens[39] = longest - 50 if num_requests == 40 else 20
        prompts = [random_ids(int(temperature * 10) + seed + n, length, vocab_size) for n, length in enumerate(lens)]
        assert lens.sum() <= llm.config.max_num_batched_tokens  # all prompts in the first step
        max_tokens = range(2, 42) if num_requests == 40 else [3] * 256
        params = [decode_params(temperature, n, length) for n, length in enumerate(max_tokens)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == list(max_tokens)
    assert [step.num_seqs for step in compared] == [*range(40, 0, -1), 256, 256]
    wrong = [step for step in compared if step.differs]
    assert not wrong, f"{len(wrong)} of {len(compared)} steps, error {max(s.error for s in wrong):.1e}: {wrong[:9]}"


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_padding_touches_nothing_that_lives(checkpoint, monkeypatch, is_async):
    """Case 8: a batch shrinks from 8 to 5 in a graph of 8. The whole state is compared bit for bit around each replay:
    what changes belongs to a live row's own token, to the spare block or to the spare row."""
    folder, steps, wrong, replay = checkpoint("qwen3"), [], [], CudaGraphs.replay
    prompts = [random_ids(800 + n, 3 + 5 * n) for n in range(8)]
    params = [greedy(4 if n in (1, 4, 6) else 10) for n in range(8)]

    def places(before, after):
        return set(map(tuple, (before != after).nonzero().tolist()))

    with float32_engine(folder, cuda_graph_batch_sizes=(8,), async_scheduling=is_async) as llm:
        runner = llm._ranks.runner
        pool = llm.config.num_kvcache_blocks * llm.config.kvcache_block_size  # slots before the spare block's

        def watched(graphs, size, inputs):
            bits = runner.kv_cache.view(torch.int32)  # NaN = NaN
            state = [tensor.clone() for tensor in (bits, runner.history, runner.block_tables)]
            outputs = replay(graphs, size, inputs)
            is_live = inputs[0] != runner.spare_row
            rows, positions, slots, context_lens, draw_positions = inputs[:, is_live].tolist()
            changed = (bits != state[0]).any(dim=5).any(dim=4).any(dim=1).any(dim=0).flatten().nonzero()[:, 0].tolist()
            spare_columns = {(runner.spare_row, 0), (runner.spare_row, runner.no_position)}
            own_columns = {(row, position // 16) for row, position in zip(rows, positions)}
            facts = {
                "padding": inputs[:, ~is_live].T.tolist() == [runner.padding] * (size - len(rows)),
                "context lengths": context_lens == [position + 1 for position in positions],
                "slots": [slot for slot in changed if slot < pool] == sorted(slots),
                "keys and values": bool(runner.kv_cache.flatten(2, 3)[:, :, slots].isfinite().all()),
                "history": places(state[1], runner.history) <= {*zip(rows, draw_positions)} | spare_columns,
                "block tables": places(state[2], runner.block_tables) <= own_columns | spare_columns,
            }  # an assertion that failed here would end requests, not the test
            wrong.extend((len(steps), name) for name, is_right in facts.items() if not is_right)
            steps.append(len(rows))
            return outputs

        monkeypatch.setattr(CudaGraphs, "replay", watched)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not wrong
    assert steps == [8] * 3 + [5] * 6
    check(folder, prompts, params, outputs)


# ---- bf16 at real shapes: teacher forcing

# Of the logits' standard deviation. This test's engine in bf16 on a CPU, with these weights and plain attention, had a
# largest gap of 0.10. With the first prompt token changed the mean is 1.8; one in the middle of 64: 0.2, up to 0.9.
TOLERANCE = 0.25


@contextlib.contextmanager
def livelier(layers):
    """Sharper attention that counts for more. As they are, random weights repeat a token whatever the context is."""
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.q_norm.weight.mul_(3)
            layer.self_attn.o_proj.weight.mul_(4)
        yield
        for layer in layers:
            layer.self_attn.q_norm.weight.mul_(1 / 3)
            layer.self_attn.o_proj.weight.mul_(1 / 4)


def reference_gaps(model, prompt, token_ids, params):
    """How far transformers' float32 score of each output token, alone and uncached, is below the best one, in units
    of the logits' standard deviation: [num output tokens]. A score is the logit plus the draw's noise."""
    n, ids = len(token_ids), torch.tensor([prompt + token_ids[:-1]], device=DEVICE)
    with torch.inference_mode():
        logits = model(ids, use_cache=False, logits_to_keep=n).logits[0].float()
    scores = logits
    if params.temperature > 0:
        positions = torch.arange(len(prompt), len(prompt) + n, device=DEVICE)
        seeds = torch.full((n,), params.seed, device=DEVICE)
        noise = kernels.gumbel_noise(seeds, positions, torch.arange(logits.shape[1], device=DEVICE))
        scores = logits + params.temperature * noise
    chosen = scores.gather(1, torch.tensor(token_ids, device=DEVICE)[:, None])[:, 0]
    return ((scores.max(dim=1).values - chosen) / logits.std(dim=1)).cpu()


def test_each_token_is_near_the_best_by_teacher_forcing(bf16_engine, random_model, monkeypatch, capsys):
    """Eight requests of 64 tokens in one batch: chunked, with prefix hits, greedy and seeded; each is scored alone."""
    from transformers import AutoModelForCausalLM

    llm = bf16_engine("big")
    monkeypatch.setattr(llm.scheduler, "max_num_batched_tokens", 512)
    vocab_size, steps = llm.model_config.vocab_size, []
    common = random_ids(900, 600, vocab_size)
    prompts = [random_ids(901 + n, length, vocab_size) for n, length in enumerate((1, 5, 64, 255, 256, 257))]
    prompts += [common + random_ids(910, 100, vocab_size), common + random_ids(911, 900, vocab_size)]
    params = [decode_params(0.6 * (n % 2), n, 64) for n in range(8)]
    with livelier(llm._ranks.runner.model.layers):
        llm.generate([common], greedy(1), use_tqdm=False)
        llm.on_step = lambda chunks, launch: steps.append([chunk.num_tokens for chunk in chunks])
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.on_step = None
    assert [len(output.token_ids) for output in outputs] == [64] * 8
    assert [output.num_cached_tokens for output in outputs] == [0] * 6 + [512] * 2
    assert any(min(lens) == 1 < max(lens) for lens in steps)  # mixed steps

    model = AutoModelForCausalLM.from_pretrained(random_model(BIG), dtype=torch.float32).to(DEVICE).eval()
    gaps, altered = [], []  # altered: the same tokens after a prompt whose first token is another
    with livelier(model.model.layers):
        for prompt, one, output in zip(prompts, params, outputs):
            gaps.append(reference_gaps(model, prompt, output.token_ids, one))
            other = [(prompt[0] + 1) % vocab_size, *prompt[1:]]
            altered.append(reference_gaps(model, other, output.token_ids, one))
    del model
    release()
    gaps, altered = torch.stack(gaps), torch.stack(altered)  # [8 requests, 64]
    with capsys.disabled():
        print(f"\nteacher forcing, {BIG}: {(gaps > 0).sum()} of {gaps.numel()} tokens aren't the float32 model's")
        print(f"    gap in std: at most {gaps.max():.4f}, by request {[round(g, 4) for g in gaps.amax(1).tolist()]}")
        print(f"    first prompt token changed: mean {[round(g, 2) for g in altered.mean(1).tolist()]}")
    assert altered.mean() > 2 * TOLERANCE  # or the model is too dull to tell
    assert (gaps < TOLERANCE).all()


# ---- memory

GIB = 2**30
SLACK = 1 * GIB  # the allocator's rounding, and what the smaller graphs take beside the largest
LASTING = GIB // 4  # what stays for the next engine: cuBLAS's workspaces, 32 MiB per stream on Hopper


def test_the_pool_fills_the_share_asked_for_and_the_largest_batch_stays_within(random_model, caplog, capsys):
    """Weights, largest step and graphs are measured, the rest goes to the pool, and the numbers are logged. An
    earlier peak of this process is no part of the largest step."""
    release()
    before, total = used_memory(), torch.cuda.mem_get_info()[1]
    ballast = torch.empty(total // 8, dtype=torch.uint8, device=DEVICE)
    del ballast
    release()
    options = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    options |= {"gpu_memory_utilization": 0.3, "cuda_graph_batch_sizes": (8, 256)}
    with caplog.at_level(logging.INFO, "nanoengine"):
        llm = LLM(random_model(BIG), device=DEVICE, dtype="bfloat16", **options)
    with llm:
        after_start, limit = used_memory(), 0.3 * total + SLACK
        (record,) = [record for record in caplog.records if record.msg.startswith("GPU memory")]
        in_all, taken, step, left = (number * GIB for number in record.args)  # taken: with the largest graph
        pool, steps = llm._ranks.runner.kv_cache, []
        num_blocks = llm.scheduler.block_manager.num_blocks
        llm.on_step = lambda chunks, launch: steps.append((len(chunks), sum(chunk.num_tokens for chunk in chunks)))
        filtered = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, max_tokens=3, ignore_eos=True)
        vocab_size = llm.model_config.vocab_size
        for num_prompts, length in ((256, 32), (16, 2040)):
            prompts = [random_ids(length + n, length, vocab_size) for n in range(num_prompts)]
            outputs = llm.generate(prompts, filtered, use_tqdm=False)
            assert {len(output.token_ids) for output in outputs} == {3}
        after_work = used_memory()
        numbers = {"before": before, "taken": taken, "step": step, "left": left, "30 %": 0.3 * total}
        numbers |= {"pool": pool.nbytes, "after start": after_start, "after work": after_work}
        with capsys.disabled():
            print("\nGPU memory in GiB:", ", ".join(f"{name} {number / GIB:.2f}" for name, number in numbers.items()))
        assert (256, 8192) in steps  # the largest step that there can be
        assert abs(in_all - total) < GIB / 100 and before < taken < limit
        assert 0 < step < 4 * GIB  # logits of 256 rows, 152k ids: 78 MB in bf16
        assert abs(taken + step + left - 0.3 * total) < GIB / 100
        assert num_blocks == left // (pool.nbytes // (num_blocks + 1))  # the pool has a spare block besides
        assert 0.3 * total - step - SLACK < after_start < limit
        assert after_work < limit
        del pool
    del llm
    release()


def test_a_share_too_small_is_refused_with_the_numbers_and_leaves_nothing(random_model):
    folder = random_model(MIDDLE)
    release()
    before = torch.cuda.memory_allocated()
    options = {"kvcache_block_size": 256, "max_model_len": 512, "max_num_seqs": 8}
    with pytest.raises(RuntimeError, match=r"\b0 KV blocks of 256 tokens.*max_model_len=512\b") as caught:
        LLM(folder, device=DEVICE, dtype="bfloat16", gpu_memory_utilization=0.001, **options)
    assert "gpu_memory_utilization" in str(caught.value)
    del caught
    release()
    assert torch.cuda.memory_allocated() - before < LASTING  # the weights alone are 257 MiB


@pytest.mark.parametrize("way", ["close", "del", "with"])
def test_memory_comes_back(checkpoint, way):
    """Case 38. At once: garbage collection may be far away."""
    folder = checkpoint("qwen3", dtype=torch.bfloat16)
    options = {"max_model_len": 512, "max_num_seqs": 8, "cuda_graph_batch_sizes": (1, 8), "num_kvcache_blocks": 8192}
    release()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        llm = LLM(folder, device=DEVICE, dtype="bfloat16", kvcache_block_size=256, **options)
        llm.generate([random_ids(n, 20) for n in range(8)], greedy(4), use_tqdm=False)
        assert torch.cuda.memory_allocated() - before > GIB  # 8192 blocks of 128 KiB
        if way == "close":
            llm.close()
            llm.close()
        elif way == "del":
            del llm
        else:
            with pytest.raises(ZeroDivisionError), llm:
                1 / 0
        assert torch.cuda.memory_allocated() - before < LASTING
    finally:
        gc.enable()


# ---- errors


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("where", ["model", "graph"])
def test_after_an_out_of_memory_error_steps_are_right(checkpoint, monkeypatch, caplog, replays, where, is_async):
    """The failed step's requests end with "error"; all blocks and rows come back, and graphs go on serving."""
    folder, params = checkpoint("llama"), [greedy(n) for n in LENGTHS]

    def too_large(*_):
        return torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    with float32_engine(folder, async_scheduling=is_async) as llm:
        check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))
        ids = [llm.add_request(prompt, greedy(24)) for prompt in PROMPTS[:3]]
        assert not any(llm.step() for _ in range(5))
        with monkeypatch.context() as patch:
            if where == "model":  # a new prompt makes the step a mixed one, which runs eagerly
                ids.append(llm.add_request(PROMPTS[6], greedy(24)))
                patch.setattr(Decoder, "forward", too_large)
            else:
                patch.setattr(CudaGraphs, "replay", too_large)
            ended = llm.step()
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "a step failed" in record.message and "allocate" in str(record.exc_info[1])
        ended.sort(key=lambda output: ids.index(output.request_id))
        assert [output.request_id for output in ended] == ids
        for prompt, output in zip([*PROMPTS[:3], PROMPTS[6]], ended):
            assert output.finish_reason == "error"
            assert output.token_ids == oracle_for(folder, prompt, greedy(24)).token_ids[: len(output.token_ids)]
        assert len(ended[0].token_ids) >= 3
        manager, num_replays = llm.scheduler.block_manager, len(replays)
        assert tiny.drain(llm) == [] and not llm.has_unfinished()
        assert manager.num_free_blocks == manager.num_blocks and len(llm.scheduler.free_rows) == 8
        for _ in range(2):
            check(folder, PROMPTS, params, llm.generate(PROMPTS, params, use_tqdm=False))
        assert len(replays) > num_replays


# ---- the program


@pytest.mark.parametrize("name", [MIDDLE, BIG])
def test_example_runs(random_model, tmp_path, name):
    """Random weights and a tokenizer of 384 ids: what it says is nonsense, ids beyond the tokenizer's have no text."""
    for file in random_model(name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    tiny.tiny_tokenizer(tmp_path)
    release()
    command = [sys.executable, str(ROOT / "example.py"), "--model", str(tmp_path), "--max-tokens", "16"]
    command += ["--prompt", "the cat", "--prompt", "what sat on the mat?"]
    run = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "> the cat\n" in run.stdout and "> what sat on the mat?\n" in run.stdout
    assert len([line for line in run.stdout.splitlines() if line in ("[length]", "[stop]")]) == 2
    assert "tokens/s" in run.stdout and "Traceback" not in run.stderr


# ---- memory errors


MEMCHECKED = """
import sys
from nanoengine import LLM, SamplingParams
folder, is_eager, dtype, block_size = sys.argv[1], sys.argv[2] == "eager", sys.argv[3], int(sys.argv[4])
prompts = [[1 + i % 100] * n for i, n in enumerate((1, 2, 31, 32, 33, 100))]
kinds = dict(temperature=0), dict(temperature=0.9, seed=3), dict(top_k=4, logprobs=2), dict(
    repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=3, bad_words=[]), dict(top_p=0.9, min_p=0.01), {}
params = [SamplingParams(max_tokens=9, ignore_eos=True, **kind) for kind in kinds]
with LLM(folder, device="cuda", dtype=dtype, kvcache_block_size=block_size, num_kvcache_blocks=max(12, 150 // block_size),
         max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, enforce_eager=is_eager) as llm:
    for some in (slice(6), slice(1), slice(2, 4), slice(6)):      # a batch, one row (matvec), prefix hits
        outputs = llm.generate(prompts[some], params[some], use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [9] * len(outputs)
    print("steps:", llm.stats()["steps"], "preemptions:", llm.stats()["preemptions"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode, dtype, block_size", [("graphs", "bfloat16", 256), ("eager", "bfloat16", 256),
                                                     ("eager", "float32", 5)])
def test_memcheck_is_clean(checkpoint, mode, dtype, block_size):
    """compute-sanitizer on a short run. It knows allocations: without torch's cache of them each tensor is one."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer isn't installed")
    release()
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    env |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if mode == "eager" else {}
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "77", sys.executable, "-c", MEMCHECKED,
               str(checkpoint("qwen3", dtype=torch.bfloat16)), mode, dtype, str(block_size)]
    run = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300)
    said = (run.stdout + run.stderr)[-4000:]
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer can't work on this machine")
    assert run.returncode == 0 and "ERROR SUMMARY: 0 errors" in said, said
    print(said.splitlines()[-3:])

"""Every kernel equals the plain lines that define it: on CUDA, and on a CPU in Triton's interpreter.

The interpreter is chosen before Triton is imported, so `test_on_the_cpu_in_the_interpreter` runs this file
again in a process of its own, where the fixture `device` is the CPU. There is no bf16: NumPy has none.
"""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanoengine import kernels
from nanoengine.attention import plain_attention
from nanoengine.step_input import FlatStep

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for the interpreter's infinities


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
        devices = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, skip])]
        metafunc.parametrize("device", devices)
    if "dtype" in metafunc.fixturenames:
        dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
        metafunc.parametrize("dtype", dtypes, ids=str)


@pytest.fixture(autouse=True)
def poison():
    """Whatever `torch.empty` hands out is NaN (or the largest integer); inputs are new in every run."""
    torch.seed()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[actual.dtype]
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < tolerance, f"relative error {error:.2e}"  # NaN fails too


def plain(function, *args, **options):
    """What the plain lines make of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_triton", lambda x: False)
        return function(*args, **options)


def ints(values, device):
    return torch.as_tensor(values, dtype=torch.int32, device=device)


@pytest.mark.skipif(INTERPRETED or kernels.triton is None, reason="needs Triton")
def test_on_the_cpu_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cpu", __file__]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_without_triton_the_plain_lines_run():
    program = ("import sys; sys.modules['triton'] = None\n"
               "import torch; from nanoengine import kernels\n"
               "raise SystemExit(kernels.silu_mul(torch.ones(2, 6)).shape != (2, 3))")
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


@pytest.mark.parametrize("hidden", [1, 80, 1024, 2560])
def test_add_rms_norm(device, dtype, hidden):
    x, residual = torch.randn(2, 7, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    for residual in (residual, None):
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
        expected_normed, expected_total = plain(kernels.add_rms_norm, x, residual, weight, 1e-6)
        assert_close(normed, expected_normed)
        assert_close(total, expected_total)
    assert total is x
    assert_close(expected_normed, F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6).to(dtype))


@pytest.mark.parametrize("head_dim, num_heads, num_kv_heads, block_size", [
    (128, 16, 8, 256), (80, 6, 2, 16), (64, 3, 1, 4), (20, 2, 2, 1)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_store(device, dtype, head_dim, num_heads, num_kv_heads, block_size, has_norm):
    num_rows = 2 if INTERPRETED else 100  # of 3 tokens each, in no order, in blocks that no other row has
    rows, starts = torch.randperm(num_rows + 2)[:num_rows].tolist(), torch.randint(0, 48, (num_rows,)).tolist()
    places = [(row, start + i) for row, start in zip(rows, starts) for i in range(3)]
    columns = {(row, position // block_size) for row, position in places}
    n, num_blocks, width = len(places), len(columns) + 2, (num_heads + 2 * num_kv_heads) * head_dim
    blocks = dict(zip(columns, torch.randperm(num_blocks).tolist()))
    slots = ints([blocks[row, p // block_size] * block_size + p % block_size for row, p in places], device)
    rows, positions = ints(places, device).T.contiguous()
    qkv = torch.randn(n, width, device=device).to(dtype)
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    norms = torch.randn(2, head_dim, device=device).to(dtype) if has_norm else (None, None)
    results = []
    for is_plain in (False, True):
        shape = 2, num_blocks, block_size, num_kv_heads, head_dim
        k_cache, v_cache = torch.full(shape, NAN, dtype=dtype, device=device)
        tables = torch.full((num_rows + 2, 49 // block_size + 3), -7, dtype=torch.int32, device=device)
        args = qkv, rows, positions, slots, cos_sin, k_cache, v_cache, tables, num_heads, *norms, 1e-6
        q = plain(kernels.rope_and_store, *args) if is_plain else kernels.rope_and_store(*args)
        results.append((q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), tables))
    (q, k, v, tables), (expected_q, expected_k, _, expected_tables) = results
    assert q.is_contiguous()
    assert_close(q, expected_q)
    assert_close(k[slots], expected_k[slots])
    assert torch.equal(v[slots], qkv.unflatten(1, (-1, head_dim))[:, -num_kv_heads:])
    untouched = torch.ones(len(k), dtype=torch.bool, device=device).index_fill_(0, slots.long(), False)
    assert k[untouched].isnan().all() and v[untouched].isnan().all()
    assert torch.equal(tables, expected_tables) and (tables != -7).sum() == len(blocks)
    assert all(tables[place] == block for place, block in blocks.items())


@pytest.mark.parametrize("width", [45, 3072])
def test_silu_mul(device, dtype, width):
    gate_up = torch.randn(5, 2 * width, device=device).to(dtype) * 30  # exp overflows
    assert_close(kernels.silu_mul(gate_up), plain(kernels.silu_mul, gate_up))


def numpy_bits(seed, position, token_ids):
    """The definition of the noise's bits, in the unsigned arithmetic that it is written in."""
    def mix(x):
        x = np.bitwise_xor(x, x >> np.uint32(16)) * np.uint32(0x7FEB352D)
        x = np.bitwise_xor(x, x >> np.uint32(15)) * np.uint32(0x846CA68B)
        return np.bitwise_xor(x, x >> np.uint32(16))

    low, high, position = (np.array([x & 0xFFFFFFFF], dtype=np.uint32) for x in (seed, seed >> 32, position))
    key = mix(mix(mix(low + np.uint32(0x9E3779B9)) ^ high) ^ position)
    return mix(key ^ token_ids.astype(np.uint32) * np.uint32(0x9E3779B9)) & np.uint32(0x7FFFFFFF)


def test_noise_bits_are_those_of_the_definition():
    seeds, positions = [0, 1, -1, 2**63 - 1, -2**63, 123456789012345], [0, 5, 2**31 - 1, 7, 0, 99]
    token_ids = torch.arange(151936)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        inputs = torch.tensor(seeds)[:, None], ints(positions, "cpu")[:, None], token_ids
        bits = kernels.noise_bits(*(x.to(device) for x in inputs), kernels._mix, torch.int32).cpu()
        for row, seed, position in zip(bits, seeds, positions):
            assert np.array_equal(row.numpy(), numpy_bits(seed, position, token_ids.numpy()))


def test_noise_is_standard_gumbel():
    noise = kernels.gumbel_noise(torch.arange(100), ints(range(100), "cpu"), torch.arange(10000)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.005 and abs(noise.var() - np.pi**2 / 6) < 0.02
    cumulative = torch.exp(-torch.exp(-noise))  # uniform on (0, 1) if the noise is Gumbel
    counts = torch.histc(cumulative, bins=100, min=0, max=1)
    assert ((counts - 10000)**2 / 10000).sum() < 160  # chi-square, 99 degrees of freedom: p = 1e-4


def test_noise_at_the_ends_of_its_range_is_finite(monkeypatch):
    monkeypatch.setattr(kernels, "noise_bits", lambda *_: torch.tensor([[0, 1, 2**31 - 1, 2**31 - 2]]))
    noise = kernels.gumbel_noise(torch.zeros(1), torch.zeros(1), None)[0]
    assert noise.tolist() == pytest.approx([22.18, 21.08, -2.81, -2.81], abs=0.01)


def test_draws_follow_the_softmax():
    logits, temperature = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, NAN, -3.0, 1.5]).nan_to_num(-torch.inf), 0.7
    n = 40000
    rows = torch.arange(n)
    _, drawn = plain(kernels.sample, logits.expand(n, -1), rows, torch.full((n,), temperature), rows,
                     ints(range(n), "cpu") % 100)
    expected = (logits / temperature).softmax(0) * n
    counts = torch.bincount(drawn, minlength=len(logits))
    assert counts[5] == 0
    assert ((counts - expected)**2 / expected)[expected > 0].sum() < 27.9  # 6 degrees of freedom: p = 1e-4


def sample_inputs(n, vocab, device, dtype=torch.float32):
    """(logits, rows, temperatures, seeds, positions): rows in no order, of which every third is greedy."""
    rows = torch.randperm(n + 3, device=device)[:n]
    seeds = torch.randint(-2**62, 2**62, (n + 3,), device=device)
    temperatures = torch.rand(n + 3, device=device) + 0.5
    temperatures[rows[::3]] = 0
    logits = 3 * torch.randn(n, vocab + 8, device=device).to(dtype)[:, :vocab]
    return logits, rows, temperatures, seeds, ints(range(n), device)


@pytest.mark.parametrize("n, vocab", [
    (1, 1), (3, 1024), (3, 1500), (10, 5000)] + [(64, 151936)] * (not INTERPRETED))
def test_sample(device, dtype, n, vocab):
    inputs = sample_inputs(n, vocab, device, dtype)
    scores, token_ids = kernels.sample(*inputs, vocab_start=7)
    expected_scores, expected_ids = plain(kernels.sample, *inputs, vocab_start=7)
    assert token_ids.dtype == torch.int32 and scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-5)
    logits, rows, temperatures, seeds, positions = inputs
    noise = kernels.gumbel_noise(seeds[rows], positions, torch.arange(7, vocab + 7, device=device))
    noised = logits.float() + temperatures[rows, None] * noise
    chosen = noised.gather(1, token_ids[:, None].long() - 7)[:, 0]  # another id only where rounding ties them
    torch.testing.assert_close(chosen, expected_scores, atol=1e-4, rtol=1e-5)
    assert torch.equal(token_ids[::3], logits[::3].float().argmax(1).int() + 7)


def test_the_kernel_draws_the_same_noise_token_by_token(device):
    n = 40 if INTERPRETED else 3000
    _, rows, temperatures, seeds, positions = sample_inputs(n, 1, device)
    logits = torch.full((n, n), -torch.inf, device=device).fill_diagonal_(0)  # row i can only draw token i
    scores, token_ids = kernels.sample(logits, rows, torch.ones_like(temperatures), seeds, positions, 100000)
    assert token_ids.tolist() == list(range(100000, 100000 + n))
    expected = kernels.gumbel_noise(seeds[rows], positions, torch.arange(100000, 100000 + n, device=device))
    torch.testing.assert_close(scores, expected.diagonal(), atol=2e-6, rtol=1e-5)


def test_ties_go_to_the_lowest_id_and_a_bad_row_still_names_a_token(device):
    logits = torch.zeros(5, 3000, device=device)
    logits[1, [2999, 1700, 1023, 1024]] = 1.0  # in several parts of the vocabulary
    logits[2] = -torch.inf
    logits[3] = NAN
    logits[4, 2000] = torch.inf
    _, rows, temperatures, seeds, positions = sample_inputs(5, 1, device)
    _, token_ids = kernels.sample(logits, rows, torch.zeros_like(temperatures), seeds, positions)
    assert token_ids[[0, 1, 2, 4]].tolist() == [0, 1023, 0, 2000] and 0 <= token_ids[3] < 3000


def test_shards_of_the_vocabulary_and_single_rows_draw_the_same_tokens(device):
    logits, *rest = sample_inputs(4, 3000, device)
    scores, token_ids = kernels.sample(logits, *rest)
    shards = [kernels.sample(logits[:, start:start + 1500], *rest, vocab_start=start) for start in (0, 1500)]
    shard_scores, shard_ids = (torch.stack(x) for x in zip(*shards))
    assert torch.equal(shard_scores.max(0).values, scores)
    assert torch.equal(shard_ids.gather(0, shard_scores.argmax(0)[None])[0], token_ids)
    rows, temperatures, seeds, positions = rest
    assert kernels.sample(logits[2:3], rows[2:3], temperatures, seeds, positions[2:3])[1] == token_ids[2]


def attention_inputs(context_lens, num_heads, num_kv_heads, head_dim, block_size, device, dtype):
    """A cache that is NaN but for the sequences' keys; a table of rows in no order, wild where unused."""
    n, max_blocks = len(context_lens), max(context_lens) // block_size + 2
    num_blocks = n * max_blocks
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), NAN, device=device).to(dtype)
    tables = torch.randperm(num_blocks, device=device).view(n, max_blocks)
    rows = torch.randperm(n + 2)[:n]
    block_tables = torch.full((n + 2, max_blocks), 2**30, device=device)  # beyond the context: a fault
    for row, table, context_len in zip(rows.tolist(), tables, context_lens):
        used = -(-context_len // block_size)
        block_tables[row, :used] = table[:used]
        position = torch.arange(context_len, device=device)
        slots = table[position // block_size] * block_size + position % block_size
        keys_and_values = torch.randn(2, context_len, num_kv_heads, head_dim, device=device)
        caches.flatten(1, 2)[:, slots] = keys_and_values.to(dtype)
    q = torch.randn(n, num_heads, head_dim, device=device).to(dtype)
    tables = ints(block_tables, device), ints(rows, device), ints(context_lens, device)
    return q, *caches, *tables, head_dim**-0.5


def decode_attention_plain(q, k_cache, v_cache, block_tables, rows, context_lens, scale):
    """What `attention.plain_attention` says, in float32; zeros for padding."""
    lives = context_lens > 0
    context = FlatStep(None, None, None, context_lens[lives], None, rows[lives], None,
                       torch.zeros(1, dtype=torch.int64), None, int(lives.sum()), 1, 1)
    out = torch.zeros_like(q)
    out[lives] = plain_attention(q[lives].float(), k_cache.float(), v_cache.float(), block_tables, scale, context).to(q.dtype)
    return out


EDGES = [1, 0, 32, 33, 65, 200]  # around the 32-key tiles, and so around the splits
SHAPES = [(16, 8, 128), (6, 2, 80), (3, 3, 64), (7, 1, 20)]  # num_heads, num_kv_heads, head_dim


@pytest.mark.parametrize("block_size, num_splits", [
    (1, 1), (4, 2), (16, 16), (256, 8)])
def test_decode_attention(device, dtype, block_size, num_splits):
    for shape in SHAPES[1:2] if INTERPRETED else SHAPES:
        context_lens = EDGES if INTERPRETED else EDGES + [31, 64, 127, 512, 1025, 3000]
        inputs = attention_inputs(context_lens, *shape, block_size, device, dtype)
        for _ in range(2):  # the second launch finds the counters that the first one left
            out = kernels.decode_attention(*inputs, num_splits)
            assert_close(out, decode_attention_plain(*inputs))
            assert (out[1] == 0).all()  # the sequence without keys
        num_pairs = len(context_lens) * shape[1]
        counters = kernels._arrivals(inputs[0].device, kernels.triton.next_power_of_2(num_pairs))  # those of the launches
        assert len(counters) >= num_pairs and (counters == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention_of_other_shapes(device, shape):
    inputs = attention_inputs([40, 0, 97], *shape, 16, device, torch.float32)
    for num_splits in (1, 4):
        assert_close(kernels.decode_attention(*inputs, num_splits), decode_attention_plain(*inputs))


def test_plain_attention_is_that_of_torch():
    q, k_cache, v_cache, block_tables, rows, context_lens, scale = attention_inputs(
        [5, 9], 6, 2, 20, 4, "cpu", torch.float32)
    out = decode_attention_plain(q, k_cache, v_cache, block_tables, rows, context_lens, scale)
    for i, context_len in enumerate([5, 9]):
        blocks = block_tables[rows[i], :-(-context_len // 4)].long()
        k, v = (cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1) for cache in (k_cache, v_cache))
        expected = F.scaled_dot_product_attention(q[i][:, None], k, v, enable_gqa=True)[:, 0]
        torch.testing.assert_close(out[i], expected)


@pytest.mark.skipif(kernels.triton is None, reason="needs Triton")
def test_few_pairs_share_contexts_among_many_programs(monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **options):
                assert len(args[9]) >= grid[1] * grid[2]  # a counter for each
                assert args[12] == grid[0]
                launched.append(grid[0])

            return launch

    monkeypatch.setattr(kernels, "_decode_attention_kernel", Kernel())
    for pairs in (1, 8, 25, 26, 64, 200, 201, 150000):
        q, cache = torch.zeros(pairs, 1, 16), torch.zeros(1, 1, 1, 16)
        kernels.decode_attention(q, cache, cache, ints([[0]], "cpu"), None, None, 1.0)
    assert launched == [16, 16, 16, 8, 4, 2, 1, 1]


@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_the_norm_adds_up_what_all_ranks_have(device, dtype, rank, ranks):
    """One-shot all-reduce. The others' memories are this process's too; they have arrived at this rank's counters."""
    n, size, most = 7, 80, 16     # of `Group.share_memory`'s num_tokens
    memories = [torch.zeros(most * ranks * 4 + 2 * most * size * dtype.itemsize, dtype=torch.uint8, device=device)
                for _ in range(ranks)]
    arrivals = [memory[:n * ranks * 4].view(torch.int32).view(n, ranks) for memory in memories]
    parts = [memory[most * ranks * 4:].view(dtype).view(2, most, size)[1, :n] for memory in memories]
    stop = torch.zeros(1, dtype=torch.int32)
    stop = stop if INTERPRETED else stop.pin_memory()
    bases = torch.tensor([memory.data_ptr() for memory in [*memories, stop]], device=device)
    weight, residual = torch.randn(size, device=device).to(dtype), torch.randn(n, size, device=device).to(dtype)
    for part in parts:
        part.copy_(torch.randn(n, size))
    for beside in (None, residual):
        for others in arrivals:
            others.zero_()
        arrivals[rank][:, [other for other in range(ranks) if other != rank]] = 1
        normed, total = kernels.add_rms_norm(parts[rank], beside, weight, 1e-6, bases, rank)
        summed = sum(part.float() for part in parts).to(dtype)
        expected = summed if beside is None else summed + beside
        assert_close(total, expected)
        assert_close(normed, torch.rms_norm(expected, (size,), eps=1e-6) * weight)
        for other in range(ranks):      # its own counters are 0 again; the others have been told that it was here
            assert arrivals[other].tolist() == [[int(other != rank and column == rank) for column in range(ranks)]] * n


def test_the_norm_waits_for_nobody_when_a_rank_is_gone(device):
    """It may notice late, but must end."""
    x, stop = torch.randn(8 + 24, device=device), torch.zeros(1, dtype=torch.int32)
    stop = stop if INTERPRETED else stop.pin_memory()
    bases = torch.tensor([x.data_ptr(), x.data_ptr(), stop.data_ptr()], device=device)
    x[:8] = 0       # counters, of which the other rank's never rises: both bases are this one's
    if INTERPRETED:
        stop[0] = 1
    _, total = kernels.add_rms_norm(x[8:].view(1, 24), None, torch.ones(24, device=device), 1e-6, bases, 0)
    stop[0] = 1     # on a GPU the kernel is waiting by now
    assert total.shape == (1, 24) and total.isfinite().all()


@pytest.mark.parametrize("in_features, out_features", [
    (45, 3), (1024, 10)] + [(3000, 4097)] * (not INTERPRETED))
def test_matvec(device, dtype, in_features, out_features):
    x = torch.randn(1, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    assert_close(kernels.matvec(x, weight), F.linear(x.double(), weight.double()).to(dtype))


def test_a_graph_replays_with_longer_contexts_and_other_rows(device):
    if INTERPRETED:
        pytest.skip("no CUDA graphs")
    inputs = attention_inputs([700, 600, 500, 0], 16, 8, 128, 16, device, torch.bfloat16)
    logits, *rest, positions = sample_inputs(4, 5000, device)
    static_lens = inputs[5].clone()

    def step():
        out = kernels.decode_attention(*inputs[:5], static_lens, inputs[6], 4)
        return out, *kernels.sample(logits, *rest, positions)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, token_ids = step()
    for lens in ([1, 0, 0, 0], [32, 33, 64, 0], [300, 600, 499, 0], [700, 1, 500, 0]):
        static_lens.copy_(ints(lens, device))
        positions += 1
        out.fill_(NAN)
        graph.replay()
        assert_close(out, decode_attention_plain(*inputs[:5], static_lens, inputs[6]))
        assert torch.equal(token_ids, kernels.sample(logits, *rest, positions)[1])

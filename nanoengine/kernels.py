"""The few fused operations of a decoder step, each beside the plain torch lines that define it.

`*_plain` is the meaning, on any device; the Triton kernel must equal it up to rounding. The public function chooses:
the kernel on CUDA (or anywhere under TRITON_INTERPRET=1), the plain lines elsewhere. A launch never waits for the device
and its grid depends on shapes only, so a CUDA graph can hold it. Arithmetic is in float32 and rounds where the plain
lines round. On Hopper a kernel starts while the one before it still runs (programmatic dependent launch): `_follow`
waits for that one's results, and lets the next kernel start.
"""
from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:
    triton, jit = None, lambda function: function

GOLDEN = 0x9E3779B9 - 2**32  # the golden ratio's bits as an int32: spreads neighbouring token ids
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and exp2 is one instruction


def has_triton(x):
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def _options(device):
    return {"PDL": True, "launch_pdl": True} if device.type == "cuda" and torch.cuda.get_device_capability(
        device) >= (9, 0) else {"PDL": False}


@jit
def _follow(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def rms_norm_plain(x, weight, eps):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm_plain(x, residual, weight, eps):
    residual = x if residual is None else x + residual
    return rms_norm_plain(residual, weight, eps), residual


def add_rms_norm(x, residual, weight, eps):
    """(RMSNorm(x + residual) * weight, x + residual) of x, residual [n, hidden] contiguous, weight [hidden].

    residual None counts as zeros, and then the second result is x itself.
    """
    if not has_triton(x):
        return add_rms_norm_plain(x, residual, weight, eps)
    normed, tile = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    total = x if residual is None else torch.empty_like(x)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, normed, total, eps, x.shape[1], tile,
                                    num_warps=min(max(tile // 256, 1), 16), **_options(x.device))
    return normed, total


@jit
def _add_rms_norm_kernel(x, residual, weight, normed, total, eps, HIDDEN: tl.constexpr, TILE: tl.constexpr,
                         PDL: tl.constexpr):
    _follow(PDL)
    column = tl.arange(0, TILE)
    place, mask = tl.program_id(0).to(tl.int64) * HIDDEN + column, column < HIDDEN
    dtype = normed.dtype.element_ty
    h = tl.load(x + place, mask, 0.0).to(tl.float32)
    if residual is not None:
        h = (h + tl.load(residual + place, mask, 0.0).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(total + place, h, mask)
    h *= tl.rsqrt(tl.sum(h * h) / HIDDEN + eps)
    tl.store(normed + place, h.to(dtype).to(tl.float32) * tl.load(weight + column, mask, 0.0).to(tl.float32), mask)


def rope_and_store_plain(qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm, eps):
    heads, num_kv_heads = qkv.unflatten(1, (-1, k_cache.shape[-1])), k_cache.shape[2]
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)     # [n, their heads, head_dim]
    if q_norm is not None:
        q, k = rms_norm_plain(q, q_norm, eps), rms_norm_plain(k, k_norm, eps)
    cos, sin = cos_sin[positions][:, :, None].unbind(1)                       # each [n, 1, head_dim / 2]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    k_cache.flatten(0, 1)[slot_mapping] = k
    v_cache.flatten(0, 1)[slot_mapping] = v
    return q


def _rotate(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_and_store(qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm, eps):
    """Rotate q and k by their position (halves paired, as HF's `rotate_half`); write k and v to their slots.

    qkv [n, (num_heads + 2 num_kv_heads) * head_dim]; positions, slot_mapping [n] integers, a slot being block *
    block_size + offset; cos_sin [max_position, 2, head_dim / 2] float32; k_cache, v_cache [num_blocks, block_size,
    num_kv_heads, head_dim]; all contiguous. q_norm, k_norm [head_dim]: weights of an RMSNorm of each head before the
    rotation (Qwen3), or both None. Returns q [n, num_heads, head_dim].
    """
    if not has_triton(qkv):
        return rope_and_store_plain(qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm,
                                    eps)
    num_kv_heads, head_dim = k_cache.shape[2:]
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    _rope_and_store_kernel[(len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, 8))](
        qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, q_norm, k_norm, q, eps, num_heads, num_kv_heads,
        head_dim // 2, triton.next_power_of_2(head_dim // 2), 8, **_options(q.device))
    return q


@jit
def _rope_and_store_kernel(qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, q_norm, k_norm, q, eps,
                           HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
                           HEAD_TILE: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)[None, :]
    # |<- HEADS rows of q ->|<- KV_HEADS rows of k ->|<- KV_HEADS rows of v ->|   a program does HEAD_TILE of them
    row = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    half, is_q = dim < HALF, row < HEADS
    dtype = q.dtype.element_ty
    is_k, is_v = ~is_q & (row < HEADS + KV_HEADS), (row >= HEADS + KV_HEADS) & (row < HEADS + 2 * KV_HEADS)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + row) * 2 * HALF + dim
    a = tl.load(source, (is_q | is_k | is_v) & half, 0.0).to(tl.float32)              # the first half of each head
    b = tl.load(source + HALF, (is_q | is_k | is_v) & half, 0.0).to(tl.float32)       # the second
    place = (tl.load(slot_mapping + token).to(tl.int64) * KV_HEADS + row - HEADS) * 2 * HALF + dim
    tl.store(v_cache + place - KV_HEADS * 2 * HALF, a, is_v & half)
    tl.store(v_cache + place - KV_HEADS * 2 * HALF + HALF, b, is_v & half)
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        weight_a = tl.where(is_q, tl.load(q_norm + dim, half), tl.load(k_norm + dim, half)).to(tl.float32)
        weight_b = tl.where(is_q, tl.load(q_norm + HALF + dim, half), tl.load(k_norm + HALF + dim, half)).to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * HALF + dim
    cos, sin = tl.load(angle, half, 0.0), tl.load(angle + HALF, half, 0.0)
    a, b = a * cos - b * sin, b * cos + a * sin
    q_place = q + (token * HEADS + row) * 2 * HALF + dim
    tl.store(q_place, a, is_q & half)
    tl.store(q_place + HALF, b, is_q & half)
    tl.store(k_cache + place, a, is_k & half)
    tl.store(k_cache + place + HALF, b, is_k & half)


def silu_mul_plain(gate_up):
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up):
    """silu(gate) * up of gate_up [n, 2 * width] contiguous, gate first: [n, width]."""
    if not has_triton(gate_up):
        return silu_mul_plain(gate_up)
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    _silu_mul_kernel[(n, triton.cdiv(width, 1024))](gate_up, out, width, 1024, **_options(out.device))
    return out


@jit
def _silu_mul_kernel(gate_up, out, width, TILE: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * width + column, column < width).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, column < width).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, column < width)


def _mix(x):  # a 32-bit hash (C. Wellons's lowbias32) in int32: torch and Triton run these same lines
    x = x ^ (x >> 16 & 0xFFFF)  # the mask makes the shift a logical one
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B
    return x ^ (x >> 16 & 0xFFFF)


_mix_jit = jit(_mix)


def noise_bits(seeds, positions, token_ids):
    key = _mix(_mix(seeds.to(torch.int32) + GOLDEN) ^ (seeds >> 32).to(torch.int32))  # the casts keep 32 low bits
    return _mix(_mix(key ^ positions.int())[:, None] ^ (token_ids.int() * GOLDEN)) & 0x7FFFFFFF


def gumbel_noise(seeds, positions, token_ids):
    """Standard Gumbel noise, a pure function of seeds [n] int64, positions [n], token_ids [vocab]: [n, vocab] float32.

    The hash's bits are equal on every device and in every kernel; then -log(-log(1 - v)), where 1 - v would round a
    small v away, which is a large noise, so the first terms of the inner logarithm's series serve there.
    """
    v = ((noise_bits(seeds, positions, token_ids).float() + 0.5) * 2**-31).clamp_(max=1 - 2**-24)  # 0 < v < 1
    return -torch.log(torch.where(v < 1 / 64, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v)))


def sample_plain(logits, temperatures, seeds, positions, vocab_start=0):
    scores, draws = logits.float(), temperatures.nonzero()[:, 0]
    if len(draws):  # noise costs more than all the rest; greedy rows need none
        token_ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        noise = temperatures[draws, None] * gumbel_noise(seeds[draws], positions[draws], token_ids)
        scores = scores.index_add(0, draws, noise)
    scores, best = scores.max(dim=1)
    return scores, (best + vocab_start).int()


def sample(logits, temperatures, seeds, positions, vocab_start=0):
    """Draw one token per row from softmax(logits / temperature): the argmax of logit + temperature * Gumbel noise.

    logits [n, vocab_shard], row stride free, column 0 being token vocab_start; temperatures [n] float32, 0 is greedy;
    seeds [n] int64; positions [n] of the drawn tokens. Ties go to the lowest id. Returns scores [n] float32 and
    token_ids [n] int32: of several shards' answers the one with the best score is the draw.
    """
    if not has_triton(logits):
        return sample_plain(logits, temperatures, seeds, positions, vocab_start)
    n, vocab = logits.shape
    num_parts = triton.cdiv(vocab, 2048)
    part_scores = torch.empty(n, num_parts, device=logits.device)
    part_ids = torch.empty_like(part_scores, dtype=torch.int32)
    _sample_kernel[(num_parts, n)](logits, temperatures, seeds, positions, part_scores, part_ids, logits.stride(0),
                                   vocab, vocab_start, GOLDEN, 2048, logits.is_cuda, **_options(logits.device))
    scores, best = part_scores.max(dim=1, keepdim=True)
    return scores[:, 0], part_ids.gather(1, best)[:, 0]


@jit
def _sample_kernel(logits, temperatures, seeds, positions, part_scores, part_ids, stride, vocab, vocab_start,
                   GOLDEN: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    score = tl.load(logits + row * stride + column, column < vocab, float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        seed = tl.load(seeds + row)
        key = _mix_jit(_mix_jit(seed.to(tl.int32) + GOLDEN) ^ (seed >> 32).to(tl.int32))
        key = _mix_jit(key ^ tl.load(positions + row).to(tl.int32))
        bits = _mix_jit(key ^ ((vocab_start + column) * GOLDEN)) & 0x7FFFFFFF
        v = tl.minimum((bits.to(tl.float32) + 0.5) * 2**-31, 1 - 2**-24)
        e = tl.where(v < 1 / 64, v * (1 + v * (0.5 + v / 3)), -_log(1 - v, FAST))
        score -= temperature * _log(e, FAST)
    score = tl.where(score == score, score, float("-inf"))  # a NaN could win with an id beyond the vocabulary
    best, index = tl.max(score, 0, return_indices=True)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_scores + part, best)
    tl.store(part_ids + part, vocab_start + tl.program_id(0) * TILE + index)


@jit
def _log(x, FAST: tl.constexpr):  # two instructions instead of some 16; its error here is at most 1e-5
    return tl.extra.cuda.libdevice.fast_logf(x) if FAST else tl.log(x)


def decode_splits(num_pairs):
    """(splits, min_split) for `num_pairs` of sequence and KV head: up to how many programs share a pair's context,
    and how many keys each gets at least. Few pairs: enough programs for two waves on an H200's 132 processors. Many:
    four, so that a long context doesn't keep one program busy when all others have ended."""
    return (4, 512) if num_pairs >= 132 else (1 << min(264 // num_pairs, 16).bit_length() - 1, 32)


@functools.cache
def _arrivals(device):  # counters, which every launch leaves at zero again
    return torch.zeros(1 << 17, dtype=torch.int32, device=device)


def decode_attention(q, k_cache, v_cache, block_tables, rows, context_lens, scale, splits=None):
    """Attention of one new token per sequence over its cached keys (flash-decoding: PyTorch blog, 2023); defined by
    `attention.plain_attention`. CUDA only; the first call must come before any capture.

    q [n, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]; block_tables
    [max_rows, max_blocks] int32; all contiguous. rows [n], each query's row there; context_lens [n], its number of
    keys: 0 is padding, which reads no key and yields zeros. Returns the shape of q.
    """
    (n, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, k_cache.shape[1:3]
    num_splits, min_split = splits or decode_splits(n * num_kv_heads)
    part_out, part_lse = (torch.empty(n * num_heads * num_splits * size, device=q.device) for size in (head_dim, 1))
    out, group = torch.empty_like(q), num_heads // num_kv_heads
    _decode_attention_kernel[(num_splits, num_kv_heads, n)](
        q, k_cache, v_cache, block_tables, rows, context_lens, out, part_out, part_lse, _arrivals(q.device),
        scale * LOG2_E, block_tables.shape[1], num_splits, min_split, num_kv_heads, group,
        triton.next_power_of_2(group), head_dim, max(triton.next_power_of_2(head_dim), 16), block_size, 32,
        num_warps=2, num_stages=5, **_options(q.device))
    return out


@jit
def _decode_attention_kernel(q, k_cache, v_cache, block_tables, rows, context_lens, out, part_out, part_lse, arrivals,
                             scale, max_blocks, num_splits, min_split, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                             GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
                             BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    split, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len, pair = tl.load(context_lens + index).to(tl.int32), index * KV_HEADS + kv_head
    # |<- split_len ->|<- split_len ->|<- the rest ->|  whole tiles; splits left empty take no part
    split_len = tl.cdiv(tl.cdiv(context_len, TILE),
                        tl.minimum(tl.maximum(tl.cdiv(context_len, min_split), 1), num_splits)) * TILE
    num_active = tl.cdiv(context_len, tl.maximum(split_len, 1))
    # All query heads of the KV head together, padded to the 16 rows that a matrix instruction wants.
    HEAD_TILE: tl.constexpr = GROUP_TILE if GROUP_TILE > 16 else 16
    head, dim = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, DIM_TILE)[None, :]
    row, mask = pair * GROUP + head, (head < GROUP) & (dim < HEAD_DIM)
    query = tl.load(q + row * HEAD_DIM + dim, mask, 0.0)
    table = block_tables + tl.load(rows + index).to(tl.int64) * max_blocks
    result, lse = _attend(query, k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table, split * split_len,
                          tl.minimum((split + 1) * split_len, context_len), scale, dim, HEAD_TILE, KV_HEADS * HEAD_DIM,
                          HEAD_DIM, BLOCK_SIZE, TILE)
    if num_active <= 1:
        if split == 0:
            tl.store(out + row * HEAD_DIM + dim, result, mask)
    elif split < num_active:
        tl.store(part_out + (row * num_splits + split) * HEAD_DIM + dim, result, mask)
        tl.store(part_lse + row * num_splits + split, lse[:, None], head < GROUP)
        tl.debug_barrier()  # all warps' stores come before the atomic, which is one thread's
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == num_active - 1:  # the last one to arrive combines
            tl.store(arrivals + pair, 0)
            for i in range(GROUP):
                _combine(part_out, part_lse, out, pair * GROUP + i, num_active, num_splits, HEAD_DIM, DIM_TILE)


@jit
def _attend(query, k_cache, v_cache, table, start, end, scale, dim, HEAD_TILE: tl.constexpr, STRIDE: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    # Softmax over the keys [start, end) in one pass; lse [HEAD_TILE] is log2 of the sum of exp2(scores).
    top, total = tl.full([HEAD_TILE], float("-inf"), tl.float32), tl.zeros([HEAD_TILE], tl.float32)
    result = tl.zeros(query.shape, tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        if BLOCK_SIZE % TILE == 0:  # the whole tile lies in one block
            block = tl.load(table + first // BLOCK_SIZE)
        else:
            block = tl.load(table + token // BLOCK_SIZE, token < end, 0)
        place = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE)[:, None] * STRIDE + dim
        mask = (token < end)[:, None] & (dim < HEAD_DIM)
        k, v = tl.load(k_cache + place, mask, 0.0), tl.load(v_cache + place, mask, 0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((token < end)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight, fade = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        result = result * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total, top = total * fade + tl.sum(weight, 1), new_top
    total = tl.where(total > 0, total, 1.0)  # without keys: zeros
    return result / total[:, None], top + tl.log2(total)


@jit
def _combine(part_out, part_lse, out, row, num_active, num_splits, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    split, dim = tl.arange(0, 16), tl.arange(0, DIM_TILE)
    lse = tl.load(part_lse + row * num_splits + split, split < num_active, float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(part_out + (row * num_splits + split)[:, None] * HEAD_DIM + dim[None, :],
                    (split < num_active)[:, None] & (dim < HEAD_DIM)[None, :], 0.0)
    tl.store(out + row * HEAD_DIM + dim, tl.sum(parts * (weight / tl.sum(weight, 0))[:, None], 0), dim < HEAD_DIM)


def matvec(x, weight):
    """x [1, in_features] @ weight.T, weight [out_features, in_features], both contiguous: [1, out_features].

    Reading the weight is all the work, and it is read ahead while the kernel before still runs. cuBLAS takes twice as
    long on the products of a small model (0.86 against 0.50 ms for a step of Qwen3-0.6B, H200).
    """
    num_outputs, num_inputs = weight.shape
    out = x.new_empty(1, num_outputs)
    tile = min(triton.next_power_of_2(num_inputs), 4096)
    rows = 4 if tile <= 1024 else 2
    _matvec_kernel[(triton.cdiv(num_outputs, rows),)](x, weight, out, num_inputs, num_outputs, rows, tile,
                                                      **_options(x.device))
    return out


@jit
def _matvec_kernel(x, weight, out, num_inputs, num_outputs, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    place = weight + row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    in_range, total = (row < num_outputs)[:, None], tl.zeros([ROWS], tl.float32)
    w = tl.load(place, in_range & (column < num_inputs)[None, :], 0.0)
    _follow(PDL)
    for first in range(0, num_inputs, TILE):
        a = tl.load(x + first + column, first + column < num_inputs, 0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * a[None, :], 1)
        following = first + TILE + column
        w = tl.load(place + first + TILE, in_range & (following < num_inputs)[None, :], 0.0)
    tl.store(out + row, total, row < num_outputs)

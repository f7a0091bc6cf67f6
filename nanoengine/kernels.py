"""The few fused operations of a decoder step, each beside the plain torch lines (`*_plain`) that define it anywhere.

The public function takes a Triton kernel, equal up to rounding, on CUDA or under TRITON_INTERPRET=1; else those lines.
A launch never waits for the device, and its grid depends on shapes only, so a CUDA graph can hold it."""
import functools
import os

import torch

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
    jit = triton.jit
except ImportError:
    triton, constexpr, jit = None, None, lambda function: function

def has_triton(x):
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")

@functools.cache
def _options(device):  # Hopper can start a kernel while the one before still runs (programmatic dependent launch)
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if is_hopper else {"PDL": False}

@jit
def _follow(PDL: constexpr):  # let the next kernel start; wait for the results of the one before
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

def rms_norm_plain(x, weight, eps):
    return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

def add_rms_norm_plain(x, residual, weight, eps):
    total = x if residual is None else x + residual
    return rms_norm_plain(total, weight, eps), total

def add_rms_norm(x, residual, weight, eps):
    """(RMSNorm(x + residual) * weight, x + residual), [n, size] contiguous; residual None: (RMSNorm(x) * weight, x)."""
    if not has_triton(x):
        return add_rms_norm_plain(x, residual, weight, eps)
    normed, tile = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    total = x if residual is None else torch.empty_like(x)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, normed, total, eps, x.shape[1], tile,
                                    num_warps=min(max(tile // 256, 1), 16), **_options(x.device))
    return normed, total

@jit
def _add_rms_norm_kernel(x, residual, weight, normed, total, eps, SIZE: constexpr, TILE: constexpr, PDL: constexpr):
    _follow(PDL)
    column = tl.arange(0, TILE)
    place, mask = tl.program_id(0).to(tl.int64) * SIZE + column, column < SIZE
    h = tl.load(x + place, mask, 0.0)
    if residual is not None:
        h += tl.load(residual + place, mask, 0.0)
        tl.store(total + place, h, mask)
    scale = tl.rsqrt(tl.sum(h.to(tl.float32) * h) / SIZE + eps)
    tl.store(normed + place, (h * scale).to(h.dtype) * tl.load(weight + column, mask, 0.0), mask)

def rope_and_store_plain(qkv, positions, slots, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm, eps):
    num_kv_heads, head_dim = k_cache.shape[2:]
    qk, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        qk = rms_norm_plain(qk, torch.cat([q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)]), eps)
    a, b = qk.float().chunk(2, dim=-1)                      # [n, num_heads + num_kv_heads, head_dim / 2]
    cos, sin = cos_sin[positions][:, :, None].unbind(1)     # [n, 1, head_dim / 2]
    qk = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(qkv.dtype)
    k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = qk[:, num_heads:], v
    return qk[:, :num_heads]

def rope_and_store(qkv, positions, slots, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm, eps):
    """Rotate q and k by position (halves paired, as HF's `rotate_half`), store k and v: q [n, num_heads, head_dim].
    qkv [n, (num_heads + 2 num_kv_heads) * head_dim]; positions, slots (block * block_size + offset) [n] integers;
    cos_sin [max_position, 2, head_dim / 2] float32; caches [num_blocks, block_size, num_kv_heads, head_dim]; all
    contiguous. q_norm, k_norm [head_dim]: weights of an RMSNorm of each head before that (Qwen3), or both None."""
    if not has_triton(qkv):
        return rope_and_store_plain(qkv, positions, slots, cos_sin, k_cache, v_cache, num_heads, q_norm, k_norm, eps)
    num_kv_heads, half = k_cache.shape[2], k_cache.shape[3] // 2
    q, grid = qkv.new_empty(len(qkv), num_heads, 2 * half), (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, 8))
    _rope_and_store_kernel[grid](qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, q, eps, num_heads,
                                 num_kv_heads, half, triton.next_power_of_2(half), **_options(q.device))
    return q

@jit
def _rope_and_store_kernel(qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, q, eps, HEADS: constexpr,
                           KV_HEADS: constexpr, HALF: constexpr, TILE: constexpr, PDL: constexpr):
    _follow(PDL)
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)[None, :]
    # |<- HEADS rows of q ->|<- KV_HEADS rows of k ->|<- KV_HEADS rows of v ->|   a program does 8 of them
    row = (tl.program_id(1) * 8 + tl.arange(0, 8))[:, None]
    half, is_q, is_k = dim < HALF, row < HEADS, (row >= HEADS) & (row < HEADS + KV_HEADS)
    is_v = (row >= HEADS + KV_HEADS) & (row < HEADS + 2 * KV_HEADS)
    source, mask = qkv + (token * (HEADS + 2 * KV_HEADS) + row) * 2 * HALF + dim, (is_q | is_k | is_v) & half
    a, b = tl.load(source, mask, 0.0), tl.load(source + HALF, mask, 0.0)  # the halves of each head
    place = (tl.load(slots + token).to(tl.int64) * KV_HEADS + row - HEADS) * 2 * HALF + dim
    tl.store(v_cache + place - KV_HEADS * 2 * HALF, a, is_v & half)
    tl.store(v_cache + place - KV_HEADS * 2 * HALF + HALF, b, is_v & half)
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(a.to(tl.float32) * a + b.to(tl.float32) * b, 1) / (2 * HALF) + eps)[:, None]
        weight_a = tl.where(is_q, tl.load(q_norm + dim, half), tl.load(k_norm + dim, half))
        weight_b = tl.where(is_q, tl.load(q_norm + HALF + dim, half), tl.load(k_norm + HALF + dim, half))
        a, b = (a * scale).to(a.dtype) * weight_a, (b * scale).to(b.dtype) * weight_b
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * HALF + dim
    cos, sin = tl.load(angle, half, 0.0), tl.load(angle + HALF, half, 0.0)
    a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(q + (token * HEADS + row) * 2 * HALF + dim, a, is_q & half)
    tl.store(q + (token * HEADS + row) * 2 * HALF + dim + HALF, b, is_q & half)
    tl.store(k_cache + place, a, is_k & half)
    tl.store(k_cache + place + HALF, b, is_k & half)

def silu_mul_plain(gate_up):
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

def silu_mul(gate_up):
    """silu(gate) * up of gate_up [n, 2 * width] contiguous, gate first: [n, width]."""
    if not has_triton(gate_up):
        return silu_mul_plain(gate_up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _silu_mul_kernel[(len(out), triton.cdiv(out.shape[1], 1024))](gate_up, out, out.shape[1], **_options(out.device))
    return out

@jit
def _silu_mul_kernel(gate_up, out, width, PDL: constexpr):
    _follow(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * 1024 + tl.arange(0, 1024)
    gate = tl.load(gate_up + row * 2 * width + column, column < width).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, column < width)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, column < width)

def _mix(x):  # a 32-bit hash (C. Wellons's lowbias32) in int32: torch and Triton run these same lines
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D  # the mask makes the shift a logical one
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ (x >> 16 & 0xFFFF)

_mix_jit = jit(_mix)
GOLDEN = 0x9E3779B9 - 2**32  # the golden ratio's bits as an int32: spreads neighbouring token ids

def noise_bits(seeds, positions, token_ids):
    key = _mix(_mix(seeds.to(torch.int32) + GOLDEN) ^ (seeds >> 32).to(torch.int32))  # the casts keep 32 low bits
    return _mix(_mix(key ^ positions.int())[:, None] ^ (token_ids.int() * GOLDEN)) & 0x7FFFFFFF

def gumbel_noise(seeds, positions, token_ids):
    """Standard Gumbel noise [n, vocab] float32, a function of seeds [n] int64, positions [n], token_ids [vocab] alone:
    hash bits, equal everywhere, make v; then -log(-log(1 - v)), by its series where 1 - v would round v away."""
    v = ((noise_bits(seeds, positions, token_ids).float() + 0.5) * 2**-31).clamp_(max=1 - 2**-24)  # 0 < v < 1
    return -torch.log(torch.where(v < 1 / 64, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v)))

def sample_plain(logits, temperatures, seeds, positions, vocab_start=0):
    token_ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    draws = temperatures.nonzero()[:, 0]  # noise costs more than all the rest; greedy rows need none
    noise = temperatures[draws, None] * gumbel_noise(seeds[draws], positions[draws], token_ids)
    scores, best = logits.float().index_add(0, draws, noise).max(dim=1)
    return scores, (best + vocab_start).int()

def sample(logits, temperatures, seeds, positions, vocab_start=0):
    """One token per row, drawn from softmax(logits / temperature): the argmax of logit + temperature * Gumbel noise.
    logits [n, vocab_shard], row stride free, column 0 being token vocab_start; temperatures [n] float32, 0 is greedy;
    seeds [n] int64; positions [n] of the drawn tokens. Ties go to the lowest id. Returns scores [n] float32 and
    token_ids [n] int32: of several shards' answers the one with the best score is the draw."""
    if not has_triton(logits):
        return sample_plain(logits, temperatures, seeds, positions, vocab_start)
    part_scores = torch.empty(len(logits), triton.cdiv(logits.shape[1], 2048), device=logits.device)
    part_ids = torch.empty_like(part_scores, dtype=torch.int32)
    _sample_kernel[part_ids.T.shape](logits, temperatures, seeds, positions, part_scores, part_ids, logits.stride(0),
                                     logits.size(1), vocab_start, GOLDEN, 2048, seeds.is_cuda, **_options(seeds.device))
    scores, best = part_scores.max(dim=1, keepdim=True)
    return scores[:, 0], part_ids.gather(1, best)[:, 0]

@jit
def _sample_kernel(logits, temperatures, seeds, positions, part_scores, part_ids, stride, vocab, vocab_start,
                   GOLDEN: constexpr, TILE: constexpr, FAST: constexpr, PDL: constexpr):
    log: constexpr = tl.extra.cuda.libdevice.fast_logf if FAST else tl.log  # two instructions, not 16; error < 1e-5
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
        score -= temperature * log(tl.where(v < 1 / 64, v * (1 + v * (0.5 + v / 3)), -log(1 - v)))
    score = tl.where(score == score, score, float("-inf"))  # a NaN could win with an id beyond the vocabulary
    best, index = tl.max(score, 0, return_indices=True)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_scores + part, best)
    tl.store(part_ids + part, vocab_start + tl.program_id(0) * TILE + index)

def decode_splits(num_pairs):
    """For so many pairs of sequence and KV head: (how many programs may share a pair's context, each's fewest keys).
    Few pairs: two waves on an H200's 132 processors. Many: four, so that no long context keeps one busy at the end."""
    return (4, 512) if num_pairs >= 132 else (1 << min(264 // num_pairs, 16).bit_length() - 1, 32)

@functools.cache
def _arrivals(device):  # counters, which every launch leaves at zero again
    return torch.zeros(1 << 17, dtype=torch.int32, device=device)

def decode_attention(q, k_cache, v_cache, block_tables, rows, context_lens, scale, splits=None):
    """`attention.plain_attention` for one new token per sequence (flash-decoding: PyTorch blog, 2023). CUDA only; call
    once before any capture. q [n, num_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim];
    block_tables [max_rows, max_blocks] int32; all contiguous. rows [n], each query's row there; context_lens [n], its
    number of keys: 0 is padding, which reads no key and yields zeros. Returns the shape of q."""
    (n, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, k_cache.shape[1:3]
    num_splits, min_split = splits or decode_splits(n * num_kv_heads)
    part_out, part_lse = (torch.empty(n * num_heads * num_splits * size, device=q.device) for size in (head_dim, 1))
    out, group = torch.empty_like(q), num_heads // num_kv_heads
    _decode_attention_kernel[(num_splits, num_kv_heads, n)](  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction
        q, k_cache, v_cache, block_tables, rows, context_lens, out, part_out, part_lse, _arrivals(q.device),
        scale * 1.4426950408889634, block_tables.shape[1], num_splits, min_split, num_kv_heads, group,
        max(triton.next_power_of_2(group), 16), head_dim, max(triton.next_power_of_2(head_dim), 16), block_size, 32,
        num_warps=2, num_stages=5, **_options(q.device))
    return out

@jit
def _decode_attention_kernel(q, k_cache, v_cache, block_tables, rows, context_lens, out, part_out, part_lse, arrivals,
                             scale, max_blocks, num_splits, min_split, KV_HEADS: constexpr, GROUP: constexpr,
                             HEAD_TILE: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr, BLOCK_SIZE: constexpr,
                             TILE: constexpr, PDL: constexpr):
    _follow(PDL)
    split, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len, pair = tl.load(context_lens + index).to(tl.int32), index * KV_HEADS + kv_head
    # |<- split_len ->|<- split_len ->|<- the rest ->|  whole tiles; splits left empty take no part
    split_len = tl.cdiv(tl.cdiv(context_len, TILE), min(max(tl.cdiv(context_len, min_split), 1), num_splits)) * TILE
    num_active, end = tl.cdiv(context_len, max(split_len, 1)), min((split + 1) * split_len, context_len)
    head, dim = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, DIM_TILE)[None, :]  # a KV head's heads; mma wants 16
    row, mask = pair * GROUP + head, (head < GROUP) & (dim < HEAD_DIM)
    query = tl.load(q + row * HEAD_DIM + dim, mask, 0.0)
    table = block_tables + tl.load(rows + index).to(tl.int64) * max_blocks
    top, total = tl.full([HEAD_TILE], float("-inf"), tl.float32), tl.zeros([HEAD_TILE], tl.float32)
    result = tl.zeros(query.shape, tl.float32)
    for first in range(split * split_len, end, TILE):  # softmax in one pass
        token = first + tl.arange(0, TILE)
        is_key = token < end
        block = (tl.load(table + first // BLOCK_SIZE) if BLOCK_SIZE % TILE == 0 else  # the tile lies in one block
                 tl.load(table + token // BLOCK_SIZE, is_key, 0))
        place = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE)[:, None] * (KV_HEADS * HEAD_DIM) + dim
        k = tl.load(k_cache + kv_head * HEAD_DIM + place, is_key[:, None] & (dim < HEAD_DIM), 0.0)
        v = tl.load(v_cache + kv_head * HEAD_DIM + place, is_key[:, None] & (dim < HEAD_DIM), 0.0)
        score = tl.where(is_key[None, :], tl.dot(query, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight, fade = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        result = result * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total, top = total * fade + tl.sum(weight, 1), new_top
    result /= tl.where(total > 0, total, 1.0)[:, None]  # without keys: zeros
    if num_active <= 1:
        if split == 0:
            tl.store(out + row * HEAD_DIM + dim, result, mask)
    elif split < num_active:
        tl.store(part_out + (row * num_splits + split) * HEAD_DIM + dim, result, mask)
        tl.store(part_lse + row * num_splits + split, (top + tl.log2(total))[:, None], head < GROUP)
        tl.debug_barrier()  # all warps' stores come before the atomic, which is one thread's
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == num_active - 1:  # the last one to arrive combines
            tl.store(arrivals + pair, 0)
            for i in range(GROUP):
                _combine(part_out, part_lse, out, pair * GROUP + i, num_active, num_splits, HEAD_DIM, DIM_TILE)

@jit
def _combine(part_out, part_lse, out, row, num_active, num_splits, HEAD_DIM: constexpr, DIM_TILE: constexpr):
    split, dim = tl.arange(0, 16), tl.arange(0, DIM_TILE)
    place, active = row * num_splits + split, split < num_active
    lse = tl.load(part_lse + place, active, float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(part_out + place[:, None] * HEAD_DIM + dim, active[:, None] & (dim < HEAD_DIM)[None, :], 0.0)
    tl.store(out + row * HEAD_DIM + dim, tl.sum(parts * (weight / tl.sum(weight, 0))[:, None], 0), dim < HEAD_DIM)

def matvec(x, weight):
    """x [1, in_features] @ weight.T, weight [out_features, in_features], both contiguous: [1, out_features]. The weight
    is read while the kernel before still runs. cuBLAS: 0.86 against 0.50 ms for a step of Qwen3-0.6B on an H200."""
    out, tile = x.new_empty(1, len(weight)), min(triton.next_power_of_2(x.shape[1]), 4096)
    rows = 4 if tile <= 1024 else 2
    _matvec_kernel[(triton.cdiv(len(weight), rows),)](x, weight, out, *weight.shape, rows, tile, **_options(x.device))
    return out

@jit
def _matvec_kernel(x, weight, out, num_outputs, num_inputs, ROWS: constexpr, TILE: constexpr, PDL: constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    place = weight + row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    in_range, total = (row < num_outputs)[:, None], tl.zeros([ROWS], tl.float32)
    w = tl.load(place, in_range & (column < num_inputs)[None, :], 0.0)
    _follow(PDL)
    for first in range(0, num_inputs, TILE):
        total += tl.sum(w.to(tl.float32) * tl.load(x + first + column, first + column < num_inputs, 0.0)[None, :], 1)
        w = tl.load(place + first + TILE, in_range & (first + TILE + column < num_inputs)[None, :], 0.0)
    tl.store(out + row, total, row < num_outputs)

"""A decoder step's fused operations: plain torch lines define each; on CUDA (or TRITON_INTERPRET=1) a Triton kernel
equals them, its grid set by shapes. Contiguous tensors, caches [num_blocks, block_size, num_kv_heads, head_dim]."""
import os
from functools import cache
import torch
try:
    import triton
    from triton import jit, language as tl
    from triton.language import constexpr
except ImportError:
    triton, constexpr, jit = None, None, lambda function: function

def has_triton(x):
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")

_arrivals = cache(lambda device, size: torch.zeros(size, dtype=torch.int32, device=device))  # launches leave them at 0
_options = cache(lambda device: {"PDL": True, "launch_pdl": True} if device.type == "cuda" and  # Hopper starts a kernel
                 torch.cuda.get_device_capability(device) >= (9, 0) else {"PDL": False})  # while the last still runs

@jit
def _follow(PDL: constexpr):  # programmatic dependent launch: let the next start; wait for the last one's results
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

def add_rms_norm(x, residual, weight, eps, bases=None, rank=0):
    """(RMSNorm(s) * weight, s), [n, size]; s = x + residual, or x. With `bases` [ranks + 1] int64 a one-shot all-reduce
    of x first: all lie as far from their base, where counters [n, ranks] int32 begin, left at 0; last `Group._stop`."""
    if not has_triton(x):
        total = x if residual is None else x + residual
        return torch.rms_norm(total, total.shape[1:], eps=eps) * weight, total
    normed, ranks = torch.empty_like(x), 1 if bases is None else len(bases) - 1
    tile, total = triton.next_power_of_2(x.shape[1]), x if residual is None and bases is None else torch.empty_like(x)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, normed, total, bases, eps, x.shape[1], tile, rank, ranks,
                                    num_warps=min(max(tile // 256, 1), 16), **_options(x.device))
    return normed, total

@jit
def _add_rms_norm_kernel(x, residual, weight, normed, total, bases, eps, SIZE: constexpr, TILE: constexpr,
                         RANK: constexpr, RANKS: constexpr, PDL: constexpr):
    _follow(PDL)
    column, here = tl.arange(0, TILE), tl.program_id(0) * RANKS
    place, mask = tl.program_id(0).to(tl.int64) * SIZE + column, column < SIZE
    if bases is None:
        h = tl.load(x + place, mask, 0.0)
    else:
        for i in tl.static_range(RANKS):  # wait until this program has begun on every rank
            tl.atomic_add(tl.load(bases + i).to(tl.pointer_type(tl.int32)) + here + RANK, 1, sem="release", scope="sys")
        mine = tl.load(bases + RANK).to(tl.pointer_type(tl.int32)) + here
        stop = tl.load(bases + RANKS).to(tl.pointer_type(tl.int32))  # the CPU's: 1 ends all waits; read every few ms
        for i in tl.static_range(RANKS):
            tries = 0
            while tl.atomic_add(tl.where(tries % 4096 < 4095, mine + i, stop), 0, sem="acquire", scope="sys") < 1:
                tries += 1
            tl.atomic_add(mine + i, -1, sem="relaxed", scope="sys")
        tl.debug_barrier()  # all warps' loads come after that
        h, distance = tl.zeros([TILE], tl.float32), x.to(tl.int64) - tl.load(bases + RANK)
        for i in tl.static_range(RANKS):
            part = tl.multiple_of((tl.load(bases + i) + distance).to(x.dtype), 16)
            h += tl.load(part + place, mask, 0.0, cache_modifier=".cg").to(tl.float32)
        h = h.to(x.dtype.element_ty)
    if residual is not None:
        h += tl.load(residual + place, mask, 0.0)
    if residual is not None or bases is not None:
        tl.store(total + place, h, mask)
    scale = tl.rsqrt(tl.sum(h.to(tl.float32) * h) / SIZE + eps)
    tl.store(normed + place, (h * scale).to(h.dtype) * tl.load(weight + column, mask, 0.0), mask)

def rope_and_store(qkv, rows, positions, slots, cos_sin, k_cache, v_cache, tables, num_heads, q_norm, k_norm, eps):
    """Rotate q and k by position (halves paired, as HF's `rotate_half`), store k and v, note their blocks in the rows'
    block tables: q [n, num_heads, head_dim]. qkv [n, (num_heads + 2 num_kv_heads) * head_dim]; rows, positions, slots
    (block * block_size + offset) [n]; cos_sin [max_position, 2, head_dim / 2] float32; tables [rows, max_blocks] int32;
    q_norm, k_norm [head_dim], weights of RMSNorms before, or None."""
    (block_size, num_kv_heads), half = k_cache.shape[1:3], k_cache.shape[3] // 2
    if not has_triton(qkv):
        qk, v = qkv.unflatten(1, (-1, 2 * half)).split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None:
            qk = torch.rms_norm(qk, (2 * half,), eps=eps) * torch.stack([q_norm] * num_heads + [k_norm] * num_kv_heads)
        (a, b), (cos, sin) = qk.float().chunk(2, dim=-1), cos_sin[positions][:, :, None].unbind(1)  # [n, heads|1, half]
        qk = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(qkv.dtype)
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = qk[:, num_heads:], v
        tables[rows, positions // block_size] = (slots // block_size).int()  # every layer writes the same
        return qk[:, :num_heads]
    q, grid = qkv.new_empty(len(qkv), num_heads, 2 * half), (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, 8))
    _rope_and_store_kernel[grid](qkv, rows, positions, slots, cos_sin, k_cache, v_cache, tables, q_norm, k_norm, q, eps,
        tables.shape[1], block_size, num_heads, num_kv_heads, half, triton.next_power_of_2(half), **_options(q.device))
    return q

@jit
def _rope_and_store_kernel(qkv, rows, positions, slots, cos_sin, k_cache, v_cache, tables, q_norm, k_norm, q, eps,
                           max_blocks, BLOCK: constexpr, HEADS: constexpr, KV_HEADS: constexpr, HALF: constexpr,
                           TILE: constexpr, PDL: constexpr):
    _follow(PDL)
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)[None, :]
    row = (tl.program_id(1) * 8 + tl.arange(0, 8))[:, None]  # 8 of: HEADS rows of q, KV_HEADS of k, KV_HEADS of v
    mask, is_q, is_v = (row < HEADS + 2 * KV_HEADS) & (dim < HALF), row < HEADS, row >= HEADS + KV_HEADS
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + row) * 2 * HALF + dim
    first, second = tl.load(source, mask, 0.0), tl.load(source + HALF, mask, 0.0)  # the halves of each head
    a, b = first, second
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token).to(tl.int64)
    tl.store(tables + tl.load(rows + token).to(tl.int64) * max_blocks + position // BLOCK, slot // BLOCK)
    cache = tl.where(is_v, v_cache - KV_HEADS * 2 * HALF, k_cache) + (slot * KV_HEADS + row - HEADS) * 2 * HALF
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(a.to(tl.float32) * a + b.to(tl.float32) * b, 1) / (2 * HALF) + eps)[:, None]
        weight = tl.where(is_q, q_norm, k_norm) + dim
        a, b = (a * scale).to(a.dtype) * tl.load(weight, mask), (b * scale).to(b.dtype) * tl.load(weight + HALF, mask)
    angle = cos_sin + position * 2 * HALF + dim
    cos, sin = tl.load(angle, dim < HALF, 0.0), tl.load(angle + HALF, dim < HALF, 0.0)
    out = tl.where(is_q, q + (token * HEADS + row) * 2 * HALF, cache) + dim
    tl.store(out, tl.where(is_v, first, a * cos - b * sin), mask)
    tl.store(out + HALF, tl.where(is_v, second, b * cos + a * sin), mask)

def silu_mul(gate_up):
    """silu(gate) * up of gate_up [n, 2 * width], gate first: [n, width]."""
    if not has_triton(gate_up):
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
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

def _mix(x):  # a 32-bit hash (C. Wellons's lowbias32) in int32
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D  # the mask makes the shift a logical one
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ (x >> 16 & 0xFFFF)

def noise_bits(seeds, positions, token_ids, mix, int32):  # torch and Triton run these lines, each with its own last two
    key = mix(mix(seeds.to(int32) - 0x61C88647) ^ (seeds >> 32).to(int32))  # the casts keep 32 low bits
    return mix(mix(key ^ positions.to(int32)) ^ token_ids.to(int32) * -0x61C88647) & 0x7FFFFFFF  # 0x9E3779B9

_mix_jit, _noise_bits_jit = jit(_mix), jit(noise_bits)

def gumbel_noise(seeds, positions, token_ids):  # standard Gumbel [n, vocab] float32, a function of these alone
    bits = noise_bits(seeds[:, None], positions[:, None], token_ids, _mix, torch.int32)
    return -torch.log(-torch.log1p(-((bits.float() + 0.5) * 2**-31).clamp_(max=1 - 2**-24)))

def sample(logits, rows, temperatures, seeds, positions, vocab_start=0):
    """Each token drawn from softmax(logits / temperature): argmax of logit + temperature * Gumbel noise, or the lowest
    id of equals. logits [n, vocab_shard], row stride free, column 0: vocab_start; rows [n] of temperatures float32 and
    seeds int64; positions [n] of the draws. Scores [n] float32, ids [n] int32: of several shards the best wins."""
    if not has_triton(logits):
        token_ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        draws = temperatures[rows].nonzero()[:, 0]  # noise costs more than all the rest; greedy rows need none
        noise = temperatures[rows[draws], None] * gumbel_noise(seeds[rows[draws]], positions[draws], token_ids)
        scores, best = logits.float().index_add(0, draws, noise).max(dim=1)
        return scores, (best + vocab_start).int()
    part_scores = torch.empty(len(logits), triton.cdiv(logits.shape[1], 2048), device=logits.device)
    part_ids = torch.empty_like(part_scores, dtype=torch.int32)
    _sample_kernel[part_ids.T.shape](logits, rows, temperatures, seeds, positions, part_scores, part_ids,
                                     logits.stride(0), logits.shape[1], vocab_start, **_options(logits.device))
    scores, best = part_scores.max(dim=1, keepdim=True)
    return scores[:, 0], part_ids.gather(1, best)[:, 0]

@jit
def _sample_kernel(logits, rows, temperatures, seeds, positions, scores, ids, stride, vocab, first, PDL: constexpr):
    log: constexpr = tl.extra.cuda.libdevice.fast_logf if PDL else tl.log  # two instructions, not 16; error < 1e-5
    _follow(PDL)
    index, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * 2048 + tl.arange(0, 2048)
    score = tl.load(logits + index * stride + column, column < vocab, float("-inf")).to(tl.float32)
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        bits = _noise_bits_jit(tl.load(seeds + row), tl.load(positions + index), first + column, _mix_jit, tl.int32)
        v = tl.minimum((bits.to(tl.float32) + 0.5) * 2**-31, 1 - 2**-24)  # small: 1 - v would round it away
        score -= temperature * log(tl.where(v < 1 / 64, v * (1 + v * (0.5 + v / 3)), -log(1 - v)))
    best, at = tl.max(tl.where(score == score, score, float("-inf")), 0, return_indices=True)  # a NaN must not win
    part = index * tl.num_programs(0) + tl.program_id(0)
    tl.store(scores + part, best)
    tl.store(ids + part, first + tl.program_id(0) * 2048 + at)

def decode_attention(q, k_cache, v_cache, block_tables, rows, context_lens, scale, splits=None):
    """`attention.plain_attention` of one token a sequence (flash-decoding: PyTorch blog, 2023). q [n, num_heads, size];
    rows, context_lens [n or more] as in `FlatStep`, 0 keys giving zeros. CUDA only; call once before any capture."""
    (n, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, k_cache.shape[1:3]
    pairs, group = n * num_kv_heads, num_heads // num_kv_heads  # few share out their contexts among up to 400 programs
    num_splits = splits or 1 << min(max(400 // pairs, 1), 16).bit_length() - 1
    part_out, part_lse = (torch.empty(n * num_heads * num_splits * size, device=q.device) for size in (head_dim, 1))
    out, head_tile, dim_tile = torch.empty_like(q), *(max(triton.next_power_of_2(x), 16) for x in (group, head_dim))
    _decode_attention_kernel[num_splits, num_kv_heads, n](  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction
        q, k_cache, v_cache, block_tables, rows, context_lens, out, part_out, part_lse, _arrivals(q.device,
        triton.next_power_of_2(pairs)), scale * 1.4426950408889634, block_tables.shape[1], num_splits, num_kv_heads,
        group, block_size, head_tile, head_dim, dim_tile, num_warps=2, num_stages=5, **_options(q.device))
    return out

@jit
def _decode_attention_kernel(q, k_cache, v_cache, tables, rows, lens, out, part_out, part_lse, arrivals, scale,
                             max_blocks, num_splits, KV_HEADS: constexpr, GROUP: constexpr, BLOCK: constexpr,
                             HEAD_TILE: constexpr, DIM: constexpr, DIM_TILE: constexpr, PDL: constexpr):
    _follow(PDL)
    split, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # a split: whole tiles, or empty
    context_len, pair = tl.load(lens + index).to(tl.int32), index * KV_HEADS + kv_head
    split_len = tl.cdiv(tl.cdiv(context_len, 32), num_splits) * 32
    num_active, end = tl.cdiv(context_len, max(split_len, 1)), min((split + 1) * split_len, context_len)
    head, dim = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, DIM_TILE)[None, :]  # a KV head's heads; mma wants 16
    row, mask = pair * GROUP + head, (head < GROUP) & (dim < DIM)
    query, result = tl.load(q + row * DIM + dim, mask, 0.0), tl.zeros([HEAD_TILE, DIM_TILE], tl.float32)
    table = tables + tl.load(rows + index).to(tl.int64) * max_blocks
    top, total = tl.full([HEAD_TILE], float("-inf"), tl.float32), tl.zeros([HEAD_TILE], tl.float32)
    for first in range(split * split_len, end, 32):  # softmax in one pass
        key = first + tl.arange(0, 32)
        block = tl.load(table + first // BLOCK) if BLOCK % 32 == 0 else tl.load(table + key // BLOCK, key < end, 0)
        place = (block.to(tl.int64) * BLOCK + key % BLOCK)[:, None] * (KV_HEADS * DIM) + dim
        k = tl.load(k_cache + kv_head * DIM + place, (key[:, None] < end) & (dim < DIM), 0.0)
        v = tl.load(v_cache + kv_head * DIM + place, (key[:, None] < end) & (dim < DIM), 0.0)
        score = tl.where(key[None, :] < end, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight, fade = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        result = result * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total, top = total * fade + tl.sum(weight, 1), new_top
    result /= tl.where(total > 0, total, 1.0)[:, None]  # without keys: zeros
    if (num_active <= 1) & (split == 0):
        tl.store(out + row * DIM + dim, result, mask)
    elif split < num_active:
        tl.store(part_out + (row * num_splits + split) * DIM + dim, result, mask)
        tl.store(part_lse + row * num_splits + split, (top + tl.log2(total))[:, None], head < GROUP)
        tl.debug_barrier()  # all warps' stores come before the atomic, which is one thread's
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == num_active - 1:  # the last one to arrive combines
            tl.store(arrivals + pair, 0)
            part, dims = tl.arange(0, 16), tl.arange(0, DIM_TILE)
            for i in range(pair * GROUP, (pair + 1) * GROUP):
                place = i * num_splits + part
                lse = tl.load(part_lse + place, part < num_active, float("-inf"))
                share = tl.exp2(lse - tl.max(lse, 0))
                outs = tl.load(part_out + place[:, None] * DIM + dims, (part[:, None] < num_active) & (dims < DIM), 0.0)
                tl.store(out + i * DIM + dims, tl.sum(outs * (share / tl.sum(share, 0))[:, None], 0), dims < DIM)

def matvec(x, weight, out=None):
    """x [1, inputs] @ weight [outputs, inputs].T, loaded while the kernel before runs: 0.5 ms a step, cuBLAS 0.86."""
    out, tile = x.new_empty(1, len(weight)) if out is None else out, min(triton.next_power_of_2(x.shape[1]), 4096)
    rows = 4 if tile <= 1024 else 2
    _matvec_kernel[(triton.cdiv(len(weight), rows),)](x, weight, out, *weight.shape, rows, tile, **_options(x.device))
    return out

@jit
def _matvec_kernel(x, weight, out, num_outputs, num_inputs, ROWS: constexpr, TILE: constexpr, PDL: constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    place, in_range = weight + row.to(tl.int64)[:, None] * num_inputs + column[None, :], (row < num_outputs)[:, None]
    w, total = tl.load(place, in_range & (column < num_inputs)[None, :], 0.0), tl.zeros([ROWS], tl.float32)
    _follow(PDL)
    for first in range(0, num_inputs, TILE):
        total += tl.sum(w.to(tl.float32) * tl.load(x + first + column, first + column < num_inputs, 0.0)[None, :], 1)
        w = tl.load(place + first + TILE, in_range & (first + TILE + column < num_inputs)[None, :], 0.0)
    tl.store(out + row, total, row < num_outputs)

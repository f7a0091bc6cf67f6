"""Attention over the paged cache: the plain version that defines it, and equal fast paths. The step, a `FlatStep` on
the device, is a global: layers needn't pass it. Cache and tables hold its keys by now (see `kernels.rope_and_store`).
    context_lens 7, chunk of 3      keys     | 0 1 2 3 4 5 6 |
                                    queries          | 4 5 6 |      query 4 sees keys 0-4, query 6 sees all"""
import functools
from contextvars import ContextVar
from itertools import pairwise
import torch
import torch.nn.functional as F
from torch import Tensor
from nanoengine import kernels
from nanoengine.step_input import FlatStep
try:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as flash_forward
    flash_forward = getattr(flash_forward, "_init_fn", flash_forward)   # its wrapper imports torch's compiler: 2 to 4 s
except ImportError:
    flash_forward = None

FLASH_BLOCK_SIZE = 256      # its paged version wants multiples
MOST_PADDED = 1 << 14       # keys that the plain version gathers at once, in one layer: 25 MB for SmolLM2
_current = ContextVar("the step under way")     # in this thread: another one may run another engine
set_context, get_context, reset_context = _current.set, _current.get, lambda: _current.set(None)

@functools.cache
def reason_against_flash(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why flash-attn can't serve this engine, or None. Builds differ in head sizes and GPUs: ask by running it."""
    if device.type != "cuda" or dtype == torch.float32:
        return f"the device is {device.type} and the dtype {dtype}"
    if flash_forward is None:
        return "it isn't installed"
    if block_size % FLASH_BLOCK_SIZE:
        return f"kvcache_block_size={block_size} is no multiple of {FLASH_BLOCK_SIZE}"
    q, bounds = torch.zeros(1, 1, head_dim, device=device, dtype=dtype), torch.arange(2, device=device).int()
    try:
        flash_forward(q, q, q, bounds, bounds, 1, 1, 0.0, 1.0, causal=True)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"its build refuses head_dim={head_dim} ({error})"

def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for every token of this step, causally within its sequence. q [num_tokens, num_heads,
    head_dim], and the same back; caches [num_blocks, block_size, num_kv_heads, head_dim]: query head h reads KV head
    h // (num_heads / num_kv_heads); block_tables [rows, max_blocks] int32."""
    c, args = get_context(), (k_cache, v_cache, block_tables)
    n = c.num_decodes if kernels.has_triton(q) else 0               # queries of the decode kernel
    parts = [kernels.decode_attention(q[:n], *args, c.rows, c.context_lens, scale)] if n else []
    if n < len(q):
        is_plain = reason_against_flash(q.device, q.dtype, q.shape[2], k_cache.shape[1])
        parts.append(plain_attention(q, *args, scale, c, first_chunk=n) if is_plain else flash_forward(
            q[n:], k_cache, v_cache, c.cu_seqlens_q.int(), c.cu_seqlens_k.int(), c.max_seqlen_q, c.max_seqlen_k, 0.0,
            scale, causal=True, block_table=block_tables[c.rows[n:]])[0])
    return torch.cat(parts) if len(parts) > 1 else parts[0]

def plain_attention(q, k_cache, v_cache, block_tables, scale, c: FlatStep, first_chunk: int = 0) -> Tensor:
    """The definition, from `first_chunk` on: gather keys through the tables, mask, SDPA. One-token chunks go together,
    padded with copies of their last key, as what lies beyond may never have been written; others one by one."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    bounds = list(range(c.num_decodes)) + (c.cu_seqlens_q + c.num_decodes).tolist()
    lens, outputs, n = c.context_lens.tolist(), [], max(c.num_decodes, first_chunk)
    for first, end in pairwise([*range(first_chunk, n, max(1, MOST_PADDED // max(lens))), *range(n, len(lens) + 1)]):
        queries = q[bounds[first]:bounds[end]].unflatten(0, (end - first, -1)).unflatten(2, (num_kv_heads, -1))
        position, last = torch.arange(max(lens[first:end]), device=q.device), c.context_lens[first:end, None] - 1
        key = position.minimum(last)                                # [num_chunks, longest context]
        slots = block_tables[c.rows[first:end, None], key // block_size] * block_size + key % block_size
        k, v = (cache.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
                for cache in (k_cache, v_cache))                    # [num_chunks, num_kv_heads, longest, head_dim]
        seen = last - torch.arange(queries.shape[1] - 1, -1, -1, device=q.device)   # last key of each query
        mask = (position <= seen[:, :, None]).repeat(1, queries.shape[3], 1)[:, None]  # a group's heads: more queries
        out = F.scaled_dot_product_attention(queries.permute(0, 2, 3, 1, 4).flatten(2, 3), k, v, mask, scale=scale)
        outputs.append(out.unflatten(2, (-1, queries.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1))
    return torch.cat(outputs)

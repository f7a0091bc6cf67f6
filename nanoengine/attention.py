"""Attention over the paged cache: the plain version that defines it, and the fast paths that must equal it.

`paged_attention` reads this step's `Context`. Keys and values of this step's tokens are already in the cache (see
`kernels.rope_and_store`), so a chunk simply looks back at everything up to itself.

    context_lens 7, chunk of 3      keys     | 0 1 2 3 4 5 6 |
                                    queries          | 4 5 6 |      query 4 sees keys 0-4, query 6 sees all
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine import kernels
from nanoengine.context import Context, get_context

try:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as flash_forward
    # Past torch's custom-operator wrapper, which imports torch's compiler at its first call: 2 to 4 s of start-up.
    flash_forward = getattr(flash_forward, "_init_fn", flash_forward)
except ImportError:
    flash_forward = None

FLASH_BLOCK_SIZE = 256      # its paged version wants multiples
MOST_PADDED = 1 << 14       # keys that the plain version gathers at once, in one layer: 25 MB for SmolLM2

def reason_against_flash(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why flash-attn can't serve this engine, or None if it can. Builds differ in head sizes and GPUs: ask by running."""
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
    return None

def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for every token of this step, causally within its own sequence.

    q [num_tokens, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]; query head h
    reads KV head h // (num_heads / num_kv_heads). The Context tells which tokens belong together, and where their
    context lies. Returns the shape of q.
    """
    c, n, outputs = get_context(), get_context().num_decodes, []
    if not kernels.has_triton(q):
        return plain_attention(q, k_cache, v_cache, scale, c)
    if n > 0:
        outputs.append(kernels.decode_attention(q[:n], k_cache, v_cache, c.block_tables, c.rows[:n], c.context_lens[:n],
                                                scale))
    if n < len(q) and c.uses_flash:
        outputs.append(flash_forward(
            q[n:], k_cache, v_cache, c.cu_seqlens_q.int(), c.cu_seqlens_k.int(), c.max_seqlen_q, c.max_seqlen_k, 0.0,
            scale, causal=True, block_table=c.block_tables[c.rows[n:]])[0])
    elif n < len(q):
        outputs.append(plain_attention(q, k_cache, v_cache, scale, c, first_chunk=n))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

def plain_attention(q, k_cache, v_cache, scale, c: Context, first_chunk: int = 0) -> Tensor:
    """The definition, from `first_chunk` on: gather contexts through the block table, mask, SDPA. One-token chunks go
    together, padded with copies of their last key, as what lies beyond may never have been written; others one by one.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    bounds = list(range(c.num_decodes)) + (c.cu_seqlens_q + c.num_decodes).tolist()
    lens, outputs, n = c.context_lens.tolist(), [], max(c.num_decodes, first_chunk)
    firsts = [*range(first_chunk, n, max(1, MOST_PADDED // max(lens))), *range(n, len(lens) + 1)]
    for first, end in pairwise(firsts):
        queries = q[bounds[first]:bounds[end]].unflatten(0, (end - first, -1)).unflatten(2, (num_kv_heads, -1))
        position, last = torch.arange(max(lens[first:end]), device=q.device), c.context_lens[first:end, None] - 1
        key = position.minimum(last)                                # [num_chunks, longest context]
        slots = c.block_tables[c.rows[first:end, None], key // block_size] * block_size + key % block_size
        k, v = (cache.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
                for cache in (k_cache, v_cache))                    # [num_chunks, num_kv_heads, longest, head_dim]
        num_later = torch.arange(queries.shape[1], device=q.device).flip(0)     # tokens after each in its chunk
        mask = (position <= (last - num_later)[:, :, None]).repeat(1, queries.shape[3], 1)[:, None]
        # The query heads that share a KV head become further queries of it.
        out = F.scaled_dot_product_attention(queries.permute(0, 2, 3, 1, 4).flatten(2, 3), k, v, mask, scale=scale)
        outputs.append(out.unflatten(2, (-1, queries.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1))
    return torch.cat(outputs)

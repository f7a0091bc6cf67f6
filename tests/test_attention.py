"""The plain paged attention beside a formula written out for one query at a time. No model."""

import math

import pytest
import torch

from nanoengine.attention import plain_attention
from nanoengine.step_input import FlatStep

BLOCK_SIZE = 4


def attend_one_by_one(q, keys, values, positions, scale):
    """softmax(q k) v of one sequence: q [n, heads, size] at `positions`, keys, values [tokens, KV heads, size]."""
    group, out = q.shape[1] // keys.shape[1], torch.empty_like(q)
    for i, position in enumerate(positions):
        for head in range(q.shape[1]):
            seen = keys[: position + 1, head // group]
            weights = (seen @ q[i, head] * scale).softmax(0)
            out[i, head] = weights @ values[: position + 1, head // group]
    return out


def chunks_and_cache(chunks, num_heads=6, num_kv_heads=2, size=8, num_rows=9):
    """(queries, caches, tables, step, expected outputs) of chunks (start, num_tokens), one-token ones first.

    The caches are NaN but for what the sequences have computed, in blocks in no order; so are the rows.
    """
    torch.manual_seed(0)
    starts, lengths = zip(*chunks)
    ends = [start + length for start, length in chunks]
    num_decodes, num_blocks = lengths.count(1), sum(-(-end // BLOCK_SIZE) for end in ends)
    free, rows = torch.randperm(num_blocks).tolist(), torch.randperm(num_rows)[: len(chunks)]
    caches = torch.full((2, num_blocks, BLOCK_SIZE, num_kv_heads, size), math.nan)
    tables = torch.full((num_rows, max(ends)), 2**30, dtype=torch.int32)
    queries, expected = [], []
    for row, start, end in zip(rows, starts, ends):
        keys_and_values, q = torch.randn(2, end, num_kv_heads, size), torch.randn(end - start, num_heads, size)
        for i in range(-(-end // BLOCK_SIZE)):
            tables[row, i] = block = free.pop()
            part = keys_and_values[:, i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            caches[:, block, : part.shape[1]] = part
        queries.append(q)
        expected.append(attend_one_by_one(q, *keys_and_values, range(start, end), 0.3))
    bounds = [torch.tensor([0, *values[num_decodes:]]).cumsum(0) for values in (lengths, ends)]
    step = FlatStep._make([None] * len(FlatStep._fields))._replace(
        rows=rows, context_lens=torch.tensor(ends), num_decodes=num_decodes, cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1], max_seqlen_q=max(lengths), max_seqlen_k=max(ends))  # fmt: skip
    return torch.cat(queries), *caches, tables, step, torch.cat(expected)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(6, 1)],
        [(0, 7)],
        [(4, 4)],
        [(5, 6)],
        [(6, 1), (3, 1), (12, 1)],
        [(0, 2), (7, 3)],
        [(6, 1), (3, 1), (4, 4), (0, 5)],
    ],
    ids=str,
)
def test_every_token_attends_to_all_up_to_itself(chunks):
    q, k_cache, v_cache, tables, step, expected = chunks_and_cache(chunks)
    torch.testing.assert_close(plain_attention(q, k_cache, v_cache, tables, 0.3, step), expected)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (4, 4), (8, 1)])
def test_each_group_of_query_heads_reads_its_own_kv_head(num_heads, num_kv_heads):
    q, k_cache, v_cache, tables, step, expected = chunks_and_cache([(6, 1), (2, 5)], num_heads, num_kv_heads)
    torch.testing.assert_close(plain_attention(q, k_cache, v_cache, tables, 0.3, step), expected)


def test_attention_from_a_later_chunk_on():
    """As behind the decode kernel, which has computed the one-token chunks."""
    q, k_cache, v_cache, tables, step, expected = chunks_and_cache([(6, 1), (3, 1), (4, 4), (0, 5)])
    out = plain_attention(q, k_cache, v_cache, tables, 0.3, step, first_chunk=2)
    torch.testing.assert_close(out, expected[2:])

"""The rotary table, and how heads turn by it, on numbers worked out by hand. No model."""

import math

import torch

from nanoengine import kernels
from nanoengine.decoder import rotary_table

PLAIN = {"rope_type": "default", "rope_theta": 100.0, "original_max_position_embeddings": 16}


def test_a_rotary_table_by_hand():
    """head_dim 4: pair 0 turns by 1 radian per position, pair 1 by 100 ** (-2 / 4) = 0.1."""
    table = rotary_table(PLAIN, 4, 3)
    assert table.shape == (3, 2, 2) and table.dtype == torch.float32
    expected = [[[math.cos(p), math.cos(0.1 * p)], [math.sin(p), math.sin(0.1 * p)]] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(expected))


def rotated(x, positions, table, num_heads, num_kv_heads=1, norms=(None, None)):
    """q, k, v [n, heads, size] that rope_and_store makes of x [n, heads, size], in the order q, k, v."""
    n, size = len(x), x.shape[2]
    caches = torch.full((2, 1, n, num_kv_heads, size), math.nan)
    slots, block_tables = torch.arange(n - 1, -1, -1), torch.full((1, 1 + int(positions.max()) // n), -1).int()
    rows = torch.zeros_like(positions)
    q = kernels.rope_and_store(x.flatten(1), rows, positions, slots, table, *caches, block_tables, num_heads, *norms,
                               1e-6)
    return q, *caches[:, 0].flip(1)


def test_rope_turns_the_halves_of_a_head_as_a_pair():
    """Head [a, b, c, d]: (a, c) turns by the first angle, (b, d) by the second; v doesn't turn."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 3, 4)
    q, k, v = rotated(x, torch.tensor([2]), rotary_table(PLAIN, 4, 3), num_heads=1)
    expected = torch.tensor([math.cos(2), -2 * math.sin(0.2), math.sin(2), 2 * math.cos(0.2)]).view(1, 1, 4)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k, expected)
    assert torch.equal(v, x[:, 2:])


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(1)
    x, table = torch.randn(1, 3, 8).expand(2, 3, 8), rotary_table(PLAIN, 8, 100)
    scores = []
    for first in (0, 5, 90):
        q, k, _ = rotated(x, torch.tensor([first, first + 7]), table, num_heads=1)
        scores.append(q[1, 0] @ k[0, 0])
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), atol=1e-4, rtol=1e-4)


def test_q_and_k_are_normalised_before_they_turn():
    torch.manual_seed(2)
    x, norms, table = torch.randn(3, 4, 8), (torch.rand(8) + 0.5, torch.rand(8) + 0.5), rotary_table(PLAIN, 8, 9)
    positions = torch.tensor([8, 0, 3])
    normed = x.clone()
    for heads, weight in ((slice(0, 2), norms[0]), (slice(2, 3), norms[1])):
        part = x[:, heads]
        normed[:, heads] = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    for one, other in zip(rotated(x, positions, table, 2, 1, norms), rotated(normed, positions, table, 2, 1)):
        torch.testing.assert_close(one, other)

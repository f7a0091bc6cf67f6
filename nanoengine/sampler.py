"""From logits to tokens.

A token is the arg max of logit + temperature * Gumbel noise (the Gumbel-max trick: it has the softmax's distribution).
The noise is a function of (seed, position, token id) alone, so batch mates, chunks, preemption and ranks don't matter;
temperature 0 is no special case. Rows that ask for filters are drawn again, from filtered logits; only they pay.
"""

import torch
from torch import Tensor

from nanoengine import kernels

ROWS_AT_A_TIME = 32     # sorting needs some 20 bytes per logit: 100 MB for 32 rows of 152k tokens

def filter_logits(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, vocab_size] float32, with -inf for every token that the filters remove; all other arguments are [n].
    On the probabilities softmax(logits / temperature), in this order: the `top_k` likeliest (0: all), renormalised;
    then the likeliest until their sum reaches `top_p` (within 1e-6), the token that reaches it included; then those
    with at least `min_p` times the likeliest's. The likeliest always stays. Ties go to the lower token id."""
    logits_sorted, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (logits_sorted - logits_sorted[:, :1]) / temperatures[:, None].clamp(min=1e-30)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    keeps = (top_k[:, None] == 0) | (ranks < top_k[:, None])
    probs = scaled.masked_fill(~keeps, -torch.inf).softmax(dim=-1)
    keeps &= probs.cumsum(dim=-1) - probs < top_p[:, None] - 1e-6
    keeps &= probs >= min_p[:, None] * probs[:, :1]
    keeps |= ranks == 0
    return logits.masked_fill(~torch.zeros_like(keeps).scatter(-1, order, keeps), -torch.inf)

def draw_filtered(logits: Tensor, seeds: Tensor, positions: Tensor, *settings: Tensor) -> Tensor:
    """Token ids [n] from filtered logits [n, vocab_size]; settings, each [n]: temperature, top_k, top_p, min_p."""
    ids = []
    parts = (tensor.split(ROWS_AT_A_TIME) for tensor in (logits, seeds, positions, *settings))
    for some_logits, seed, position, *setting in zip(*parts):
        ids.append(kernels.sample(filter_logits(some_logits.float(), *setting), setting[0], seed, position)[1])
    return torch.cat(ids)

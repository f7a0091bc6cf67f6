"""From logits to tokens.

A token is drawn as the arg max of logit + temperature * noise, with Gumbel noise that is a function of (seed,
position, token id) alone (the Gumbel-max trick): the draw has the softmax's distribution, and doesn't depend on batch
mates, chunks, preemption, ranks or any generator state. Temperature 0 is the arg max of the logits with no case of
its own. Rows that ask for filters are drawn again, from filtered logits; a batch pays only for those rows.
"""

import torch
from torch import Tensor

from nanoengine import kernels

ROWS_AT_A_TIME = 32     # sorting needs some 20 bytes per logit: 100 MB for 32 rows of 152k tokens

def filter_logits(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, vocab_size] float32, with -inf for every token that the filters remove; all other arguments are [n].

    On the probabilities softmax(logits / temperature), in this order: the `top_k` likeliest (0: all), renormalised;
    then the likeliest until their sum reaches `top_p` (within 1e-6), the token that reaches it included; then those
    with at least `min_p` times the likeliest's. The likeliest always stays. Ties go to the lower token id.
    """
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
    """Token ids [n] drawn from filtered logits [n, vocab_size]. settings: temperatures, top_k, top_p, min_p, each [n]."""
    ids = []
    for i in range(0, len(logits), ROWS_AT_A_TIME):
        some = slice(i, i + ROWS_AT_A_TIME)
        kept = filter_logits(logits[some].float(), *(setting[some] for setting in settings))
        ids.append(kernels.sample(kept, settings[0][some], seeds[some], positions[some])[1])
    return torch.cat(ids)

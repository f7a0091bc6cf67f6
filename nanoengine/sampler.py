"""From logits to tokens. A token is the arg max of logit + temperature * Gumbel noise (the Gumbel-max trick: it has the
softmax's distribution). The noise is a function of (seed, position, token id) alone, so batch mates, chunks, preemption
and ranks don't matter; temperature 0 is no special case. `kernels.sample` does this for every row. Rows that ask for
more (not `SamplingParams.is_plain`) are drawn again; only they pay. What is done to their logits, in this order: rules
(bias and bans), penalties, [temperature, top-k, renormalise, top-p, min-p], draw. Here n such rows are changed."""
import numpy as np
import torch
from torch import Tensor
from nanoengine.sampling_params import Rule, SamplingParams

ROWS_AT_A_TIME = 32     # sorting needs some 20 bytes per logit: 100 MB for 32 rows of 152k tokens
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
COSTLY = SamplingParams(top_k=1, repetition_penalty=2.0, logprobs=1)      # needs most memory

def pack_rules(rules_of: list[list[Rule]]) -> list[np.ndarray]:
    """The rules of n rows as int64 arrays for `apply_rules`, each of length num_rules but the last, which holds the
    prefixes, one after the other, filled up with -1 on their left. Biases are float64's bits. [] without rules."""
    rules = [(row, rule) for row, rules in enumerate(rules_of) for rule in rules]
    if not rules:
        return []
    longest = max(len(rule.prefix) for _, rule in rules)
    columns = zip(*((row, rule.token_id, rule.start, rule.end) for row, rule in rules))
    prefixes = [(-1,) * (longest - len(rule.prefix)) + tuple(rule.prefix) for _, rule in rules]
    biases = np.array([rule.bias for _, rule in rules], np.float64).view(np.int64)
    return [*map(np.array, columns), biases, np.array(prefixes, np.int64).ravel()]

def apply_rules(logits: Tensor, history: Tensor, positions: Tensor, *packed: Tensor) -> Tensor:
    """logits [n, vocab_size] with the rules' biases added where they hold. history [n, length] int32: each row's tokens;
    positions [n]: of the tokens to be drawn; packed: see `pack_rules`."""
    row, token_id, start, end, bias, prefixes = packed
    prefixes = prefixes.reshape(len(row), prefixes.numel() // len(row))                     # [num_rules, longest]
    place = positions[row, None] + torch.arange(-prefixes.shape[1], 0, device=row.device)
    follows = ((prefixes < 0) | (history[row[:, None], place.clamp(min=0)] == prefixes)).all(dim=1)
    holds = follows & (start <= positions[row]) & (positions[row] < end)
    biases = torch.where(holds, bias.view(torch.float64).float(), 0.0)
    return logits.index_put((row, token_id), biases, accumulate=True)

def penalise(logits: Tensor, history: Tensor, positions: Tensor, repetition: Tensor, frequency: Tensor,
             presence: Tensor, num_prompt: Tensor) -> Tensor:
    """Lower the logits [n, vocab_size] of tokens in history [n, length], each row's first positions[i] ids, of which
    num_prompt[i] are the prompt. A token that occurs: logit / repetition if positive, else * repetition (Keskar et al.
    2019). One in the output: - frequency * count - presence. All arguments but the first two are [n]."""
    place = torch.arange(history.shape[1], device=logits.device)
    is_known, is_output = place < positions[:, None], place >= num_prompt[:, None]
    seen, drawn = (torch.zeros_like(logits).scatter_add_(1, history.long(), mask.float())    # counts [n, vocab_size]
                   for mask in (is_known, is_known & is_output))
    repeated = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    return torch.where(seen > 0, repeated, logits) - frequency[:, None] * drawn - presence[:, None] * (drawn > 0)

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
    keeps &= (probs.cumsum(dim=-1) - probs < top_p[:, None] - 1e-6) | (top_p[:, None] == 1)
    keeps &= probs >= min_p[:, None] * probs[:, :1]
    keeps |= ranks == 0
    return logits.masked_fill(~torch.zeros_like(keeps).scatter(-1, order, keeps), -torch.inf)

def top_logprobs(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Ids and log-softmax of raw logits [n, vocab_size]: [n, 1 + num] each, the drawn token_ids [n] first, then the
    `num` likeliest in falling order."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.cat((token_ids[:, None].long(), logprobs.topk(num).indices), dim=1)
    return ids, logprobs.gather(1, ids)

"""From logits to tokens: `kernels.sample` draws for every row the arg max of logit + temperature * Gumbel noise, which
has the softmax's distribution (Gumbel-max trick), from (seed, position, token id) alone, whatever the batch mates,
chunks and ranks. Rows that ask for more (not `SamplingParams.is_plain`) are drawn again; only they pay. Their logits go
through, in this order: rules (bias and bans), penalties, [temperature, top-k, renormalise, top-p, min-p], draw."""
import numpy as np
import torch
from torch import Tensor
from nanoengine.sampling_params import Rule, SamplingParams

ROWS_AT_A_TIME = 32     # sorting needs some 20 bytes per logit: 100 MB for 32 rows of 152k tokens
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
COSTLY = SamplingParams(top_k=1, repetition_penalty=2.0, logprobs=1)      # needs most memory

def pack_rules(rules_of: list[list[Rule]]) -> np.ndarray:
    """The rules of n rows for `apply_rules`: float64 [num_rules, 5 + longest prefix], of each the row, the token id,
    start, end, bias, and the prefix, filled up with -1 on its left."""
    longest = max((len(rule.prefix) for rules in rules_of for rule in rules), default=0)
    return np.array([(row, rule.token_id, rule.start, rule.end, rule.bias, *[-1] * (longest - len(rule.prefix)),
                      *rule.prefix) for row, rules in enumerate(rules_of) for rule in rules], np.float64)

def apply_rules(logits: Tensor, history: Tensor, positions: Tensor, rules: Tensor) -> Tensor:
    """logits [n, vocab_size] with the biases added of `pack_rules`' rules that hold. history [n, length] int32: each
    row's tokens; positions [n]: of the tokens to be drawn."""
    (row, token_id, start, end), prefixes = rules[:, :4].long().T, rules[:, 5:].long()
    place = positions[row, None] + torch.arange(-prefixes.shape[1], 0, device=row.device)
    follows = ((prefixes < 0) | (history[row[:, None], place.clamp(min=0)] == prefixes)).all(dim=1)
    holds = follows & (start <= positions[row]) & (positions[row] < end)
    return logits.index_put((row, token_id), torch.where(holds, rules[:, 4].float(), 0.0), accumulate=True)

def penalise(logits: Tensor, history: Tensor, positions: Tensor, settings: Tensor) -> Tensor:
    """Lower the logits of tokens among a row's first positions[i] of history, the first num_prompt of which are the
    prompt. settings [8, n]: `SETTINGS`, num_prompt. A token that occurs: logit / repetition if positive, else
    * repetition (Keskar et al. 2019). One in the output: - frequency * count - presence."""
    repetition, frequency, presence, num_prompt = settings[4:, :, None]
    place = torch.arange(history.shape[1], device=logits.device)
    masks = place < num_prompt, (num_prompt <= place) & (place < positions[:, None])
    given, drawn = (torch.zeros_like(logits).scatter_add_(1, history.long(), mask.float()) for mask in masks)   # counts
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(given + drawn > 0, repeated, logits) - frequency * drawn - presence * (drawn > 0)

def filter_logits(logits: Tensor, settings: Tensor) -> Tensor:
    """Logits [n, vocab_size] float32, -inf where the filters remove a token. settings: as in `penalise`. On the
    probabilities softmax(logits / temperature), in this order: the `top_k` likeliest (0: all), renormalised; then the
    likeliest until their sum reaches `top_p` (within 1e-6), the token that reaches it included; then those with at
    least `min_p` times the likeliest's. The likeliest always stays. Ties go to the lower token id."""
    temperature, top_k, top_p, min_p = settings[:4, :, None]
    falling, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    keeps = (top_k == 0) | (ranks < top_k)
    probs = ((falling - falling[:, :1]) / temperature.clamp(min=1e-30)).masked_fill(~keeps, -torch.inf).softmax(dim=-1)
    keeps &= (probs.cumsum(dim=-1) - probs < top_p - 1e-6) | (top_p == 1)
    keeps &= probs >= min_p * probs[:, :1]
    return logits.masked_fill(~torch.zeros_like(keeps).scatter(-1, order, keeps | (ranks == 0)), -torch.inf)

def top_logprobs(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Ids and log-softmax of raw logits [n, vocab_size]: [n, num] each, the drawn token_ids [n], then the likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.cat((token_ids[:, None].long(), logprobs.topk(num - 1).indices), dim=1)
    return ids, logprobs.gather(1, ids)

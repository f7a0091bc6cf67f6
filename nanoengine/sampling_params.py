"""What a caller may ask of one request. What depends on a model (vocabulary, length) is checked when it is added."""
from collections import namedtuple
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real

# Adds `bias` (-inf bans) to a token's logit in draws at positions [start, end) right behind the tokens `prefix`.
Rule = namedtuple("Rule", "prefix token_id bias start end")

@dataclass(frozen=True)
class SamplingParams:
    """ValueErrors name field and value. The order of what is done to the logits: see `sampler`."""
    temperature: float = 1.0                # 0 is greedy (arg max); otherwise logits are divided by it
    max_tokens: int = 64                    # at most so many new tokens
    top_k: int = 0                          # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0                      # keep the likeliest up to and with the one that reaches this sum
    min_p: float = 0.0                      # keep what has this share of the likeliest one's probability
    seed: int | None = None                 # gives the same tokens in any batch; None: the engine draws one
    stop: str | tuple[str, ...] = ()        # strings (or one) that end the text, which is cut before them
    stop_token_ids: tuple[int, ...] = ()    # end the request, besides the model's own end-of-sequence ids
    ignore_eos: bool = False                # do not stop at those of the model
    repetition_penalty: float = 1.0         # > 1 divides (multiplies, if negative) logits of tokens seen, prompt too
    frequency_penalty: float = 0.0          # subtracted from a logit once per time that its token was drawn
    presence_penalty: float = 0.0           # the same, once
    logit_bias: dict[int, float] | None = None      # token id -> what is added to its logit
    min_tokens: int = 0                     # no end token among the first so many new ones
    bad_words: str | tuple[str, ...] = ()   # the tokens of such a word, also behind a space, are never drawn in a row
    logprobs: int | None = None             # report the log-probabilities of so many likeliest tokens and the drawn one
    def __post_init__(self):
        for names, kind, is_valid, wanted in (
                ("temperature", Real, lambda v: 0 <= v < 1e30, "in [0, 1e30)"),
                ("repetition_penalty", Real, lambda v: 0 < v < 1e30, "in (0, 1e30)"),
                ("frequency_penalty presence_penalty", Real, lambda v: -2 <= v <= 2, "in [-2, 2]"),
                ("ignore_eos", bool, lambda v: True, "a bool"),
                ("top_p", Real, lambda v: 0 < v <= 1, "in (0, 1]"), ("min_p", Real, lambda v: 0 <= v <= 1, "in [0, 1]"),
                ("max_tokens", Integral, lambda v: v >= 1, "an integer >= 1"),
                ("top_k", Integral, lambda v: 0 <= v < 2**63, "in [0, 2**63), 0 for all tokens"),
                ("min_tokens", Integral, lambda v: 0 <= v <= self.max_tokens, f"in [0, max_tokens={self.max_tokens}]"),
                ("seed logprobs", Integral | None, lambda v: v is None or 0 <= v < 2**63, "None or in [0, 2**63)"),
                ("stop bad_words", tuple, lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings"),
                ("stop_token_ids", tuple, lambda v: all(isinstance(t, Integral) for t in v), "integers"),
                ("logit_bias", dict | None, lambda v: all(isinstance(token_id, Integral) and isinstance(bias, Real)
                    and abs(bias) < 1e30 for token_id, bias in (v or {}).items()), "id -> number in (-1e30, 1e30)")):
            for name in names.split():
                value = getattr(self, name)
                if kind is tuple and (value is None or hasattr(value, "__iter__")):
                    value = (value,) if isinstance(value, str) else tuple(value or ())
                if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind) or not is_valid(value):
                    raise ValueError(f"SamplingParams: {name}={value!r}, but it must be {wanted}")
                object.__setattr__(self, name, getattr(value, "item", lambda: value)())    # NumPy's overflow
    has_filters = property(lambda p: p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0))
    has_penalties = property(lambda p: (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0))
    is_plain = property(lambda p: not (p.has_filters or p.has_penalties or p.logit_bias or p.min_tokens or p.bad_words
                                       or p.logprobs is not None))      # temperature and noise are all it needs
    def rules(self, num_prompt_tokens: int, stop_token_ids, bad_words) -> list[Rule]:
        """logit_bias, min_tokens and bad_words (each a tuple of token ids, within the output) as rules."""
        forever, first_end = 1 << 62, min(1 << 62, num_prompt_tokens + self.min_tokens)
        return [*(Rule((), token_id, bias, 0, forever) for token_id, bias in (self.logit_bias or {}).items()),
                *(Rule((), token_id, -inf, 0, first_end) for token_id in stop_token_ids if self.min_tokens),
                *(Rule(ids[:-1], ids[-1], -inf, num_prompt_tokens + len(ids) - 1, forever) for ids in bad_words)]

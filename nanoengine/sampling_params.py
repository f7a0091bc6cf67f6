"""What a caller may ask of one request. What depends on a model (vocabulary, length) is checked when it is added."""

from dataclasses import dataclass
from numbers import Integral, Real

@dataclass(frozen=True)
class SamplingParams:
    """ValueErrors name field and value. Filters act on probabilities: temperature, top_k, renormalise, top_p, min_p."""
    temperature: float = 1.0                # 0 is greedy (arg max); otherwise logits are divided by it
    max_tokens: int = 64                    # at most so many new tokens
    top_k: int = 0                          # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0                      # keep the likeliest up to and with the one that reaches this sum
    min_p: float = 0.0                      # keep what has this share of the likeliest one's probability
    seed: int | None = None                 # gives the same tokens in any batch; None: the engine draws one
    stop: str | tuple[str, ...] = ()        # strings (or one) that end the text, which is cut before them
    stop_token_ids: tuple[int, ...] = ()    # end the request, besides the model's own end-of-sequence ids
    ignore_eos: bool = False                # do not stop at those of the model

    def __post_init__(self):
        for field, kind, is_valid, wanted in (
                ("temperature", Real, lambda v: 0 <= v < float("inf"), "a finite number >= 0"),
                ("max_tokens", Integral, lambda v: v >= 1, "an integer >= 1"),
                ("top_k", Integral, lambda v: v >= 0, "an integer >= 0 (0 keeps all tokens)"),
                ("top_p", Real, lambda v: 0 < v <= 1, "in (0, 1]"), ("min_p", Real, lambda v: 0 <= v <= 1, "in [0, 1]"),
                ("seed", Integral | None, lambda v: v is None or 0 <= v < 2**63, "None or in [0, 2**63)"),
                ("stop", tuple, lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings"),
                ("stop_token_ids", tuple, lambda v: all(isinstance(t, Integral) for t in v), "integers")):
            value = getattr(self, field)
            if kind is tuple and (value is None or hasattr(value, "__iter__")):
                value = (value,) if isinstance(value, str) else tuple(value or ())
                object.__setattr__(self, field, value)
            if isinstance(value, bool) or not isinstance(value, kind) or not is_valid(value):
                raise ValueError(f"SamplingParams: {field}={value!r}, but it must be {wanted}")

    @property
    def has_filters(self) -> bool:          # whether drawing needs more than temperature and noise
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

"""What a caller may ask of one request.

Values are checked here, once, when the object is made: an invalid request never reaches the engine. Nothing here
knows a model; what depends on one (vocabulary, context length) is checked when the request is added.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of one request, and when to stop.

    The filters act in the order temperature, `top_k`, renormalise, `top_p`, `min_p`, on probabilities:
      temperature     0 is greedy (arg max); otherwise logits are divided by it.
      max_tokens      at most so many new tokens, >= 1.
      top_k           keep the k likeliest tokens; 0 keeps all.
      top_p           keep the likeliest tokens up to and including the one that reaches this sum, in (0, 1].
      min_p           keep tokens with at least this share of the likeliest one's probability, in [0, 1].
      seed            0 <= seed < 2**63; the same seed gives the same tokens in any batch. None: the engine draws one.
      stop            strings (or one) that end the text; the text is cut before them.
      stop_token_ids  token ids that end the request, besides the model's own end-of-sequence ids.
      ignore_eos      do not stop at the model's end-of-sequence ids.
    Raises ValueError with the field and the value.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check("temperature", Real, lambda v: 0 <= v < math.inf, "a finite number >= 0")
        self._check("max_tokens", Integral, lambda v: v >= 1, "an integer >= 1")
        self._check("top_k", Integral, lambda v: v >= 0, "an integer >= 0 (0 keeps all tokens)")
        self._check("top_p", Real, lambda v: 0 < v <= 1, "in (0, 1]")
        self._check("min_p", Real, lambda v: 0 <= v <= 1, "in [0, 1]")
        if self.seed is not None:
            self._check("seed", Integral, lambda v: 0 <= v < 2**63, "None or an integer in [0, 2**63)")
        self._check("stop", tuple, lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings")
        self._check("stop_token_ids", tuple, lambda v: all(isinstance(t, Integral) for t in v), "integers")

    def _check(self, field, kind, is_valid, wanted):
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, kind) or not is_valid(value):
            raise ValueError(f"SamplingParams: {field}={value!r}, but it must be {wanted}")

    @property
    def has_filters(self) -> bool:
        """Whether drawing needs more than temperature and noise."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

"""What isn't a matrix product or attention: RMSNorm's weight and the table of the rotary embedding.
The arithmetic is in `kernels`, fused with its neighbours.
"""

import math

import torch
from torch import Tensor, nn

from nanoengine import kernels
from nanoengine.linear import Source

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), after adding the residual stream to x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = torch.empty(size), eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual [n, size] -> (norm of their sum, their sum)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def sources(self, path: str) -> list[Source]:
        return [Source(f"{path}.weight", self.weight, tuple(self.weight.shape), (slice(None),))]

def rotary_table(rope: dict, head_dim: int, max_position: int) -> Tensor:
    """[max_position, 2, head_dim / 2] float32: cos and sin of position * frequency, per pair of dimensions.

    rope: as in `ModelConfig`. Frequencies are theta^(-2i / head_dim) (Su et al. 2021). Scalings divide them
    by `factor`: "linear" all; "llama3" long waves, but not short ones, with a ramp between; "yarn" (Peng et
    al. 2023) the same with a ramp over dimensions, and it multiplies cos and sin by an attention factor."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    frequencies = rope["rope_theta"] ** (-2 * pairs / head_dim)
    kept, attention_factor = 0.0, 1.0           # kept: the share of a frequency that isn't divided
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        waves = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((waves - low) / (high - low)).clamp(0, 1)
    elif rope["rope_type"] == "yarn":
        kept, attention_factor = _yarn(rope, pairs)
    if rope["rope_type"] != "default":
        frequencies *= kept + (1 - kept) / rope["factor"]
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor

def _yarn(rope: dict, pairs: Tensor) -> tuple[Tensor, float]:
    """The pairs that turn `beta_fast` times and `beta_slow` times in the original context bound the ramp."""
    head_dim, original = 2 * len(pairs), rope["original_max_position_embeddings"]
    low, high = (head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
                 for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1)))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    top, bottom = (1 + 0.1 * m * math.log(max(rope["factor"], 1))
                   for m in ((mscale, all_dim) if mscale and all_dim else (1, 0)))
    return kept, rope.get("attention_factor", top / bottom)

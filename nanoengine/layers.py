"""RMSNorm's weight and the table of the rotary embedding. The arithmetic is in `kernels`, fused with its neighbours."""

import math

import torch
from torch import Tensor, nn

from nanoengine import kernels
from nanoengine.linear import Source

class RMSNorm(nn.Module):
    """x, residual [n, size] -> (s / sqrt(mean(s^2) + eps) * weight, s = x + residual); Zhang & Sennrich 2019."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = torch.empty(size), eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def sources(self, path: str) -> list[Source]:
        return [Source(f"{path}.weight", self.weight, tuple(self.weight.shape), (slice(None),))]

def rotary_table(rope: dict, head_dim: int, max_position: int) -> Tensor:
    """[max_position, 2, head_dim / 2] float32: cos, sin of position * theta^(-2i / head_dim) (Su et al. 2021).
    rope as in `ModelConfig`. Scalings divide frequencies by `factor`: "linear" all; "llama3" long waves, not short,
    with a ramp between; "yarn" (Peng et al. 2023) with a ramp over i, and cos and sin times an attention factor."""
    pairs, rope_type = torch.arange(head_dim // 2, dtype=torch.float32), rope["rope_type"]
    frequencies = 1 / rope["rope_theta"] ** (2 * pairs / head_dim)
    kept, attention_factor = float(rope_type == "default"), 1.0     # kept: the share that isn't divided
    if rope_type == "llama3":
        low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        kept = ((length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    elif rope_type == "yarn":
        kept, attention_factor = _yarn(rope, pairs)
    frequencies = frequencies * kept + frequencies / rope.get("factor", 1) * (1 - kept)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor

def _yarn(rope: dict, pairs: Tensor) -> tuple[Tensor, float]:
    """The pairs that turn `beta_fast` times and `beta_slow` times in the original context bound the ramp."""
    theta, waves, num = rope["rope_theta"], rope["original_max_position_embeddings"] / (2 * math.pi), len(pairs)
    low, high = (num * math.log(waves / rope.get(*turns), theta) for turns in (("beta_fast", 32), ("beta_slow", 1)))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num - 1)
    kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    top, bottom = (1 + 0.1 * m * math.log(max(rope["factor"], 1)) for m in (scales if all(scales) else (1, 0)))
    return kept, rope.get("attention_factor", top / bottom)

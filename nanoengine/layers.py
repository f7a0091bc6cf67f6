"""The two layers that aren't matrix products or attention: RMSNorm and the rotary embedding's tables.

The arithmetic itself is in `kernels`, where it is fused with its neighbours; here are the weights, and the
frequencies with their scalings for longer contexts.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoengine import kernels
from nanoengine.linear import Source, parameter


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), after adding the residual stream to x."""

    def __init__(self, name: str, size: int, eps: float):
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = parameter(size)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual [n, size] -> (norm of their sum, their sum)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def sources(self) -> Iterator[Source]:
        yield Source(f"{self.name}.weight", self.weight.data, tuple(self.weight.shape), (slice(None),))


def rotary_table(rope: dict, head_dim: int, max_position: int) -> Tensor:
    """cos and sin of position * frequency for each pair of dimensions: [max_position, 2, head_dim / 2] float32.

    rope: as `config.normalise_rope` returns it. Frequencies are theta^(-2i / head_dim) (Su et al. 2021), scaled by
    type: "default" not at all; "linear" all by 1 / factor; "llama3" long waves by 1 / factor, short ones not, a ramp
    between; "yarn" (Peng et al. 2023) a ramp over dimensions, and cos and sin times an attention factor.
    """
    scale = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope["rope_type"]]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies, attention_factor = scale(frequencies, rope, head_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor


def _default(frequencies, rope, head_dim):
    return frequencies, 1.0


def _linear(frequencies, rope, head_dim):
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies, rope, head_dim):
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)     # in the original context
    share_kept = ((waves - low) / (high - low)).clamp(0, 1)
    return frequencies * (share_kept + (1 - share_kept) / rope["factor"]), 1.0


def _yarn(frequencies, rope, head_dim):
    factor = rope["factor"]

    def dimension_of(num_rotations):        # the dimension that turns so often within the original context
        original = rope["original_max_position_embeddings"]
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp + ramp / factor), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope, factor):
    def magnitude(mscale):
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1)

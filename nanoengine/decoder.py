"""Llama, Qwen2 and Qwen3 in one decoder: they differ in a few flags of `ModelConfig`. Modules are named as in the
checkpoints. A layer gets hidden states and the residual stream apart: adding and normalising is one pass."""
import math
from collections.abc import Iterator
import torch
from torch import Tensor, nn
from nanoengine import kernels
from nanoengine.attention import get_context, paged_attention
from nanoengine.config import ModelConfig
from nanoengine.group import Group
from nanoengine.linear import Linear, Source, VocabParallelEmbedding

class RMSNorm(nn.Module):
    """x, residual [n, size] -> (s / sqrt(mean(s^2) + eps) * weight, s = x + residual); Zhang & Sennrich 2019. x may be
    this rank's part of a sum over the group's ranks."""
    def __init__(self, size: int, eps: float, group: Group = Group()):
        super().__init__()
        self.weight, self.eps, self.group = torch.empty(size), eps, group
    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.group.bases is not None:
            return kernels.add_rms_norm(x, residual, self.weight, self.eps, self.group.bases, self.group.rank)
        return kernels.add_rms_norm(self.group.all_reduce(x), residual, self.weight, self.eps)
    def sources(self, path: str) -> list[Source]:
        return [Source(f"{path}.weight", self.weight, tuple(self.weight.shape), (slice(None),))]

class Attention(nn.Module):
    """Grouped-query attention over the paged cache. Each rank holds some query heads and their KV heads."""
    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        self.num_heads, self.eps = config.num_attention_heads // group.size, config.rms_norm_eps
        self.head_dim, hidden_size = config.head_dim, config.hidden_size
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.qkv_proj = Linear({"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden_size,
                               config.has_qkv_bias, outputs=group)
        self.o_proj = Linear({"o_proj": hidden_size}, q_size, config.has_o_bias, inputs=group)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, self.eps) if config.has_qk_norm else None for _ in range(2))
        self.k_cache = self.v_cache = self.block_tables = None      # see `Decoder.bind_kv_cache`
    def forward(self, hidden: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        q = kernels.rope_and_store(self.qkv_proj(hidden), positions, get_context().slot_mapping, cos_sin, self.k_cache,
                                   self.v_cache, self.num_heads, self.q_norm and self.q_norm.weight,
                                   self.k_norm and self.k_norm.weight, self.eps)    # [num_tokens, num_heads, head_dim]
        return self.o_proj(paged_attention(q, self.k_cache, self.v_cache, self.block_tables, self.head_dim ** -0.5).flatten(1))

class DecoderLayer(nn.Module):
    """Attention, then MLP, down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), each on the norm of all before it."""
    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        size, inner_size, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(size, config.rms_norm_eps, group) for _ in range(2))
        self.self_attn = Attention(config, group)
        self.mlp = nn.ModuleDict({
            "gate_up_proj": Linear({"gate_proj": inner_size, "up_proj": inner_size}, size, has_bias, outputs=group),
            "down_proj": Linear({"down_proj": size}, inner_size, has_bias, inputs=group)})
    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor):
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, positions, cos_sin), residual)
        return self.mlp.down_proj(kernels.silu_mul(self.mlp.gate_up_proj(hidden))), residual

class Decoder(nn.Module):
    """Token ids, positions [num_tokens] -> hidden states [num_tokens, hidden_size]; on the default device, dtype."""
    def __init__(self, config: ModelConfig, max_position: int, group: Group = Group()):
        super().__init__()
        sizes = config.vocab_size, config.hidden_size, group
        self.embed_tokens = VocabParallelEmbedding("embed_tokens", *sizes)
        self.layers = nn.ModuleList(DecoderLayer(config, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabParallelEmbedding("lm_head", *sizes)
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_position)
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, self.cos_sin)
        return self.norm(hidden, residual)[0]
    def sources(self) -> Iterator[Source]:
        """Every tensor that the checkpoint must hold, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, (Linear, RMSNorm)):
                yield from module.sources(path if path == "lm_head" else f"model.{path}")
    def bind_kv_cache(self, kv_cache: Tensor, block_tables: Tensor) -> None:
        """[2 (keys, values), num_hidden_layers, num_blocks + 1, block_size, num_kv_heads, head_dim]; [rows, max_blocks]."""
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.unbind(1)):
            layer.self_attn.k_cache, layer.self_attn.v_cache, layer.self_attn.block_tables = k_cache, v_cache, block_tables

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

"""Llama, Qwen2 and Qwen3 in one decoder: they differ in a few flags of `ModelConfig`. Modules are named as in the
checkpoints. A layer gets hidden states and the residual stream apart: adding and normalising is one pass."""
import math
import torch
from torch import Tensor, nn
from nanoengine import kernels
from nanoengine.attention import get_context, paged_attention
from nanoengine.config import ModelConfig
from nanoengine.group import Group
from nanoengine.linear import Linear, Source, VocabParallelEmbedding

class RMSNorm(nn.Module):
    """(s / sqrt(mean(s^2) + eps) * weight, s), s = x summed over ranks + residual [n, size]; Zhang & Sennrich 2019."""
    def __init__(self, size: int, eps: float, group: Group = Group()):
        super().__init__()
        self.weight, self.eps, self.group = torch.empty(size), eps, group
    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.group.all_reduce(x) if self.group.bases is None else x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps, self.group.bases, self.group.rank)
    def sources(self, path: str):
        yield Source(f"{path}.weight", self.weight, tuple(self.weight.shape), 0)

class Attention(nn.Module):
    """Grouped-query attention over the paged cache. Each rank holds some query heads and their KV heads."""
    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        self.num_heads, self.eps, size = config.num_attention_heads // group.size, config.rms_norm_eps, config.head_dim
        q_size, kv_size = config.num_attention_heads * size, config.num_key_value_heads * size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(parts, config.hidden_size, config.has_qkv_bias, outputs=group)
        self.o_proj = Linear({"o_proj": config.hidden_size}, q_size, config.has_o_bias, inputs=group)
        self.q_norm, self.k_norm = (RMSNorm(size, self.eps) if config.has_qk_norm else None for _ in range(2))
    def forward(self, hidden: Tensor, positions: Tensor, cos_sin: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
        q = kernels.rope_and_store(                 # [num_tokens, num_heads, head_dim]
            self.qkv_proj(hidden), get_context().token_rows, positions, get_context().slot_mapping, cos_sin, *cache,
            self.num_heads, self.q_norm and self.q_norm.weight, self.k_norm and self.k_norm.weight, self.eps)
        return self.o_proj(paged_attention(q, *cache, q.shape[2] ** -0.5).flatten(1))

class DecoderLayer(nn.Module):
    """Attention, then MLP, down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), each on the norm of all before it."""
    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(size, eps, group) for _ in range(2))
        self.self_attn = Attention(config, group)
        self.mlp = nn.ModuleDict({
            "gate_up_proj": Linear({"gate_proj": inner, "up_proj": inner}, size, config.has_mlp_bias, outputs=group),
            "down_proj": Linear({"down_proj": size}, inner, config.has_mlp_bias, inputs=group)})
    def forward(self, hidden: Tensor, residual: Tensor | None, *place) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, *place), residual)
        return self.mlp.down_proj(kernels.silu_mul(self.mlp.gate_up_proj(hidden))), residual

class Decoder(nn.Module):
    """Token ids, positions [num_tokens] -> hidden states [num_tokens, hidden_size]; on the default device, dtype."""
    def __init__(self, config: ModelConfig, max_position: int, group: Group = Group()):
        super().__init__()
        vocab_size, size = config.vocab_size, config.hidden_size
        self.embed_tokens = self.lm_head = VocabParallelEmbedding({"embed_tokens": vocab_size}, size, outputs=group)
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding({"lm_head": vocab_size}, size, outputs=group)
        self.layers = nn.ModuleList(DecoderLayer(config, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps, group)
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_position)
    def bind_kv_cache(self, kv_cache: Tensor, block_tables: Tensor) -> None:
        """[2 (k, v), num_hidden_layers, num_blocks + 1, block_size, num_kv_heads, head_dim]; [rows, max_blocks]."""
        self.caches = [(k_cache, v_cache, block_tables) for k_cache, v_cache in kv_cache.unbind(1)]
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(token_ids), None
        for layer, cache in zip(self.layers, self.caches):
            hidden, residual = layer(hidden, residual, positions, self.cos_sin, cache)
        return self.norm(hidden, residual)[0]
    def sources(self):      # of every tensor that the checkpoint must hold
        for path, module in self.named_modules():
            if isinstance(module, (Linear, RMSNorm)):
                yield from module.sources(path if path == "lm_head" else f"model.{path}")

def rotary_table(rope: dict, head_dim: int, max_position: int) -> Tensor:
    """[max_position, 2, head_dim / 2] float32: cos, sin of position * theta^(-2i / head_dim) (Su et al. 2021). Scalings
    divide frequencies by `factor`: "linear" all; "llama3" long waves, by a ramp; "yarn" (Peng et al. 2023) by a ramp
    over i, from the pair that turns `beta_fast` times in the original context to `beta_slow`; and scales cos, sin."""
    rope = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "truncate": True} | rope
    i, theta, rope_type = torch.arange(head_dim // 2, dtype=torch.float32), rope["rope_theta"], rope["rope_type"]
    frequencies, waves = 1 / theta ** (2 * i / head_dim), rope["original_max_position_embeddings"] / (2 * math.pi)
    kept, attention_factor = float(rope_type == "default"), 1.0     # kept: the share that isn't divided
    if rope_type == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((waves * frequencies - low) / (high - low)).clamp(0, 1)
    elif rope_type == "yarn":
        low, high = (len(i) * math.log(waves / rope[name], theta) for name in ("beta_fast", "beta_slow"))
        low, high = (math.floor(low), math.ceil(high)) if rope["truncate"] else (low, high)
        low, high = max(low, 0), min(high, head_dim - 1)
        kept = 1 - ((i - low) / max(high - low, 0.001)).clamp(0, 1)
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        top, bottom = (1 + 0.1 * m * math.log(max(rope["factor"], 1)) for m in (scales if all(scales) else (1, 0)))
        attention_factor = rope.get("attention_factor", top / bottom)
    frequencies = frequencies * kept + frequencies / rope["factor"] * (1 - kept)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor

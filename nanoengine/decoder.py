"""Llama, Qwen2 and Qwen3 in one decoder: they differ in a few flags of `ModelConfig`.

Modules are named as in the checkpoints. A layer gets hidden states and the residual stream apart: adding and
normalising is one pass. Nothing here knows sequences, blocks or sampling.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from nanoengine import kernels
from nanoengine.attention import paged_attention
from nanoengine.config import ModelConfig
from nanoengine.context import get_context
from nanoengine.layers import RMSNorm, rotary_table
from nanoengine.linear import Group, Linear, Source, VocabParallelEmbedding

class Attention(nn.Module):
    """Grouped-query attention over the paged cache. Each rank holds some query heads and their KV heads."""

    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        self.num_heads = config.num_attention_heads // group.size
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = Linear({"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, config.hidden_size,
                               config.has_qkv_bias, outputs=group)
        self.o_proj = Linear({"o_proj": config.hidden_size}, q_size, config.has_o_bias, inputs=group)
        self.q_norm = RMSNorm(self.head_dim, self.eps) if config.has_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, self.eps) if config.has_qk_norm else None
        self.k_cache = self.v_cache = None      # [num_blocks + 1, block_size, num_kv_heads, head_dim]

    def forward(self, hidden: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        q = kernels.rope_and_store(                                 # [num_tokens, num_heads, head_dim]
            self.qkv_proj(hidden), positions, get_context().slot_mapping, cos_sin, self.k_cache, self.v_cache,
            self.num_heads, self.q_norm and self.q_norm.weight, self.k_norm and self.k_norm.weight, self.eps)
        return self.o_proj(paged_attention(q, self.k_cache, self.v_cache, self.head_dim ** -0.5).flatten(1))

class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        size, hidden_size, has_bias = config.intermediate_size, config.hidden_size, config.has_mlp_bias
        self.gate_up_proj = Linear({"gate_proj": size, "up_proj": size}, hidden_size, has_bias, outputs=group)
        self.down_proj = Linear({"down_proj": hidden_size}, size, has_bias, inputs=group)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(kernels.silu_mul(self.gate_up_proj(hidden)))

class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the norm of the sum of all before it."""

    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        self.self_attn = Attention(config, group)
        self.mlp = MLP(config, group)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor):
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, cos_sin)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

class Decoder(nn.Module):
    """Token ids and positions (below `max_position`) [num_tokens] -> hidden states [num_tokens, hidden_size].
    To be built under `torch.device(...)` with the right default dtype."""

    def __init__(self, config: ModelConfig, max_position: int, group: Group = Group()):
        super().__init__()
        size = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding("embed_tokens", *size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if is_tied else VocabParallelEmbedding("lm_head", *size, group)
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_position)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, self.cos_sin)
        return self.norm(hidden, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size / ranks], this rank's range of the vocabulary."""
        return self.lm_head.logits(hidden)

    def sources(self) -> Iterator[Source]:
        """Every tensor that the checkpoint must hold, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, (Linear, RMSNorm)):
                yield from module.sources(path if path == "lm_head" else f"model.{path}")

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """[2 (keys, values), num_hidden_layers, num_blocks + 1, block_size, num_kv_heads, head_dim]."""
        for i, layer in enumerate(self.layers):
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_cache[:, i]

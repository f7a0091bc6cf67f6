"""Llama, Qwen2 and Qwen3 in one decoder: they differ in a few flags of `ModelConfig`.

Module names follow the checkpoints'. A layer gets hidden states and the residual stream apart, so that adding and
normalising is one pass. The key and value caches are handed in by the model runner (`bind_kv_cache`); nothing here
knows sequences, blocks or sampling.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from nanoengine import kernels
from nanoengine.attention import paged_attention
from nanoengine.config import ModelConfig
from nanoengine.context import get_context
from nanoengine.layers import RMSNorm, rotary_table
from nanoengine.linear import ColumnParallelLinear, Group, RowParallelLinear, Source, VocabParallelEmbedding


class Attention(nn.Module):
    """Grouped-query attention over the paged cache. Each rank holds some of the query heads and their KV heads."""

    def __init__(self, prefix: str, config: ModelConfig, group: Group):
        super().__init__()
        self.num_heads = config.num_attention_heads // group.size
        self.num_kv_heads = config.num_key_value_heads // group.size
        self.scale, self.eps = config.head_dim ** -0.5, config.rms_norm_eps
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.qkv_proj = ColumnParallelLinear(prefix, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
                                             config.hidden_size, config.has_qkv_bias, group)
        self.o_proj = RowParallelLinear(f"{prefix}o_proj", q_size, config.hidden_size, config.has_o_bias, group)
        self.q_norm = self.k_norm = None
        if config.has_qk_norm:
            self.q_norm = RMSNorm(f"{prefix}q_norm", config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(f"{prefix}k_norm", config.head_dim, config.rms_norm_eps)
        self.k_cache = self.v_cache = None      # [num_blocks + 1, block_size, num_kv_heads, head_dim]

    def forward(self, hidden: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        q = kernels.rope_and_store(
            self.qkv_proj(hidden), positions, get_context().slot_mapping, cos_sin, self.k_cache, self.v_cache,
            self.num_heads, self.q_norm and self.q_norm.weight, self.k_norm and self.k_norm.weight,
            self.eps)                           # [num_tokens, num_heads, head_dim]
        return self.o_proj(paged_attention(q, self.k_cache, self.v_cache, self.scale).flatten(1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, prefix: str, config: ModelConfig, group: Group):
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(prefix, {"gate_proj": size, "up_proj": size}, config.hidden_size,
                                                 config.has_mlp_bias, group)
        self.down_proj = RowParallelLinear(f"{prefix}down_proj", size, config.hidden_size, config.has_mlp_bias, group)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(kernels.silu_mul(self.gate_up_proj(hidden)))


class DecoderLayer(nn.Module):

    def __init__(self, prefix: str, config: ModelConfig, group: Group):
        super().__init__()
        self.self_attn = Attention(f"{prefix}self_attn.", config, group)
        self.mlp = MLP(f"{prefix}mlp.", config, group)
        self.input_layernorm = RMSNorm(f"{prefix}input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(f"{prefix}post_attention_layernorm", config.hidden_size,
                                                config.rms_norm_eps)

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor):
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, cos_sin)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden_size]; `logits` applies the LM head.

    max_position: rows of the rotary table. Build it under `torch.device(...)` with the right default dtype.
    """

    def __init__(self, config: ModelConfig, max_position: int, group: Group = Group()):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding("model.embed_tokens", config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(f"model.layers.{i}.", config, group)
                                    for i in range(config.num_hidden_layers))
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabParallelEmbedding(
            "lm_head", config.vocab_size, config.hidden_size, group)
        self.register_buffer("cos_sin", rotary_table(config.rope, config.head_dim, max_position), persistent=False)

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
        for module in self.modules():
            if module is not self and hasattr(module, "sources"):
                yield from module.sources()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [2, num_hidden_layers, num_blocks + 1, block_size, num_kv_heads, head_dim]: keys, then values."""
        for i, layer in enumerate(self.layers):
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_cache[0, i], kv_cache[1, i]

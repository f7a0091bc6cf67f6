"""Llama, Qwen2 and Qwen3 in one decoder: they differ in a few flags of `ModelConfig`. Modules are named as in the
checkpoints. A layer gets hidden states and the residual stream apart: adding and normalising is one pass."""

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
        self.num_heads, self.eps = config.num_attention_heads // group.size, config.rms_norm_eps
        self.head_dim, hidden_size = config.head_dim, config.hidden_size
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.qkv_proj = Linear({"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden_size,
                               config.has_qkv_bias, outputs=group)
        self.o_proj = Linear({"o_proj": hidden_size}, q_size, config.has_o_bias, inputs=group)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, self.eps) if config.has_qk_norm else None for _ in range(2))
        self.k_cache = self.v_cache = None      # [num_blocks + 1, block_size, num_kv_heads, head_dim]

    def forward(self, hidden: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        q = kernels.rope_and_store(self.qkv_proj(hidden), positions, get_context().slot_mapping, cos_sin, self.k_cache,
                                   self.v_cache, self.num_heads, self.q_norm and self.q_norm.weight,
                                   self.k_norm and self.k_norm.weight, self.eps)    # [num_tokens, num_heads, head_dim]
        return self.o_proj(paged_attention(q, self.k_cache, self.v_cache, self.head_dim ** -0.5).flatten(1))

class DecoderLayer(nn.Module):
    """Attention, then MLP, down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), each on the norm of all before it."""
    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        size, inner_size, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.self_attn = Attention(config, group)
        self.mlp = nn.ModuleDict({
            "gate_up_proj": Linear({"gate_proj": inner_size, "up_proj": inner_size}, size, has_bias, outputs=group),
            "down_proj": Linear({"down_proj": size}, inner_size, has_bias, inputs=group)})
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(size, config.rms_norm_eps) for _ in range(2))

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
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabParallelEmbedding("lm_head", *sizes)
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

"""What a model is (`ModelConfig`, read from its config.json) and what a user may set (`EngineConfig`).

Both are checked once and frozen. config.json comes in several spellings; they are normalised here and nowhere else,
and what the engine can't run is refused by name rather than dropped. Nothing here imports torch or our own modules.
"""

import difflib
import json
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path

# What differs between the families: (bias on q, k, v; bias on o; bias in the MLP; per-head norm of q and k).
# A string names the field of config.json that decides.
FAMILIES = {"LlamaForCausalLM": ("attention_bias", "attention_bias", "mlp_bias", False),
            "Qwen2ForCausalLM": (True, False, False, False),
            "Qwen3ForCausalLM": ("attention_bias", "attention_bias", False, True)}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. Names follow config.json; `rope` holds the type and numbers of the rotary embedding."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: dict
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises FileNotFoundError, or ValueError for what isn't
        supported: another architecture, quantised weights, a sliding window, another rope type or activation."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no config.json, so it is no model folder")
        raw = json.loads(path.read_text())
        architecture = (raw.get("architectures") or ["none"])[0]
        refuse_if(architecture not in FAMILIES, f"{path}: architecture {architecture} is not supported; "
                  f"supported are {', '.join(FAMILIES)}")
        refuse_if(raw.get("quantization_config"), f"{path}: quantization_config: quantised weights are not supported")
        refuse_if(raw.get("hidden_act", "silu") != "silu", f"{path}: hidden_act {raw.get('hidden_act')!r} is not "
                  "supported, only 'silu'")
        slides = raw.get("use_sliding_window", architecture == "LlamaForCausalLM") and raw.get("sliding_window")
        refuse_if(slides or "sliding_attention" in (raw.get("layer_types") or ()),
                  f"{path}: sliding_window {raw.get('sliding_window')} is active, which is not supported")
        qkv, o, mlp, qk_norm = (raw.get(flag, False) if isinstance(flag, str) else flag
                                for flag in FAMILIES[architecture])
        num_heads = raw["num_attention_heads"]
        return cls(
            architecture=architecture, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"], num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=num_heads, num_key_value_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=raw.get("head_dim") or (128 if qk_norm else raw["hidden_size"] // num_heads),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6), rope=normalise_rope(raw, path),
            max_position_embeddings=raw.get("max_position_embeddings", 2048 if "Llama" in architecture else 32768),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            has_qkv_bias=qkv, has_o_bias=o, has_mlp_bias=mlp, has_qk_norm=qk_norm,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_token_ids=eos_token_ids(raw, Path(folder) / "generation_config.json"))


def refuse_if(condition, message: str) -> None:
    if condition:
        raise ValueError(message)


def normalise_rope(raw: dict, path: Path) -> dict:
    """`rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5) as one dict with
    "rope_type", "rope_theta" and the numbers of that type."""
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {}),
            **(raw.get("rope_parameters") or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    refuse_if(rope["rope_type"] not in ROPE_TYPES, f"{path}: rope type {rope['rope_type']!r} is not supported; "
              f"supported are {', '.join(ROPE_TYPES)}")
    refuse_if(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1) != 1,
              f"{path}: partial_rotary_factor is not supported")
    rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    return rope


def eos_token_ids(raw: dict, generation_config: Path) -> frozenset[int]:
    """The union of what config.json and generation_config.json say; each an int, a list, or absent."""
    sources = [raw, json.loads(generation_config.read_text()) if generation_config.is_file() else {}]
    values = [source.get("eos_token_id") for source in sources]
    return frozenset(i for v in values if v is not None for i in (v if isinstance(v, list) else [v]))


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set, with `None` or "auto" for what the engine chooses.

      dtype                     "auto", "float32", "bfloat16", "float16". auto: float32 on the CPU, else the model's own.
      device                    "auto", "cuda" or "cpu".
      tensor_parallel_size      number of processes (GPUs) that share the model.
      max_model_len             most tokens of one request, prompt and output. None: what the model was trained for.
      max_num_seqs              most sequences running at once. None: 512 on CUDA, 64 on the CPU.
      max_num_batched_tokens    most tokens computed in one step. None: 16,384 on CUDA, 2,048 on the CPU.
      kvcache_block_size        tokens per block. None: 256 with flash-attn (it wants a multiple), else 16.
      num_kvcache_blocks        size of the pool. None: what memory allows.
      gpu_memory_utilization    share of the GPU's memory to use for everything.
      enable_prefix_caching     find and share blocks with equal prefixes.
      async_scheduling          launch the next step before the last one's result is known.
      enforce_eager             capture no CUDA graphs.
      cuda_graph_batch_sizes    batch sizes to capture. None: 1, 2, 4, 8 and multiples of 16 up to 512.
      seed                      of the generator that gives unseeded requests their seeds.
    Raises TypeError for an unknown name, ValueError for a value out of range.
    """

    dtype: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    enforce_eager: bool = False
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    seed: int = 0

    @classmethod
    def from_options(cls, options: dict) -> "EngineConfig":
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
                                + f" Known options: {', '.join(known)}")
        return cls(**options)

    def __post_init__(self):
        if self.cuda_graph_batch_sizes is not None:
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(self.cuda_graph_batch_sizes))
        for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                     "kvcache_block_size", "num_kvcache_blocks"):
            self._check_count(name, getattr(self, name), may_be_none=name != "tensor_parallel_size")
        for size in self.cuda_graph_batch_sizes or ():
            self._check_count("cuda_graph_batch_sizes", size)
        for name, allowed in (("dtype", ("auto", "float32", "bfloat16", "float16")),
                              ("device", ("auto", "cuda", "cpu"))):
            refuse_if(getattr(self, name) not in allowed, f"{name}={getattr(self, name)!r}, but it must be one of "
                      f"{', '.join(allowed)}")
        refuse_if(not 0 < self.gpu_memory_utilization <= 1,
                  f"gpu_memory_utilization={self.gpu_memory_utilization!r}, but it must be in (0, 1]")

    @staticmethod
    def _check_count(name, value, may_be_none=False):
        is_count = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
        refuse_if(not (is_count or (may_be_none and value is None)), f"{name}={value!r}, but it must be an integer >= 1")

    def check_model(self, model: ModelConfig) -> None:
        """Raises ValueError if the options don't fit the model: its length, or heads that don't divide."""
        limit = model.max_position_embeddings
        refuse_if(self.max_model_len and self.max_model_len > limit, f"max_model_len={self.max_model_len} is more than "
                  f"the model's max_position_embeddings={limit}")
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            refuse_if(getattr(model, name) % self.tensor_parallel_size,
                      f"{name}={getattr(model, name)} can't be split over tensor_parallel_size={self.tensor_parallel_size}")

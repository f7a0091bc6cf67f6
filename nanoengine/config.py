"""What a model is (`ModelConfig`, from its config.json) and what a user may set (`EngineConfig`). Frozen.

The spellings of config.json are normalised here and nowhere else. No torch, and no other module of ours.
"""

import difflib
import json
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path

# Families differ in (bias on q, k, v; bias on o; bias in the MLP; norm of q and k). A string names the field
# of config.json that decides.
FAMILIES = {"LlamaForCausalLM": ("attention_bias", "attention_bias", "mlp_bias", False),
            "Qwen2ForCausalLM": (True, False, False, False),
            "Qwen3ForCausalLM": ("attention_bias", "attention_bias", False, True)}
# What config.json may ask for; a field that is absent asks for the first.
SUPPORTED = {"architecture": tuple(FAMILIES), "rope_type": ("default", "linear", "llama3", "yarn"),
             "partial_rotary_factor": (1,), "hidden_act": ("silu",), "sliding_window": (None,),
             "quantization_config": (None,)}

def refuse_if(condition, message: str) -> None:
    if condition:
        raise ValueError(message)

def read_json(path: Path) -> dict:
    """Without nulls, which say the same as an absent field."""
    return json.loads(path.read_text(), object_hook=lambda d: {k: v for k, v in d.items() if v is not None})

@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. Names follow config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: dict                      # "rope_type", "rope_theta" and the numbers of that type
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: frozenset[int]   # the union of what config.json and generation_config.json say
    dtype: str
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Raises FileNotFoundError without config.json, ValueError if it asks for what isn't `SUPPORTED`."""
        path, generation_path = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        raw, generation = read_json(path), read_json(generation_path) if generation_path.is_file() else {}
        architecture = (raw.get("architectures") or ["none"])[0]
        rope = {"rope_theta": raw.get("rope_theta", 10000.0),       # transformers 4: beside a rope_scaling
                **raw.get("rope_scaling", {}), **raw.get("rope_parameters", {})}
        rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
        slides = raw.get("use_sliding_window") or "sliding_attention" in raw.get("layer_types", ())
        asked = {**raw, **rope, "architecture": architecture,
                 "sliding_window": raw.get("sliding_window", "on") if slides else None}
        for name, allowed in SUPPORTED.items():
            value = asked.get(name, allowed[0])
            refuse_if(value not in allowed, f"{path}: {name}={value!r} is not supported, only {allowed}")
        flags = (raw.get(f, False) if isinstance(f, str) else f for f in FAMILIES[architecture])
        has_qkv_bias, has_o_bias, has_mlp_bias, has_qk_norm = flags
        shape = {"num_key_value_heads": raw["num_attention_heads"],
                 "head_dim": 128 if has_qk_norm else raw["hidden_size"] // raw["num_attention_heads"],
                 "max_position_embeddings": 2048 if architecture == "LlamaForCausalLM" else 32768,
                 **{field.name: raw[field.name] for field in fields(cls) if field.name in raw}}
        shape["dtype"] = (raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        rope.setdefault("original_max_position_embeddings", shape["max_position_embeddings"])
        eos = [source.get("eos_token_id", []) for source in (raw, generation)]      # each an id or a list
        return cls(architecture=architecture, rope=rope, has_qkv_bias=has_qkv_bias, has_o_bias=has_o_bias,
                   has_mlp_bias=has_mlp_bias, has_qk_norm=has_qk_norm, **shape,
                   eos_token_ids=frozenset(i for v in eos for i in (v if isinstance(v, list) else [v])))

@dataclass(frozen=True)
class EngineConfig:
    """What a user may set. Raises TypeError for an unknown name, ValueError for a value out of range."""

    dtype: str = "auto"                         # auto: float32 on the CPU, else the model's own
    device: str = "auto"                        # auto: "cuda" if there is one, else "cpu"
    tensor_parallel_size: int = 1               # processes (GPUs) that share the model
    max_model_len: int | None = None            # most tokens of a request, with output; None: the model's
    max_num_seqs: int | None = None             # most sequences at once; None: 512 on CUDA, 64 on the CPU
    max_num_batched_tokens: int | None = None   # most tokens of a step; None: 16,384 on CUDA, 2,048 on CPU
    kvcache_block_size: int | None = None       # tokens; None: 256 with flash-attn (or a multiple), else 16
    num_kvcache_blocks: int | None = None       # size of the pool; None: what memory allows
    gpu_memory_utilization: float = 0.9         # share of the GPU's memory to use for everything
    enable_prefix_caching: bool = True          # find and share blocks with equal prefixes
    async_scheduling: bool = True               # launch the next step before the last one's result is known
    enforce_eager: bool = False                 # capture no CUDA graphs
    cuda_graph_batch_sizes: tuple[int, ...] | None = None   # None: 1, 2, 4, 8 and multiples of 16 up to 512
    seed: int = 0                               # of the generator that gives unseeded requests their seeds

    @classmethod
    def from_options(cls, options: dict) -> "EngineConfig":
        known = [field.name for field in fields(cls)]
        for name in options.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"unknown option {name!r}{hint} Known options: {', '.join(known)}")
        return cls(**options)

    def __post_init__(self):
        if self.cuda_graph_batch_sizes is not None:
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(self.cuda_graph_batch_sizes))
        counts = [(f.name, getattr(self, f.name)) for f in fields(self) if f.type == int | None]
        counts = [(name, value) for name, value in counts if value is not None]
        counts += [("cuda_graph_batch_sizes", size) for size in self.cuda_graph_batch_sizes or ()]
        for name, value in [*counts, ("tensor_parallel_size", self.tensor_parallel_size)]:
            is_count = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
            refuse_if(not is_count, f"{name}={value!r}, but it must be an integer >= 1")
        for name, allowed in (("device", ("auto", "cuda", "cpu")),
                              ("dtype", ("auto", "float32", "bfloat16", "float16"))):
            value = getattr(self, name)
            refuse_if(value not in allowed, f"{name}={value!r}, but it must be one of {allowed}")
        share = self.gpu_memory_utilization
        refuse_if(not 0 < share <= 1, f"gpu_memory_utilization={share!r}, but it must be in (0, 1]")

    def check_model(self, model: ModelConfig) -> None:
        """Raises ValueError if the options don't fit the model: its length, or heads that don't divide."""
        limit, size = model.max_position_embeddings, self.tensor_parallel_size
        refuse_if((self.max_model_len or 0) > limit,
                  f"max_model_len={self.max_model_len} exceeds the model's max_position_embeddings={limit}")
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            value = getattr(model, name)
            refuse_if(value % size, f"{name}={value} can't be split over tensor_parallel_size={size}")

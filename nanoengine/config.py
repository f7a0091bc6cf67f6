"""What a model is (`ModelConfig`, from its config.json) and what a user may set (`EngineConfig`). Frozen. The spellings
of config.json are normalised here and nowhere else. No torch, and no other module of ours."""

import difflib
import json
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path

# Families differ in these flags of ModelConfig. A string names the field of config.json that decides.
FLAGS = ("has_qkv_bias", "has_o_bias", "has_mlp_bias", "has_qk_norm")
FAMILIES = {"LlamaForCausalLM": ("attention_bias", "attention_bias", "mlp_bias", False),
            "Qwen2ForCausalLM": (True, False, False, False),
            "Qwen3ForCausalLM": ("attention_bias", "attention_bias", False, True)}
# What config.json must give: sizes, and the numbers of its rope_type. What it may ask for; the first if absent.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROPE_NUMBERS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
                "yarn": ("factor",)}
SUPPORTED = {"architecture": tuple(FAMILIES), "rope_type": tuple(ROPE_NUMBERS), "partial_rotary_factor": (1,),
             "hidden_act": ("silu",), "sliding_window": (None,), "quantization_config": (None,)}

def is_count(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1

# What an option of EngineConfig may be: a test and the words for it, by the option's name or else its type.
OPTIONS = {
    "dtype": (lambda v: v in ("auto", "float32", "bfloat16", "float16"), "auto, float32, bfloat16 or float16"),
    "device": (lambda v: v in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
    "seed": (lambda v: isinstance(v, Integral), "an integer"), bool: (lambda v: isinstance(v, bool), "True or False"),
    int: (is_count, "an integer >= 1"), float: (lambda v: isinstance(v, Real) and 0 < v <= 1, "in (0, 1]"),
    int | None: (lambda v: v is None or is_count(v), "an integer >= 1, or None"),
    tuple[int, ...] | None: (lambda v: v is None or isinstance(v, tuple) and all(map(is_count, v)), "integers >= 1")}

def refuse_if(condition, message: str) -> None:
    if condition:
        raise ValueError(message)

def read_json(path: Path) -> dict:
    """Without nulls, which say the same as an absent field."""
    try:
        return json.loads(path.read_bytes(), object_hook=lambda d: {k: v for k, v in d.items() if v is not None})
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error

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
        """Raises FileNotFoundError without config.json, ValueError if it lacks a number or isn't `SUPPORTED`."""
        path, generation_path = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        raw, generation = read_json(path), read_json(generation_path) if generation_path.is_file() else {}
        architecture, num_heads = (raw.get("architectures") or ["none"])[0], raw.get("num_attention_heads")
        is_llama, slides = architecture == "LlamaForCausalLM", "sliding_attention" in raw.get("layer_types", ())
        slides = slides or raw.get("use_sliding_window", is_llama and "sliding_window" in raw)
        length = raw.get("max_position_embeddings", 2048 if is_llama else 32768)
        rope = {"rope_theta": raw.get("rope_theta", 10000.0), "original_max_position_embeddings": length,
                **raw.get("rope_scaling", {}), **raw.get("rope_parameters", {})}
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        eos = [source.get("eos_token_id", []) for source in (raw, generation)]  # each an id or a list
        asked = {"num_key_value_heads": num_heads, **raw, **rope, "max_position_embeddings": length,
                 "sliding_window": raw.get("sliding_window", "on") if slides else None, "architecture": architecture,
                 "dtype": (raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
                 "rope": rope, "eos_token_ids": frozenset(i for v in eos for i in (v if isinstance(v, list) else [v]))}
        for name, allowed in SUPPORTED.items():
            value = asked.get(name, allowed[0])
            refuse_if(value not in allowed, f"{path}: {name}={value!r} is not supported, only {allowed}")
        for name in (*SIZES, *ROPE_NUMBERS[rope["rope_type"]]):
            refuse_if(name not in asked, f"{path}: {name} is missing (rope_type={rope['rope_type']!r})")
        asked |= {k: raw.get(v, False) if isinstance(v, str) else v for k, v in zip(FLAGS, FAMILIES[architecture])}
        asked.setdefault("head_dim", 128 if asked["has_qk_norm"] else raw["hidden_size"] // num_heads)
        return cls(**{field.name: asked[field.name] for field in fields(cls) if field.name in asked})

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
            hint = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, known, n=1, cutoff=0.5))
            raise TypeError(f"unknown option {name!r}{hint} (known options: {', '.join(known)})")
        return cls(**options)

    def __post_init__(self):
        if hasattr(self.cuda_graph_batch_sizes, "__iter__"):
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(self.cuda_graph_batch_sizes))
        for field in fields(self):
            value, (is_valid, wanted) = getattr(self, field.name), OPTIONS.get(field.name) or OPTIONS[field.type]
            refuse_if(not is_valid(value), f"{field.name}={value!r}, but it must be {wanted}")

    def check_model(self, model: ModelConfig) -> None:
        """Raises ValueError if the options don't fit the model: its length, or heads that don't divide."""
        longest, limit, size = self.max_model_len or 0, model.max_position_embeddings, self.tensor_parallel_size
        refuse_if(longest > limit, f"max_model_len={longest} exceeds the model's max_position_embeddings={limit}")
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            value = getattr(model, name)
            refuse_if(value % size, f"{name}={value} can't be split over tensor_parallel_size={size}")

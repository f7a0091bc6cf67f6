"""What a model is (`ModelConfig`, from its config.json) and what a user may set (`EngineConfig`). Frozen. The spellings
of config.json are normalised here and nowhere else. No torch, and no other module of ours."""
import difflib
import json
from collections import namedtuple
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path

# Families differ in the first four fields of ModelConfig. A string names the field of config.json that decides.
FAMILIES = {"LlamaForCausalLM": ("attention_bias", "attention_bias", "mlp_bias", False),
            "Qwen2ForCausalLM": (True, False, False, False),
            "Qwen3ForCausalLM": ("attention_bias", "attention_bias", False, True)}
ROPE_TYPES = {"default": "", "linear": "factor", "llama3": "factor low_freq_factor high_freq_factor", "yarn": "factor"}
SUPPORTED = {"architecture": tuple(FAMILIES), "rope_type": tuple(ROPE_TYPES), "partial_rotary_factor": (1,),
             "hidden_act": ("silu",), "sliding_window": (None,), "quantization_config": (None,)}   # first: if absent

def refuse_if(condition, message: str) -> None:
    if condition:
        raise ValueError(message)

def read_json(path: Path) -> dict:      # without nulls, which say the same as an absent field
    try:
        return json.loads(path.read_bytes(), object_hook=lambda d: {k: v for k, v in d.items() if v is not None})
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error

class ModelConfig(namedtuple("ModelConfig", """has_qkv_bias has_o_bias has_mlp_bias has_qk_norm architecture
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        max_position_embeddings rms_norm_eps tie_word_embeddings rope dtype eos_token_ids""")):
    """The model's shape; names follow config.json. rope: a dict of rope_type, rope_theta and that type's numbers."""
    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Raises FileNotFoundError without config.json; ValueError for a number it lacks or what is not `SUPPORTED`."""
        path, generation_path = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        raw, generation = read_json(path), read_json(generation_path) if generation_path.is_file() else {}
        architecture, num_heads = (raw.get("architectures") or ["none"])[0], raw.get("num_attention_heads", 1)
        slides = (raw.get("use_sliding_window", architecture == "LlamaForCausalLM" and "sliding_window" in raw)
                  or "sliding_attention" in raw.get("layer_types", ()))
        scaling = raw.get("rope_scaling", {}) | raw.get("rope_parameters", {})
        rope = {"rope_type": scaling.pop("type", "default"), "rope_theta": raw.get("rope_theta", 10000.0),
                "original_max_position_embeddings": raw.get("max_position_embeddings"), **scaling}
        eos = [source.get("eos_token_id", []) for source in (raw, generation)]      # both count; each an id or a list
        asked = {**{name: allowed[0] for name, allowed in SUPPORTED.items()}, "tie_word_embeddings": False,
                 "head_dim": 128 if architecture == "Qwen3ForCausalLM" else raw.get("hidden_size", 0) // num_heads,
                 "num_key_value_heads": num_heads, "rms_norm_eps": 1e-6, **raw, **rope, "architecture": architecture,
                 "sliding_window": raw.get("sliding_window", "on") if slides else None, "rope": rope,
                 "dtype": raw.get("dtype", raw.get("torch_dtype", "float32")).removeprefix("torch."),
                 "eos_token_ids": frozenset(i for v in eos for i in (v if isinstance(v, list) else [v]))}
        for name, allowed in SUPPORTED.items():
            refuse_if(asked[name] not in allowed, f"{path}: {name}={asked[name]!r} is not supported, only {allowed}")
        asked |= {name: v is True or raw.get(v, False) for name, v in zip(cls._fields, FAMILIES[architecture])}
        for name in (*cls._fields, *ROPE_TYPES[rope["rope_type"]].split()):
            refuse_if(name not in asked, f"{path}: {name} is missing (rope_type={rope['rope_type']!r})")
        return cls(**{name: asked[name] for name in cls._fields})

is_count = lambda value: isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
LIMITS = {"dtype": (("auto", "float32", "bfloat16", "float16").__contains__, "auto, float32, bfloat16 or float16"),
          "device": (("auto", "cuda", "cpu").__contains__, "auto, cuda or cpu"), int: (is_count, "an integer >= 1"),
          "seed": (lambda v: isinstance(v, Integral), "an integer"), bool: (lambda v: isinstance(v, bool), "a bool"),
          float: (lambda v: isinstance(v, Real) and 0 < v <= 1, "in (0, 1]"),    # the tests, and words for them
          int | None: (lambda v: v is None or is_count(v), "an integer >= 1, or None"),
          list | None: (lambda v: v is None or type(v) in (list, tuple) and v and all(map(is_count, v)), "ints >= 1")}

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
    cuda_graph_batch_sizes: list | None = None  # None: 1, 2, 4, 8 and multiples of 16 up to 512
    seed: int = 0                               # of the generator that gives unseeded requests their seeds
    @classmethod
    def from_options(cls, options: dict) -> "EngineConfig":
        types = {field.name: field.type for field in fields(cls)}
        for name, value in options.items():
            if name not in types:
                hint = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, types, 1, 0.5))
                raise TypeError(f"unknown option {name!r}{hint} (known options: {', '.join(types)})")
            is_valid, wanted = LIMITS.get(name) or LIMITS[types[name]]
            refuse_if(not is_valid(value), f"{name}={value!r}, but it must be {wanted}")
        return cls(**{k: getattr(v, "item", lambda: v)() for k, v in options.items()})       # NumPy's numbers overflow
    def check_model(self, model: ModelConfig) -> None:
        """Raises ValueError if the options don't fit the model: its length, or heads that don't divide."""
        longest, limit, size = self.max_model_len or 0, model.max_position_embeddings, self.tensor_parallel_size
        refuse_if(longest > limit, f"max_model_len={longest} exceeds the model's max_position_embeddings={limit}")
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            value = getattr(model, name)
            refuse_if(value % size, f"{name}={value} can't be split over tensor_parallel_size={size}")

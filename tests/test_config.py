"""config.json in its spellings, what is refused by name, and the options and settings that users may give."""

import dataclasses
import json
import math

import pytest

from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.sampling_params import SamplingParams

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 256, "rope_theta": 5000.0}


@pytest.fixture
def read(tmp_path):
    """Writes config.json (Llama's, with some fields replaced; `...` leaves one out) and reads it."""
    def read(generation_config=None, **changes):
        raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return ModelConfig.from_folder(tmp_path)
    return read


# --- The model's shape


def test_the_shape_is_read(read):
    model = read(head_dim=24, tie_word_embeddings=True)
    assert (model.architecture, model.vocab_size, model.hidden_size) == ("LlamaForCausalLM", 128, 64)
    assert (model.intermediate_size, model.num_hidden_layers) == (96, 2)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (4, 2, 24)
    assert (model.rms_norm_eps, model.max_position_embeddings) == (1e-5, 256)
    assert model.tie_word_embeddings is True


def test_a_model_config_is_frozen(read):
    with pytest.raises(AttributeError):
        read().vocab_size = 7


def test_a_folder_may_be_given_as_a_string(read, tmp_path):
    assert read() == ModelConfig.from_folder(str(tmp_path))


@pytest.mark.parametrize("head_dim", [None, ...])
def test_without_head_dim_the_heads_share_the_hidden_size(read, head_dim):
    assert read(head_dim=head_dim).head_dim == 16


def test_qwen3_without_head_dim_has_128(read):
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize("num_key_value_heads", [None, ...])
def test_without_kv_heads_every_head_has_its_own(read, num_key_value_heads):
    assert read(num_key_value_heads=num_key_value_heads).num_key_value_heads == 4


def test_embeddings_are_tied_only_if_the_config_says_so(read):
    assert read().tie_word_embeddings is False


def test_qwen2_has_qkv_biases_though_its_config_does_not_say_so(read):
    model = read(architectures=["Qwen2ForCausalLM"])
    assert (model.has_qkv_bias, model.has_o_bias, model.has_mlp_bias, model.has_qk_norm) == (True, False, False, False)


@pytest.mark.parametrize("attention_bias", [False, True, ...])
def test_llama_and_qwen3_have_the_biases_that_their_config_asks_for(read, attention_bias):
    has = attention_bias is True
    llama = read(attention_bias=attention_bias, mlp_bias=True)
    assert (llama.has_qkv_bias, llama.has_o_bias, llama.has_mlp_bias, llama.has_qk_norm) == (has, has, True, False)
    assert read(attention_bias=attention_bias).has_mlp_bias is False
    qwen3 = read(architectures=["Qwen3ForCausalLM"], attention_bias=attention_bias)
    assert (qwen3.has_qkv_bias, qwen3.has_o_bias, qwen3.has_mlp_bias, qwen3.has_qk_norm) == (has, has, False, True)


@pytest.mark.parametrize("fields, dtype", [
    ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"),
    ({"torch_dtype": "torch.bfloat16"}, "bfloat16"), ({}, "float32"), ({"torch_dtype": None}, "float32"),
    ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "bfloat16")])
def test_dtype_is_read_in_both_spellings(read, fields, dtype):
    assert read(**fields).dtype == dtype


# --- Rotary embedding (case 20)


def rope_of(model, *names):
    return {name: model.rope.get(name) for name in ("rope_type", "rope_theta", *names)}


@pytest.mark.parametrize("fields, theta", [
    ({}, 5000.0),
    ({"rope_theta": ...}, 10000.0),
    ({"rope_scaling": None}, 5000.0),
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0),
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0}}, 7.0),
    ({"rope_theta": ..., "rope_scaling": None, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0),
    ({"rope_parameters": {"rope_type": "default"}}, 5000.0),
    ({"rope_parameters": None}, 5000.0)])
def test_plain_rope_is_read_in_every_spelling(read, fields, theta):
    assert rope_of(read(**fields)) == {"rope_type": "default", "rope_theta": theta}


NUMBERS = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize("rope_type", NUMBERS)
@pytest.mark.parametrize("spelling", ["rope_type", "type", "both", "rope_parameters"])
def test_scaled_rope_is_read_with_its_numbers_in_every_spelling(read, rope_type, spelling):
    numbers = NUMBERS[rope_type]
    if spelling == "rope_parameters":
        model = read(rope_theta=..., rope_parameters={**numbers, "rope_type": rope_type, "rope_theta": 5000.0})
    else:
        keys = {"both": ("rope_type", "type")}.get(spelling, (spelling,))
        model = read(rope_scaling={**numbers, **dict.fromkeys(keys, rope_type)})
    assert rope_of(model, *numbers) == {"rope_type": rope_type, "rope_theta": 5000.0, **numbers}


def test_a_scaling_without_the_original_length_takes_the_model_s(read):
    model = read(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert model.rope["original_max_position_embeddings"] == 256


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["longrope", "dynamic", "su", "mrope"])
def test_another_rope_type_is_refused_by_name(read, field, key, rope_type):
    with pytest.raises(ValueError, match=f"{rope_type}.*yarn"):
        read(**{field: {key: rope_type, "factor": 2.0}})


@pytest.mark.parametrize("fields", [
    {"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partial_rotation_is_refused_by_name(read, fields):
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        read(**fields)


# --- End-of-sequence ids


@pytest.mark.parametrize("config, generation, ids", [
    (..., None, set()), (None, None, set()), (5, None, {5}), ([5, 7], None, {5, 7}), (0, None, {0}),
    (..., {}, set()), (..., {"eos_token_id": 7}, {7}), (..., {"eos_token_id": [7, 8]}, {7, 8}),
    (5, {"eos_token_id": None}, {5}), (5, {"eos_token_id": 7}, {5, 7}), (5, {"eos_token_id": [5, 7]}, {5, 7}),
    ([5, 6], {"eos_token_id": [7]}, {5, 6, 7}), ([5, 6], {"eos_token_id": 0}, {0, 5, 6})])
def test_end_of_sequence_ids_are_the_union_of_both_files(read, config, generation, ids):
    assert read(generation, eos_token_id=config).eos_token_ids == ids


# --- What is refused (case 19)


def test_a_folder_without_config_json_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=folder.name):
            ModelConfig.from_folder(folder)


@pytest.mark.parametrize("fields, named", [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM.*Qwen2ForCausalLM.*Qwen3ForCausalLM"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    ({"architectures": []}, "architecture"), ({"architectures": None}, "architecture"),
    ({"architectures": ...}, "architecture"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
    ({"sliding_window": 32}, "sliding_window.*32"),
    ({"sliding_window": 32, "use_sliding_window": True, "architectures": ["Qwen2ForCausalLM"]}, "sliding_window.*32"),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, "sliding_window")])
def test_what_the_engine_cannot_run_is_refused_by_name(read, fields, named):
    with pytest.raises(ValueError, match=named):
        read(**fields)


@pytest.mark.parametrize("fields", [
    {"quantization_config": None}, {"hidden_act": "silu"}, {"sliding_window": None},
    {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2},
    {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32},
    {"architectures": ["Qwen3ForCausalLM"], "sliding_window": None, "use_sliding_window": False,
     "layer_types": ["full_attention"] * 2},
    {"partial_rotary_factor": 1.0}])
def test_what_is_switched_off_is_not_refused(read, fields):
    assert read(**fields).num_hidden_layers == 2


# --- Engine options


def test_the_defaults_leave_the_choice_to_the_engine():
    config = EngineConfig.from_options({})
    assert (config.dtype, config.device, config.tensor_parallel_size) == ("auto", "auto", 1)
    assert config.enable_prefix_caching and config.async_scheduling and not config.enforce_eager
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size", "num_kvcache_blocks",
                 "cuda_graph_batch_sizes"):
        assert getattr(config, name) is None


def test_options_are_taken_over_and_frozen():
    config = EngineConfig.from_options({"max_num_seqs": 3, "kvcache_block_size": 4, "cuda_graph_batch_sizes": [1, 2]})
    assert (config.max_num_seqs, config.kvcache_block_size, config.cuda_graph_batch_sizes) == (3, 4, [1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 4


@pytest.mark.parametrize("name, near", [
    ("max_model_length", "max_model_len"), ("tensor_parallel", "tensor_parallel_size"),
    ("block_size", "kvcache_block_size"),
    ("gpu_memory_utilisation", "gpu_memory_utilization"), ("max_num_seq", "max_num_seqs")])
def test_an_unknown_option_is_refused_with_the_nearest_known_name(name, near):
    """Case 17."""
    with pytest.raises(TypeError, match=f"{name}.*did you mean '{near}'"):
        EngineConfig.from_options({name: 1})


def test_an_option_like_no_other_is_refused_with_the_known_names():
    with pytest.raises(TypeError, match="zzz.*max_model_len.*seed") as error:
        EngineConfig.from_options({"zzz": 1})
    assert "did you mean" not in str(error.value)


COUNTS = ["tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size",
          "num_kvcache_blocks"]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, math.nan])
def test_a_count_is_an_integer_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        EngineConfig.from_options({name: value})
    assert getattr(EngineConfig.from_options({name: 1}), name) == 1


def test_there_is_no_tensor_parallel_size_of_none():
    with pytest.raises(ValueError, match="tensor_parallel_size=None"):
        EngineConfig.from_options({"tensor_parallel_size": None})


@pytest.mark.parametrize("name, value", [
    ("dtype", "int8"), ("dtype", None), ("device", "tpu"), ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.01), ("gpu_memory_utilization", -0.5), ("gpu_memory_utilization", math.nan)])
def test_a_value_out_of_range_is_refused_with_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig.from_options({name: value})


@pytest.mark.parametrize("sizes", [(0,), [1, -2], (1.5,), ("1",), (None,), [], ()])
def test_graph_batch_sizes_are_counts(sizes):
    with pytest.raises(ValueError, match="cuda_graph_batch_sizes"):
        EngineConfig.from_options({"cuda_graph_batch_sizes": sizes})


@pytest.mark.parametrize("value", [0.1, 1, 1.0])
def test_the_whole_gpu_may_be_used(value):
    assert EngineConfig.from_options({"gpu_memory_utilization": value}).gpu_memory_utilization == value


# --- Options and model together (case 35)


@pytest.mark.parametrize("fields, size, name, number", [
    ({}, 3, "num_attention_heads", 4),
    ({}, 4, "num_key_value_heads", 2),
    ({"vocab_size": 129}, 2, "vocab_size", 129),
    ({"intermediate_size": 97}, 2, "intermediate_size", 97)])
def test_what_cannot_be_split_over_the_ranks_is_refused_with_the_numbers(read, fields, size, name, number):
    with pytest.raises(ValueError, match=f"{name}={number}.*tensor_parallel_size={size}"):
        EngineConfig(tensor_parallel_size=size).check_model(read(**fields))


@pytest.mark.parametrize("size", [1, 2])
def test_what_can_be_split_is_accepted(read, size):
    EngineConfig(tensor_parallel_size=size).check_model(read())


def test_max_model_len_is_at_most_what_the_model_was_trained_for(read):
    model = read()
    EngineConfig(max_model_len=256).check_model(model)
    EngineConfig().check_model(model)
    with pytest.raises(ValueError, match="257.*256"):
        EngineConfig(max_model_len=257).check_model(model)


# --- Sampling settings (case 14)


@pytest.mark.parametrize("field, value", [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", None), ("max_tokens", True),
    ("max_tokens", "5"), ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", None),
    ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -5), ("top_k", 2.0), ("min_p", -0.1), ("min_p", 1.1),
    ("seed", -1), ("seed", 2**63), ("seed", 1.5), ("stop", ""), ("stop", ["a", ""]), ("stop", [5]),
    ("stop_token_ids", ["a"]), ("stop_token_ids", [1.5])])
def test_a_bad_setting_is_refused_with_its_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        SamplingParams(**{field: value})


def test_settings_at_their_limits_are_accepted():
    SamplingParams(temperature=0, max_tokens=1, top_k=0, top_p=1, min_p=1, seed=2**63 - 1)
    SamplingParams(top_p=1e-9, min_p=0, seed=0)


def test_one_stop_string_and_lists_become_tuples():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"], stop_token_ids=[5, 7]).stop == ("ab", "c")
    assert SamplingParams(stop_token_ids=[5, 7]).stop_token_ids == (5, 7)
    assert SamplingParams(stop=None, stop_token_ids=None).stop == SamplingParams().stop == ()


@pytest.mark.parametrize("fields, has_filters", [
    ({}, False), ({"temperature": 0.5}, False), ({"top_k": 1}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True),
    ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, False)])
def test_only_drawing_with_filters_has_filters(fields, has_filters):
    assert SamplingParams(**fields).has_filters is has_filters


# --- Wrong kinds and missing fields


@pytest.mark.parametrize("field, value", [("stop", 5), ("stop", 0), ("stop_token_ids", 7), ("stop_token_ids", 0)])
def test_a_setting_of_the_wrong_kind_is_refused_with_its_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field, value", [
    ("gpu_memory_utilization", "0.9"), ("cuda_graph_batch_sizes", 8), ("seed", "x"), ("seed", None),
    ("enable_prefix_caching", "no"), ("async_scheduling", None), ("enforce_eager", "false")])
def test_an_option_of_the_wrong_kind_is_refused_with_its_name(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        EngineConfig.from_options({field: value})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                   "num_attention_heads"])
def test_a_missing_size_is_named(read, field):
    with pytest.raises(ValueError, match=field):
        read(**{field: ...})


@pytest.mark.parametrize("rope_type, missing", [
    ("linear", "factor"), ("llama3", "factor"), ("llama3", "low_freq_factor"), ("yarn", "factor")])
def test_a_missing_rope_number_is_named(read, rope_type, missing):
    numbers = {name: value for name, value in NUMBERS[rope_type].items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        read(rope_scaling={"rope_type": rope_type, **numbers})


def test_a_broken_config_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_folder(tmp_path)


def test_rope_holds_only_names_of_the_new_spelling(read):
    assert "type" not in read(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}).rope

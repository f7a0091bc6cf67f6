"""Three families in one decoder: logits and tokens equal transformers'; what can't run is refused by name."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from nanoengine import LLM, SamplingParams
from tiny import assert_same_tokens, copy_checkpoint, engine, oracle_for, random_ids, reference_logits

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
VARIANTS = [
    (family, tied, rope, spelling)
    for family in tiny.FAMILIES
    for tied in (False, True)
    for rope in tiny.ROPES
    for spelling in ("new", "old")
]


def greedy(folder, prompts, **options):
    with engine(folder, **options) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def check_tokens(folder, prompts, reference=None, **options):
    for prompt, output in zip(prompts, greedy(folder, prompts, **options)):
        assert_same_tokens(output, oracle_for(reference or folder, prompt, GREEDY))


# ---- equal to transformers


@pytest.mark.parametrize("family, tied, rope, spelling", VARIANTS)
def test_logits_equal_transformers(checkpoint, family, tied, rope, spelling):
    folder = checkpoint(family, tied=tied, rope=rope, spelling=spelling)
    token_ids = random_ids(1, 120)
    logits, expected = tiny.engine_logits(folder, token_ids), reference_logits(folder, token_ids)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("rope", tiny.ROPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_tokens_equal_transformers(checkpoint, family, tied, rope):
    check_tokens(checkpoint(family, tied=tied, rope=rope), [random_ids(2, 70), random_ids(3, 5)])


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "yarn-options"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_dropped_rope_scaling_would_show(checkpoint, family, rope):
    token_ids = random_ids(1, 120)
    plain, scaled = (reference_logits(checkpoint(family, rope=name), token_ids) for name in ("default", rope))
    assert (plain - scaled).abs().max().item() > 1.0


def test_rope_theta_absent_means_the_familys_default(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("llama", spelling="old"), tmp_path / "a", config={"rope_theta": None})
    check_tokens(folder, [random_ids(2, 70)])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_early_prompt_token_changes_the_output(checkpoint, family):
    """If this fails the models are too dull for every other test here."""
    prompt = random_ids(4, 60)
    changed = [prompt[0], (prompt[1] + 1) % 128, *prompt[2:]]
    first, second = greedy(checkpoint(family), [prompt, changed])
    assert first.token_ids != second.token_ids
    assert len(set(first.token_ids)) > 2


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_kv_head_per_head_and_one_for_all(checkpoint, family):
    for num_kv_heads in (4, 1):
        check_tokens(checkpoint(family, num_key_value_heads=num_kv_heads), [random_ids(5, 20)])


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_llama_with_biases_is_right_or_refused_by_name(checkpoint, field):
    folder = checkpoint("llama", **{field: True})
    try:
        check_tokens(folder, [random_ids(6, 20)])
    except ValueError as error:
        assert field in str(error)


# ---- weights


def test_shards_with_an_index_beside_a_consolidated_copy(checkpoint):
    folder = checkpoint("qwen3", num_shards=3, consolidated=True)
    assert len(list(folder.glob("*.safetensors"))) == 5
    check_tokens(folder, [random_ids(7, 20)])


def test_bfloat16_weights_are_float32_on_the_cpu(checkpoint):
    """dtype "auto": 16-bit matrix products on a CPU are slow and coarse, and the oracle would disagree."""
    folder = checkpoint("llama", dtype=torch.bfloat16)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype is torch.bfloat16
    check_tokens(folder, [random_ids(8, 40)])


def test_a_tied_head_that_is_in_the_file_loads_too(checkpoint, tmp_path):
    def add_head(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    source = checkpoint("llama", tied=True)
    folder = copy_checkpoint(source, tmp_path / "a", edit=add_head)
    check_tokens(folder, [random_ids(9, 20)], reference=source)


def test_an_untied_head_that_is_absent_is_refused(checkpoint, tmp_path):
    source = checkpoint("llama")
    folder = copy_checkpoint(source, tmp_path / "a", edit=lambda state: state.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        tiny.make_llm(folder)


DAMAGE = {
    "missing": lambda state, name: state.pop(name),
    "unexpected": lambda state, name: state.update({name: torch.zeros(4)}),
    "wrong shape": lambda state, name: state.update({name: torch.zeros(65, 64)}),
}


@pytest.mark.parametrize(
    "kind, family, name",
    [
        ("missing", "llama", "model.layers.1.mlp.up_proj.weight"),
        ("missing", "llama", "model.norm.weight"),
        ("missing", "qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("missing", "qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("missing", "llama", "model.layers.1.self_attn.v_proj.weight"),
        ("unexpected", "llama", "model.layers.0.self_attn.q_norm.weight"),
        ("unexpected", "llama", "model.layers.2.input_layernorm.weight"),
        ("unexpected", "qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("wrong shape", "llama", "model.layers.0.self_attn.q_proj.weight"),
        ("wrong shape", "llama", "model.layers.0.mlp.gate_proj.weight"),
        ("wrong shape", "qwen2", "model.embed_tokens.weight"),
        ("wrong shape", "qwen2", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_every_tensor_is_accounted_for(checkpoint, tmp_path, kind, family, name):
    source, damage = checkpoint(family), DAMAGE[kind]
    folder = copy_checkpoint(source, tmp_path / "damaged", edit=lambda state: damage(state, name))
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        tiny.make_llm(folder)
    assert str(folder) in str(caught.value)


def test_a_tensor_of_the_index_that_its_shard_lacks(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("qwen3", num_shards=3, consolidated=True), tmp_path / "a")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["model.norm.weight"]
    state = load_file(shard)
    del state["model.norm.weight"]
    save_file(state, shard)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        tiny.make_llm(folder)


def test_a_shard_of_the_index_that_does_not_exist(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("qwen3", num_shards=3, consolidated=True), tmp_path / "a")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors"):
        tiny.make_llm(folder)


def test_a_folder_without_weights(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("llama"), tmp_path / "weightless")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors") as caught:
        tiny.make_llm(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_without_config(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json") as caught:
        tiny.make_llm(tmp_path / "empty")
    assert str(tmp_path / "empty") in str(caught.value)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "nowhere"))):
        tiny.make_llm(tmp_path / "nowhere")


def test_a_hub_id_that_cannot_be_reached():
    with pytest.raises((OSError, RuntimeError, ValueError), match="no-such-owner/no-such-model"):
        LLM("no-such-owner/no-such-model", device="cpu")


# ---- configs that are refused before anything is loaded


@pytest.mark.parametrize(
    "family, config, names",
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    ],
)
def test_refused_by_name(checkpoint, tmp_path, family, config, names):
    """The folder holds no weights: a refusal that came after loading would be another error."""
    folder = copy_checkpoint(checkpoint(family), tmp_path / "refused", config=config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=names):
        tiny.make_llm(folder)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_old_spelling_of_rope_is_refused_by_name(checkpoint, tmp_path, scaling, key):
    config = {"rope_scaling": {key: scaling, "factor": 2.0}}
    folder = copy_checkpoint(checkpoint("llama", spelling="old"), tmp_path / "refused", config=config)
    with pytest.raises(ValueError, match=scaling):
        tiny.make_llm(folder)


def test_a_sliding_window_that_is_switched_off_is_no_reason(checkpoint, tmp_path):
    """As in Qwen2.5's config.json."""
    config = {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2}
    folder = copy_checkpoint(checkpoint("qwen2"), tmp_path / "a", config=config)
    check_tokens(folder, [random_ids(10, 40)], reference=checkpoint("qwen2"))


def test_max_model_len_defaults_to_the_models_limit(checkpoint):
    folder = checkpoint("llama", max_position_embeddings=64)
    with engine(folder, max_model_len=None) as llm:
        with pytest.raises(ValueError, match="64"):
            llm.generate([random_ids(1, 64)], GREEDY, use_tqdm=False)
        (output,) = llm.generate([random_ids(1, 60)], GREEDY, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.mark.gpu
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_float32_on_the_gpu_equals_transformers(checkpoint, family):
    prompts = [random_ids(2, 70), random_ids(3, 5)]
    check_tokens(checkpoint(family), prompts, device="cuda", dtype="float32")

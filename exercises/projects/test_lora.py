"""The open project `lora`: an adapter per request. Fails on the plain engine; lora.md says what to build.

An adapter's answers must be those of a checkpoint into which it has been merged, W + scale * B A: each such copy goes
through tiny.py's oracle. The adapters are random, and large enough that every one of them changes the answers.
"""

import json

import pytest
import tiny
import torch
from conftest import checkpoint  # noqa: F401  (a fixture)
from nanoengine import SamplingParams
from safetensors.torch import load_file, save_file
from tiny import assert_same_tokens, oracle_for, random_ids

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ADAPTERS = {  # what it changes: modules, of which layers; fields of adapter_config.json
    "all": (ATTENTION + MLP, (0, 1), {"r": 4, "lora_alpha": 8}),
    "qv": (("q_proj", "v_proj"), (0, 1), {"r": 2, "lora_alpha": 3, "use_rslora": True}),
    "late": (("k_proj", "o_proj", "up_proj", "down_proj"), (1,), {"r": 9, "lora_alpha": 9}),
}


def write_adapter(folder, base, modules, layers, config, seed):
    """PEFT's two files; returns folder. base: the checkpoint's folder."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "bias": "none", "target_modules": list(modules), "use_dora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "modules_to_save": None, "rank_pattern": {}}))
    tensors, generator, r = {}, torch.manual_seed(seed), config["r"]
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(tuple(f"{m}.weight" for m in modules)) and int(name.split(".")[2]) in layers:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(r, weight.shape[1], generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], r, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(base, adapter, folder):
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")

    def edit(state):
        for name in [name for name in tensors if ".lora_A." in name]:
            weight = state[name.removeprefix("base_model.model.").replace(".lora_A", "")]
            weight += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]

    return tiny.copy_checkpoint(base, folder, edit=edit)


class Case:
    """A checkpoint, its adapters' folders, and by adapter the folder whose weights the answers must come from."""

    def __init__(self, base, root):
        self.base, self.adapters, self.merged = base, {}, {None: base}
        for seed, (name, what) in enumerate(ADAPTERS.items()):
            self.adapters[name] = write_adapter(root / name, base, *what, seed)
            self.merged[name] = merge(base, self.adapters[name], root / f"merged-{name}")

    def engine(self, names=tuple(ADAPTERS), **options):
        return tiny.engine(self.base, lora_adapters={name: str(self.adapters[name]) for name in names}, **options)

    def check(self, prompts, params, outputs):
        for number, (prompt, one, output) in enumerate(zip(prompts, params, outputs, strict=True)):
            expected = oracle_for(self.merged[one.adapter], prompt, one)
            assert_same_tokens(output, expected, f"prompt {number}, adapter {one.adapter}:")


@pytest.fixture(scope="module")
def cases(checkpoint, tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = Case(checkpoint(family), tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def case(cases):
    return cases("llama")


def greedy(max_tokens, adapter=None, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, adapter=adapter, **changes)


# ---- what is refused, and when


@pytest.mark.parametrize("adapter", ["", 3, ("all",)])
def test_an_adapters_name_is_a_string(adapter):
    with pytest.raises(ValueError, match="adapter="):
        SamplingParams(adapter=adapter)


@pytest.mark.parametrize("adapters", ["all", ["all"], {3: "x"}])
def test_adapters_are_a_dict_of_names(case, adapters):
    with pytest.raises(ValueError, match="lora_adapters="):
        tiny.make_llm(case.base, lora_adapters=adapters)


def test_an_unknown_adapter_is_refused_when_the_request_is_added(case):
    with case.engine(["all", "qv"]) as llm:
        with pytest.raises(ValueError, match="adapter='late'.*all.*qv"):
            llm.generate([[1, 2], [3]], [greedy(2), greedy(2, "late")], use_tqdm=False)
        assert not llm.has_unfinished() and llm.step() == []
    with tiny.engine(case.base, lora_adapters=None) as llm, pytest.raises(ValueError, match="adapter='all'"):
        llm.add_request([1], greedy(1, "all"))


def changed(case, folder, config=None, edit=None):
    """A copy of the adapter "all" with changes, as an engine's option."""
    fields = json.loads((case.adapters["all"] / "adapter_config.json").read_text())
    tensors = load_file(case.adapters["all"] / "adapter_model.safetensors")
    (edit or (lambda tensors: None))(tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **(config or {})}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return {"lora_adapters": {"changed": str(folder)}}


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"}, {"rank_pattern": {"q_proj": 8}}, {"r": None}]
    + [{"alpha_pattern": {"q_proj": 8}}, {"modules_to_save": ["lm_head"]}, {"lora_alpha": None}],
    ids=lambda config: next(iter(config)),
)
def test_what_isnt_plain_lora_is_refused_by_name(case, tmp_path, config):
    with pytest.raises(ValueError, match=next(iter(config))):
        tiny.make_llm(case.base, **changed(case, tmp_path / "a", config))


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
EDITS = {
    "B is missing": lambda t: t.pop(Q.format("B")),
    "A is missing": lambda t: t.pop(Q.format("A")),
    "a layer too many": lambda t: t.update({Q.format("A").replace("layers.0", "layers.2"): torch.zeros(4, 64)}),
    "an unknown module": lambda t: t.update({Q.format("A").replace("q_proj", "qkv_proj"): torch.zeros(4, 64)}),
    "another width": lambda t: t.update({Q.format("A"): torch.zeros(4, 32)}),
    "another height": lambda t: t.update({Q.format("B"): torch.zeros(32, 4)}),
    "another rank": lambda t: t.update({Q.format("A"): torch.zeros(3, 64), Q.format("B"): torch.zeros(64, 3)}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_tensor_is_accounted_for(case, tmp_path, edit):
    with pytest.raises(ValueError, match="adapter_model.safetensors.*layers"):
        tiny.make_llm(case.base, **changed(case, tmp_path / "a", edit=EDITS[edit]))


def test_a_folder_that_isnt_there(case, tmp_path):
    with pytest.raises(FileNotFoundError):
        tiny.make_llm(case.base, lora_adapters={"gone": str(tmp_path / "gone")})


# ---- one adapter at a time


def test_the_checkpoints_can_tell(case):
    answers = {tuple(oracle_for(folder, random_ids(1, 9), greedy(8)).token_ids) for folder in case.merged.values()}
    assert len(answers) == len(case.merged)


@pytest.mark.parametrize("name", ADAPTERS)
def test_equal_to_merged_weights(case, name):
    prompts = [random_ids(n, 1 + 4 * n) for n in range(4)]
    with case.engine([name]) as llm:
        outputs = llm.generate(prompts, greedy(8, name), use_tqdm=False)
        case.check(prompts, [greedy(8, name)] * 4, outputs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_equal_to_merged_weights_in_other_families(cases, family):
    case, prompt = cases(family), random_ids(5, 11)
    params = [greedy(8, name) for name in case.merged]
    with case.engine() as llm:
        case.check([prompt] * 4, params, llm.generate([prompt] * 4, params, use_tqdm=False))


def test_without_an_adapter_the_model_is_as_it_was(case):
    """Token for token what the plain engine gives, with rows of adapters beside it."""
    prompts = [random_ids(20 + n, 7) for n in range(3)]
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=12) for n in range(3)]
    with tiny.engine(case.base) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with case.engine() as llm:
        others = [greedy(12, "all"), greedy(12, "qv")]
        outputs = llm.generate(prompts + prompts[:2], params + others, use_tqdm=False)
    assert [o.token_ids for o in outputs[:3]] == [o.token_ids for o in expected]


def test_an_adapter_of_zeros(case, tmp_path):
    """B is 0 when training starts: nothing is added."""

    def zero(tensors):
        for name in tensors:
            tensors[name] *= "lora_A" in name

    prompt = random_ids(30, 9)
    with tiny.engine(case.base, **changed(case, tmp_path / "a", edit=zero)) as llm:
        (output,) = llm.generate([prompt], greedy(9, "changed"), use_tqdm=False)
    case.check([prompt], [greedy(9)], [output])


# ---- many in one batch

LONG = random_ids(100, 18)
PROMPTS = [LONG, LONG[:12] + [1, 2, 3], LONG, LONG, random_ids(101, 1), LONG[:8], random_ids(102, 13), LONG]
NAMES = ["all", None, "qv", None, "late", "all", "qv"]


def params_of_rows():
    """Not at import: the plain engine has no such field, and each test is to say so by itself."""
    draws = SamplingParams(temperature=0.7, top_k=40, seed=3, max_tokens=10, adapter="all")
    return [*(greedy(n, name) for n, name in zip((6, 9, 9, 10, 12, 8, 10), NAMES)), draws]


SETTINGS = {
    "roomy": {},
    "budget 7": {"max_num_batched_tokens": 7},
    "few blocks": {"num_kvcache_blocks": 9},
    "two rows": {"max_num_seqs": 2},
    "no cache": {"enable_prefix_caching": False},
    "all at once": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 5, "max_num_seqs": 3},
}


@pytest.mark.parametrize("setting, is_async", [(setting, n % 2 == 0) for n, setting in enumerate(SETTINGS)])
def test_rows_of_one_batch(case, setting, is_async):
    with case.engine(async_scheduling=is_async, **SETTINGS[setting]) as llm:
        for _ in range(2):  # the second time with blocks in the cache
            case.check(PROMPTS, params_of_rows(), llm.generate(PROMPTS, params_of_rows(), use_tqdm=False))
        if "blocks" in setting:
            assert llm.stats()["preemptions"] > 0
        assert llm.stats()["blocks_used"] == 0


def test_a_row_forgets_its_adapter(case):
    params = [greedy(6, name) for name in ("all", None, "qv", None)]
    with case.engine(max_num_seqs=1) as llm:
        case.check([LONG] * 4, params, llm.generate([LONG] * 4, params, use_tqdm=False))


def test_the_order_of_the_adapters_is_free(case):
    params = [greedy(6, name) for name in case.merged]
    with case.engine(["late", "qv", "all"]) as llm:
        case.check([LONG] * 4, params, llm.generate([LONG] * 4, params, use_tqdm=False))


# ---- the prefix cache


def test_blocks_are_shared_within_an_adapter_only(case):
    names = [None, "all", "qv", "late"]
    with case.engine() as llm:
        for expected in (0, 16):  # 18 tokens: four whole blocks of 4, the second time
            for name in names:
                (output,) = llm.generate([LONG], greedy(5, name), use_tqdm=False)
                case.check([LONG], [greedy(5, name)], [output])
                assert output.num_cached_tokens == expected, name


def test_an_answer_is_found_by_the_same_adapter(case):
    with case.engine() as llm:
        (first,) = llm.generate([LONG], greedy(11, "qv"), use_tqdm=False)
        prompt = LONG + list(first.token_ids) + [5]
        for name, expected in (("all", 0), ("qv", 28), (None, 0)):  # 28 of 29 computed tokens
            (output,) = llm.generate([prompt], greedy(4, name), use_tqdm=False)
            case.check([prompt], [greedy(4, name)], [output])
            assert output.num_cached_tokens == expected


def test_twins_with_different_adapters(case):
    """The same prompt, side by side, computed in the same steps: blocks of equal tokens, and no twins."""
    params = [greedy(5, name) for name in ("all", "qv", None, "all", "qv", None)]
    with case.engine() as llm:
        for expected in (0, 16):
            outputs = llm.generate([LONG] * 6, params, use_tqdm=False)
            case.check([LONG] * 6, params, outputs)
            assert [output.num_cached_tokens for output in outputs] == [expected] * 6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_two_ranks(cases, family):
    case = cases(family)
    with case.engine(tensor_parallel_size=2) as llm:
        case.check(PROMPTS, params_of_rows(), llm.generate(PROMPTS, params_of_rows(), use_tqdm=False))

"""Tiny random checkpoints, and the oracle every output of the engine is compared with.

The checkpoints are written by transformers' own classes, with weights so large that tokens depend on their
whole context. The oracle knows no cache, batch or block: for every token the whole sequence goes through
transformers again, in float32. Helpers here raise AssertionError themselves, so they count under `python -O`.
"""

import contextlib
import copy
import gc
import json
import math
import shutil
from collections import namedtuple
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

MARGIN = 1e-4  # two scores closer than this may change places with the order of float32 sums
EDGE = 1e-5  # the same for a probability beside top_p or min_p
COUNTS = {"compared": 0, "stopped": 0}

FAMILIES = ("llama", "qwen2", "qwen3")
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}

# Small numbers, so that scaled and plain tables differ within a short prompt.
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn-options": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.5,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
}


# ---- checkpoints


def tiny_checkpoint(
    folder,
    family,
    *,
    tied=False,
    rope="default",
    spelling="new",
    vocab_size=128,
    seed=0,
    dtype=torch.float32,
    num_shards=1,
    consolidated=False,
    generation_eos=None,
    edit=None,
    **config,
):
    """Write a checkpoint of 2 layers, hidden 64, 4 heads, 2 KV heads; return its folder (Path).

    spelling: config.json in the style of transformers 5 ("new": rope_parameters, dtype) or 4 ("old":
    rope_theta and rope_scaling, torch_dtype). num_shards > 1 writes shards and an index; consolidated adds a
    copy with wrong values, which a loader that trusts the index doesn't see. generation_eos: eos_token_id of
    generation_config.json. edit(state_dict) changes tensors before they are written. All else goes to the
    config. By default no token ends a sequence.
    """
    import transformers

    folder = Path(folder)
    folder.mkdir(parents=True)
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    fields = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=tied,
        rope_parameters=dict(ROPES[rope]),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    fields["head_dim"] = 32 if family == "qwen3" else 16
    if family == "qwen2":
        del fields["head_dim"]  # Qwen2's config.json has none
    fields.update(config)
    model_config = config_class(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_config).to(torch.float32)
        randomise_biases_and_norms(model)
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    if edit is not None:
        edit(state)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    write_config(folder, model_config, model_class.__name__, fields, spelling, dtype)
    write_weights(folder, state, num_shards, consolidated)
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


def randomise_biases_and_norms(model):
    """A bias of 0 and a norm weight of 1 would hide their loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)


def write_config(folder, model_config, architecture, fields, spelling, dtype):
    config = model_config.to_dict()
    config.update(fields)  # what the class drops or moves is still written as asked
    config["architectures"] = [architecture]
    dtype = str(dtype).removeprefix("torch.")
    if spelling == "new":
        config["dtype"] = dtype
    else:
        config.pop("dtype", None)
        config["torch_dtype"] = dtype
        scaling = dict(config.pop("rope_parameters"))
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        if scaling["rope_type"] == "linear":
            scaling["type"] = scaling.pop("rope_type")  # the oldest spelling of all
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_weights(folder, state, num_shards, consolidated):
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names, weight_map = sorted(state), {}
        for number in range(num_shards):
            file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
            shard = names[number::num_shards]
            save_file({name: state[name] for name in shard}, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if consolidated:
        wrong = {name: torch.full_like(tensor, 0.125) for name, tensor in state.items()}
        for file in ("consolidated.safetensors", "original.safetensors"):  # before and after the shards by name
            save_file(wrong, folder / file, metadata={"format": "pt"})


def copy_checkpoint(source, folder, *, config=None, edit=None, generation_eos=None):
    """A copy with changed fields of config.json (None deletes one) and changed tensors (of a single file)."""
    folder = Path(shutil.copytree(source, folder))
    if config is not None:
        fields = json.loads((folder / "config.json").read_text())
        for name, value in config.items():
            fields.pop(name, None)
            if value is not None:
                fields[name] = value
        (folder / "config.json").write_text(json.dumps(fields))
    if edit is not None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


def known_distribution(probabilities):
    """An `edit` for an untied checkpoint after which softmax(logits) is this list, whatever came before.

    Attention and MLP add nothing to an embedding of ones; each row of the head is log p / hidden_size.
    """

    def edit(state):
        for name, tensor in state.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith(("embed_tokens.weight", "model.norm.weight")):
                tensor.fill_(1.0)
        head = state["lm_head.weight"]
        head.fill_(-1e4 / head.shape[1])
        for token, probability in enumerate(probabilities):
            head[token].fill_(math.log(probability) / head.shape[1])

    return edit


TEXT = (
    "the cat and the hat sat on the mat; there is another thing that they think. "
    "Le café est très agréable à Noël. 世界 你好 世界 👍🏽 😀😀 naïve Привет мир привет. "
    "def engine(step): return [token for token in step]\n\n"
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder, *, bos=False):
    """Save a byte-level BPE tokenizer (ids below 384) into folder, and return folder.

    Rare characters of several bytes are spread over several tokens; </s>, id 1, is the end of a sequence.
    With bos, every encoded text begins with <s>, as Llama's does, and so does the chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = ("<s>" if bos else "") + TEMPLATE
    fast.save_pretrained(folder)
    return folder


# ---- the engine


def make_llm(folder, **options):
    """An engine on the CPU with a small cache full of NaN: reading what was never written is loud."""
    from nanoengine import LLM

    settings = dict(device="cpu", max_model_len=128, kvcache_block_size=4, num_kvcache_blocks=256)
    settings.update(options)
    llm = LLM(str(folder), **settings)
    poison_cache(llm)
    return llm


def poison_cache(llm):
    llm._ranks.runner.kv_cache.fill_(math.nan)


def engine_logits(folder, token_ids):
    """The engine's decoder on one whole prompt: logits at every position, float32 [num_tokens, vocab_size].

    The prompt is one chunk; its blocks of 4 stand in the cache in falling order.
    """
    from nanoengine.config import ModelConfig
    from nanoengine.attention import reset_context, set_context
    from nanoengine.decoder import Decoder
    from nanoengine.loader import load_weights
    from nanoengine.step_input import FlatStep

    config, n = ModelConfig.from_folder(Path(folder)), len(token_ids)
    model = Decoder(config, n)
    load_weights(Path(folder), model.sources())
    positions, num_blocks = torch.arange(n), -(-n // 4)
    blocks = torch.arange(num_blocks - 1, -1, -1)
    shape = (2, config.num_hidden_layers, num_blocks + 1, 4, config.num_key_value_heads, config.head_dim)
    model.bind_kv_cache(torch.full(shape, math.nan), torch.full((1, num_blocks), num_blocks).int())   # filled in
    bounds = torch.tensor([0, n])
    set_context(
        FlatStep._make([None] * len(FlatStep._fields))._replace(
            slot_mapping=blocks[positions // 4] * 4 + positions % 4,
            token_rows=torch.zeros_like(positions),
            rows=torch.tensor([0]),
            context_lens=torch.tensor([n]),
            num_decodes=0,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=n,
            max_seqlen_k=n,
        )
    )
    try:
        with torch.inference_mode():
            return model.lm_head.logits(model(torch.tensor(token_ids), positions))
    finally:
        reset_context()


@contextlib.contextmanager
def engine(folder, **options):
    """make_llm, and closed at the end whatever happens."""
    llm = make_llm(folder, **options)
    try:
        yield llm
    finally:
        llm.close()
        gc.collect(0)


def drain(llm, limit=5000):
    """Step until nothing is left; every output in the order in which it ended."""
    outputs = []
    for _ in range(limit):
        if not llm.has_unfinished():
            return outputs + llm.step()
        outputs += llm.step()
    raise AssertionError(f"still unfinished after {limit} steps")


# ---- the oracle

Oracle = namedtuple("Oracle", "token_ids margins")


@lru_cache(maxsize=64)
def reference_model(folder):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(folder, token_ids):
    """transformers' logits at every position of one sequence, uncached: float32 [num_tokens, vocab_size]."""
    model, token_ids = reference_model(str(folder)), torch.tensor([list(token_ids)])
    with torch.inference_mode():
        return model(token_ids, use_cache=False).logits[0].float()


@lru_cache(maxsize=None)
def last_logits(folder, token_ids):
    return reference_logits(folder, token_ids)[-1].numpy()


def oracle(
    folder,
    prompt_token_ids,
    *,
    max_tokens,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=None,
    stop_ids=(),
):
    """What the request must give: token ids, and per token how far the best score is ahead of the second.

    A draw adds temperature x noise to the raw logits and takes the largest of what the filters leave. A
    filter whose edge runs too close beside a token counts as margin 0.
    """
    token_ids, margins = list(prompt_token_ids), []
    for _ in range(max_tokens):
        scores, margin = last_logits(str(folder), tuple(token_ids)).astype(np.float64), math.inf
        if temperature > 0:
            scores, margin = drawn_scores(scores, len(token_ids), temperature, top_k, top_p, min_p, seed)
        best, second = np.sort(scores)[:-3:-1]
        token_ids.append(int(scores.argmax()))
        margins.append(min(margin, best - second))
        if token_ids[-1] in stop_ids:
            break
    return Oracle(token_ids[len(prompt_token_ids) :], margins)


def drawn_scores(logits, position, temperature, top_k, top_p, min_p, seed):
    """Noised scores [vocab_size], -inf where filtered; and 0 if a filter's edge is too close, else inf."""
    order = np.argsort(-logits, kind="stable")
    is_close = False
    keep = order
    if 0 < top_k < len(order):
        keep = order[:top_k]
        is_close |= logits[order[top_k - 1]] - logits[order[top_k]] < MARGIN
    weights = np.exp((logits[keep] - logits[order[0]]) / temperature)
    probabilities = weights / weights.sum()  # renormalised after top-k, in falling order
    if top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        is_close |= np.abs(before[1:] - top_p).min(initial=1.0) < EDGE
        keep = keep[: max(1, int((before < top_p).sum()))]
        probabilities = probabilities[: len(keep)]
    if min_p > 0:
        ratio = probabilities / probabilities[0]
        is_close |= np.abs(ratio[1:] - min_p).min(initial=1.0) < EDGE
        keep = keep[ratio >= min_p]
    scores = np.full(len(logits), -np.inf)
    scores[keep] = logits[keep] + temperature * gumbel_noise(seed, position, len(logits))[keep]
    return scores, (0.0 if is_close else math.inf)


def mix(x):
    """A 32-bit integer hash; x is a uint32 array."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def gumbel_noise(seed, position, vocab_size):
    """The noise of one draw, float32 [vocab_size]: a function of (seed, position, token id) alone."""
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    low, high, position = (np.array([n], np.uint32) for n in (seed & 0xFFFFFFFF, seed >> 32, position))
    key = mix(mix(mix(low + np.uint32(0x9E3779B9)) ^ high) ^ position)
    hashed = mix(key ^ (np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B9)))
    one = np.float32(1)
    v = ((hashed & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    v = np.minimum(v, one - np.float32(2.0**-24))
    exponential = np.where(v < np.float32(1 / 1024), v + np.float32(0.5) * v * v, -np.log(one - v))
    return -np.log(exponential)


def assert_same_tokens(got, expected, label=""):
    """Equal token for token; a comparison ends (and is counted) where the oracle itself is undecided."""
    got = list(getattr(got, "token_ids", got))
    COUNTS["compared"] += 1
    for place, (token, margin) in enumerate(zip(expected.token_ids, expected.margins)):
        if margin < MARGIN:
            COUNTS["stopped"] += 1
            return
        if place >= len(got) or got[place] != token:
            found = got[place] if place < len(got) else "nothing"
            raise AssertionError(
                f"{label} token {place}: {found} instead of {token} (margin {margin:.4f})\n"
                f"got      {got}\nexpected {expected.token_ids}"
            )
    if len(got) != len(expected.token_ids):
        raise AssertionError(f"{label} {len(got)} tokens instead of {len(expected.token_ids)}: {got}")


def oracle_for(folder, prompt_token_ids, params, **changes):
    """The oracle for a SamplingParams object; stop strings and end tokens are the test's own affair."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    fields = {name: getattr(params, name) for name in names}
    fields["stop_ids"] = tuple(params.stop_token_ids)
    fields.update(changes)
    return copy.copy(cached_oracle(str(folder), tuple(prompt_token_ids), tuple(sorted(fields.items()))))


@lru_cache(maxsize=None)
def cached_oracle(folder, prompt_token_ids, fields):
    return oracle(folder, prompt_token_ids, **dict(fields))


def random_ids(seed, length, vocab_size=128):
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()

"""A real model answers real prompts: SmolLM2-135M-Instruct in float32 on the CPU, beside transformers.

transformers' greedy tokens come from one forward over prompt and answer, one prompt at a time. Up to the first token
that differs that is what its `generate` would choose, for a tenth of the time, and it tells each choice's margin.
"""

import os
import time

import pytest
import torch

import tiny
from nanoengine import LLM, SamplingParams
from smollm2 import smollm2_folder
from tiny import assert_same_tokens

PROMPTS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three tips for learning a new language.",
    "Translate to German: The cat sleeps on the warm stone.",
    "Is 91 a prime number? Answer yes or no, then say why.",
    "List the planets of the solar system, the nearest to the sun first.",
    "Write a haiku about the sea in winter.",
    "A train leaves at 9:40 and needs two and a half hours. When does it arrive, and how much later is that than noon?",
    "Summarise in one sentence: Bees visit flowers to collect nectar and pollen. While they do, they carry pollen from "
    "one flower to the next, and so many plants, among them most fruit trees, can bear fruit at all.",
]
END = 2  # <|im_end|>


def conversations(prompts):
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder())


@torch.inference_mode()
def greedy_choices(model, prompt_token_ids, token_ids):
    """What transformers chooses after the prompt and each beginning of `token_ids`, and by what margin."""
    logits = model(torch.tensor([prompt_token_ids + token_ids[:-1]]), use_cache=False).logits[0]
    best = logits[-len(token_ids) :].topk(2)
    return tiny.Oracle(best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist())


def check_answers(model, tokenizer, prompts, outputs, max_tokens):
    """Each output against transformers: prompt and answer tokens, their text, and why they end."""
    assert len(outputs) == len(prompts)
    assert len({output.request_id for output in outputs}) == len(prompts)
    for conversation, output in zip(conversations(prompts), outputs):
        prompt_token_ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert list(output.prompt_token_ids) == prompt_token_ids
        token_ids = list(output.token_ids)
        assert_same_tokens(token_ids, greedy_choices(model, prompt_token_ids, token_ids), conversation)

        has_ended = token_ids[-1] == END
        assert END not in token_ids[:-1]
        assert has_ended or len(token_ids) == max_tokens
        assert output.finish_reason == ("stop" if has_ended else "length")
        whole = tokenizer.decode(token_ids[:-1] if has_ended else token_ids)
        assert output.text == whole.rstrip("\ufffd")  # a last character cut in two doesn't show


def chat(llm, prompts, max_tokens):
    tiny.poison_cache(llm)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return llm.chat(conversations(prompts), params, use_tqdm=False)


def test_three_chats_in_one_batch_are_answered_as_by_transformers(model, tokenizer):
    with LLM(smollm2_folder(), device="cpu") as llm:
        outputs = chat(llm, PROMPTS[:3], 32)
    check_answers(model, tokenizer, PROMPTS[:3], outputs, 32)
    assert "Paris" in outputs[0].text
    assert {output.finish_reason for output in outputs} == {"stop", "length"}  # both ends are seen


@pytest.mark.slow
def test_ten_chats_in_one_batch_are_answered_as_by_transformers(model, tokenizer):
    with LLM(smollm2_folder(), device="cpu") as llm:
        outputs = chat(llm, PROMPTS, 64)
    check_answers(model, tokenizer, PROMPTS, outputs, 64)


@pytest.mark.slow
def test_ten_chats_are_answered_as_by_transformers_when_chunked_and_preempted(model, tokenizer):
    scarce = {"max_num_batched_tokens": 40, "max_num_seqs": 7, "num_kvcache_blocks": 30, "max_model_len": 200}
    with LLM(smollm2_folder(), device="cpu", **scarce) as llm:
        outputs = chat(llm, PROMPTS, 64)
        assert llm.scheduler.num_preemptions > 0
    check_answers(model, tokenizer, PROMPTS, outputs, 64)


# ---- speed

NUM_TOKENS = 64


@pytest.fixture
def num_threads():
    """All cores that this process may use, or OMP_NUM_THREADS; the rest of the suite runs on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


@torch.inference_mode()
def generate(model, tokenizer, prompts):
    """transformers' own loop, prompts padded on the left: NUM_TOKENS ids for each prompt."""
    inputs = tokenizer.apply_chat_template(
        conversations(prompts), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    token_ids = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
    return token_ids[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.slow
def test_twice_as_fast_as_one_at_a_time_and_no_slower_than_a_padded_batch(
    model, tokenizer, num_threads, monkeypatch, capsys
):
    """Eight prompts x 64 tokens, prefill included; the best of three rounds, in which the three take turns.

    On a machine that does nothing else; beside other work, on one core: OMP_NUM_THREADS=1 taskset -c 1 pytest ...
    """
    prompts, params = PROMPTS[:8], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(tokenizer, "padding_side", "left")
    with LLM(smollm2_folder(), device="cpu", enable_prefix_caching=False) as llm:  # or round two has no prefill
        calls = {
            "nanoengine": lambda: [o.token_ids for o in llm.chat(conversations(prompts), params, use_tqdm=False)],
            "one at a time": lambda: [generate(model, tokenizer, [prompt])[0] for prompt in prompts],
            "padded batch": lambda: generate(model, tokenizer, prompts),
        }
        seconds = {name: [] for name in calls}
        for _ in range(3):
            for name, call in calls.items():
                start = time.perf_counter()
                answers = call()
                seconds[name].append(time.perf_counter() - start)
                assert [len(token_ids) for token_ids in answers] == [NUM_TOKENS] * len(prompts)
    speed = {name: len(prompts) * NUM_TOKENS / min(times) for name, times in seconds.items()}
    with capsys.disabled():
        figures = ", ".join(f"{name} {tokens_per_s:.0f}" for name, tokens_per_s in speed.items())
        print(f"\nSmolLM2 on the CPU, {num_threads} thread(s), tokens/s: {figures}")
    assert speed["nanoengine"] >= 2 * speed["one at a time"]
    assert speed["nanoengine"] >= speed["padded batch"]

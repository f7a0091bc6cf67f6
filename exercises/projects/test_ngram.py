"""The open project `ngram`: fewer steps, the same tokens. Fails on the plain engine; ngram.md says what to build.

Everything is compared with what the engine gives without drafts. The checkpoint's next token is mostly a function of
the last one (five cycles over 40 tokens), a little of the context: so drafts are right often, but not always.
"""

from itertools import product

import pytest
import tiny
import torch
from conftest import checkpoint  # noqa: F401  (a fixture)
from nanoengine import SamplingParams
from tiny import drain, random_ids

LENGTHS = (3, 5, 8, 11, 13)  # of the cycles: 0 1 2, 3 ... 7, 8 ... 15, 16 ... 26, 27 ... 39
CYCLES = [list(range(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1]))) for i in range(5)]
NEXT = {cycle[i - 1]: token_id for cycle in CYCLES for i, token_id in enumerate(cycle)}


def cyclic(context_share):
    """An edit of an untied checkpoint: the head's row of NEXT[t] is the embedding of t."""

    def edit(state):
        embeddings = torch.randn(state["model.embed_tokens.weight"].shape, generator=torch.manual_seed(5))
        state["model.embed_tokens.weight"].copy_(embeddings)
        state["model.norm.weight"].fill_(1.0)
        state["lm_head.weight"].mul_(context_share)
        for token_id, successor in NEXT.items():
            state["lm_head.weight"][successor] = embeddings[token_id] / 4
        for name, tensor in state.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(context_share)

    return edit


CONTEXT, PURE = cyclic(0.15), cyclic(0.0)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama", edit=CONTEXT)


@pytest.fixture(scope="module")
def pure_folder(checkpoint):
    return checkpoint("llama", edit=PURE)


def greedy(max_tokens, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def sampled(seed, **changes):
    return SamplingParams(**{"temperature": 0.7, "max_tokens": 30, "seed": seed, "ignore_eos": True, **changes})


def speculative(folder, num_draft_tokens=4, **options):
    return tiny.engine(folder, async_scheduling=False, num_draft_tokens=num_draft_tokens, **options)


def chunks_of(llm, prompts, params):
    """(start, num_tokens) of each chunk, per step; outputs."""
    steps = []
    llm.on_step = lambda chunks, launch: steps.append(sorted((c.start, c.num_tokens) for c in chunks))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return steps, [list(output.token_ids) for output in outputs]


def assert_same_outputs(got, expected):
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert list(one.token_ids) == list(other.token_ids), number
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason), number
        assert (one.logprobs is None) == (other.logprobs is None), number
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4), number


# ---- options


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"num_draft_tokens": True}, {"ngram_size": 0}])
def test_a_bad_option_is_refused_by_name(pure_folder, options):
    with pytest.raises(ValueError, match=f"{list(options)[0]}={list(options.values())[0]}"):
        tiny.make_llm(pure_folder, async_scheduling=False, **options)


def test_drafts_need_tokens_that_the_host_knows(pure_folder):
    with pytest.raises(ValueError, match="num_draft_tokens=4.*async_scheduling=False"):
        tiny.make_llm(pure_folder, num_draft_tokens=4)
    with tiny.engine(pure_folder, num_draft_tokens=None, async_scheduling=True) as llm:  # off: nothing is asked
        llm.generate([[1]], greedy(2), use_tqdm=False)


# ---- worked examples: chunks (start, num_tokens) step by step


def test_the_running_example(pure_folder):
    """0 1 2 0 1 2 0: the last two tokens, 2 0, ended last at position 4; behind them 1 2 0, then the draft itself."""
    with speculative(pure_folder, 4, ngram_size=2) as llm:
        steps, (token_ids,) = chunks_of(llm, [[0, 1, 2, 0, 1, 2, 0]], greedy(12))
    assert token_ids == [1, 2, 0] * 4
    assert steps == [[(0, 7 + 4)], [(11, 1 + 4)], [(16, 1 + 1)]]  # 5, 5 and 2 tokens: the last 1 + 1 reach max_tokens


def test_the_latest_occurrence_counts(pure_folder):
    """3 4 was followed by 9, later by 5 6: the draft 5 6 3 4 is right twice, then 7 is drawn."""
    with speculative(pure_folder, 4, ngram_size=2) as llm:
        steps, (token_ids,) = chunks_of(llm, [[3, 4, 9, 9, 3, 4, 5, 6, 3, 4]], greedy(4))
    assert token_ids == [5, 6, 7, 3]
    assert steps == [[(0, 10 + 3)], [(12, 1)]]  # 3, as 4 tokens are wanted; then one is, and no draft


def test_an_ngram_must_have_been_seen(pure_folder):
    with speculative(pure_folder, 4, ngram_size=3) as llm:
        steps, (token_ids,) = chunks_of(llm, [[0, 1]], greedy(6))
    assert token_ids == [2, 0, 1, 2, 0, 1]
    assert steps == [[(0, 2)], [(2, 1)], [(3, 1)], [(4, 1)], [(5, 1 + 1)]]  # 0 1 2 0 1: the last three are new


def test_one_token_is_no_work_for_a_draft(pure_folder):
    with speculative(pure_folder) as llm:
        assert chunks_of(llm, [[0, 1, 2] * 4], greedy(1)) == ([[(0, 12)]], [[0]])


def test_a_prompt_in_chunks_is_followed_by_a_draft_only_at_its_end(pure_folder):
    with speculative(pure_folder, 4, max_num_batched_tokens=8) as llm:
        steps, (token_ids,) = chunks_of(llm, [[0, 1, 2] * 4], greedy(9))
    assert token_ids == [0, 1, 2] * 3
    assert steps == [[(0, 8)], [(8, 4 + 4)], [(16, 1 + 3)]]


def test_a_draft_takes_what_is_left_of_the_budget(pure_folder):
    prompts = [[0, 1, 2] * 3, [3, 4, 5, 6, 7] * 2]
    with speculative(pure_folder, 4, max_num_batched_tokens=19) as llm:
        assert chunks_of(llm, prompts, greedy(2))[0][0] == [(0, 9), (0, 10)]  # both prompts, no draft
    with speculative(pure_folder, 4, max_num_batched_tokens=20) as llm:
        assert chunks_of(llm, prompts, greedy(9))[0][0] == [(0, 9 + 1), (0, 10)]
    with speculative(pure_folder, 4, max_num_batched_tokens=2) as llm:
        steps, _ = chunks_of(llm, [[0], [8]], greedy(30))
        assert steps == [[(n, 1), (n, 1)] for n in range(30)]  # nobody waits for another's draft


def test_a_draft_takes_free_blocks_and_nobodys(pure_folder):
    """5 blocks of 4: the prompts take 2 each, the first one's draft the last. The second gets none, nobody has to go."""
    seen = []
    with speculative(pure_folder, 4, num_kvcache_blocks=5, enable_prefix_caching=False) as llm:
        llm.on_step = lambda chunks, launch: seen.append(
            ([(c.start, c.num_tokens) for c in chunks], llm.scheduler.num_preemptions)
        )
        outputs = llm.generate([[0, 1, 2, 0, 1, 2, 0, 1]] * 2, greedy(9), use_tqdm=False)
        assert seen[0] == ([(0, 12), (0, 8)], 0)
        assert llm.stats()["blocks_used"] == 0
    assert [list(output.token_ids) for output in outputs] == [[2, 0, 1] * 3] * 2


# ---- the same tokens

PROMPTS = [
    CYCLES[1] * 3,
    CYCLES[4] + CYCLES[4][:4],
    random_ids(7, 17),  # hardly a draft is right
    CYCLES[1] * 3 + [9],  # shares blocks with the first
    CYCLES[2][:3],
    CYCLES[0] * 4,
]
PARAMS = [
    greedy(40),
    sampled(1),
    sampled(2, temperature=1.0),
    sampled(3, top_p=0.9, logprobs=2),
    sampled(4, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, top_k=20),
    greedy(30, stop_token_ids=(2,), min_tokens=5, logit_bias={1: 1.0}, logprobs=0),
]
SETTINGS = {  # num_draft_tokens, ngram_size, the engine's options
    "roomy": (4, 2, {}),
    "many": (9, 1, {}),
    "budget 7": (4, 2, {"max_num_batched_tokens": 7}),
    "few blocks": (4, 2, {"num_kvcache_blocks": 17}),
    "two rows": (1, 1, {"max_num_seqs": 2}),
    "no cache": (5, 3, {"enable_prefix_caching": False}),
    "blocks of 16": (9, 2, {"kvcache_block_size": 16, "num_kvcache_blocks": 5, "max_num_batched_tokens": 11}),
}


@pytest.fixture(scope="module")
def plain(folder):
    """What the engine gives without drafts: one call in which few end in the same step."""
    with tiny.engine(folder) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_the_checkpoint_can_tell(folder, plain):
    """Drafts are right often, but not always, and the samplers disagree."""
    with speculative(folder, 4, ngram_size=2) as llm:
        steps, token_ids = chunks_of(llm, PROMPTS, PARAMS)
    assert 0.5 < sum(map(len, steps)) / sum(map(len, token_ids)) < 0.8  # with all drafts right it is about 0.3
    assert any(NEXT.get(a) != b for o in plain for a, b in zip(o.token_ids, o.token_ids[1:]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_tokens(folder, plain, setting):
    num_draft_tokens, ngram_size, options = SETTINGS[setting]
    with speculative(folder, num_draft_tokens, ngram_size=ngram_size, **options) as llm:
        for _ in range(2):  # the second time with blocks in the cache
            assert_same_outputs(llm.generate(PROMPTS, PARAMS, use_tqdm=False), plain)
        stats = llm.stats()
        assert stats["output_tokens"] == 2 * sum(len(output.token_ids) for output in plain)
        assert stats["blocks_used"] == 0 and (stats["preemptions"] > 0) == ("blocks" in setting)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_same_tokens_of_other_families(checkpoint, family):
    folder = checkpoint(family, edit=CONTEXT)
    with tiny.engine(folder) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with speculative(folder, 4, ngram_size=2, num_kvcache_blocks=17) as llm:
        assert_same_outputs(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def test_unseeded_requests_get_the_seeds_they_would_get(folder):
    params = SamplingParams(temperature=0.8, max_tokens=25, ignore_eos=True)
    with tiny.engine(folder, seed=11) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
    with speculative(folder, 3, ngram_size=1, seed=11) as llm:
        assert_same_outputs(llm.generate(PROMPTS, params, use_tqdm=False), expected)


def test_blocks_with_rejected_drafts_are_not_found(folder):
    """Every output is sent again as a prompt: its blocks must hold the keys of the tokens that were drawn."""
    params = [sampled(n, temperature=1.0, max_tokens=24) for n in range(6)]
    with tiny.engine(folder) as llm, speculative(folder, 5, ngram_size=1) as other:
        first, second = (one.generate(PROMPTS, params, use_tqdm=False) for one in (llm, other))
        assert_same_outputs(second, first)
        again = [prompt + list(output.token_ids) for prompt, output in zip(PROMPTS, first)]
        first, second = (one.generate(again, greedy(10), use_tqdm=False) for one in (llm, other))
        assert_same_outputs(second, first)
        assert [o.num_cached_tokens for o in second] == [o.num_cached_tokens for o in first]


def test_what_is_drawn_behind_a_draft_looks_at_the_draft(checkpoint, tmp_path):
    """top_k=1 draws the likeliest token, so drafts are right, where temperature alone would draw anything. The word 34
    is banned: no 4 behind a 3 that is still a draft."""
    folder = tiny.tiny_tokenizer(tiny.tiny_checkpoint(tmp_path / "text", "llama", vocab_size=384, edit=PURE))
    params = [sampled(n, temperature=10.0, top_k=1, bad_words="34") for n in range(3)]
    with tiny.engine(folder) as llm:
        expected = llm.generate([CYCLES[3] * 2] * 3, params, use_tqdm=False)
        assert llm.tokenizer.encode("34") == [23, 24] and list(expected[0].token_ids[:8]) == list(range(16, 24))
    with speculative(folder, 10, ngram_size=2) as llm:
        assert_same_outputs(llm.generate([CYCLES[3] * 2] * 3, params, use_tqdm=False), expected)


# ---- endings


def test_a_stop_token_within_a_draft_is_the_last(pure_folder):
    with speculative(pure_folder, 8, ngram_size=2) as llm:
        (output,) = llm.generate([CYCLES[2] * 2], greedy(40, stop_token_ids=(11,)), use_tqdm=False)
        assert (list(output.token_ids), output.finish_reason) == ([8, 9, 10, 11], "stop")
        assert llm.stats()["steps"] == 1 and llm.stats()["output_tokens"] == 4
        assert llm.stats()["blocks_used"] == 0 and not llm.has_unfinished()


def test_a_stop_string_within_a_draft_ends_text_and_tokens(checkpoint, tmp_path):
    folder = tiny.tiny_tokenizer(tiny.tiny_checkpoint(tmp_path / "text", "llama", vocab_size=384, edit=PURE))
    prompts, params = [CYCLES[3] * 2] * 2, [greedy(40, stop="345", logprobs=0), greedy(40)]
    with tiny.engine(folder) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert expected[0].finish_reason == "stop" and len(expected[0].token_ids) < 11
    with speculative(folder, 10, ngram_size=2) as llm:
        assert_same_outputs(llm.generate(prompts, params, use_tqdm=False), expected)
        assert "".join(llm.stream(prompts[0], params[0])) == expected[0].text


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_never_a_token_too_many(pure_folder, max_tokens):
    with speculative(pure_folder, 4, max_model_len=14, num_kvcache_blocks=4) as llm:
        (output,) = llm.generate([CYCLES[0] * 3], greedy(max_tokens), use_tqdm=False)
        expected = (CYCLES[0] * 3)[: min(max_tokens, 5)]  # position 13 is the last
        assert (list(output.token_ids), output.finish_reason) == (expected, "length")


def test_abort_between_steps(pure_folder):
    with speculative(pure_folder, 4) as llm:
        ids = [llm.add_request(CYCLES[n] * 3, greedy(30)) for n in (0, 1)]
        llm.step()
        assert llm.abort(ids[0])
        aborted, other = sorted(drain(llm), key=lambda output: ids.index(output.request_id))
        assert (list(aborted.token_ids), aborted.finish_reason) == ([0, 1, 2, 0, 1], "abort")
        assert list(other.token_ids) == CYCLES[1] * 6
        assert llm.stats()["blocks_used"] == 0


# ---- what it is for


@pytest.mark.parametrize("cycle, num_draft_tokens", product((0, 2, 3), (3, 7)))
def test_steps_per_token(pure_folder, cycle, num_draft_tokens):
    with speculative(pure_folder, num_draft_tokens, ngram_size=2) as llm:
        llm.generate([CYCLES[cycle] * 2], greedy(96), use_tqdm=False)
        assert llm.stats()["steps"] == 96 // (1 + num_draft_tokens)


def test_where_nothing_repeats_it_takes_no_more_steps(checkpoint):
    folder, prompts = checkpoint("llama"), [random_ids(30 + n, 12) for n in range(4)]
    with tiny.engine(folder, async_scheduling=False) as llm, speculative(folder, 4, ngram_size=2) as other:
        first, second = (one.generate(prompts, sampled(3, temperature=1.0), use_tqdm=False) for one in (llm, other))
        assert_same_outputs(second, first)
        assert other.stats()["steps"] <= llm.stats()["steps"]


@pytest.mark.slow
def test_two_ranks(folder, plain):
    with speculative(folder, 4, ngram_size=2, tensor_parallel_size=2) as llm:
        assert_same_outputs(llm.generate(PROMPTS, PARAMS, use_tqdm=False), plain)

"""What a request may ask of a draw: penalties, biases, bans, filters, log-probabilities; and what the engine tells.

Worked examples on a handful of tokens first. Then whole engines beside an oracle of this file's own, in float64: the
logits of transformers without a cache, changed in the documented order (bias and bans, penalties, temperature, top-k,
renormalise, top-p, min-p, draw). Then frequencies of draws by chi-square, and `stats()`.
"""

import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

import tiny
from nanoengine import SamplingParams, kernels, sampler
from nanoengine.model_runner import ModelRunner
from nanoengine.sampling_params import Rule
from test_rpc import poison_caches, start
from tiny import copy_checkpoint, drain, engine, known_distribution, random_ids

NAN, INF = float("nan"), float("inf")
CPU_AND_CUDA = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOTH_WAYS = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


def greedy(max_tokens, **changes):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **changes})


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def approx(values):
    return pytest.approx(values, abs=1e-5)


# ---- SamplingParams


@pytest.mark.parametrize(
    "field, value",
    [
        *[("repetition_penalty", value) for value in (0, 0.0, -1.5, NAN, INF, None, "big", True)],
        *[("frequency_penalty", value) for value in (-2.01, 2.01, NAN, INF, None, "a", True)],
        *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, -INF, None, "a", False)],
        *[("logit_bias", value) for value in ({1: NAN}, {1: INF}, {1: -INF}, {1: None}, {1: "a"}, {1.5: 1.0})],
        *[("logit_bias", value) for value in ({"a": 1.0}, {1: 1.0, None: 2.0}, ((1, 2.0, 3.0),), (7,), 7, 1.5)],
        *[("min_tokens", value) for value in (-1, 1.5, None, NAN, "a", True)],
        *[("bad_words", value) for value in ((1,), ("",), "", ("a", ""), ("a", None), 7, 1.5)],
        *[("logprobs", value) for value in (-1, 1.5, NAN, "a", True)],
        *[("ignore_eos", value) for value in (0, 1, None, "no")],
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_field_and_value(field, value):
    """Case 14, for what the full sampler takes."""
    with pytest.raises(ValueError, match=rf"\b{field}\b") as caught:
        SamplingParams(**{field: value})
    while isinstance(value, (tuple, dict)) and value:  # the innermost value must show, however its container is written
        value = list(value.items())[-1] if isinstance(value, dict) else value[-1]
    assert repr(value) in str(caught.value)


def test_the_limits_themselves_are_allowed():
    for field, values in {
        "repetition_penalty": (1e-3, 1, 1.0, 100),
        "frequency_penalty": (-2, 2, 0, -2.0),
        "presence_penalty": (-2, 2, 0, 2.0),
        "logit_bias": ({}, {0: -100, 127: 100.0}, {np.int64(3): np.float32(0.5)}),
        "min_tokens": (0, 1, 64),
        "bad_words": ((), "word", ["a", "b c"], (" ",)),
        "logprobs": (None, 0, 1, 10**6),
    }.items():
        for value in values:
            SamplingParams(**{field: value})


def test_min_tokens_beyond_max_tokens_names_both():
    SamplingParams(min_tokens=7, max_tokens=7)
    with pytest.raises(ValueError, match=r"min_tokens\D*8.*max_tokens\D*7"):
        SamplingParams(min_tokens=8, max_tokens=7)


def test_by_default_nothing_is_asked():
    p = SamplingParams()
    assert (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0)
    assert (p.min_tokens, tuple(p.bad_words), p.logprobs) == (0, (), None) and not p.logit_bias
    assert p.is_plain and not p.has_filters and not p.has_penalties


@pytest.mark.parametrize(
    "wish, is_plain",
    [
        *[(wish, False) for wish in ({"repetition_penalty": 0.9}, {"presence_penalty": -1}, {"min_p": 0.1})],
        *[(wish, False) for wish in ({"logit_bias": {0: 1.0}}, {"min_tokens": 1}, {"bad_words": "a"}, {"logprobs": 0})],
        *[(wish, False) for wish in ({"frequency_penalty": 0.1}, {"logprobs": 2}, {"top_k": 1}, {"top_p": 0.9})],
        *[(wish, True) for wish in ({"temperature": 0}, {"seed": 1}, {"stop": "a"}, {"stop_token_ids": (1,)})],
        *[(wish, True) for wish in ({"ignore_eos": True}, {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1})],
        *[(wish, True) for wish in ({"logit_bias": {}}, {"bad_words": ()}, {"repetition_penalty": 1, "top_p": 1})],
    ],
    ids=str,
)
def test_plain_is_what_temperature_and_noise_can_draw(wish, is_plain):
    """A greedy draw needs no filter: the likeliest token always stays."""
    assert SamplingParams(**wish).is_plain == is_plain


def test_one_bad_word_or_many():
    assert tuple(SamplingParams(bad_words="one word").bad_words) == ("one word",)
    words = ["a", "b"]
    p = SamplingParams(bad_words=words)
    words.append("c")
    assert tuple(p.bad_words) == ("a", "b")


def holds(rule, position):
    return rule.start <= position < rule.end


def test_rules_of_a_request():
    """A prompt of 10 tokens: the new ones stand at positions 10, 11, ..."""
    p = SamplingParams(logit_bias={5: 1.5, 6: -2.0}, min_tokens=3)
    rules = p.rules(10, [7, 8], [(20,), (21, 22), (23, 24, 25)])
    by_token = {rule.token_id: rule for rule in rules}
    assert len(rules) == len(by_token) == 7
    assert sorted(by_token) == [5, 6, 7, 8, 20, 22, 25]
    assert [by_token[token].bias for token in sorted(by_token)] == [1.5, -2.0] + [-INF] * 5
    assert [by_token[token].prefix for token in sorted(by_token)] == [()] * 5 + [(21,), (23, 24)]
    for position in (10, 11, 12, 13, 14, 10**6):
        held = {token for token, rule in by_token.items() if holds(rule, position)}
        assert held >= {5, 6, 20}  # from the first new token on, for ever
        assert (7 in held, 8 in held) == (position < 13,) * 2  # not among the first three
        assert (22 in held) == (position >= 11)  # 21 stands at 10 at the earliest: a new token, not the prompt's last
        assert (25 in held) == (position >= 12)


def test_who_asks_for_nothing_has_no_rules():
    assert SamplingParams().rules(10, [7], []) == []
    assert SamplingParams(stop_token_ids=(7,), top_k=3, frequency_penalty=1.0).rules(10, [7], set()) == []


# ---- biases and bans

VOCAB5 = [[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, -2.0, -3.0, -4.0, -5.0]]


def apply(rules_of, logits=None, history=None, positions=None):
    """apply_rules on rows of five logits; 6 known tokens each."""
    logits = tensor(VOCAB5 if logits is None else logits)
    history = tensor([[0, 1, 2, 3, 4, 0, 9], [4, 4, 4, 4, 4, 4, 9]] if history is None else history, torch.int32)
    before, rules = logits.clone(), torch.from_numpy(sampler.pack_rules(rules_of))
    out = sampler.apply_rules(logits, history, tensor(positions or [6, 6], torch.int64), rules)
    assert torch.equal(logits, before)  # log-probabilities are of the raw ones
    assert out.dtype == torch.float32
    return out.tolist()


def test_nothing_to_pack():
    assert len(sampler.pack_rules([])) == len(sampler.pack_rules([[], []])) == 0


def test_packed_rules_are_a_table():
    rules_of = [[Rule((), 3, 0.5, 0, 9)], [], [Rule((7, 8), 1, -INF, 4, 1 << 62), Rule((9,), 2, -INF, 5, 6)]]
    packed = sampler.pack_rules(rules_of)
    assert isinstance(packed, np.ndarray) and packed.dtype == np.float64
    assert packed.tolist() == [
        # row, token, start, end, bias, prefix
        [0, 3, 0, 9, 0.5, -1, -1],
        [2, 1, 4, 1 << 62, -INF, 7, 8],
        [2, 2, 5, 6, -INF, -1, 9],
    ]


def test_a_bias_is_added_to_its_own_row_and_token():
    out = apply([[], [Rule((), 3, 2.5, 0, 99), Rule((), 0, -1.0, 0, 99)]])
    assert out == [VOCAB5[0], [-2.0, -2.0, -3.0, -1.5, -5.0]]


def test_biases_of_one_token_add_up_and_a_ban_wins():
    rules = [Rule((), 2, 1.0, 0, 99), Rule((), 2, 0.25, 0, 99), Rule((), 4, 100.0, 0, 99), Rule((), 4, -INF, 0, 99)]
    out = apply([rules, [*rules[::-1], Rule((), 4, -INF, 0, 99)]])
    assert out == [[1.0, 2.0, 4.25, 4.0, -INF], [-1.0, -2.0, -1.75, -4.0, -INF]]


def test_a_rule_holds_from_start_to_before_end():
    rules = [Rule((), 0, 1.0, 0, 6), Rule((), 1, 1.0, 0, 7), Rule((), 2, 1.0, 6, 99), Rule((), 3, 1.0, 7, 99)]
    assert apply([rules, []])[0] == [1.0, 3.0, 4.0, 4.0, 5.0]
    assert apply([rules, []], positions=[5, 6])[0] == [2.0, 3.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "prefix, follows",
    [
        ((), True),
        ((0,), True),  # the tokens before position 6 are ... 3 4 0
        ((4, 0), True),
        ((3, 4, 0), True),
        ((0, 1, 2, 3, 4, 0), True),
        ((4,), False),
        ((0, 4), False),
        ((3, 0), False),
        ((4, 4, 0), False),
        ((0, 9), False),  # 9 stands behind the known ones
        ((9,), False),
        ((1, 1, 2, 3, 4, 0), False),
    ],
    ids=str,
)
def test_a_prefix_is_what_stands_right_before(prefix, follows):
    rule = Rule(prefix, 1, -INF, 0, 99)
    expected = [[1.0, -INF if follows else 2.0, 3.0, 4.0, 5.0], VOCAB5[1]]
    assert apply([[rule], []]) == expected
    longer = Rule((5, 4, 4, 4), 2, -INF, 0, 99)  # a longer prefix beside it fills the shorter ones up
    assert apply([[rule], [longer]]) == expected


def test_a_prefix_longer_than_what_is_known_does_not_follow():
    """At position 2 of [0 1 | 2 ...] nothing has stood before 0."""
    for prefix in ((0, 0, 1), (3, 0, 1), (0, 1, 0, 1), (0, 1) * 5):
        assert apply([[Rule(prefix, 1, -INF, 3, 99)], []], positions=[2, 6]) == VOCAB5
    assert apply([[Rule((0, 1), 1, -INF, 2, 99)], []], positions=[2, 6])[0][1] == -INF


# ---- penalties


def columns(*settings, n=1, device="cpu"):
    """The settings of n rows, [8, n]: numbers that all rows share, or lists of n."""
    assert len(settings) == len(sampler.SETTINGS) + 1
    rows = [torch.as_tensor(setting, dtype=torch.float32, device=device).expand(n) for setting in settings]
    return torch.stack(rows)


def penalised(logits, tokens, num_prompt, repetition=1.0, frequency=0.0, presence=0.0):
    """One row; behind the known tokens the history holds others, which must not count."""
    history = tensor([tokens + [0, 1, 2]], torch.int32)
    values = tensor([logits])
    before, settings = values.clone(), columns(1.0, 0.0, 1.0, 0.0, repetition, frequency, presence, num_prompt)
    out = sampler.penalise(values, history, tensor([len(tokens)], torch.int64), settings)
    assert torch.equal(values, before) and out.dtype == torch.float32
    return out[0].tolist()


def test_repetition_divides_positive_and_multiplies_negative_logits_of_what_occurred():
    logits = [3.0, -3.0, 0.0, 4.0, -4.0]
    assert penalised(logits, [0, 1, 2], 3, repetition=2.0) == [1.5, -6.0, 0.0, 4.0, -4.0]  # the prompt
    assert penalised(logits, [0, 1, 2], 1, repetition=2.0) == [1.5, -6.0, 0.0, 4.0, -4.0]  # prompt and output
    assert penalised(logits, [0, 0, 0, 0], 2, repetition=2.0) == [1.5, -3.0, 0.0, 4.0, -4.0]  # not once per time
    assert penalised(logits, [3, 4], 1, repetition=0.5) == [3.0, -3.0, 0.0, 8.0, -2.0]


def test_frequency_counts_what_was_drawn():
    logits = [3.0, -3.0, 0.0, 4.0, -4.0]
    assert penalised(logits, [0, 0, 1, 0, 3, 3, 3], 3, frequency=0.5) == [2.5, -3.0, 0.0, 2.5, -4.0]
    assert penalised(logits, [0, 1], 2, frequency=0.5) == logits  # the prompt alone
    assert penalised(logits, [1, 1, 1], 1, frequency=-0.25) == [3.0, -2.5, 0.0, 4.0, -4.0]


def test_presence_counts_once():
    logits = [3.0, -3.0, 0.0, 4.0, -4.0]
    assert penalised(logits, [0, 0, 1, 0, 3, 3, 3], 3, presence=0.5) == [2.5, -3.0, 0.0, 3.5, -4.0]
    assert penalised(logits, [0, 1], 2, presence=0.5) == logits
    assert penalised(logits, [0, 1, 1], 1, presence=-1.0) == [3.0, -2.0, 0.0, 4.0, -4.0]


def test_all_three_penalties_repetition_first():
    out = penalised([3.0, -3.0, 0.5, 4.0, -4.0], [2, 0, 0, 1], 1, repetition=2.0, frequency=0.25, presence=1.0)
    assert out == [1.5 - 0.5 - 1.0, -6.0 - 0.25 - 1.0, 0.25, 4.0, -4.0]


def test_a_banned_token_stays_banned_whatever_its_penalties():
    for repetition in (0.5, 2.0):
        out = penalised([-INF, 1.0, -INF], [0, 1, 0], 1, repetition=repetition, frequency=-2.0, presence=-2.0)
        assert (out[0], out[2]) == (-INF, -INF) and math.isfinite(out[1])


def test_each_row_has_its_own_penalties_and_history():
    """A neutral row is left as it is, to the last bit."""
    torch.manual_seed(1)
    logits = torch.randn(4, 8)
    history = torch.randint(0, 8, (4, 12), dtype=torch.int32)
    positions, num_prompt = [12, 5, 1, 9], [3, 5, 1, 2]
    penalties = [1.5, 1.0, 1.7, 0.8], [0.5, 0.0, -0.5, 1.0], [0.0, 0.0, 1.0, -1.0]
    settings = columns(0.7, 3, 0.5, 0.1, *penalties, num_prompt, n=4)
    out = sampler.penalise(logits, history, tensor(positions, torch.int64), settings)
    for row, length in enumerate(positions):
        alone = [values[row] for values in penalties]
        tokens = history[row, :length].tolist()
        assert out[row].tolist() == approx(penalised(logits[row].tolist(), tokens, num_prompt[row], *alone))
    assert torch.equal(out[1], logits[1])


# ---- filters


def kept(probabilities, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that stay; the others are -inf, and those that stay are as they were."""
    logits = tensor([probabilities]).log()
    before = logits.clone()
    out = sampler.filter_logits(logits, columns(temperature, top_k, top_p, min_p, 1.5, 0.5, 0.5, 2))
    assert torch.equal(logits, before)
    stays = out[0] > -INF
    assert torch.equal(out[0][stays], logits[0][stays]) and (out[0][~stays] == -INF).all()
    return set(stays.nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    "filters, expected",
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 0}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.4}, {1}),  # reached exactly
        ({"top_p": 0.41}, {1, 3}),  # the token that reaches it stays
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 0}),
        ({"top_p": 0.91}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),  # of the likeliest's: 0.08
        ({"min_p": 0.3}, {1, 3, 0}),  # 0.12
        ({"min_p": 0.6}, {1, 3}),  # 0.24
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.57}, {1}),  # 0.4 / 0.7 = 0.571: renormalised before top-p
        ({"top_k": 2, "top_p": 0.58}, {1, 3}),
        ({"top_k": 3, "top_p": 0.76}, {1, 3}),  # 0.7 / 0.9 = 0.778
        ({"top_k": 3, "top_p": 0.79}, {1, 3, 0}),
        ({"top_p": 0.75, "min_p": 0.6}, {1, 3}),  # top-p leaves 1 3 0, min-p takes 0
        ({"top_k": 3, "top_p": 0.79, "min_p": 0.6}, {1, 3}),
        ({"temperature": 0.5, "top_p": 0.53}, {1}),  # squares: 0.04 0.16 0.01 0.09 of 0.30; 0.16 / 0.30 = 0.533
        ({"temperature": 0.5, "top_p": 0.54}, {1, 3}),
        ({"temperature": 0.5, "min_p": 0.3}, {1, 3}),  # 0.04 / 0.16 = 0.25
        ({"temperature": 2.0, "min_p": 0.6}, {1, 3, 0}),  # roots: 0.71, 0.5 and 0.87 of the likeliest's
        ({"temperature": 1e-10, "top_p": 0.99}, {1}),
        ({"temperature": 0.0, "top_p": 0.99}, {1}),  # a greedy row beside filtered ones
    ],
    ids=str,
)
def test_what_the_filters_keep(filters, expected):
    """Case 22. In falling order the tokens are 1 3 0 2."""
    assert kept([0.2, 0.4, 0.1, 0.3], **filters) == expected


def test_ties_go_to_the_lower_ids():
    assert kept([0.25] * 4, top_k=2) == {0, 1}
    assert kept([0.25] * 4, top_p=0.6) == {0, 1, 2}
    assert kept([0.1, 0.3, 0.3, 0.3], top_k=2) == {1, 2}
    assert kept([0.25] * 4, min_p=1.0) == {0, 1, 2, 3}
    assert kept([1 / 600] * 600, top_k=300) == set(range(300))  # sorting a long row is stable too


def test_removed_tokens_stay_removed_and_top_p_of_one_keeps_the_rarest():
    assert kept([0.0, 0.6, 0.4, 0.0], top_k=3, top_p=0.99) <= {1, 2}
    assert kept([1.0 - 1e-9, 1e-9, 1e-12, 1e-30]) == {0, 1, 2, 3}
    assert kept([1.0 - 1e-9, 1e-9, 1e-12, 1e-30], top_k=4) == {0, 1, 2, 3}


def test_each_row_has_its_own_filters():
    logits = tensor([[0.2, 0.4, 0.1, 0.3]] * 5).log()
    settings = columns(1.0, [0, 2, 0, 0, 3], [1, 1, 0.41, 1, 1], [0, 0, 0, 1, 0], 1.0, 0.0, 0.0, 1, n=5)
    stays = sampler.filter_logits(logits, settings) > -INF
    assert [set(row.nonzero()[:, 0].tolist()) for row in stays] == [{0, 1, 2, 3}, {1, 3}, {1, 3}, {1}, {0, 1, 3}]


def test_filters_and_bans_of_huge_logits_stay_finite():
    """Case 21: +-1e4, and rows of which little is left."""
    logits = tensor([[1e4, -1e4, 9e3, -INF], [-1e4, -INF, -INF, -INF], [-INF, -INF, 5.0, 5.0]])
    for temperature in (0.0, 1e-10, 1.0, 1e4):
        out = sampler.filter_logits(logits, columns(temperature, 2, 0.9, 0.1, 1.0, 0.0, 0.0, 1, n=3))
        assert not out.isnan().any()
        assert [row.argmax().item() for row in out] == [0, 0, 2]


# ---- log-probabilities


def test_the_drawn_token_first_then_the_likeliest():
    logits = tensor([[0.2, 0.4, 0.1, 0.3], [0.5, 0.25, 0.125, 0.125]]).log() + tensor([[100.0], [-3.0]])
    ids, values = sampler.top_logprobs(logits, tensor([2, 0], torch.int32), 3)  # three in all
    assert ids.tolist() == [[2, 1, 3], [0, 0, 1]]
    assert values.exp().tolist() == [approx([0.1, 0.4, 0.3]), approx([0.5, 0.5, 0.25])]
    ids, values = sampler.top_logprobs(logits, tensor([3, 1], torch.int32), 1)
    assert ids.tolist() == [[3], [1]] and values.exp().tolist() == [approx([0.3]), approx([0.25])]


# ---- the oracle of this file


def changed_logits(raw, tokens, num_prompt, params, end_ids=(), bad_words=()):
    """Bias and bans, then penalties: float64 [vocab_size]. bad_words: lists of token ids."""
    logits, drawn = raw.astype(np.float64), tokens[num_prompt:]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    banned = set(end_ids) if len(drawn) < params.min_tokens else set()
    for *prefix, last in bad_words:
        if len(prefix) <= len(drawn) and drawn[len(drawn) - len(prefix) :] == prefix:
            banned.add(last)
    logits[[token for token in banned if 0 <= token < len(logits)]] = -np.inf
    for token in set(tokens):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token, count in Counter(drawn).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def check(folder, prompt, params, output, *, end_ids=(), bad_words=(), label=""):
    """The output is what the documented order gives, token for token, with its log-probabilities, and ended rightly.

    One pass of the reference model along prompt and output gives the logits of each draw. Where the oracle's two best
    lie within tiny.MARGIN either may be drawn (counted, as in tiny.assert_same_tokens).
    """
    prompt, got, label = list(prompt), list(output.token_ids), f"{label} {params} {prompt}"
    assert list(output.prompt_token_ids) == prompt and got, label
    rows = tiny.reference_logits(folder, prompt + got)[len(prompt) - 1 : -1].numpy()
    end_ids, undecided = set(end_ids) | set(params.stop_token_ids), False
    for place, (raw, token) in enumerate(zip(rows, got, strict=True)):
        tokens, margin = prompt + got[:place], math.inf
        scores = changed_logits(raw, tokens, len(prompt), params, end_ids, bad_words)
        if params.temperature > 0:
            filters = params.temperature, params.top_k, params.top_p, params.min_p
            with np.errstate(invalid="ignore"):  # -inf - -inf among the banned
                scores, margin = tiny.drawn_scores(scores, len(tokens), *filters, params.seed)
        second, best = np.sort(scores)[-2:]
        margin = min(margin, best - second)
        undecided |= margin < tiny.MARGIN
        expected = int(scores.argmax())
        assert token == expected or margin < tiny.MARGIN, f"token {place} of {got}: not {expected} {label}"
    tiny.COUNTS["compared"] += 1
    tiny.COUNTS["stopped"] += undecided
    assert not end_ids.intersection(got[:-1]), label
    assert (output.finish_reason == "stop") == (got[-1] in end_ids), label
    assert output.finish_reason == "stop" or len(got) == params.max_tokens, label
    check_logprobs(rows, got, output.logprobs, params.logprobs, label)


def check_logprobs(rows, token_ids, logprobs, num, label=""):
    """Per new token: the drawn one's log-softmax of the raw logits, then the `num` likeliest in falling order."""
    if num is None:
        assert logprobs is None, label
        return
    assert len(logprobs) == len(token_ids), label
    for raw, token, entry in zip(rows, token_ids, logprobs, strict=True):
        expected = raw.astype(np.float64) - np.logaddexp.reduce(raw.astype(np.float64))
        assert list(map(type, entry)) == [int] * len(entry) and all(type(value) is float for value in entry.values())
        assert next(iter(entry)) == token, label
        assert list(entry.values()) == pytest.approx([expected[i] for i in entry], abs=1e-4), label
        others = list(entry.values())[1:]
        assert others == sorted(others, reverse=True), label
        top = np.sort(expected)[::-1][:num]
        if num and abs(expected[token] - top[-1]) > 1e-4 or token == expected.argmax():
            is_among = num > 0 and expected[token] >= top[-1]
            assert len(entry) == num + (not is_among), label
        likeliest = sorted(entry.values(), reverse=True)[:num] if len(entry) <= num else others
        assert likeliest == pytest.approx(top, abs=1e-4), label


def check_all(folder, prompts, params, outputs, **options):
    assert len(prompts) == len(params) == len(outputs)
    for prompt, one, output in zip(prompts, params, outputs):
        check(folder, prompt, one, output, **options)


# ---- engines: every wish, whatever the engine does beneath


@pytest.fixture(scope="module")
def folder(checkpoint):
    """Sixteen tokens only: they repeat, so that penalties have something to do."""
    return checkpoint("llama", vocab_size=16, seed=5)


def ids(seed, length):
    return random_ids(seed, length, 16)


PENALTIES = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.3},
    {"frequency_penalty": -0.9},
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 1.1},
]
FILTERS = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.15}, {"top_k": 7, "top_p": 0.8, "min_p": 0.05}]
EVERYTHING = {
    **{"repetition_penalty": 0.8, "frequency_penalty": 1.1, "presence_penalty": -0.4, "logit_bias": {2: 1.0, 9: -3.0}},
    **{"min_tokens": 8, "stop_token_ids": (1, 5, 7, 11), "logprobs": 2, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
}
WISHES = [
    *PENALTIES,
    {"logit_bias": {3: 2.5, 4: -100.0, 0: -1.5, 12: 1.0}},
    {"logit_bias": {3: 100.0}, "presence_penalty": 1.0},
    {"min_tokens": 7, "stop_token_ids": (0, 2, 3, 5, 7, 11, 13)},
    {"logprobs": 0},
    {"logprobs": 5, "frequency_penalty": 0.5},
    EVERYTHING,
]


def drawn(wish, seed, max_tokens=14):
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True, **wish)


def batch_of_wishes(max_tokens=14):
    """Prompts and params: each wish greedily and drawn, the filters, and plain rows between; prompts share a prefix."""
    params = [greedy(max_tokens, **wish) for wish in WISHES]
    params += [drawn(wish, 100 + n, max_tokens) for n, wish in enumerate([*WISHES, *FILTERS])]
    for place in range(0, len(params), 6):
        params.insert(place, greedy(max_tokens) if place % 12 else drawn({}, place, max_tokens))
    prompts = [(ids(7, 13) if n % 3 else []) + ids(50 + n, 1 + n % 5) for n in range(len(params))]
    return prompts, params


ENGINES = {
    "async": {},
    "sync": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"num_kvcache_blocks": 20},
    "preempted, sync": {"num_kvcache_blocks": 20, "async_scheduling": False},
    "blocks of 1, few rows, no cache": {"kvcache_block_size": 1, "max_num_seqs": 5, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_every_wish_in_one_batch_equals_the_oracle(folder, options):
    """Twice: the second call finds the prompts in the cache. Penalties count the token that is still in flight."""
    prompts, params = batch_of_wishes()
    with engine(folder, **options) as llm:
        for call in ("first", "second"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            check_all(folder, prompts, params, outputs, label=f"{call} call")
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
    has_cache = options.get("enable_prefix_caching", True)
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == has_cache


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 6, "async_scheduling": False}], ids=str)
def test_every_wish_on_a_gpu_equals_the_oracle(folder, options):
    """Draws are replaced in what a graph gave; batches of 8 replay one, longer chunks don't."""
    prompts, params = batch_of_wishes()
    settings = {"device": "cuda", "dtype": "float32", "kvcache_block_size": 16, "max_num_seqs": 8}
    with engine(folder, **settings | options) as llm:
        for _ in range(2):
            check_all(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))


def test_two_ranks_give_one_ranks_tokens(chat_checkpoint):
    """Every wish, bad words too, chunked and preempted; what is asked of a draw reaches both ranks."""
    prompts, params = batch_of_wishes(max_tokens=8)
    with start(chat_checkpoint, 2, num_kvcache_blocks=40, max_num_batched_tokens=64) as llm:
        poison_caches(llm)
        encode = llm.tokenizer.encode
        word = llm.tokenizer.decode(llm.generate([prompts[0]], greedy(3), use_tqdm=False)[0].token_ids[1:])
        params = [dataclasses.replace(one, bad_words=(word, "the")) if n % 2 else one for n, one in enumerate(params)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0
    words = [encode(form, add_special_tokens=False) for text in (word, "the") for form in (text, f" {text}")]
    for n, (prompt, one, output) in enumerate(zip(prompts, params, outputs)):
        check(chat_checkpoint, prompt, one, output, bad_words=words if n % 2 else ())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_wish_changes_some_tokens(folder, temperature):
    """Or the comparisons with the oracle would say little."""
    prompts = [ids(20 + n, 6) for n in range(6)]

    def tokens(wish):
        common = {"temperature": temperature, "max_tokens": 14, "ignore_eos": True, "seed": 3}
        outputs = llm.generate(prompts, SamplingParams(**common, **wish), use_tqdm=False)
        return [output.token_ids for output in outputs]

    with engine(folder) as llm:
        plain = tokens({})
        for wish in WISHES + (FILTERS if temperature else []):
            same = [list(one) == list(other) for one, other in zip(tokens(wish), plain)]
            assert all(same) if list(wish) == ["logprobs"] else not all(same), wish


def random_params(rng):
    pick = rng.choice
    params = {"max_tokens": int(rng.integers(1, 16)), "seed": int(rng.integers(2**62)), "ignore_eos": True}
    params |= {"temperature": float(pick([0.0, 0.4, 1.0, 1.6]))}
    wishes = {
        "top_k": lambda: int(rng.integers(1, 20)), "top_p": lambda: float(rng.uniform(0.05, 1)),
        "min_p": lambda: float(rng.uniform(0, 0.4)), "repetition_penalty": lambda: float(rng.uniform(0.4, 2.5)),
        "frequency_penalty": lambda: float(rng.uniform(-2, 2)), "presence_penalty": lambda: float(rng.uniform(-2, 2)),
        "logit_bias": lambda: {int(t): float(rng.normal(0, 3)) for t in rng.integers(0, 16, rng.integers(1, 5))},
        "min_tokens": lambda: int(rng.integers(0, params["max_tokens"] + 1)),
        "stop_token_ids": lambda: tuple(map(int, rng.integers(0, 20, 3))), "logprobs": lambda: int(rng.integers(0, 17)),
    }  # fmt: skip
    return SamplingParams(**params, **{name: make() for name, make in wishes.items() if rng.random() < 0.3})


def random_batch(folder, seed):
    rng = np.random.default_rng(seed)
    params = [random_params(rng) for _ in range(10)]
    prompts = [ids(int(rng.integers(4)), int(rng.integers(1, 9))) + ids(200 + n, 1) for n in range(len(params))]
    options = {"max_num_seqs": int(rng.choice([2, 4, 16])), "max_num_batched_tokens": int(rng.choice([3, 8, 64]))}
    options |= {"async_scheduling": bool(rng.random() < 0.6), "num_kvcache_blocks": int(rng.choice([7, 12, 40]))}
    with engine(folder, **options) as llm:
        check_all(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False), label=f"seed {seed}")


def test_random_wishes_equal_the_oracle(folder):
    for seed in range(12):
        random_batch(folder, seed)


@pytest.mark.slow
def test_many_random_wishes_equal_the_oracle(folder):
    for seed in range(100, 700):
        random_batch(folder, seed)


def test_more_rows_with_wishes_than_are_drawn_again_at_once(folder):
    """Sorting is done in parts of `sampler.ROWS_AT_A_TIME` rows: here of one, two and three of them."""
    n = 2 * sampler.ROWS_AT_A_TIME + 5
    prompts = [ids(300 + i, 1 + i % 4) for i in range(n)]
    wishes = EVERYTHING | {"min_tokens": 3}, {"top_k": 2, "logprobs": 1}, {"presence_penalty": 0.5}
    params = [drawn(wishes[i % 3], i, 4 + i % 2) if i % 5 else greedy(4) for i in range(n)]
    with engine(folder, max_num_seqs=n) as llm:
        check_all(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))


# ---- who pays


@BOTH_WAYS
def test_a_plain_row_gets_the_same_tokens_alone_and_among_others(folder, is_async):
    plain = [greedy(12), drawn({}, 5, 12), greedy(12, stop_token_ids=(3, 4)), drawn({"stop_token_ids": (5, 6)}, 6, 12)]
    prompts = [ids(80 + n, 4 + n) for n in range(4)]
    others = [ids(90 + n, 3) for n in range(len(WISHES))]
    with engine(folder, async_scheduling=is_async) as llm:
        alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts, plain)]
        for wishes in ([drawn(wish, n) for n, wish in enumerate(WISHES)], [greedy(14, **wish) for wish in WISHES]):
            everybody = others[:5] + prompts + others[5:], wishes[:5] + plain + wishes[5:]
            mixed = llm.generate(*everybody, use_tqdm=False)[5:9]
            check_all(folder, prompts, plain, mixed)
            assert [output.token_ids for output in mixed] == [output.token_ids for output in alone]
    check_all(folder, prompts, plain, alone)


@BOTH_WAYS
def test_a_batch_of_plain_rows_never_draws_again(folder, monkeypatch, is_async):
    def fail(*_):
        raise LookupError("drawn again")

    monkeypatch.setattr(ModelRunner, "_draw_again", fail)
    plain = [greedy(5), drawn({}, 1, 5), greedy(5, stop_token_ids=(3,)), SamplingParams(max_tokens=5), drawn({}, 2, 7)]
    plain += [greedy(5, top_k=3, top_p=0.5, min_p=0.5)]  # greedy: no filter matters
    prompts = [ids(110 + n, 3 + 4 * n) for n in range(6)]
    with engine(folder, async_scheduling=is_async, max_num_batched_tokens=8, num_kvcache_blocks=12) as llm:
        outputs = llm.generate(prompts, plain, use_tqdm=False)
        assert {output.finish_reason for output in outputs} <= {"length", "stop"}
        assert llm.generate([[1]], greedy(2, top_k=2, logprobs=0), use_tqdm=False)[0].finish_reason == "error"


@pytest.mark.parametrize(
    "wish, needed",
    [
        ({"logit_bias": {1: 1.0}}, "apply_rules"),
        ({"min_tokens": 4, "stop_token_ids": (3,)}, "apply_rules"),
        ({"repetition_penalty": 1.5}, "penalise"),
        ({"frequency_penalty": 0.5}, "penalise"),
        ({"presence_penalty": -0.5}, "penalise"),
        ({"top_k": 3}, "filter_logits"),
        ({"top_p": 0.5}, "filter_logits"),
        ({"min_p": 0.5}, "filter_logits"),
        ({"logprobs": 2}, "top_logprobs"),
    ],
    ids=str,
)
def test_a_batch_pays_only_for_what_its_rows_ask(folder, monkeypatch, wish, needed):
    """One row of five asks for one thing: that alone is done, for that row, once per token; not for its first chunk."""
    calls = []

    def watch(name):
        function = getattr(sampler, name)

        def counted(logits, *args):
            calls.append((name, len(logits)))
            return function(logits, *args)

        monkeypatch.setattr(sampler, name, counted)

    for name in ("apply_rules", "penalise", "filter_logits", "top_logprobs"):
        watch(name)
    params = [greedy(6), drawn({}, 1, 6), drawn(wish, 2, 4), drawn({}, 3, 6), greedy(6)]
    prompts = [ids(120 + n, 3) for n in range(5)]
    prompts[2] = ids(122, 20)
    with engine(folder, max_num_batched_tokens=16, async_scheduling=False) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert calls == [(needed, 1)] * len(outputs[2].token_ids)


# ---- penalties, token by token

FOUR_TOKENS = known_distribution([0.5, 0.3, 0.15, 0.05])  # made once: the fixture `checkpoint` goes by its address


@pytest.mark.parametrize(
    "wish, prompt, expected",
    [
        # log 0.5 0.3 0.15 0.05: -0.69 -1.20 -1.90 -3.00
        ({"frequency_penalty": 1.0}, [3], [0, 1, 0, 2, 1, 0, 2, 3, 1]),
        ({"frequency_penalty": 1.0}, [0, 0, 0, 0], [0, 1, 0, 2, 1, 0, 2, 3, 1]),  # the prompt doesn't count
        ({"presence_penalty": 2.0}, [3], [0, 1, 2, 0, 0, 0, 0]),  # -2.69 -3.20 -3.90 -3.00, once and for all
        ({"repetition_penalty": 3.0}, [1], [0, 2, 0, 0, 0, 0]),  # -2.08 -3.61 -5.69 -9: the prompt counts
        ({"repetition_penalty": 3.0}, [0], [1, 2, 0, 0, 0, 0]),
        ({"frequency_penalty": -1.0, "logit_bias": {2: 2.0}}, [1], [2, 2, 2, 2, 2]),
        ({"frequency_penalty": 2.0, "presence_penalty": -2.0}, [1], [0, 0, 1, 1, 2, 2, 0, 3, 3, 1]),
        ({"logit_bias": {0: -100.0, 3: 2.0}}, [1], [3, 3, 3]),
    ],
    ids=str,
)
@BOTH_WAYS
def test_penalties_by_hand(checkpoint, wish, prompt, expected, is_async):
    """A model whose distribution is always the same. Greedily; the token before is counted though still in flight."""
    source = checkpoint("llama", vocab_size=16, edit=FOUR_TOKENS)
    with engine(source, async_scheduling=is_async) as llm:
        (output,) = llm.generate([prompt], greedy(len(expected), **wish), use_tqdm=False)
    assert list(output.token_ids) == expected


# ---- logit_bias, min_tokens


@BOTH_WAYS
def test_a_large_bias_forces_and_bans_tokens(folder, is_async):
    force, ban = {"logit_bias": {6: 100.0}}, {"logit_bias": {t: -100.0 for t in range(16) if t not in (2, 9)}}
    with engine(folder, async_scheduling=is_async) as llm:
        params = [greedy(6, **force), drawn(force, 1, 6), greedy(20, **ban), drawn(ban, 2, 20)]
        outputs = llm.generate([ids(130, 5)] * 4, params, use_tqdm=False)
    assert [list(output.token_ids) for output in outputs[:2]] == [[6] * 6] * 2
    assert set(outputs[2].token_ids) | set(outputs[3].token_ids) == {2, 9}


@BOTH_WAYS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_among_the_first_min_tokens_and_none_is_banned_after(folder, tmp_path, is_async, temperature):
    """Ids 4 and 8 (of the model) and 6 (the caller's) would be drawn at once if they could."""
    source = copy_checkpoint(folder, tmp_path / "eos", config={"eos_token_id": 4}, generation_eos=[8])
    with engine(source, async_scheduling=is_async) as llm:
        for favoured, min_tokens, fields, length, reason in (
            (4, 0, {}, 1, "stop"),
            (4, 1, {}, 2, "stop"),
            (8, 5, {}, 6, "stop"),
            (6, 5, {"stop_token_ids": (6,)}, 6, "stop"),
            (6, 5, {"stop_token_ids": (6,), "ignore_eos": True}, 6, "stop"),
            (6, 9, {}, 10, "length"),  # 6 ends nothing here: drawn from the first on
            (4, 5, {"ignore_eos": True}, 10, "length"),
            (4, 9, {}, 10, "stop"),
            (4, 10, {}, 10, "length"),
        ):
            params = SamplingParams(temperature=temperature, max_tokens=10, min_tokens=min_tokens, seed=1,
                                    logit_bias={favoured: 100.0}, **fields)  # fmt: skip
            (output,) = llm.generate([ids(140, 5)], params, use_tqdm=False)
            assert (len(output.token_ids), output.finish_reason) == (length, reason), (favoured, min_tokens, fields)
            end_ids = {*fields.get("stop_token_ids", ()), *(() if params.ignore_eos else (4, 8))}
            check(source, ids(140, 5), params, output, end_ids=end_ids)
            assert list(output.token_ids).count(favoured) == (1 if reason == "stop" else 10 * (favoured not in end_ids))


def test_min_tokens_bans_the_tokenizers_end_token_too(chat_checkpoint):
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias={1: 100.0})
    with engine(chat_checkpoint) as llm:
        assert llm.tokenizer.eos_token_id == 1
        (output,) = llm.generate(["the cat"], params, use_tqdm=False)
    assert (len(output.token_ids), output.token_ids[-1], output.finish_reason) == (5, 1, "stop")


# ---- one bad request never hurts another


def serve_beside(source, params, prompt=(1, 2, 3)):
    """What becomes of a request: the refusal, or its output. One that was there before must not notice."""
    with engine(source) as llm:
        before = llm.add_request([3, 2, 1], greedy(6), request_id="before")
        llm.step()
        try:
            llm.add_request(list(prompt), params, request_id="own")
        except ValueError as error:
            refusal = error
        else:
            refusal = None
        outputs = {output.request_id: output for output in drain(llm)}
        assert outputs[before].finish_reason == "length", "the request failed in a step that others are in"
        check(source, [3, 2, 1], greedy(6), outputs[before])
        check_all(source, [[1, 2]], [greedy(3)], llm.generate([[1, 2]], greedy(3), use_tqdm=False))
    return refusal or outputs["own"]


@pytest.mark.parametrize("token", [-1, 16, 2**40])
def test_a_bias_outside_the_vocabulary_is_refused_with_id_and_limit(folder, token):
    refusal = serve_beside(folder, greedy(3, logit_bias={2: 1.0, token: 1.0}))
    assert isinstance(refusal, ValueError) and str(token) in str(refusal) and "16" in str(refusal)


def test_more_logprobs_than_tokens_are_refused_and_all_tokens_are_not(folder):
    refusal = serve_beside(folder, greedy(3, logprobs=17))
    assert isinstance(refusal, ValueError) and "logprobs" in str(refusal)
    assert "17" in str(refusal) and "16" in str(refusal)
    output = serve_beside(folder, greedy(3, logprobs=16))
    assert [len(entry) for entry in output.logprobs] == [16] * 3
    assert [sum(map(math.exp, entry.values())) for entry in output.logprobs] == [approx(1.0)] * 3
    check(folder, [1, 2, 3], greedy(3, logprobs=16), output)


def test_bad_words_without_a_tokenizer_are_refused(folder):
    refusal = serve_beside(folder, greedy(3, bad_words=("some", "words")))
    assert isinstance(refusal, ValueError) and "bad_words" in str(refusal) and "tokenizer" in str(refusal)


@pytest.mark.parametrize("token", [-1, -17, 16, 2**40])
def test_an_end_token_outside_the_vocabulary_bans_nothing(folder, token):
    """A negative one doesn't count from the end: 15, the last, would be drawn at once and may."""
    params = greedy(4, stop_token_ids=(token,), min_tokens=3, logit_bias={15: 100.0})
    output = serve_beside(folder, params)
    assert isinstance(output, ValueError) and str(token) in str(output) or list(output.token_ids) == [15] * 4


def test_a_bad_word_outside_the_vocabulary_bans_nothing_or_is_refused(checkpoint, tmp_path):
    """A tokenizer may know more tokens than the model."""
    source = tiny.tiny_tokenizer(copy_checkpoint(checkpoint("llama", vocab_size=128), tmp_path / "a"))
    output = serve_beside(source, greedy(4, bad_words=("the", "Привет")))
    if isinstance(output, ValueError):
        assert "bad_words" in str(output)
    else:
        check(source, [1, 2, 3], greedy(4), output)


def test_a_bad_word_without_tokens_bans_nothing_or_is_refused(chat_checkpoint, tmp_path):
    """A tokenizer may drop spaces before it looks for words."""
    source = copy_checkpoint(chat_checkpoint, tmp_path / "a")
    fields = json.loads((source / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (source / "tokenizer.json").write_text(json.dumps(fields))
    output = serve_beside(source, greedy(4, bad_words=(" ", "the")))
    if isinstance(output, ValueError):
        assert "bad_words" in str(output)
    else:
        check(source, [1, 2, 3], greedy(4), output)


def test_what_a_caller_does_to_his_biases_later_changes_nothing(folder):
    bias = {3: 100.0}
    with engine(folder) as llm:
        llm.add_request([1, 2, 3], greedy(5, logit_bias=bias))
        llm.step()
        bias.update({3: -100.0, 4: NAN, 99: 1.0})
        (output,) = drain(llm)
    assert list(output.token_ids) == [3] * 5


def test_min_tokens_as_large_as_numbers_get(folder):
    """No overflow of 64 bits: an end token, though favoured, never comes."""
    room = 128 - 3
    for most in (sys.maxsize, 2**63 - 4, 2**64, 10**30):
        params = greedy(most, min_tokens=most, stop_token_ids=(7,), logit_bias={7: 100.0})
        output = serve_beside(folder, params)
        assert (len(output.token_ids), output.finish_reason) == (room, "length") and 7 not in output.token_ids


@pytest.mark.parametrize("field", ["temperature", "top_k", "repetition_penalty", "logit_bias"])
def test_a_number_too_large_for_a_float_hurts_nobody(folder, field):
    """Refused at once or served, but it doesn't fail within the step that others are in."""
    huge = 10**400
    try:
        params = SamplingParams(max_tokens=4, seed=1, **{field: {3: huge} if field == "logit_bias" else huge})
    except ValueError as error:
        assert field in str(error)
        return
    output = serve_beside(folder, params)
    assert isinstance(output, ValueError) or output.finish_reason == "length"


def test_a_ban_wins_over_the_largest_bias(folder):
    """Beyond float32 a bias would be infinite, and inf - inf no number."""
    for bias in (1e4, 3e38, 1e39, 1e300):
        try:
            params = greedy(5, stop_token_ids=(7,), min_tokens=4, logit_bias={7: bias})
        except ValueError as error:
            assert "logit_bias" in str(error) and bias > 1e38
            continue
        output = serve_beside(folder, params)
        assert len(output.token_ids) == 5 and 7 not in output.token_ids[:4] and output.token_ids[4] == 7


def test_a_request_that_leaves_no_token_still_ends(folder):
    """Every token is an end token and banned: what it gets is its own affair."""
    for changes in ({}, {"top_p": 0.5, "temperature": 1.0, "seed": 1, "repetition_penalty": 2.0, "logprobs": 3}):
        output = serve_beside(folder, greedy(5, **{"stop_token_ids": range(16), "min_tokens": 3, **changes}))
        assert output.finish_reason in ("stop", "length") and all(0 <= token < 16 for token in output.token_ids)


def test_a_failed_step_leaves_as_many_logprobs_as_tokens(folder, monkeypatch):
    for is_async, num_steps in itertools.product((True, False), (1, 3)):
        with engine(folder, async_scheduling=is_async) as llm:
            llm.add_request([1, 2, 3], greedy(9, logprobs=2, frequency_penalty=0.5))
            for _ in range(num_steps):
                assert llm.step() == []
            with monkeypatch.context() as patch:
                patch.setattr(sampler, "penalise", lambda *_: 1 / 0)
                (output,) = drain(llm)
        assert output.finish_reason == "error"
        assert len(output.logprobs) == len(output.token_ids) == num_steps - is_async
        check_partial_logprobs(folder, output, 2)


# ---- bad_words


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_checkpoint)


def forms(tokenizer, words):
    """What may not be drawn: a word's tokens, and those of the word behind a space."""
    return [tokenizer.encode(form, add_special_tokens=False) for word in words for form in (word, f" {word}")]


def contains(token_ids, word):
    token_ids = list(token_ids)
    return any(token_ids[n : n + len(word)] == list(word) for n in range(len(token_ids) - len(word) + 1))


def words_in(tokenizer, token_ids, width):
    """Words that `width` tokens in a row spell, and that are spelled so."""
    runs = [list(token_ids[n : n + width]) for n in range(len(token_ids) - width + 1)]
    found = [(tokenizer.decode(run).removeprefix(" "), run) for run in runs]
    return [word for word, run in found if word.strip() and run in forms(tokenizer, [word])]


@BOTH_WAYS
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bad_words_are_never_drawn(chat_checkpoint, tokenizer, is_async, temperature):
    """Words of one, two and three tokens that would be drawn, one and several of them; equal to the oracle."""
    prompts, found = [random_ids(600 + n, 5, 384) for n in range(4)], Counter()
    common = {"temperature": temperature, "seed": 9, "ignore_eos": True, "max_tokens": 24}
    with engine(chat_checkpoint, async_scheduling=is_async) as llm:
        plain = llm.generate(prompts, SamplingParams(**common), use_tqdm=False)
        jobs = []
        for prompt, output in zip(prompts, plain):
            for width in (1, 2, 3):
                words = words_in(tokenizer, output.token_ids, width)
                jobs += [(prompt, output, chosen) for chosen in (words[:1], words[-1:], words) if chosen]
                found[width] += len(words)
        params = [SamplingParams(**common, bad_words=words) for _, _, words in jobs]
        outputs = llm.generate([prompt for prompt, _, _ in jobs], params, use_tqdm=False)
    assert min(found.values()) > 3, found
    for (prompt, before, words), one, output in zip(jobs, params, outputs):
        banned = forms(tokenizer, words)
        assert any(contains(before.token_ids, word) for word in banned)
        assert not any(contains(output.token_ids, word) for word in banned)
        check(chat_checkpoint, prompt, one, output, bad_words=banned)


@BOTH_WAYS
def test_a_bad_words_beginning_in_the_prompt_does_not_count(chat_checkpoint, tokenizer, is_async):
    """k is one token, and nothing joins two of them: k k ... may follow the prompt's k, but not each other."""
    (k,) = tokenizer.encode("k", add_special_tokens=False)
    assert tokenizer.encode("kkk", add_special_tokens=False) == [k, k, k]
    with engine(chat_checkpoint, async_scheduling=is_async) as llm:
        for prompt in ([k], [40, k, k], [k, k, k, k, k, 40]):
            words = "k", "kk", ("kkk",), "k" * 20
            params = [greedy(9, bad_words=word, logit_bias={k: 100.0}) for word in words]
            one, two, three, twenty = (o.token_ids for o in llm.generate([prompt] * 4, params, use_tqdm=False))
            assert k not in one
            assert [token == k for token in two] == [True, False] * 4 + [True]
            assert [token == k for token in three] == [True, True, False] * 3
            assert list(twenty) == [k] * 9


def test_a_bad_word_behind_a_space_is_one_too(chat_checkpoint, tokenizer):
    """"the" and " the" are different tokens; another capital, or a word that holds it, is another word."""
    (bare,), (spaced,) = forms(tokenizer, ["the"])
    others = [tokenizer.encode(text, add_special_tokens=False)[0] for text in ("t", " t", "h")]
    assert len({bare, spaced, *others}) == 5
    bias = {bare: 90.0, spaced: 100.0, others[0]: 50.0}
    with engine(chat_checkpoint) as llm:
        free, banned = (
            llm.generate([[5, 6]], greedy(4, logit_bias=bias, bad_words=words), use_tqdm=False)[0].token_ids
            for words in ((), "the")
        )
    assert list(free) == [spaced] * 4 and list(banned) == [others[0]] * 4


def test_bad_words_have_no_begin_token(chat_checkpoint, tokenizer, tmp_path):
    """A tokenizer that begins every text with <s> doesn't put one before the word."""
    source = tiny.tiny_tokenizer(copy_checkpoint(chat_checkpoint, tmp_path / "bos"), bos=True)
    (bare,), _ = forms(tokenizer, ["the"])
    with engine(source) as llm:
        assert llm.tokenizer.encode("the") == [0, bare]
        (output,) = llm.generate([[5, 6]], greedy(5, logit_bias={bare: 100.0}, bad_words="the"), use_tqdm=False)
    assert bare not in output.token_ids


def test_bad_words_hold_after_a_preemption_within_the_word(chat_checkpoint, tokenizer):
    """Also when the sequence comes back through cached blocks, at whatever token of the word."""
    (k,) = tokenizer.encode("k", add_special_tokens=False)
    for num_blocks in range(13, 19):
        with engine(chat_checkpoint, num_kvcache_blocks=num_blocks) as llm:
            prompts = [random_ids(610 + n, 9, 384) for n in range(3)]
            params = greedy(21, bad_words="kkk", logit_bias={k: 100.0}, frequency_penalty=0.1)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.scheduler.num_preemptions > 0
        for prompt, output in zip(prompts, outputs):
            assert [token == k for token in output.token_ids] == [True, True, False] * 7
            check(chat_checkpoint, prompt, params, output, bad_words=forms(tokenizer, ["kkk"]))


# ---- logprobs: one entry per new token, however a request goes and ends


def check_partial_logprobs(source, output, num):
    got = list(output.token_ids)
    assert len(output.logprobs) == len(got)
    if got:
        rows = tiny.reference_logits(source, list(output.prompt_token_ids) + got)[-len(got) - 1 : -1].numpy()
        check_logprobs(rows, got, output.logprobs, num)


@BOTH_WAYS
@pytest.mark.parametrize("num_steps", range(7))
def test_an_aborted_request_has_as_many_logprobs_as_tokens(folder, is_async, num_steps):
    """Waiting, within its prompt (three steps), running, with a token in flight; a neighbour goes on."""
    with engine(folder, max_num_batched_tokens=8, async_scheduling=is_async) as llm:
        victim = llm.add_request(ids(150, 20), greedy(30, logprobs=3, presence_penalty=0.5))
        other = llm.add_request(ids(151, 4), greedy(9, logprobs=1))
        for _ in range(num_steps):
            assert llm.step() == []
        llm.abort(victim)
        outputs = {output.request_id: output for output in drain(llm)}
    assert outputs[victim].finish_reason == "abort"
    assert len(outputs[victim].token_ids) == max(0, num_steps - 2 - is_async)
    check_partial_logprobs(folder, outputs[victim], 3)
    check(folder, ids(151, 4), greedy(9, logprobs=1), outputs[other])


@BOTH_WAYS
def test_a_stop_tokens_and_a_stop_strings_last_token_have_logprobs(chat_checkpoint, is_async):
    """The surplus token that was in flight has none."""
    with engine(chat_checkpoint, async_scheduling=is_async) as llm:
        (whole,) = llm.generate(["the cat sat"], greedy(30, logprobs=2), use_tqdm=False)
        assert len(whole.logprobs) == 30
        token = whole.token_ids[9]
        length = list(whole.token_ids).index(token) + 1
        for stop in ({"stop_token_ids": (token,)}, {"stop": whole.text[12:14]}):
            params = [greedy(30, logprobs=2, **stop), greedy(25, logprobs=1)]
            output, other = llm.generate(["the cat sat", "the"], params, use_tqdm=False)
            assert output.finish_reason == "stop" and len(output.token_ids) < 30
            assert len(output.logprobs) == len(output.token_ids)
            assert output.logprobs == [
                {token: pytest.approx(value, abs=1e-4) for token, value in entry.items()}
                for entry in whole.logprobs[: len(output.token_ids)]
            ]
            assert "stop" in stop or len(output.token_ids) == length
            check(chat_checkpoint, other.prompt_token_ids, params[1], other)


def test_logprobs_change_no_token_and_each_row_gets_its_own_number(folder):
    prompts, common = [ids(160 + n, 5) for n in range(6)], {"max_tokens": 8, "ignore_eos": True, "temperature": 0.9}
    nums = [None, 0, 5, 1, None, 16]
    with engine(folder) as llm:
        params = [SamplingParams(**common, seed=n, logprobs=num) for n, num in enumerate(nums)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        without = [dataclasses.replace(one, logprobs=None) for one in params]
        plain = llm.generate(prompts, without, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert [output.logprobs is None for output in outputs] == [num is None for num in nums]
    check_all(folder, prompts, params, outputs)


def test_a_later_request_does_not_inherit_a_rows_wishes(folder):
    """One row, which changes hands: settings, rules and logprobs are the new owner's."""
    prompt, wishes = ids(170, 6), [EVERYTHING, {}, {"top_k": 2}, {}, {"logit_bias": {3: 9.0}}, {"min_tokens": 2}, {}]
    params = [drawn({"stop_token_ids": (1, 5), **wish}, 4, 9) for wish in wishes]
    with engine(folder, max_num_seqs=1) as llm:
        check_all(folder, [prompt] * 7, params, llm.generate([prompt] * 7, params, use_tqdm=False))


# ---- frequencies

CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88, 9: 33.72}  # p = 1e-4, by freedom
LOGITS4, LOGITS5 = [0.0, 1.0, -1.0, 0.5], [2.0, 1.5, 1.9, -0.5, 0.0]
LOGITS8 = [0.3, -2.0, 1.2, 1.1, 0.0, -0.7, 2.1, 0.9]
FIVE_PROBABILITIES = [0.4, 0.25, 0.15, 0.12, 0.08]
FIVE_TOKENS = known_distribution(FIVE_PROBABILITIES)
NUM_DRAWS = 40_000


def expected_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The documented order, one token at a time."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    falling = sorted(weights, key=lambda token: -weights[token])[: top_k or None]
    total, before, kept = sum(weights[token] for token in falling), 0.0, []
    for token in falling:
        if before < top_p and weights[token] >= min_p * weights[falling[0]]:
            kept.append(token)
        before += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def assert_follows(drawn, probabilities):
    """Pearson's chi-square of token ids. Seeds and positions are fixed, so the figure is the same each time."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    expected = np.array(probabilities) * len(drawn)
    assert len(counts) == len(expected) and (counts[expected == 0] == 0).all(), counts
    some = expected > 0
    if some.sum() > 1:
        chi_square = ((counts - expected)[some] ** 2 / expected[some]).sum()
        assert chi_square < CHI_SQUARE[some.sum() - 1], (counts.tolist(), expected.tolist())


def draw_many(logits, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Token ids [NUM_DRAWS] drawn with seeds 0, 1, ... at one position. logits [vocab_size], or a tensor of rows."""
    rows = torch.as_tensor(logits, device=device).expand(NUM_DRAWS, -1).contiguous()
    settings = columns(temperature, top_k, top_p, min_p, 1.0, 0.0, 0.0, 1, n=NUM_DRAWS, device=device)
    if (top_k, top_p, min_p) != (0, 1.0, 0.0):
        rows = sampler.filter_logits(rows, settings)
    seeds = torch.arange(NUM_DRAWS, device=device)
    positions = torch.full((NUM_DRAWS,), 17, device=device)
    return kernels.sample(rows, seeds, settings[0], seeds, positions)[1].cpu().numpy()     # row i has seed i


SETTINGS = [
    *[{"temperature": temperature} for temperature in (1.0, 0.5, 1.7, 0.05)],
    *[{"top_k": top_k} for top_k in (1, 2, 3)],
    *[{"top_p": top_p} for top_p in (0.4, 0.8, 0.97)],
    *[{"min_p": min_p} for min_p in (0.1, 0.3, 0.6)],
    *[{"top_k": 3, "top_p": 0.8}, {"top_k": 4, "min_p": 0.2}, {"top_p": 0.9, "min_p": 0.15}],
    *[{"temperature": t, "top_k": 4, "top_p": 0.9, "min_p": 0.1} for t in (0.7, 1.0, 1.5)],
]


@CPU_AND_CUDA
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_what_temperature_and_filters_leave(device, settings):
    for logits in (LOGITS4, LOGITS5, LOGITS8):
        assert_follows(draw_many(logits, device, **settings), expected_probabilities(logits, **settings))


@CPU_AND_CUDA
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.75, "min_p": 0.1}], ids=str)
def test_draws_follow_what_biases_and_penalties_leave(device, settings):
    """Token 4 is biased, 6 banned behind 2 3; the prompt is 0 7 2, the output 2 3 0 2 3."""
    tokens, num_prompt = [0, 7, 2, 2, 3, 0, 2, 3], 3
    rules, penalties = [Rule((), 4, 1.25, 0, 99), Rule((2, 3), 6, -INF, 0, 99)], (1.4, 0.3, -0.5)
    raw = torch.tensor(LOGITS8, device=device).expand(NUM_DRAWS, -1)
    history = torch.tensor(tokens, dtype=torch.int32, device=device).expand(NUM_DRAWS, -1)
    positions = torch.full((NUM_DRAWS,), len(tokens), device=device)
    packed = torch.from_numpy(sampler.pack_rules([rules] * NUM_DRAWS)).to(device)
    numbers = columns(1.0, 0, 1.0, 0.0, *penalties, num_prompt, n=NUM_DRAWS, device=device)
    changed = sampler.penalise(sampler.apply_rules(raw, history, positions, packed), history, positions, numbers)
    logits = [0.3 / 1.4 - 0.3 + 0.5, -2.0, 1.2 / 1.4 - 0.6 + 0.5, 1.1 / 1.4 - 0.6 + 0.5, 1.25, -0.7, -INF, 0.9 / 1.4]
    assert changed[0].tolist() == approx(logits)
    assert_follows(draw_many(changed, device, **settings), expected_probabilities(logits, **settings))


@CPU_AND_CUDA
def test_draws_at_neighbouring_positions_and_of_neighbouring_seeds_are_independent(device):
    n, probabilities = NUM_DRAWS, expected_probabilities(LOGITS4)
    rows = torch.tensor(LOGITS4, device=device).expand(n, -1).contiguous()

    def draw(seed, position):
        """seed, position: numbers, or tensors of n."""
        seeds, positions = (torch.as_tensor(x).expand(n).contiguous().to(device) for x in (seed, position))
        temperatures, own = torch.ones(n, device=device), torch.arange(n, device=device)
        return kernels.sample(rows, own, temperatures, seeds, positions)[1].cpu().numpy()

    counting = torch.arange(n)
    both = np.outer(probabilities, probabilities).ravel() * n
    for one, other in (
        (draw(counting, 5), draw(counting, 6)),
        (draw(7, counting), draw(8, counting)),
        (draw(counting, counting), draw(counting + 1, counting)),
        (draw(counting, 0), draw(counting + 2**32, 0)),
        (draw(2**63 - 1, counting), draw(2**63 - 1, counting + 1)),
    ):
        assert_follows(one, probabilities)
        counts = np.bincount(one * 4 + other, minlength=16)
        assert ((counts - both) ** 2 / both).sum() < 44.26  # 15 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "wish",
    [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}, {"logit_bias": {1: 1.0, 4: -100.0}},
     {"top_k": 4, "top_p": 0.9, "min_p": 0.12, "logit_bias": {1: 1.0}}],
    ids=str,
)  # fmt: skip
def test_an_engines_draws_follow_the_distribution(checkpoint, device, wish):
    """3,840 tokens of 96 requests with seeds of their own, beside each other."""
    source = checkpoint("llama", vocab_size=16, edit=FIVE_TOKENS)
    logits = np.log(FIVE_PROBABILITIES) + [dict(wish.get("logit_bias", {})).get(token, 0.0) for token in range(5)]
    params = [SamplingParams(max_tokens=40, seed=seed, temperature=0.8, **wish) for seed in range(96)]
    with engine(source, device=device, dtype="float32", num_kvcache_blocks=1200, max_num_seqs=96) as llm:
        outputs = llm.generate([[1]] * 96, params, use_tqdm=False)
    filters = {name: value for name, value in wish.items() if name != "logit_bias"}
    expected = np.round(expected_probabilities(logits, 0.8, **filters), 12)
    assert_follows([token for output in outputs for token in output.token_ids], expected)


# ---- stats


def blocks(llm):
    stats = llm.stats()
    return stats["blocks_used"], stats["blocks_cached"], stats["blocks_free"]


def pick(llm, *names):
    stats = llm.stats()
    return tuple(stats[name] for name in names)


def test_stats_by_hand(folder):
    """Two rows, 16 blocks of 4 tokens. A has 5 tokens and draws 3, B 9 and 6; C waits, begins like A, and draws 2."""
    queues, work = ("running", "waiting", "requests"), ("steps", "computed_tokens", "output_tokens")
    a, b = ids(180, 5), ids(181, 9)
    c = [*a[:4], (a[4] + 1) % 16]
    with engine(folder, num_kvcache_blocks=16, max_num_seqs=2, async_scheduling=False) as llm:
        assert pick(llm, *queues, *work, "preemptions") == (0,) * 7
        assert blocks(llm) == (0, 0, 16) and pick(llm, "cache_hit_rate", "host_ms_per_step") == (0, 0)
        for prompt, max_tokens in ((a, 3), (b, 6), (c, 2)):
            llm.add_request(prompt, greedy(max_tokens))
        assert pick(llm, *queues, *work) == (0, 3, 0, 0, 0, 0) and blocks(llm) == (0, 0, 16)
        for expected in (
            # queues, work, blocks, hit rate
            ((2, 1, 0), (1, 14, 2), (5, 0, 11), 0),
            ((2, 1, 0), (2, 16, 4), (5, 0, 11), 0),
            ((1, 1, 1), (3, 18, 6), (3, 1, 12), 0),  # A has ended and leaves one full block
            ((2, 0, 1), (4, 20, 8), (5, 0, 11), 0),  # C has found it and computes one token
            ((1, 0, 2), (5, 22, 10), (4, 1, 11), 4 / 10),
            ((0, 0, 3), (6, 23, 11), (0, 4, 12), 4 / 19),
        ):
            llm.step()
            assert (pick(llm, *queues), pick(llm, *work), blocks(llm), llm.stats()["cache_hit_rate"]) == expected
            assert llm.stats()["host_ms_per_step"] > 0
        llm.step()
        assert pick(llm, *queues, *work) == (0, 0, 3, 6, 23, 11)  # an idle step is none
        assert llm.stats()["preemptions"] == 0


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_stats_add_up_after_every_step(folder, options):
    prompts, params = batch_of_wishes(max_tokens=10)
    with engine(folder, **options) as llm:
        pool, before, outputs = llm.scheduler.block_manager.num_blocks, llm.stats(), []
        added = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params)]
        for number in itertools.count():
            stats = llm.stats()
            assert stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] == pool
            assert min(stats.values()) >= 0 and stats["cache_hit_rate"] <= 1
            assert stats["running"] + stats["waiting"] + stats["requests"] == len(added)
            assert stats["requests"] == len(outputs)
            assert (stats["running"] == 0) == (stats["blocks_used"] == 0)
            for name in ("steps", "computed_tokens", "output_tokens", "preemptions", "requests"):
                assert stats[name] >= before[name]
            before = stats
            if not llm.has_unfinished():
                break
            if number == 7:
                assert llm.abort(added[2])
            outputs += llm.step()
    assert stats["preemptions"] == llm.scheduler.num_preemptions
    assert (stats["preemptions"] > 0) == ("num_kvcache_blocks" in options)
    drawn_tokens = sum(len(output.token_ids) for output in outputs)
    assert stats["output_tokens"] == drawn_tokens
    cached = sum(output.num_cached_tokens for output in outputs)
    assert stats["cache_hit_rate"] == pytest.approx(cached / sum(map(len, prompts)))
    assert stats["requests"] == len(prompts) and stats["running"] == stats["waiting"] == stats["blocks_used"] == 0


@BOTH_WAYS
def test_stats_count_each_computed_token_once(folder, is_async):
    """No end tokens, no hits, no preemption: all but each request's last token, in chunks or not."""
    prompts, lengths = [ids(190 + n, 3 + 5 * n) for n in range(4)], [5, 1, 9, 3]
    for budget in (64, 6):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": False, "async_scheduling": is_async}
        with engine(folder, **options) as llm:
            steps = []
            llm.on_step = lambda chunks, launch: steps.append(sum(chunk.num_tokens for chunk in chunks))
            llm.generate(prompts, [greedy(length) for length in lengths], use_tqdm=False)
            assert llm.stats()["computed_tokens"] == sum(map(len, prompts)) + sum(lengths) - 4 == sum(steps)
            assert llm.stats()["steps"] == len(steps) and llm.stats()["output_tokens"] == sum(lengths)


def test_stats_show_a_preemption_by_hand(folder):
    """Four blocks of 4 tokens: A and B hold two each; when A's ninth token needs a third, B gives its own back."""
    with engine(folder, num_kvcache_blocks=4, async_scheduling=False) as llm:
        for seed in (200, 201):
            llm.add_request(ids(seed, 7), greedy(5))
        for expected in ((2, 0, 0), (2, 0, 0), (1, 1, 1), (1, 1, 1)):
            llm.step()
            assert pick(llm, "running", "waiting", "preemptions") == expected
        drain(llm)
        assert pick(llm, "running", "waiting", "preemptions", "requests", "blocks_used") == (0, 0, 1, 2, 0)


def test_a_block_that_cannot_be_found_is_free_not_cached(folder):
    """Two equal prompts in one step fill blocks of equal content, of which the index knows the first ones."""
    prompt = ids(210, 9)
    with engine(folder, num_kvcache_blocks=16) as llm:
        llm.generate([prompt, prompt], greedy(1), use_tqdm=False)
        assert blocks(llm) == (0, 2, 14)
        assert llm.generate([prompt], greedy(1), use_tqdm=False)[0].num_cached_tokens == 8
        assert blocks(llm) == (0, 2, 14)


def test_host_time_is_the_steps_without_the_waiting(folder, monkeypatch):
    with engine(folder, async_scheduling=False) as llm:
        token_ids, schedule = llm._ranks.token_ids, llm.scheduler.schedule
        monkeypatch.setattr(llm._ranks, "token_ids", lambda launch: time.sleep(0.3) or token_ids(launch))
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        assert 0 < llm.stats()["host_ms_per_step"] < 250
    with engine(folder) as llm:
        schedule = llm.scheduler.schedule
        monkeypatch.setattr(llm.scheduler, "schedule", lambda: time.sleep(0.05) or schedule())
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        assert llm.stats()["host_ms_per_step"] >= 50

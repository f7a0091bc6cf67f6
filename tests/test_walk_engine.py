"""A random walk over the whole engine: requests of every kind arrive, are aborted, stream, fail, in tiny pools.

Each walk has an engine of its own, with a cache full of NaN. Three things are checked. The tokens: transformers runs
over each prompt and output at once, without a cache, and every token must have the best score given those before it (or
be within tiny.MARGIN of it; such are counted). The pool and the scheduler: after every step, by the checker of
test_walk_scheduler.py. What the rank did: a hash of the tokens up to each slot is kept beside the real cache, through
the rank's own history and block tables, so a slot that is read but not (or wrongly) written is seen in that step.

NANOENGINE_WALKS=20000 walks further, and at random; without it the same 300 walks are taken each time.
NANOENGINE_NO_SHRINK=1 stops at the first failure.
"""

import itertools
import math
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_walk_scheduler import EMPTY, NEVER_WRITTEN, PHASES, Walk, extend
from transformers import AutoTokenizer

from nanoengine import SamplingParams, llm_engine, sampler
from nanoengine.sequence import Status
from nanoengine.step_input import flatten

NUM_WALKS = int(os.environ.get("NANOENGINE_WALKS", 300))
VOCAB, EOS = 32, 1

# The tokens of ids 0 to 30; 31 has none. The last five are bytes of é, 丸 and ©, so characters may stay incomplete.
PIECES = ["<s>", "</s>", *"abcdefghijklmno", "ab", "ba", "bc", "abc", "ca", "dd", "Ġ", "Ġa", "cab",
          "Ã", "©", "ä", "¸", "Â"]
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, eos_token_id=EOS, rms_norm_eps=0.01)
MODELS = [("qwen3", True), ("llama", False), ("qwen2", True)]       # with a tokenizer?
SAMPLED = dict(temperature=0.9)
ENDS = dict.fromkeys((EOS, 3, 9, 19, VOCAB - 1), 4.0)   # of STOPS, so that they come at once; and one that is none
WANTED = dict.fromkeys(map(PIECES.index, ["d", "ab", "ba", "Ġ", "Ã", "©"]), 6.0)   # what bad words are made of
ASKED = [                                                           # of SamplingParams; each as likely as the others
    {}, {}, {}, SAMPLED, SAMPLED, {"temperature": 2.0}, {**SAMPLED, "top_k": 3}, {**SAMPLED, "top_p": 0.6},
    {**SAMPLED, "min_p": 0.2}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.7}, {**SAMPLED, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"logit_bias": {3: 3.5, 5: -4.0, 30: 1.0}}, {"min_tokens": 4, "logit_bias": ENDS}, {**SAMPLED, "min_tokens": 2},
    {"bad_words": ("ab", "d", "é"), "logit_bias": WANTED}, {**SAMPLED, "bad_words": "bad", "logit_bias": WANTED},
    {"repetition_penalty": 1.7, "logit_bias": dict.fromkeys(range(VOCAB), -20.0)}, {"logprobs": 0}, {"logprobs": 3},
    {**SAMPLED, "logprobs": 2, "top_k": 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.8, "frequency_penalty": 0.3,
     "presence_penalty": 0.4, "logit_bias": {7: 2.0, EOS: 1.0}, "min_tokens": 3, "bad_words": "ca", "logprobs": 1}]
STOPS = [{"ignore_eos": True}, {"ignore_eos": True}, {}, {"ignore_eos": True, "stop_token_ids": (3, 19, -1, 2**40)},
         {"stop": ("ab", "é"), "ignore_eos": True}, {"stop": "ac", "stop_token_ids": (9,)}]


# --- The world


@dataclass
class Request:
    kind: str               # add, stream, generate; refuse: it must be refused; again: the id of the one before again
    arrival: int            # before this step
    prompt: list
    params: SamplingParams
    abort: int | str | None     # before this step, or when it is first seen to be so


@dataclass
class World:
    model: int
    options: dict
    failure: tuple | None   # (launch that fails, where in it)
    requests: list = field(default_factory=list)
    num_blocks = property(lambda self: self.options["num_kvcache_blocks"])      # as test_walk_scheduler names them
    block_size = property(lambda self: self.options["kvcache_block_size"])
    max_num_seqs = property(lambda self: self.options["max_num_seqs"])
    budget = property(lambda self: self.options["max_num_batched_tokens"])
    caching = property(lambda self: self.options["enable_prefix_caching"])


REQUESTS = st.tuples(
    st.sampled_from(["add"] * 12 + ["stream", "stream", "generate", "refuse", "again"]),
    st.sampled_from([0, 0, 0, 1, 4]),                               # steps since the last arrival
    st.sampled_from("aabbc"),                                       # a: a's text; b: b's text; c: the last prompt again
    st.integers(0, 50),                                             # how much of the text
    st.integers(0, 3),                                              # own tokens after it
    st.sampled_from([10, 14, 1, 2, 4, 7, 10, 12, 5]),               # max_tokens
    st.integers(0, len(ASKED) - 1), st.integers(0, len(STOPS) - 1),
    st.sampled_from([None] * 16 + [2, 3, 5, 8, 0, "chunked", "preempted"]))     # aborted so many steps later, or then


@st.composite
def worlds(draw):
    block_size, model = draw(st.sampled_from([1, 4, 2, 3, 8, 16])), draw(st.integers(0, len(MODELS) - 1))
    requests, arrival = [], 0
    for i, (kind, gap, text, length, own, max_tokens, asked, stop, abort) in enumerate(
            draw(st.lists(REQUESTS, min_size=draw(st.sampled_from([1, 3, 5, 6])), max_size=7))):
        arrival += gap
        text = {"a": [3, 17, 4, 17, 5, 2, 6], "b": [2, 2, 2]}.get(text)
        length %= min(2 * block_size + 4, 30)
        prompt = (text * 14)[:length] + [2 + (i + 3 * k) % 30 for k in range(own)] if text else (
            requests[-1].prompt if requests else [])
        asked = {"temperature": 0.0, "seed": None if i % 3 else i << 33 | 5, **ASKED[asked], **STOPS[stop]}
        if not MODELS[model][1]:
            asked = {name: value for name, value in asked.items() if name not in ("stop", "bad_words")}
        if kind == "stream" and i % 3 and abort is None:
            abort = 1 + max_tokens // 2
        asked["min_tokens"] = min(asked.get("min_tokens", 0), max_tokens)
        requests.append(Request(kind, arrival, prompt or [2 + i], SamplingParams(max_tokens=max_tokens, **asked),
                                arrival + abort if isinstance(abort, int) else abort))
    longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
    length = max(1 + max(len(r.prompt) for r in requests), longest - draw(st.sampled_from([0, 0, 0, 3])))
    # What needs more blocks than there are would be refused; the last token drawn needs no place.
    blocks = -(-(min(length, longest) - 1) // block_size) + draw(st.sampled_from([0, 1, 0, 2, 5]))
    return World(model=model, requests=requests, options=dict(
        max_model_len=length, kvcache_block_size=block_size, num_kvcache_blocks=blocks,
        max_num_seqs=draw(st.sampled_from([4, 6, 5, 3, 2, 1])),
        max_num_batched_tokens=draw(st.sampled_from([40, 13, 8, 40, 5, 4, 2, 1])),
        async_scheduling=draw(st.sampled_from([True, True, False])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False]))),
        failure=draw(st.sampled_from([None] * 8 + [(1, "within"), (3, "before"), (5, "within"), (8, "after")])))


# --- What must come out


def scores_after(logits, request, prompt, drawn, sequence, banned_words):
    """Scores [vocab_size] of the next token, by the documented order; and whether a filter's edge is too close."""
    p, x = request.params, logits.astype(np.float64)
    for token_id, bias in dict(p.logit_bias or ()).items():
        x[token_id] += bias
    if len(drawn) < p.min_tokens:
        x[[token_id for token_id in sequence.stop_token_ids if 0 <= token_id < VOCAB]] = -np.inf
    for *before, last in banned_words:
        if drawn[len(drawn) - len(before):] == before:
            x[last] = -np.inf
    seen, counts = list({*prompt, *drawn}), np.bincount(drawn, minlength=VOCAB)
    x[seen] = np.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    x -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    if p.temperature == 0:
        return x, False
    with np.errstate(invalid="ignore"):     # banned tokens beside each other
        scores, margin = tiny.drawn_scores(x, len(prompt) + len(drawn), p.temperature, p.top_k, p.top_p, p.min_p,
                                           sequence.seed)
    return scores, margin == 0


def check_tokens(request, sequence, logits, tokenizer, seen):
    """logits [num_tokens, vocab_size] of the prompt and the output."""
    output, p = sequence.output, request.params
    prompt, tokens = output.prompt_token_ids, output.token_ids
    assert prompt == request.prompt
    banned = {tuple(tokenizer.encode(form, add_special_tokens=False))
              for word in p.bad_words for form in (word, f" {word}")}
    for i, token_id in enumerate(tokens):
        row = logits[len(prompt) + i - 1]
        scores, is_close = scores_after(row, request, prompt, tokens[:i], sequence, banned)
        seen["tokens"] += 1
        seen["undecided tokens"] += is_close or scores[token_id] < scores.max()
        short = scores.max() - scores[token_id]
        assert is_close or short < tiny.MARGIN, f"token {i}: {scores.argmax()} is better by {short:.4f}; {tokens}"
    seen["filtered, penalised or ruled tokens"] += len(tokens) * (not p.is_plain)
    if p.logprobs is None:
        assert output.logprobs is None
    else:
        check_logprobs(output, logits[len(prompt) - 1:], p.logprobs, seen)


def check_logprobs(output, logits, num, seen):
    """Per token: the drawn one's first, then the `num` likeliest's, of the raw logits."""
    assert len(output.logprobs) == len(output.token_ids)
    for row, token_id, given_ones in zip(logits, output.token_ids, output.logprobs):
        expected = row - np.logaddexp.reduce(row)
        assert next(iter(given_ones)) == token_id
        assert all(abs(expected[i] - value) < 1e-4 for i, value in given_ones.items())
        edge = np.sort(expected)[-num] if num else math.inf
        assert all(expected[i] > edge - 1e-4 for i in given_ones if i != token_id)
        is_close = abs(expected[token_id] - edge) < 1e-4        # then it may be one of the likeliest, or not
        assert len(given_ones) - num in ((0, 1) if is_close else (0,) if expected[token_id] > edge else (1,))
        seen["logprobs"] += 1


def check_end(request, sequence, world, tokenizer, seen):
    """Why it ended, and its text."""
    output, p = sequence.output, request.params
    tokens, ends = output.token_ids, {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
    limit = min(p.max_tokens, world.options["max_model_len"] - len(request.prompt))

    def text_of(token_ids):
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True).rstrip("\ufffd")

    assert not ends & {*tokens[:-1]} and len(tokens) <= limit
    has_end = bool(ends & {*tokens[-1:]})
    shown = tokens[:-1] if has_end else tokens
    text = text_of(shown)
    places = [text.find(stop) for stop in p.stop if stop in text]
    assert not any(stop in text_of(shown[:-1]) for stop in p.stop)
    text = text[:min(places)] if places else text
    reason = "stop" if has_end or places else "length" if len(tokens) == limit else None
    assert output.text == text
    assert output.finish_reason == reason or (reason is None and output.finish_reason in ("abort", "error"))
    seen[f"ended: {output.finish_reason}"] += 1
    seen["ended by a stop string"] += bool(places)
    seen["ended at max_model_len"] += reason == "length" and limit < p.max_tokens
    seen["a last character cut"] += tokenizer is not None and "\ufffd" in tokenizer.decode(shown)[len(text):]
    assert output.num_cached_tokens % world.block_size == 0 and output.num_cached_tokens < len(request.prompt)
    assert world.caching or output.num_cached_tokens == 0


# --- The walk


class Watched:
    """The engine's scheduler, with the checks of test_walk_scheduler around it."""

    def __init__(self, scheduler, check):
        self._scheduler, self._check = scheduler, check

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def add(self, sequence):
        self._check.sequences.append(sequence)
        self._scheduler.add(sequence)

    def schedule(self):
        self._check.launch()
        self._check.chunks, _ = self._check.in_flight.pop()
        return self._check.chunks

    def update(self, chunks, token_ids):
        return self._check.take_in(chunks, token_ids)


class Check(Walk):
    """Beside one engine. `device.store` holds for each slot a hash of the tokens up to its own."""

    def __init__(self, llm, world, seen):
        self.world, self.seen, self.llm = world, seen, llm
        self.scheduler, self.manager = llm.scheduler, llm.scheduler.block_manager
        self.sequences, self.held, self.content_hashes, self.in_flight, self.chunks = [], {}, {0: EMPTY}, [], []
        self.oracles = defaultdict(lambda: None)
        store = np.full(world.num_blocks * world.block_size, NEVER_WRITTEN, np.int64)
        self.device = SimpleNamespace(store=store, run=lambda step, _: [0 if d else None for d in step.draws_token])
        self.num_launched, self.failed = 0, []
        self.steps_left = 60 + 4 * sum(len(r.prompt) + r.params.max_tokens for r in world.requests)
        llm._ids = map(str, itertools.count(100))       # as Walk compares ids to know the order of arrival
        llm.scheduler, self.runner = Watched(llm.scheduler, self), llm._ranks.runner
        self.real_run, self.runner.run = self.runner.run, self.run

    def launch(self):
        self.steps_left -= 1
        assert self.steps_left, "no progress"
        super().launch()

    def run(self, step):
        """`ModelRunner.run`, then a look at what it did. The device of the engine runs at once: it is the CPU."""
        self.num_launched += 1
        flat, chunks = flatten(step, self.world.block_size, self.runner.no_position), self.chunks
        fails, where = self.world.failure or (None, None)
        fails = fails == self.num_launched
        hook = self.runner.model.layers[1].register_forward_pre_hook(fail) if fails and where == "within" else None
        try:
            if fails and where == "before":
                fail()
            launch = self.real_run(step)
            if fails and where == "after":
                fail()
        except OutOfMemory:
            self.failed += [chunk.sequence for chunk in chunks]
            self.seen["failed steps"] += 1
            self.seen["failed steps with one in flight"] += self.llm._in_flight is not None
            self.seen["failed requests"] += len(chunks)
            self.device.store[flat.slot_mapping] = NEVER_WRITTEN
            self.runner.kv_cache.flatten(2, 3)[:, :, flat.slot_mapping] = math.nan
            raise
        finally:
            if hook:
                hook.remove()
        slots, begin, bs = flat.slot_mapping.tolist(), 0, self.world.block_size
        assert len(set(slots)) == len(slots), "two tokens of one step are written to one slot"
        for chunk, row, last in zip(chunks, flat.rows.tolist(), flat.last_indices.tolist(), strict=True):
            end, sequence = chunk.end, chunk.sequence
            tokens, prefix_hash, hashes = self.runner.history[row, :end].tolist(), EMPTY, []
            assert row == sequence.row and tokens[:len(sequence.token_ids)] == sequence.token_ids[:end]
            for token_id in tokens:
                prefix_hash = extend(prefix_hash, token_id)
                hashes.append(prefix_hash)
            self.device.store[slots[begin:last + 1]] = hashes[chunk.start:]
            begin = last + 1
            table = self.runner.block_tables[row, :-(-end // bs)].numpy()
            assert table.tolist() == sequence.block_table[:len(table)]
            position = np.arange(end)
            assert self.device.store[table[position // bs] * bs + position % bs].tolist() == hashes, (
                "a chunk reads what isn't its own prefix")
        return launch

    def take_in(self, chunks, token_ids):
        live = [c.sequence for c in chunks if c.draws_token and c.sequence.status is not Status.FINISHED]
        ended = [c.sequence.finish_reason for c in chunks if c.draws_token and c.sequence.finish_reason]
        self.seen["surplus tokens after a stop"] += ended.count("stop")
        self.seen["surplus tokens of aborted or failed ones"] += len(ended) - ended.count("stop")
        self.seen["preempted while in flight"] += sum(s.status is Status.WAITING for s in live)
        advanced = self.scheduler.update(chunks, token_ids)
        assert advanced == live
        self.check_pool()
        return advanced


class OutOfMemory(RuntimeError):
    pass


def fail(*_):
    raise OutOfMemory("as if CUDA ran out of memory")


class Drive:
    """A user: does what the world says, keeps what comes back."""

    def __init__(self, llm, folder, world, seen):
        self.llm, self.folder, self.world, self.seen, self.check = llm, folder, world, seen, Check(llm, world, seen)
        self.returned, self.aborted = [], []        # outputs, by `step`; sequences
        self.sequences = {}                         # request number -> its sequence
        self.streams, self.pieces = {}, {}          # request number -> generator; text so far

    def run(self):
        requests, llm = self.world.requests, self.llm
        for now in itertools.count():
            for i, request in enumerate(requests):
                if request.arrival == now:
                    self.begin(i, request)
                    self.look()
                if i in self.sequences and request.abort in (now, state_of(self.sequences[i])):
                    self.abort(i)
                    self.look()
            for i in [i for i in self.streams if (now + i) % 2]:
                self.pull(i)
            self.returned += llm.step()
            self.look()
            if now >= requests[-1].arrival and not llm.has_unfinished():
                break
        while self.streams:
            self.pull(next(iter(self.streams)))
        assert llm.step() == llm.step() == []
        self.check_all_is_over()
        self.check_outputs()

    def look(self):
        llm, check = self.llm, self.check
        check.check_pool()
        assert llm._live == {s.request_id: s for s in check.sequences if s.output is None}
        stats = llm.stats()
        assert (stats["running"], stats["waiting"]) == (len(check.scheduler.running), len(check.scheduler.waiting))
        assert stats["blocks_used"] == sum(block.ref_count > 0 for block in check.manager.blocks)
        assert stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] == self.world.num_blocks

    def begin(self, i, request):
        llm, before = self.llm, len(self.check.sequences)
        self.seen[request.kind] += 1
        if request.kind == "refuse":
            return self.refuse(request)
        if request.kind == "stream":
            self.streams[i], self.pieces[i] = llm.stream(request.prompt, request.params), ""
            self.pull(i)
        elif request.kind == "generate":
            (output,) = llm.generate([request.prompt], request.params, use_tqdm=False)
            assert output is self.check.sequences[before].output
        elif request.kind == "again" and before:
            last = self.check.sequences[-1]
            if llm.abort(last.request_id):
                self.aborted.append(last)
            llm.add_request(request.prompt, request.params, last.request_id)
        else:
            llm.add_request(request.prompt, request.params)
        self.sequences[i] = self.check.sequences[before]

    def refuse(self, request):
        llm, live, one = self.llm, dict(self.llm._live), SamplingParams(max_tokens=1)
        for bad in ([], [VOCAB], [2] * self.world.options["max_model_len"]):
            with pytest.raises(ValueError):
                llm.add_request(bad, one)
            with pytest.raises(ValueError):
                llm.generate([request.prompt, bad], one, use_tqdm=False)
        for request_id in live:
            with pytest.raises(ValueError):
                llm.add_request([2], one, request_id)
        assert llm._live == live

    def pull(self, i):
        piece = next(self.streams[i], None)
        if piece is None:
            del self.streams[i]
        else:
            assert piece
            self.pieces[i] += piece

    def abort(self, i):
        request_id, manager = self.sequences[i].request_id, self.check.manager
        sequence = self.llm._live.get(request_id)
        if sequence is None:
            assert not self.llm.abort(request_id)
            return
        self.seen[f"abort while {state_of(sequence)}" + (", in flight" if sequence.num_in_flight else "")] += 1
        own = sum(manager.blocks[block_id].ref_count == 1 for block_id in sequence.block_table)
        num_free, self.aborted = manager.num_free_blocks, [*self.aborted, sequence]
        if i in self.streams and i % 3 and sequence is self.sequences[i]:
            self.streams.pop(i).close()
            self.seen["streams dropped"] += 1
        else:
            assert self.llm.abort(request_id)
        assert sequence.output.finish_reason == "abort"
        assert manager.num_free_blocks == num_free + own

    def check_all_is_over(self):
        llm, check, world = self.llm, self.check, self.world
        assert (llm._live, llm._outputs, llm._in_flight) == ({}, [], None)
        assert check.manager.num_free_blocks == world.num_blocks
        assert sorted(check.scheduler.free_rows) == list(range(world.max_num_seqs))
        stats = llm.stats()
        assert (stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0)
        assert (stats["requests"], stats["preemptions"]) == (len(check.sequences), check.scheduler.num_preemptions)
        assert not check.runner.kv_cache[:, :, list(check.manager.index.values())].isnan().any()

    def check_outputs(self):
        check, tokenizer = self.check, self.llm.tokenizer
        assert sorted(map(id, self.returned)) == sorted(id(s.output) for s in check.sequences if not s.is_owned)
        assert len(self.sequences) == len(check.sequences)
        token_ids = [s.output.prompt_token_ids + s.output.token_ids for s in self.sequences.values()]
        for (i, sequence), logits in zip(self.sequences.items(), all_logits(self.folder, token_ids), strict=True):
            request, output = self.world.requests[i], sequence.output
            assert output.request_id == sequence.request_id
            check_tokens(request, sequence, logits, tokenizer, self.seen)
            check_end(request, sequence, self.world, tokenizer, self.seen)
            assert (output.finish_reason == "error") == (sequence in check.failed)
            assert (output.finish_reason == "abort") == (sequence in self.aborted)
            if request.kind == "stream":        # a dropped one is read no further
                was_dropped = sequence in self.aborted and i % 3
                assert output.text.startswith(self.pieces[i]) if was_dropped else output.text == self.pieces[i]


def state_of(sequence):
    if sequence.status is Status.WAITING and sequence.num_cached_tokens is not None:
        return "preempted"
    if sequence.status is Status.RUNNING and sequence.num_computed < sequence.num_prompt_tokens:
        return "chunked"
    return sequence.status.name.lower()


def all_logits(folder, prompts):
    """transformers' logits at every position of each prompt, uncached: float32 arrays [num_tokens, vocab_size]."""
    if not prompts:
        return []
    padded = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in zip(padded, prompts):
        row[:len(prompt)] = torch.tensor(prompt)        # nobody looks ahead, so what follows is of no matter
    with torch.inference_mode():
        return list(tiny.reference_model(folder)(padded, use_cache=False).logits.numpy())


def save_tokenizer(folder):
    """A byte-level one of VOCAB tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {name: i for i, name in enumerate(PIECES)}
    merges = [("a", "b"), ("b", "a"), ("b", "c"), ("ab", "c"), ("c", "a"), ("d", "d"), ("Ġ", "a"), ("c", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = []
    for family, has_tokenizer in MODELS:
        folder = tiny.tiny_checkpoint(tmp_path_factory.mktemp("walk") / family, family, seed=5, **SHAPE)
        if has_tokenizer:
            save_tokenizer(folder)
        made.append(str(folder))
    return made


# The walks must have met what they are for. Two to ten times as many of each were counted in 300 walks.
EVENTS = {
    "walks": 300, "tokens": 3000, "filtered, penalised or ruled tokens": 1500, "logprobs": 400, "preemptions": 50,
    "preempted while in flight": 30, "hit blocks": 150, "comes back through hits": 20, "mixed steps": 120,
    "chunks that draw nothing": 400, "abort while waiting": 20, "abort while chunked": 5, "abort while running": 5,
    "abort while running, in flight": 10, "abort while preempted": 2, "streams dropped": 5, "stream": 50,
    "generate": 20, "again": 20, "refuse": 20, "failed steps": 20, "failed steps with one in flight": 5,
    "failed requests": 30, "surplus tokens after a stop": 30, "surplus tokens of aborted or failed ones": 20,
    "a last character cut": 20, "ended: stop": 60, "ended: length": 300, "ended by a stop string": 20,
    "ended at max_model_len": 15}


def test_random_walks_of_the_engine_equal_transformers_and_leave_nothing(folders, monkeypatch):
    seen = Counter()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lru_cache(AutoTokenizer.from_pretrained))
    monkeypatch.setattr(sampler, "ROWS_AT_A_TIME", 2)               # so that there are several parts
    monkeypatch.setattr(llm_engine.logger, "disabled", True)        # tracebacks of the steps that fail

    @settings(max_examples=NUM_WALKS, deadline=None, derandomize="NANOENGINE_WALKS" not in os.environ, database=None,
              print_blob=True, phases=PHASES, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
    @given(worlds())
    def walk(world):
        seen["walks"] += 1
        with tiny.engine(folders[world.model], **world.options) as llm:
            Drive(llm, folders[world.model], world, seen).run()

    walk()
    print(dict(sorted(seen.items())))
    assert seen["undecided tokens"] < 0.01 * seen["tokens"]
    for event, least in EVENTS.items():
        assert seen[event] >= least * min(1, NUM_WALKS / 300), (event, dict(seen))


@pytest.mark.parametrize("is_read", [True, False], ids=["read to its end", "dropped"])
def test_a_stream_that_has_ended_leaves_alone_who_has_its_id_by_now(folders, is_read):
    with tiny.engine(folders[0]) as llm:
        stream = llm.stream([2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
        next(stream)
        (request_id,) = llm._live
        assert llm.abort(request_id)
        assert llm.add_request([4, 5], SamplingParams(max_tokens=5, ignore_eos=True), request_id) == request_id
        list(stream) if is_read else stream.close()
        (output,) = tiny.drain(llm)
        assert (output.request_id, output.finish_reason) == (request_id, "length")

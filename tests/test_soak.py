"""Thousands of requests through one engine: nothing grows, no block is lost, every answer is the right one.

On the CPU a tiny float32 model serves short requests with shared prefixes, each compared with the oracle; CI takes
2,100 of them, `-m slow` 20,000. On a GPU (`-m "gpu and slow"`, about a minute on an H200) the shapes are those of
Qwen3-0.6B with random weights in bf16, and a sample of the answers is scored alone by transformers in float32.
"""

import gc
import os
import random
import sys
import time
import types
from collections import Counter, deque
from functools import _lru_cache_wrapper

import bench
import pytest
import tiny
import torch
from tiny import assert_same_tokens, oracle_for

from nanoengine import LLM, SamplingParams

# ---- what must not grow


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def container_sizes(llm):
    """Type -> elements in all containers (tuples apart) that the engine or the package's modules reach."""
    sizes, done, todo = Counter(), set(), [llm]
    for name, module in list(sys.modules.items()):
        if name.startswith("nanoengine"):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    sizes["lru_cache"] += value.cache_info().currsize
                elif isinstance(value, (dict, list, set, deque)):
                    todo.append(value)
    opaque = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.FrameType, torch.Tensor)
    while todo:
        value = todo.pop()
        if id(value) in done or isinstance(value, opaque):
            continue
        done.add(id(value))
        if isinstance(value, (dict, list, set, deque, bytearray)):
            sizes[type(value).__name__] += len(value)
        todo += gc.get_referents(value)
    return sizes


def check_idle(llm):
    """Nothing is live, every block and row is free."""
    manager, stats = llm.scheduler.block_manager, llm.stats()
    assert (llm._live, llm._outputs, llm._in_flight) == ({}, [], None)
    assert sorted(manager.free_blocks) == list(range(manager.num_blocks))
    assert all(block.ref_count == 0 for block in manager.blocks)
    assert sorted(llm.scheduler.free_rows) == list(range(llm.config.max_num_seqs))
    assert (stats["blocks_used"], stats["blocks_cached"] + stats["blocks_free"]) == (0, manager.num_blocks)


# ---- short requests on the CPU


PREFIXES = [tiny.random_ids(700 + n, 21, 64) for n in range(4)]


def short_request(rng):
    """One of 240 prompts: part of a prefix, with a tail of its own; a quarter is sampled."""
    n = rng.randrange(240)
    prompt = PREFIXES[n % 4][:n // 4 % 20 + 1] + [n % 61] * (n % 3)
    drawn = dict(temperature=0.8, seed=n, top_k=n % 16) if n % 4 == 3 else dict(temperature=0)
    return prompt, SamplingParams(max_tokens=1 + n % 7, stop_token_ids=(n % 64,), ignore_eos=True, **drawn)


def serve(llm, folder, num_requests, rng):
    """So many requests, twelve at a time, some aborted, some refused; all answers compared. Returns counts."""
    live, seen, num_added = {}, Counter(), 0
    while num_added < num_requests or live:
        while len(live) < 12 and num_added < num_requests:
            prompt, params = short_request(rng)
            live[llm.add_request(prompt, params)] = prompt, params
            num_added += 1
            if num_added % 10 == 0:
                with pytest.raises(ValueError):
                    llm.generate([prompt, prompt + [64]], params, use_tqdm=False)
        if rng.random() < 0.1:
            assert llm.abort(rng.choice(list(live)))
        for output in llm.step():
            prompt, params = live.pop(output.request_id)
            expected = oracle_for(folder, prompt, params)
            if output.finish_reason == "abort":
                assert output.token_ids == expected.token_ids[:len(output.token_ids)]
            else:
                assert_same_tokens(output, expected)
            seen[output.finish_reason] += 1
            seen["hits"] += output.num_cached_tokens > 0
    assert llm.step() == []
    assert sum(seen[reason] for reason in ("abort", "stop", "length")) == num_requests
    return seen


TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8)


def soak(folder, num_rounds, per_round, is_async):
    seen, rounds, rng, begin = Counter(), [], random.Random(5), time.monotonic()
    with tiny.engine(folder, kvcache_block_size=4, num_kvcache_blocks=20, max_num_seqs=8, max_model_len=64,
                     max_num_batched_tokens=32, async_scheduling=is_async) as llm:
        for _ in range(num_rounds):
            seen += serve(llm, folder, per_round, rng)
            check_idle(llm)
            gc.collect()
            rounds.append((resident_bytes(), container_sizes(llm).total(), len(gc.get_objects())))
        seen["preemptions"] = llm.scheduler.num_preemptions
    num_requests = num_rounds * per_round
    memory, containers, objects = zip(*rounds[num_rounds // 3:])        # what came before is the warm-up
    print(f"{num_requests} requests in {time.monotonic() - begin:.0f} s: {dict(seen)}; after a third, and at the end: "
          f"{memory[0] / 1e6:.1f}, {memory[-1] / 1e6:.1f} MB; {objects[0]}, {objects[-1]} objects; "
          f"{containers[0]}, {containers[-1]} elements in containers")
    for kind, least in {"hits": 0.3, "abort": 0.01, "stop": 0.02, "length": 0.5, "preemptions": 0.01}.items():
        assert seen[kind] > least * num_requests
    assert memory[-1] - memory[0] < 4 << 20
    # Which blocks can be found is a matter of chance.
    assert max(containers) - min(containers) <= 40 and max(objects) - min(objects) < 200


@pytest.mark.parametrize("is_async, num_rounds", [
    (True, 15), (False, 6), pytest.param(True, 200, marks=pytest.mark.slow)])
def test_short_requests_leave_nothing_behind(checkpoint, is_async, num_rounds):
    soak(checkpoint("qwen3", **TINY), num_rounds, 100, is_async)


def test_the_soak_sees_what_grows(checkpoint):
    """A list in a part of the engine, what a hook holds."""
    with tiny.engine(checkpoint("qwen3", **TINY)) as llm:
        before = container_sizes(llm)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        llm.scheduler.block_manager.forgotten = [0] * 1000
        llm.on_step = types.MethodType(lambda *_: None, {n: None for n in range(2000)})
        after = container_sizes(llm)
    assert after["list"] - before["list"] >= 1000 and after["dict"] - before["dict"] >= 2000


# ---- a mixed load


def word_tokenizer(folder, vocab_size):
    """Save a tokenizer whose token n is "n ", so that streams have text to show."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"{n} ": n for n in range(vocab_size)}, unk_token="0 "))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class Load:
    """Requests of every kind, mixed; lengths are multiples of `unit`. A quarter has a prefix that others have too."""

    def __init__(self, llm, num_requests, num_live, unit, seed=0):
        self.llm, self.num_requests, self.num_live, self.unit = llm, num_requests, num_live, unit
        self.rng, self.vocab_size = random.Random(seed), llm.model_config.vocab_size
        self.prefixes = [self.ids(16 * unit) for _ in range(4)]
        self.live, self.streams, self.outputs, self.seen = {}, [], {}, Counter()

    def ids(self, n):
        return [self.rng.randrange(self.vocab_size) for _ in range(n)]

    def request(self, n):
        rng, unit = self.rng, self.unit
        prefix = rng.choice(self.prefixes)[:rng.randint(8 * unit, 16 * unit)] if n % 4 == 0 else []
        prompt = prefix + self.ids(rng.randint(1, 4 * unit if prefix else 8 * unit))
        kinds = [{"temperature": 0}] * 6 + [{"seed": n}] * 4 + [
            {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1, "seed": n}, {"temperature": 0, "repetition_penalty": 1.3},
            {"frequency_penalty": 0.5, "presence_penalty": 0.5}, {"temperature": 0, "logprobs": 3},
            {"logit_bias": {5: 4.0}, "min_tokens": 4, "logprobs": 0}]
        asked = kinds[n % len(kinds)] | ({} if n % 21 else {"stop_token_ids": range(3, self.vocab_size, 50)})
        return prompt, SamplingParams(max_tokens=rng.randint(4, 4 * unit), ignore_eos=n % 5 > 0, **asked)

    def run(self):
        """Returns {request number: (output, params)} of those that weren't aborted."""
        n, kept = 0, {}
        while n < self.num_requests or self.live or self.streams:
            num_aborts = 0
            while n < self.num_requests and len(self.live) + len(self.streams) < self.num_live:
                prompt, params = self.request(n)
                if n % 50 == 7:
                    self.streams.append((self.llm.stream(prompt, params), self.rng.choice((1, 2, 4, 10_000))))
                else:
                    self.live[self.llm.add_request(prompt, params)] = n, prompt, params
                n += 1
                num_aborts += self.rng.random() < 0.03
            for request_id in self.rng.sample(list(self.live), min(num_aborts, len(self.live))):
                assert self.llm.abort(request_id)
            streams, self.streams = self.streams, []
            for stream, num_pieces in streams:      # how many more of its pieces are read before it is dropped
                piece = next(stream, None)
                assert piece is None or piece.endswith(" ")
                if piece and num_pieces > 1:
                    self.streams.append((stream, num_pieces - 1))
                else:
                    stream.close()
                    self.seen["streams read whole" if piece is None else "streams dropped"] += 1
            for output in self.llm.step():
                number, prompt, params = self.live.pop(output.request_id)
                self.take(output, prompt, params)
                if output.finish_reason != "abort":
                    kept[number] = output, params
        while self.llm._in_flight:
            assert self.llm.step() == []
        self.seen["preemptions"] = self.llm.scheduler.num_preemptions
        return kept

    def take(self, output, prompt, params):
        assert output.prompt_token_ids == prompt
        assert len(output.token_ids) == params.max_tokens or output.finish_reason in ("stop", "abort")
        shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        assert output.text == "".join(f"{token_id} " for token_id in shown)
        assert (output.logprobs is None) == (params.logprobs is None)
        if output.logprobs is not None:
            assert [next(iter(row)) for row in output.logprobs] == output.token_ids
            assert all(params.logprobs <= len(row) <= params.logprobs + 1 for row in output.logprobs)
        self.seen[output.finish_reason] += 1
        self.seen["hits"] += output.num_cached_tokens > 0


def largest_gap(folder, kept, device):
    """How far, at most, a token's score is behind the best one's, given those before it, in standard deviations of the
    logits; and how far a logprob is off. Of greedy and plainly sampled outputs, each alone, in float32."""
    from transformers import AutoModelForCausalLM

    model, gaps, errors = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device), [], []
    for output, params in kept:
        num, token_ids = len(output.prompt_token_ids), torch.tensor(output.token_ids, device=device)[:, None]
        ids = torch.tensor([output.prompt_token_ids + output.token_ids], device=device)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, num - 1:-1].float()
        scores, scale = logits.clone(), logits.std(dim=1)
        if params.temperature > 0:
            for i in range(len(scores)):
                noise = tiny.gumbel_noise(params.seed, num + i, scores.shape[1])
                scores[i] += params.temperature * torch.tensor(noise, device=device)
        gaps.append(((scores.max(dim=1).values - scores.gather(1, token_ids)[:, 0]) / scale).max().item())
        if params.logprobs is not None:
            given = torch.tensor([row[token_id] for row, token_id in zip(output.logprobs, output.token_ids)])
            own = logits.log_softmax(dim=1).gather(1, token_ids)[:, 0].cpu()
            errors.append(((given - own).abs() / scale.cpu()).max().item())
    assert errors
    return max(gaps), max(errors)


def sizes_but_wishes(llm):
    """Of an idle engine: rows keep the wishes of who had them last, and these may have 3,000 stop tokens."""
    assert len(llm._ranks.runner.wishes) <= llm.config.max_num_seqs + 1
    llm._ranks.runner.wishes.clear()
    return container_sizes(llm)


def mixed_soak(folder, num_requests, num_live, unit, device, **options):
    """Returns what `largest_gap` says of 20 greedy and 6 sampled outputs, and counts."""
    begin = time.monotonic()
    with LLM(folder, device=device, max_model_len=32 * unit, **options) as llm:
        tiny.poison_cache(llm)
        Load(llm, num_live, num_live, unit, seed=1).run()       # the warm-up
        check_idle(llm)
        memory = torch.cuda.memory_allocated() if device == "cuda" else 0
        containers, load = sizes_but_wishes(llm), Load(llm, num_requests, num_live, unit)
        llm.scheduler.num_preemptions = 0
        kept = load.run()
        check_idle(llm)
        seen, seconds = load.seen, time.monotonic() - begin
        grown = (sizes_but_wishes(llm) - containers).total()
        memory = torch.cuda.memory_allocated() - memory if device == "cuda" else 0
        num_blocks, load.llm = llm.scheduler.block_manager.num_blocks, None
    print(f"{num_requests} requests in {seconds:.0f} s, {num_blocks} blocks: {dict(seen)}; grown by {grown} elements, "
          f"{memory / 1e6:.1f} MB on the device")
    assert grown < num_blocks + 50      # how many blocks can be found is a matter of chance
    assert memory < 16e6
    plain = [pair for pair in kept.values() if pair[1].is_plain or pair[1].logprobs == 3]
    greedy = sorted((pair for pair in plain if pair[1].temperature == 0), key=lambda pair: -len(pair[0].token_ids))
    sampled = [pair for pair in plain if pair[1].temperature > 0]
    some = greedy[:len(greedy) // 2:max(1, len(greedy) // 40)][:20] + sampled[::max(1, len(sampled) // 6)][:6]
    gap, error = largest_gap(folder, some, device)
    print(f"{len(some)} outputs alone in float32: gap {gap:.4f}, logprobs off by {error:.4f}, in standard deviations")
    return gap, error, seen


def check_seen(seen, num_requests):
    for event, least in {"preemptions": 0.01, "abort": 0.015, "hits": 0.05, "length": 0.5, "stop": 0.002,
                         "streams read whole": 0.003, "streams dropped": 0.003}.items():
        assert seen[event] >= least * num_requests, (event, dict(seen))


def test_a_mixed_load_in_a_small_pool(tmp_path):
    """The soak of the next test, on the CPU: float32, so that each token is the best, but for near-ties."""
    folder = tmp_path / "tiny"
    bench.make_random_model("tiny", folder)
    word_tokenizer(folder, 512)
    gap, error, seen = mixed_soak(folder, 300, 20, 4, "cpu", num_kvcache_blocks=26, kvcache_block_size=16,
                                  max_num_seqs=16, max_num_batched_tokens=256)
    assert gap < 1e-3 and error < 1e-3
    check_seen(seen, 300)


@pytest.mark.gpu
@pytest.mark.slow
def test_5000_mixed_requests_on_the_gpu(tmp_path):
    folder = tmp_path / "qwen"
    bench.make_random_model("qwen3-0.6b", folder)
    word_tokenizer(folder, bench.CONFIGS["qwen3-0.6b"]["vocab_size"])
    gap, error, seen = mixed_soak(folder, 5000, 300, 32, "cuda", num_kvcache_blocks=200, kvcache_block_size=256,
                                  max_num_seqs=256, max_num_batched_tokens=8192)
    assert gap < 0.25 and error < 0.25
    check_seen(seen, 5000)

"""The contract with the caller: what a request may ask, how it ends, and that no request hurts another."""

import contextlib
import gc
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

import tiny
from nanoengine import LLM, SamplingParams, attention, model_runner
from tiny import assert_same_tokens, copy_checkpoint, drain, engine, oracle, oracle_for, random_ids

NAN, INF = float("nan"), float("inf")


def greedy(max_tokens, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **changes})


def check(folder, prompts, params, outputs):
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    assert len(outputs) == len(prompts)
    for number, (prompt, one, output) in enumerate(zip(prompts, params, outputs)):
        assert list(output.prompt_token_ids) == list(prompt)
        assert_same_tokens(output, oracle_for(folder, prompt, one), f"prompt {number}:")


def ids_of(outputs):
    return [output.request_id for output in outputs]


@contextlib.contextmanager
def refused(llm, match=None, error=ValueError):
    """The call raises, nothing of it is queued, and the engine still answers."""
    with pytest.raises(error, match=match):
        yield
    assert not llm.has_unfinished()
    assert llm.step() == []


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama")


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def llm(request, folder):
    with engine(folder, async_scheduling=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_checkpoint)


@pytest.fixture(scope="module")
def chat_llm(chat_checkpoint):
    with engine(chat_checkpoint) as llm:
        yield llm


# ---- SamplingParams


@pytest.mark.parametrize(
    "field, value",
    [
        *[("max_tokens", value) for value in (0, -1, 1.5, None, "many", NAN, True)],
        *[("temperature", value) for value in (-1, -1e-9, NAN, INF, None, "hot")],
        *[("top_p", value) for value in (0, 0.0, 1.1, -0.5, NAN, None)],
        *[("top_k", value) for value in (-5, 1.5, None, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN, None)],
        *[("seed", value) for value in (1.5, "seven", NAN)],
        *[("stop_token_ids", value) for value in ((1.5,), ("a",))],
        *[("stop", value) for value in ((1,), ("",), "")],
    ],
)
def test_sampling_params_are_checked_by_name_and_value(field, value):
    """Case 14."""
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    shown = value[0] if isinstance(value, tuple) else value
    assert repr(shown) in str(caught.value)


def test_sampling_params_defaults_and_limits():
    p = SamplingParams()
    assert (p.temperature, p.max_tokens, p.top_k, p.top_p, p.min_p) == (1.0, 64, 0, 1.0, 0.0)
    assert (p.seed, tuple(p.stop), tuple(p.stop_token_ids), p.ignore_eos) == (None, (), (), False)
    SamplingParams(temperature=0, max_tokens=1, top_p=1, min_p=1, seed=0, stop=["a", "b"], stop_token_ids=[0])


def test_unknown_sampling_option():
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)


# ---- options of the engine


@pytest.mark.parametrize(
    "option, nearest",
    [
        ("max_model_length", "max_model_len"),
        ("block_size", "kvcache_block_size"),
        ("max_num_seq", "max_num_seqs"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("tensor_parallel", "tensor_parallel_size"),
    ],
)
def test_an_unknown_option_names_the_nearest(folder, option, nearest):
    """Case 17."""
    with pytest.raises(TypeError, match=option) as caught:
        LLM(str(folder), **{option: 1})
    assert re.search(rf"\b{nearest}\b", str(caught.value))


@pytest.mark.parametrize(
    "option, value",
    [
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", -3),
        ("max_num_batched_tokens", 0),
        ("kvcache_block_size", 0),
        ("num_kvcache_blocks", 0),
        ("tensor_parallel_size", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("dtype", "float17"),
        ("device", "tpu"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(folder, option, value):
    with pytest.raises(ValueError, match=option) as caught:
        tiny.make_llm(folder, **{option: value})
    assert str(value) in str(caught.value)


def test_max_model_len_beyond_the_models_positions(folder):
    with pytest.raises(ValueError, match="513") as caught:
        tiny.make_llm(folder, max_model_len=513)
    assert "512" in str(caught.value)


# ---- requests that are refused, and those at the limit


def test_as_many_params_as_prompts(llm, folder):
    """Case 14."""
    prompts = [random_ids(n, 4) for n in range(3)]
    for count in (0, 2, 4):
        with refused(llm, match=rf"3\b.*\b{count}|{count}\b.*\b3"):
            llm.generate(prompts, [greedy(3)] * count, use_tqdm=False)
    params = [greedy(3), greedy(1), greedy(5)]
    check(folder, prompts, params, llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [5, 128], [2**40], [1.5], ["a"], [None], [[1, 2], [3.5]], None, 7, {"prompt": "a"}, b"abc"],
    ids=repr,
)
def test_bad_prompts(llm, folder, prompt):
    """Case 15; the valid prompt beside it isn't queued either."""
    bad = (ValueError, TypeError)
    with refused(llm, error=bad):
        llm.add_request(prompt, greedy(3))
    with refused(llm, error=bad):
        llm.generate([[1, 2, 3], prompt], greedy(3), use_tqdm=False)
    with refused(llm, error=bad):
        list(llm.stream(prompt, greedy(3)))
    check(folder, [[1, 2, 3]], greedy(3), llm.generate([1, 2, 3], greedy(3), use_tqdm=False))


@pytest.mark.parametrize("token", [-1, 128, 2**40])
def test_a_token_outside_the_vocabulary_is_named_with_the_limit(llm, token):
    with refused(llm, match=str(token)):
        llm.add_request([1, token], greedy(3))
    with refused(llm, match="128"):
        llm.add_request([1, token], greedy(3))


def test_stop_token_outside_the_vocabulary_stops_nothing_or_is_refused(llm, folder):
    prompt = random_ids(3, 5)
    try:
        (output,) = llm.generate([prompt], greedy(3, stop_token_ids=(2**40,)), use_tqdm=False)
    except ValueError as error:
        assert str(2**40) in str(error) and not llm.has_unfinished()
    else:
        assert_same_tokens(output, oracle_for(folder, prompt, greedy(3)))


def test_numpy_and_tuples_are_token_ids_too(llm, folder):
    import numpy as np

    prompt = random_ids(4, 6)
    outputs = llm.generate([tuple(prompt), np.array(prompt)], greedy(4), use_tqdm=False)
    check(folder, [prompt] * 2, greedy(4), outputs)


@pytest.mark.parametrize("number", ["uint8(250)", "int8(100)", "int64(2**63 - 1)"])
def test_numpys_numbers_do_not_overflow(llm, folder, number):
    """60 + 250 is 54 in eight bits: such a request would never end."""
    import numpy as np

    max_tokens, prompt = eval(f"np.{number}", {"np": np}), random_ids(5, 60)
    params = [greedy(max_tokens), greedy(max_tokens, min_tokens=max_tokens), greedy(9, logprobs=np.int8(127))]
    assert all(type(value) is not type(max_tokens) for one in params for value in vars(one).values())
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [min(int(max_tokens), 128 - 60)] * 2 + [9]
    assert all(len(row) in (127, 128) for row in outputs[2].logprobs)
    with engine(folder, seed=np.int64(3), max_num_batched_tokens=np.uint8(200)) as other:
        check(folder, [prompt] * 4, greedy(3), other.generate([prompt] * 4, greedy(3), use_tqdm=False))


def test_prompts_around_max_model_len(llm, folder):
    """Case 15: max_model_len is 128; one place is left for an output token."""
    for length in (128, 129, 500):
        with refused(llm, match=rf"\b{length}\b"):
            llm.add_request(random_ids(1, length), greedy(1))
        with refused(llm, match=r"\b128\b"):
            llm.generate([random_ids(1, length)], greedy(1), use_tqdm=False)
    prompt = random_ids(1, 127)
    (output,) = llm.generate([prompt], greedy(10), use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    check(folder, [prompt], greedy(1), [output])


@pytest.mark.parametrize("prompt_len, max_tokens", [(120, 8), (120, 9), (120, 1000), (126, 2), (1, 10**9)])
def test_the_output_ends_at_max_model_len(llm, folder, prompt_len, max_tokens):
    """Case 16."""
    prompt, room = random_ids(5, prompt_len), 128 - prompt_len
    (output,) = llm.generate([prompt], greedy(max_tokens), use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (room, "length")
    check(folder, [prompt], greedy(room), [output])


@pytest.mark.parametrize("is_async", [True, False])
def test_a_request_larger_than_the_pool_is_refused_when_added(folder, is_async):
    """Case 11: 10 blocks of 4; for the prompt alone, or for prompt and output. What is running goes on."""
    prompt = random_ids(6, 20)
    with engine(folder, num_kvcache_blocks=10, async_scheduling=is_async) as llm:
        running = llm.add_request(prompt, greedy(12))
        llm.step()
        for length, max_tokens, needed in ((41, 1, 11), (60, 1, 15), (20, 22, 11), (5, 10**6, 32)):
            with pytest.raises(ValueError, match=rf"\b{needed}\b") as caught:
                llm.add_request(random_ids(7, length), greedy(max_tokens))
            assert re.search(r"\b10\b", str(caught.value))
        fits = llm.add_request(random_ids(7, 20), greedy(21))  # 40 tokens with KV: all 10 blocks
        outputs = {output.request_id: output for output in drain(llm)}
    assert set(outputs) == {running, fits}
    check(folder, [prompt, random_ids(7, 20)], [greedy(12), greedy(21)], [outputs[running], outputs[fits]])


def test_an_invalid_prompt_among_valid_ones_leaves_nothing(llm, folder):
    """Case 28; requests added before stay."""
    prompt = random_ids(8, 6)
    waiting = llm.add_request(prompt, greedy(4))
    for bad in ([], [1, 999], random_ids(1, 128)):
        with pytest.raises(ValueError):
            llm.generate([[1, 2], [3, 4], bad, [5, 6]], greedy(4), use_tqdm=False)
    outputs = drain(llm)
    assert ids_of(outputs) == [waiting]
    check(folder, [prompt], greedy(4), outputs)


# ---- generate, step, and what they return


def test_an_idle_engine(llm):
    """Case 27."""
    assert llm.step() == []
    assert not llm.has_unfinished()
    assert llm.generate([], greedy(3), use_tqdm=False) == []
    llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    assert llm.step() == [] and not llm.has_unfinished()


def test_one_bare_prompt_gives_a_list_of_one(llm, folder):
    outputs = llm.generate([1, 2, 3], greedy(4), use_tqdm=False)
    assert isinstance(outputs, list)
    check(folder, [[1, 2, 3]], greedy(4), outputs)
    (output,) = outputs
    assert (output.finish_reason, output.num_cached_tokens, output.text) == ("length", 0, "")


def test_default_params(llm):
    (output,) = llm.generate([1, 2, 3], use_tqdm=False)
    assert len(output.token_ids) == 64
    request_id = llm.add_request([1, 2, 3])
    assert ids_of(drain(llm)) == [request_id]


def test_outputs_stand_in_input_order_exactly_max_tokens_long(llm, folder):
    """Case 29: they finish in another order."""
    lengths = [17, 1, 9, 2, 30, 1, 5, 12]
    prompts, params = [random_ids(10 + n, 3 + n) for n in range(8)], [greedy(length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(folder, prompts, params, outputs)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert len(set(ids_of(outputs))) == 8


def test_step_returns_each_ended_request_once(llm):
    added = [llm.add_request(random_ids(20 + n, 4), greedy(1 + 3 * n)) for n in range(5)]
    assert llm.has_unfinished()
    outputs = drain(llm)
    assert ids_of(outputs) == added  # the shortest first
    assert llm.step() == [] and not llm.has_unfinished()


def test_never_more_than_max_num_seqs_at_once(folder):
    """Case 10: in pairs, 5 tokens each, so at steps 5, 10 and 15."""
    prompts = [random_ids(30 + n, 3) for n in range(6)]
    with engine(folder, max_num_seqs=2, async_scheduling=False) as llm:
        added = [llm.add_request(prompt, greedy(5)) for prompt in prompts]
        steps = [llm.step() for _ in range(15)]
        assert not llm.has_unfinished()
    assert [len(step) for step in steps] == [0, 0, 0, 0, 2] * 3
    outputs = list(itertools.chain(*steps))
    assert ids_of(outputs) == added
    check(folder, prompts, greedy(5), outputs)


def test_what_ends_during_another_call_is_returned_by_the_next_step(llm, folder):
    prompt, aborted, long = random_ids(40, 5), random_ids(41, 5), random_ids(42, 5)
    first = llm.add_request(prompt, greedy(3))
    second = llm.add_request(aborted, greedy(50))
    third = llm.add_request(long, greedy(20))
    llm.step()
    llm.abort(second)
    outputs = llm.generate([[1, 2]], greedy(10), use_tqdm=False)
    check(folder, [[1, 2]], greedy(10), outputs)
    rest = drain(llm)
    by_id = {output.request_id: output for output in rest}
    assert len(rest) == 3 and set(by_id) == {first, second, third}
    assert by_id[second].finish_reason == "abort"
    check(folder, [prompt, long], [greedy(3), greedy(20)], [by_id[first], by_id[third]])


def test_what_ended_during_a_stream_is_returned_by_the_next_step(llm, folder):
    first = llm.add_request([1, 2, 3], greedy(2))
    list(llm.stream([4, 5, 6], greedy(10)))
    outputs = drain(llm)
    assert ids_of(outputs) == [first]
    check(folder, [[1, 2, 3]], greedy(2), outputs)


def test_requests_may_arrive_at_any_time(llm, folder):
    prompts, outputs = [random_ids(50 + n, 2 + n % 7) for n in range(12)], []
    added = []
    for prompt in prompts:
        added.append(llm.add_request(prompt, greedy(6)))
        outputs += llm.step()
    outputs += drain(llm)
    by_id = {output.request_id: output for output in outputs}
    check(folder, prompts, greedy(6), [by_id[request_id] for request_id in added])


def test_the_callers_lists_are_neither_kept_nor_changed(llm, folder):
    prompt = random_ids(60, 6)
    given = list(prompt)
    llm.add_request(given, greedy(5))
    given[:] = [0] * 9
    (output,) = drain(llm)
    check(folder, [prompt], greedy(5), [output])
    assert given == [0] * 9


def test_progress_bar_shows_rates_on_stderr_only(llm, capsys):
    llm.generate([[1, 2, 3]] * 3, greedy(5))
    captured = capsys.readouterr()
    assert captured.out == "" and "tok" in captured.err
    llm.generate([[1, 2, 3]] * 3, greedy(5), use_tqdm=False)
    assert capsys.readouterr().err == ""


# ---- request ids and aborts


def test_a_live_request_id_is_refused(llm, folder):
    llm.add_request([1, 2, 3], greedy(4), request_id="a")
    with pytest.raises(ValueError, match="a"):
        llm.add_request([4, 5, 6], greedy(4), request_id="a")
    llm.step()
    with pytest.raises(ValueError, match="a"):
        llm.add_request([4, 5, 6], greedy(4), request_id="a")
    outputs = drain(llm)
    assert ids_of(outputs) == ["a"]
    check(folder, [[1, 2, 3]], greedy(4), outputs)
    assert llm.add_request([4, 5, 6], greedy(4), request_id="a") == "a"
    check(folder, [[4, 5, 6]], greedy(4), drain(llm))


def test_ids_of_the_callers_and_of_the_engine_never_collide(llm):
    drawn = llm.add_request([1], greedy(2))
    drain(llm)
    names = {drawn, "0", "1", "2", "3", "4", "5"}
    ids = [llm.add_request([1], greedy(2), request_id=name) for name in names]
    ids += [llm.add_request([1], greedy(2)) for _ in range(8)]
    assert len(set(ids)) == len(ids)
    assert sorted(map(str, ids_of(drain(llm)))) == sorted(map(str, ids))


@pytest.mark.parametrize("num_steps", range(5))
def test_an_aborted_id_used_again_is_a_new_request(llm, folder, num_steps):
    old, new = random_ids(70, 9), random_ids(71, 5)
    llm.add_request(old, greedy(30), request_id="a")
    outputs = list(itertools.chain(*(llm.step() for _ in range(num_steps))))
    assert outputs == []
    llm.abort("a")
    llm.add_request(new, greedy(6), request_id="a")
    first, second = drain(llm)
    assert (first.request_id, first.finish_reason) == ("a", "abort")
    assert (second.request_id, second.finish_reason) == ("a", "length")
    assert list(first.prompt_token_ids) == old
    assert list(first.token_ids) == oracle_for(folder, old, greedy(30)).token_ids[: len(first.token_ids)]
    check(folder, [new], greedy(6), [second])


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5, 6, 7])
def test_abort_in_every_state(folder, num_steps, is_async):
    """Case 26: waiting (0 steps), mid-chunk (1, 2: the prompt takes 3), running, token in flight (async)."""
    victim, other, waiting = random_ids(80, 20), random_ids(81, 4), random_ids(82, 24)
    options = {"max_num_batched_tokens": 8, "num_kvcache_blocks": 12, "async_scheduling": is_async}
    with engine(folder, **options) as llm:
        llm.add_request(victim, greedy(25), request_id="victim")  # 11 of 12 blocks
        llm.add_request(other, greedy(9), request_id="other")
        for _ in range(num_steps):
            assert llm.step() == []
        llm.abort("victim")
        llm.abort("victim")
        llm.abort("nobody")
        llm.add_request(waiting, greedy(20), request_id="waiting")  # 11 blocks: the victim's must be back
        outputs = drain(llm)
        by_id = {output.request_id: output for output in outputs}
        assert len(outputs) == len(by_id) == 3
        assert by_id["victim"].finish_reason == "abort"
        given = list(by_id["victim"].token_ids)
        assert given == oracle_for(folder, victim, greedy(25)).token_ids[: len(given)]
        assert len(given) <= max(0, num_steps - 2)
        check(folder, [other, waiting], [greedy(9), greedy(20)], [by_id["other"], by_id["waiting"]])
        full = random_ids(83, 40)
        check(folder, [full], greedy(9), llm.generate([full], greedy(9), use_tqdm=False))  # the whole pool


def test_abort_everything_then_go_on(llm, folder):
    for _ in range(3):
        added = [llm.add_request(random_ids(90 + n, 10), greedy(40)) for n in range(5)]
        for _ in range(4):
            llm.step()
        for request_id in added:
            llm.abort(request_id)
        outputs = drain(llm, limit=10)
        assert sorted(ids_of(outputs), key=str) == sorted(added, key=str)
        assert {output.finish_reason for output in outputs} == {"abort"}
    check(folder, [[1, 2, 3]], greedy(5), llm.generate([[1, 2, 3]], greedy(5), use_tqdm=False))


def test_abort_after_the_end_changes_nothing(llm):
    request_id = llm.add_request([1, 2, 3], greedy(2))
    (output,) = drain(llm)
    llm.abort(request_id)
    assert drain(llm) == [] and output.finish_reason == "length"


# ---- interruption


@pytest.fixture
def ctrl_c():
    """Python's own handler, even where the suite runs in the background and SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def test_ctrl_c_in_generate_leaves_nothing_of_the_call(llm, folder, ctrl_c):
    """Case 28: whenever it comes. A request added before goes on."""
    prompts = [random_ids(500 + n, 12) for n in range(12)]
    for number, delay in enumerate((0.01, 0.02, 0.035, 0.05, 0.0717, 0.1)):
        kept = llm.add_request([1, 2, number], greedy(110))
        with pytest.raises(KeyboardInterrupt):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            llm.generate(prompts, greedy(100), use_tqdm=False)
            time.sleep(5)
        outputs = drain(llm)
        assert ids_of(outputs) == [kept]
        check(folder, [[1, 2, number]], greedy(110), outputs)
    check(folder, [[7, 8]], greedy(6), llm.generate([[7, 8]], greedy(6), use_tqdm=False))


@contextlib.contextmanager
def ctrl_c_at_line(number):
    """A SIGINT when so many lines of the package have been run; yields a list that holds the lines run."""
    count, package = [0], os.sep + "nanoengine" + os.sep

    def trace(frame, event, arg):
        if package not in frame.f_code.co_filename:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("is_async", [True, False])
def test_ctrl_c_at_any_line_of_generate(folder, is_async, ctrl_c):
    """Case 28, without luck: the interrupt comes at one line after the other of a short call."""
    prompts = [random_ids(510 + n, 3 + n) for n in range(2)]
    with engine(folder, async_scheduling=is_async, num_kvcache_blocks=16) as llm:
        with ctrl_c_at_line(0) as count:
            llm.generate(prompts, greedy(3), use_tqdm=False)
        num_lines, num_calls, num_interrupts = count[0], 0, 0
        for line in itertools.chain(range(1, 300), range(300, num_lines, 13)):  # 13: steps repeat themselves
            num_calls += 1
            with ctrl_c_at_line(line), contextlib.suppress(KeyboardInterrupt):
                llm.generate(prompts, greedy(3), use_tqdm=False)
                num_interrupts -= 1
            num_interrupts += 1
            assert not llm.has_unfinished() and llm.step() == [], f"interrupted at line {line} of {num_lines}"
            manager = llm.scheduler.block_manager
            assert manager.num_free_blocks == manager.num_blocks == 16
            assert len(llm.scheduler.free_rows) == 64
        assert num_interrupts > 0.9 * num_calls
        check(folder, prompts, greedy(3), llm.generate(prompts, greedy(3), use_tqdm=False))


def test_ctrl_c_at_any_line_of_other_calls_leaves_nothing_that_never_ends(folder, ctrl_c):
    """Case 28, for `add_request`, `abort` and `stream`: what was added or not, the engine comes to rest."""
    def add_and_abort(llm):
        llm.abort(llm.add_request([1, 2, 3], greedy(3)))

    with engine(folder, num_kvcache_blocks=16) as llm:
        for call in (add_and_abort, lambda llm: list(llm.stream([1, 2, 3], greedy(3)))):
            with ctrl_c_at_line(0) as count:
                call(llm)
            for line in range(1, min(count[0], 300)):
                with ctrl_c_at_line(line), contextlib.suppress(KeyboardInterrupt):
                    call(llm)
                for _ in range(8):
                    llm.step()
                assert not llm.has_unfinished() and llm.step() == [], f"interrupted at line {line} of {count[0]}"
                assert llm.scheduler.block_manager.num_free_blocks == 16 and len(llm.scheduler.free_rows) == 64
        check(folder, [[1, 2, 3]], greedy(3), llm.generate([1, 2, 3], greedy(3), use_tqdm=False))


def test_a_step_that_fails_ends_its_own_requests_only(folder, monkeypatch):
    """With one rank: reason "error" for what was in the step; what waited, or comes later, is served."""
    prompts = [random_ids(530 + n, 6) for n in range(2)]
    for is_async, num_steps in itertools.product((True, False), (0, 1, 3)):
        with engine(folder, max_num_seqs=1, async_scheduling=is_async) as llm:
            ids = [llm.add_request(prompt, greedy(9)) for prompt in prompts]
            outputs = list(itertools.chain(*(llm.step() for _ in range(num_steps))))
            assert outputs == []

            def fail(step):
                raise RuntimeError("out of memory")

            with monkeypatch.context() as patch:
                patch.setattr(llm._ranks.runner, "run", fail)
                outputs += llm.step()
            outputs += drain(llm)
            assert ids_of(outputs) == ids
            assert [output.finish_reason for output in outputs] == ["error", "length"]
            given = list(outputs[0].token_ids)
            assert given == oracle_for(folder, prompts[0], greedy(9)).token_ids[: len(given)]
            check(folder, prompts[1:], greedy(9), outputs[1:])


def test_a_stream_left_early_leaves_nothing(llm, folder, chat_llm):
    for engine_ in (llm, chat_llm):
        stream = engine_.stream([1, 2, 3], greedy(60))
        next(stream, None)
        stream.close()
        outputs = drain(engine_, limit=5)
        assert [output for output in outputs if output.finish_reason != "abort"] == []
    check(folder, [[1, 2, 3]], greedy(5), llm.generate([[1, 2, 3]], greedy(5), use_tqdm=False))


# ---- end of sequence


def first_new_token(token_ids, at_least):
    """A token id that stands at some place >= at_least and not before: (place, id)."""
    for place in range(at_least, len(token_ids)):
        if token_ids[place] not in token_ids[:place]:
            return place, token_ids[place]
    raise AssertionError(f"no new token from {at_least} on in {token_ids}")


def test_every_source_of_end_tokens_counts(folder, tmp_path):
    """Case 24: ids from generation_config (a list), from config.json (an int), and the caller's own."""
    prompt = random_ids(510, 7)
    plain = oracle_for(folder, prompt, greedy(30)).token_ids
    (first, a), (second, b), (third, c) = (first_new_token(plain, place) for place in (4, 10, 16))
    unused = next(token for token in range(128) if token not in plain)
    source = copy_checkpoint(folder, tmp_path / "eos", config={"eos_token_id": c}, generation_eos=[unused, b])
    for is_async in (True, False):
        with engine(source, async_scheduling=is_async) as llm:
            for params, length, reason in (
                (greedy(30, ignore_eos=False), second + 1, "stop"),
                (greedy(30, ignore_eos=True), 30, "length"),
                (greedy(30, ignore_eos=False, stop_token_ids=(a,)), first + 1, "stop"),
                (greedy(30, ignore_eos=True, stop_token_ids=[unused, c]), third + 1, "stop"),
                (greedy(second + 1, ignore_eos=False), second + 1, "stop"),
                (greedy(second, ignore_eos=False), second, "length"),
            ):
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                assert list(output.token_ids) == plain[:length]
                assert output.finish_reason == reason
            outputs = llm.generate([prompt] * 3, greedy(30, ignore_eos=False), use_tqdm=False)
            assert [list(output.token_ids) for output in outputs] == [plain[: second + 1]] * 3
    config_only = copy_checkpoint(folder, tmp_path / "config", config={"eos_token_id": [unused, c]})
    with engine(config_only) as llm:
        (output,) = llm.generate([prompt], greedy(30, ignore_eos=False), use_tqdm=False)
    assert list(output.token_ids) == plain[: third + 1]


def test_the_tokenizers_end_token_counts(chat_checkpoint, tmp_path):
    """Case 24: </s> has id 1 in the tiny tokenizer, and no config says so. Its text doesn't show."""

    def favour(state):
        state["lm_head.weight"][1] = state["lm_head.weight"][[40, 41]].mean(0) * 3

    source = copy_checkpoint(chat_checkpoint, tmp_path / "a", edit=favour)
    for seed in range(520, 560):
        prompt = random_ids(seed, 6, 384)
        expected = oracle(source, prompt, max_tokens=24, stop_ids=(1,)).token_ids
        if 3 < len(expected) < 24:
            break
    else:
        raise AssertionError("no prompt reaches </s>")
    with engine(source) as llm:
        (output,) = llm.generate([prompt], greedy(24, ignore_eos=False), use_tqdm=False)
        (ignored,) = llm.generate([prompt], greedy(24), use_tqdm=False)
    assert (list(output.token_ids), output.finish_reason) == (expected, "stop")
    assert expected[-1] == 1 and "</s>" not in output.text
    assert (len(ignored.token_ids), ignored.finish_reason) == (24, "length")


# ---- text


def expected_text(tokenizer, token_ids):
    """Bytes at the very end that are no whole character aren't shown."""
    return tokenizer.decode(token_ids, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")


def printable_run(chat_checkpoint, tokenizer, max_tokens=60):
    """A prompt, its greedy tokens, and the text of each, where many of them are plain ASCII."""
    prompt = tokenizer("the cat sat on the").input_ids
    token_ids = oracle_for(chat_checkpoint, prompt, greedy(max_tokens)).token_ids
    return prompt, token_ids, [expected_text(tokenizer, [token]) for token in token_ids]


def places(texts, width, long=1):
    """Places where `width` tokens in a row are ASCII letters, at least `long` each."""
    fine = [text.isascii() and text.strip().isalpha() and len(text) >= long for text in texts]
    return [n for n in range(2, len(texts) - width) if all(fine[n : n + width])]


def test_the_text_is_the_tokenizers(chat_llm, chat_checkpoint, tokenizer):
    prompts = ["the cat", "Noël", "世界 你好", "def engine(step):\n\n", " ", "👍🏽"]
    outputs = chat_llm.generate(prompts, greedy(50), use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        assert list(output.prompt_token_ids) == tokenizer(prompt).input_ids
        assert_same_tokens(output, oracle_for(chat_checkpoint, output.prompt_token_ids, greedy(50)))
        assert output.text == expected_text(tokenizer, output.token_ids)
    assert len({output.text for output in outputs}) == len(prompts)


def test_one_bare_string(chat_llm, tokenizer):
    outputs = chat_llm.generate("the cat", greedy(5), use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == [tokenizer("the cat").input_ids]


def test_an_empty_string_is_refused(chat_llm):
    """Case 15."""
    with refused(chat_llm):
        chat_llm.generate(["the cat", ""], greedy(3), use_tqdm=False)


def test_a_stop_tokens_text_does_not_show(chat_llm, chat_checkpoint, tokenizer):
    """Case 24."""
    prompt, token_ids, _ = printable_run(chat_checkpoint, tokenizer)
    place, token = first_new_token(token_ids, 6)
    params = greedy(60, stop_token_ids=(token,))
    (output,) = chat_llm.generate([prompt], params, use_tqdm=False)
    assert list(output.token_ids) == token_ids[: place + 1] and output.finish_reason == "stop"
    assert output.text == expected_text(tokenizer, token_ids[:place])
    assert "".join(chat_llm.stream(prompt, params)) == output.text


def check_stop(llm, tokenizer, prompt, token_ids, stop):
    """Text up to the first match of any of `stop`, tokens up to the one that completes it; streamed too."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    text = expected_text(tokenizer, token_ids)
    cut = min(text.find(one) for one in stops if one in text)
    params = greedy(len(token_ids), stop=stop)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.finish_reason == "stop"
    assert output.text == text[:cut]
    given = list(output.token_ids)
    assert given == token_ids[: len(given)]
    assert any(one in expected_text(tokenizer, given) for one in stops)
    assert not any(one in expected_text(tokenizer, given[:-1]) for one in stops)
    shown = ""
    for piece in llm.stream(prompt, params):
        shown += piece
        assert text[:cut].startswith(shown)
    assert shown == text[:cut]


@pytest.mark.parametrize("is_async", [True, False])
def test_stop_strings(chat_checkpoint, tokenizer, is_async):
    """Case 25: over two and three tokens, inside a longer token, several of them, as a list or one string."""
    prompt, token_ids, texts = printable_run(chat_checkpoint, tokenizer)
    pairs, long = places(texts, 2), places(texts, 1, long=3)
    assert pairs and long
    with engine(chat_checkpoint, async_scheduling=is_async) as llm:
        for place in pairs:
            joined = texts[place] + texts[place + 1]
            check_stop(llm, tokenizer, prompt, token_ids, joined)
            check_stop(llm, tokenizer, prompt, token_ids, texts[place][-1] + texts[place + 1][0])
        for place in long:
            check_stop(llm, tokenizer, prompt, token_ids, [texts[place][1:-1]])
            check_stop(llm, tokenizer, prompt, token_ids, [texts[place][-2:], texts[place][:2]])
        for place in places(texts, 3)[:2]:
            check_stop(llm, tokenizer, prompt, token_ids, "".join(texts[place : place + 3]))
        check_stop(llm, tokenizer, prompt, token_ids, ("never there", texts[long[-1]], texts[pairs[0]]))


def test_a_stop_string_that_never_completes_holds_nothing_back(chat_llm, chat_checkpoint, tokenizer):
    prompt, token_ids, texts = printable_run(chat_checkpoint, tokenizer)
    text = expected_text(tokenizer, token_ids)
    stops = [text[-6:] + "!", text[20:30] + "\x00", "never there"]
    params = greedy(60, stop=stops)
    (output,) = chat_llm.generate([prompt], params, use_tqdm=False)
    assert (output.text, output.finish_reason) == (text, "length")
    assert "".join(chat_llm.stream(prompt, params)) == text


def test_a_stop_string_is_not_sought_in_the_prompt(chat_llm, tokenizer):
    (output,) = chat_llm.generate(["the cat"], greedy(5, stop="the cat"), use_tqdm=False)
    assert len(output.token_ids) == 5


def test_stop_strings_without_a_tokenizer_are_refused(llm):
    with refused(llm, match="stop|tokenizer", error=(ValueError, RuntimeError)):
        llm.generate([[1, 2, 3]], greedy(5, stop="ab"), use_tqdm=False)


def test_the_pieces_of_a_stream_join_to_the_text(chat_llm, chat_checkpoint, tokenizer):
    """With characters of several bytes cut by tokens, and with bytes that are no character at all."""
    num_pieces = 0
    for seed in range(12):
        prompt = random_ids(600 + seed, 5, 384)
        params = SamplingParams(temperature=1.0, max_tokens=80, seed=seed, ignore_eos=True)
        pieces = list(chat_llm.stream(prompt, params))
        (output,) = chat_llm.generate([prompt], params, use_tqdm=False)
        assert "".join(pieces) == output.text == expected_text(tokenizer, output.token_ids)
        assert all(pieces)
        num_pieces += len(pieces)
    assert num_pieces > 12 * 20  # it does stream


def test_characters_of_several_tokens_stream_whole(tmp_path, chat_checkpoint, tokenizer):
    """A model that spells a text token by token, bytes of one character apart: no piece shows half of one."""
    token_ids = tokenizer("the naïve世界👍🏽Приветąß→").input_ids
    spelled = dict(zip(token_ids, token_ids[1:]))
    if len(spelled) != len(token_ids) - 1:
        pytest.skip("a token occurs twice")

    def edit(state):
        for name, tensor in state.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name == "model.norm.weight":
                tensor.fill_(1.0)
        for token, following in spelled.items():
            state["lm_head.weight"][following] = state["model.embed_tokens.weight"][token] * 10

    source = copy_checkpoint(chat_checkpoint, tmp_path / "a", edit=edit)
    with engine(source) as llm:
        pieces = list(llm.stream(token_ids[:1], greedy(len(token_ids) - 1)))
    assert "".join(pieces) == tokenizer.decode(token_ids[1:])
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_two_streams_at_once_and_a_request_beside_them(chat_llm, tokenizer):
    prompts, params = ["the cat", "世界"], [greedy(30), greedy(20)]
    alone = [output.text for output in chat_llm.generate(prompts, params, use_tqdm=False)]
    beside = chat_llm.add_request("def engine", greedy(5))
    streams = [chat_llm.stream(prompt, one) for prompt, one in zip(prompts, params)]
    shown = ["", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        shown = [text + piece for text, piece in zip(shown, pieces)]
    assert shown == alone
    assert ids_of(drain(chat_llm)) == [beside]


def test_a_stream_whose_request_ends_during_another_call(chat_llm):
    """The rest of it is still there to be read."""
    params = greedy(12)
    (whole,) = chat_llm.generate(["the cat"], params, use_tqdm=False)
    stream = chat_llm.stream("the cat", params)
    shown = next(stream)
    chat_llm.generate(["the hat"], greedy(40), use_tqdm=False)
    assert shown + "".join(stream) == whole.text
    drain(chat_llm)
    assert not chat_llm.has_unfinished()


# ---- chat


CHATS = [
    [{"role": "user", "content": "the cat"}],
    [
        {"role": "system", "content": "sat"},
        {"role": "user", "content": "Noël"},
        {"role": "assistant", "content": "the mat"},
        {"role": "user", "content": "世界"},
    ],
]


@pytest.mark.parametrize("bos", [False, True])
def test_chat_uses_the_template_once(chat_checkpoint, tmp_path, bos):
    """One conversation or many; a tokenizer that begins every text with <s> doesn't add a second one."""
    from transformers import AutoTokenizer

    source = tiny.tiny_tokenizer(copy_checkpoint(chat_checkpoint, tmp_path / "a"), bos=bos)
    tokenizer = AutoTokenizer.from_pretrained(source)
    options = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **options) for chat in CHATS]
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert [ids.count(0) for ids in expected] == [int(bos)] * 2
    with engine(source) as llm:
        many = llm.chat(CHATS, greedy(6), use_tqdm=False)
        one = llm.chat(CHATS[1], greedy(6), use_tqdm=False)
        each = llm.chat(CHATS, [greedy(2), greedy(4)], use_tqdm=False)
        (plain,) = llm.generate(["the cat"], greedy(6), use_tqdm=False)
    check(source, expected, greedy(6), many)
    check(source, expected[1:], greedy(6), one)
    assert [len(output.token_ids) for output in each] == [2, 4]
    assert list(plain.prompt_token_ids).count(0) == int(bos)


def test_chat_without_a_template(chat_checkpoint, tmp_path):
    source = copy_checkpoint(chat_checkpoint, tmp_path / "a")
    (source / "chat_template.jinja").unlink()
    with engine(source) as llm:
        with refused(llm, match="template"):
            llm.chat(CHATS[0], greedy(3), use_tqdm=False)


def test_a_folder_without_a_tokenizer_serves_token_ids(llm, folder):
    """Design, trap 14: text is empty; strings and chat raise."""
    bad = (ValueError, RuntimeError)
    with refused(llm, match="tokenizer", error=bad):
        llm.generate(["the cat"], greedy(3), use_tqdm=False)
    with refused(llm, match="tokenizer", error=bad):
        llm.add_request("the cat", greedy(3))
    with refused(llm, match="tokenizer", error=bad):
        llm.chat(CHATS[0], greedy(3), use_tqdm=False)
    with refused(llm, match="tokenizer", error=bad):
        list(llm.stream("the cat", greedy(3)))
    outputs = llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    check(folder, [[1, 2, 3]], greedy(3), outputs)
    assert outputs[0].text == "" and "".join(llm.stream([1, 2, 3], greedy(3))) == ""


# ---- growth and closing


def test_many_short_requests_leave_nothing(folder):
    """Case 37: as many objects as before, whether requests end, are aborted or are refused."""
    with engine(folder, num_kvcache_blocks=32) as llm:

        def work(seed):
            prompts = [random_ids(seed + n, 1 + n % 9) for n in range(50)]
            llm.generate(prompts, greedy(2), use_tqdm=False)
            for prompt in prompts[:10]:
                llm.abort(llm.add_request(prompt, greedy(3)))
                with contextlib.suppress(ValueError):
                    llm.add_request([*prompt, 999], greedy(3))
            drain(llm)
            gc.collect()
            return len(gc.get_objects())

        work(1000)
        counts = [work(2000 + 100 * n) for n in range(6)]
    assert max(counts) - counts[0] < 60, counts  # 300 requests: less than one object for five of them


def test_a_dropped_engine_is_freed(folder):
    """Case 38: nothing (an atexit hook, a cycle through a global) keeps it alive."""
    llm = tiny.make_llm(folder)
    llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None


def test_close_twice_and_after_an_exception(folder):
    """Case 38."""
    llm = tiny.make_llm(folder)
    llm.add_request([1, 2, 3], greedy(5))
    llm.step()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="clos"):
        llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
    with pytest.raises(ZeroDivisionError):
        with LLM(str(folder), device="cpu", num_kvcache_blocks=64, max_model_len=64) as inside:
            inside.add_request([1, 2, 3], greedy(5))
            inside.step()
            1 / 0
    with pytest.raises(RuntimeError, match="clos"):
        inside.add_request([1, 2, 3], greedy(2))


SCRIPT = """
import logging, sys
for name in ("triton", "flash_attn", "flash_attn_2_cuda"):
    sys.modules[name] = None
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
import nanoengine
if "torch" in sys.modules:
    raise RuntimeError("import nanoengine is not lazy")
llm = nanoengine.LLM(sys.argv[1], num_kvcache_blocks=64, max_model_len=64)
params = nanoengine.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
print([output.token_ids for output in llm.generate([[1, 2, 3]], params, use_tqdm=False)])
if sys.argv[2] == "close":
    llm.close()
    llm.close()
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_without_triton_flash_attention_and_cuda_then_exit(folder, how):
    """Cases 36 and 38: it runs, says once which attention it chose, and leaves without a traceback."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    expected = oracle_for(folder, [1, 2, 3], greedy(4)).token_ids
    assert str([expected]) in done.stdout
    assert len(re.findall("^nanoengine.*attention", done.stdout, re.MULTILINE)) == 1, done.stdout


def test_the_package_logs_and_does_not_print(folder, capsys, caplog):
    with caplog.at_level(logging.INFO):
        with engine(folder) as llm:
            llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.out == ""


# ---- found by trying to break it


def test_a_closed_engine_with_a_token_in_flight_says_so_at_every_step(folder):
    """Or `while llm.has_unfinished(): llm.step()` would never end."""
    with engine(folder) as llm:
        llm.add_request([1, 2, 3], greedy(1))
        llm.step()
        llm.close()
        assert llm.has_unfinished()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed"):
                llm.step()


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {}, [greedy(1)], "x", 3], ids=repr)
def test_what_is_no_sampling_params_is_refused(llm, wrong):
    for call in (llm.add_request, lambda *args: next(llm.stream(*args))):
        with pytest.raises(ValueError, match="must be SamplingParams"):
            call([1, 2, 3], wrong)
    assert not llm.has_unfinished()


@pytest.mark.parametrize("where", ["run", "token_ids"])
def test_after_a_cuda_error_the_engine_closes_itself_and_says_so(folder, monkeypatch, where):
    """Such an error stays: every later call of CUDA would fail too. It often comes while a result is awaited."""
    with engine(folder) as llm:
        llm.add_request([1, 2, 3], greedy(9))
        llm.step()

        def fail(*_):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with monkeypatch.context() as patch:
            patch.setattr(*((llm._ranks.runner, "run") if where == "run" else (model_runner.Launch, "token_ids")), fail)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                llm.step()
        for call in (llm.step, lambda: llm.generate([[1]], greedy(1), use_tqdm=False)):
            with pytest.raises(RuntimeError, match="engine is closed.*illegal memory access"):
                call()


def test_a_step_is_forgotten_when_it_is_launched_or_has_failed(folder, monkeypatch):
    with engine(folder) as llm:
        llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
        assert attention.get_context() is None
        with monkeypatch.context() as patch:
            patch.setattr(llm._ranks.runner.model, "forward", lambda *_: 1 / 0)
            (output,) = llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
        assert output.finish_reason == "error" and attention.get_context() is None


def test_two_engines_in_two_threads(folder):
    """The step that attention reads is a global, of a thread."""
    prompts, found = [random_ids(600 + n, 9) for n in range(4)], {}
    with engine(folder) as first, engine(folder, kvcache_block_size=4) as second:

        def work(number, llm):
            found[number] = [llm.generate(prompts, greedy(12), use_tqdm=False) for _ in range(6)]

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for outputs in found[0] + found[1]:
        check(folder, prompts, greedy(12), outputs)

"""Messages between ranks, and what is left of an engine that ends, in whatever way: nothing.

Two or three real processes on the CPU. A peer can't be monkeypatched from here, but it runs what it unpickles: an
`InPeers` argument carries a call to it. What an engine holds (processes, names in /dev/shm, listening ports) is read
from /proc while it runs, and must be gone afterwards.
"""

import contextlib
import copy
import gc
import importlib
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tiny
from nanoengine import SamplingParams, model_runner, rpc
from nanoengine.group import Group
from tiny import assert_same_tokens, oracle_for, random_ids

ROOT = Path(__file__).resolve().parent.parent
SPAWN = multiprocessing.get_context("spawn")
needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@contextlib.contextmanager
def within(seconds):
    """Fails if the block takes longer; also if it would never end, as long as Python gets to run."""

    def ring(*_):
        raise TimeoutError(f"not done after {seconds} s")

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.monotonic()
    try:
        yield
        assert time.monotonic() - start < seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# ---- the channel


def message_lengths():
    """10,000 lengths, from nothing to five segments of 4,096 bytes; small ones, and edges of a segment, prevail."""
    rng = np.random.default_rng(1)
    some = rng.choice([0, 1, 100, 4000, 4050, 4072, 4096, 8144, 20_000], 10_000)
    return (some + rng.integers(0, 60, 10_000) * (some > 0)).tolist()


NOISE = np.random.default_rng(2).bytes(40_000)


def message(number, length):
    return number, NOISE[number : number + length]


def read_all(channel, peer, answers):
    """A reader that sleeps now and then; answers with the first message that isn't what it should be, or "all"."""
    naps = np.random.default_rng(peer).choice([0, 0.002, 0.01], 10_000, p=[0.99, 0.008, 0.002]).tolist()
    for number, (length, nap) in enumerate(zip(message_lengths(), naps)):
        got = channel.receive(peer)
        if got != message(number, length):
            return answers.send(f"{number}: {got!r:.100}")
        if nap:
            time.sleep(nap)
    answers.send("all")


def test_ten_thousand_messages_arrive_whole_and_in_order():
    """Two readers, each slow at other times; the segment holds a fifth of the longest message."""
    channel, ours, processes = rpc.Channel(2, SPAWN, segment_bytes=4096), [], []
    for peer in range(2):
        mine, theirs = SPAWN.Pipe(duplex=False)
        processes.append(SPAWN.Process(target=read_all, args=(channel, peer, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        ours.append(mine)

    def check():
        assert all(process.is_alive() for process in processes), [end.recv() for end in ours if end.poll()]

    try:
        with within(60):
            for number, length in enumerate(message_lengths()):
                channel.send(message(number, length), check)
            assert [answers.recv() for answers in ours] == ["all", "all"]
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def channel_and_readers(num_peers=1, **options):
    """A channel, and its readers as they would be in other processes: one segment, but each counts for itself."""
    channel = rpc.Channel(num_peers, SPAWN, **options)
    yield channel, [partial(copy.copy(channel).receive, peer) for peer in range(num_peers)]


class MustWait(Exception):
    pass


def wait_is_an_error():
    raise MustWait


def receive_in_thread(reader):
    got = []
    thread = threading.Thread(target=lambda: got.append(reader()), daemon=True)
    thread.start()
    return thread, got


def test_a_message_larger_than_the_segment():
    """Case 32: 64 prompts of 4,000 tokens are more than 1 MiB."""
    prompts = np.arange(64 * 4000, dtype=np.int64).reshape(64, 4000)
    with channel_and_readers() as (channel, [reader]), within(20):
        thread, got = receive_in_thread(reader)
        channel.send(("run", (list(prompts), {"a": 1}, None)))
        thread.join()
        channel.send("small")
        assert reader() == "small"
    method, (arrays, options, nothing) = got[0]
    assert (method, options, nothing) == ("run", {"a": 1}, None)
    assert (np.array(arrays) == prompts).all() and arrays[0].dtype == np.int64


@pytest.mark.parametrize("segment_bytes", [1, 2, 64, 100])
def test_any_size_of_the_segment(segment_bytes):
    """Down to one byte a part."""
    with channel_and_readers(segment_bytes=segment_bytes) as (channel, [reader]), within(20):
        for length in range(100):
            thread, got = receive_in_thread(reader)
            channel.send(NOISE[:length])
            thread.join()
            assert got == [NOISE[:length]]


def test_what_somebody_still_reads_is_not_overwritten():
    """The writer waits for the slowest of its readers, and asks `check` meanwhile."""
    with channel_and_readers(3) as (channel, readers), within(20):
        channel.send("first")
        for reader in readers[:2]:
            assert reader() == "first"
        with pytest.raises(MustWait):
            channel.send("second", wait_is_an_error)
        assert readers[2]() == "first"


def test_nobody_waits_when_everybody_has_read():
    with channel_and_readers(2) as (channel, readers), within(20):
        for number in range(5):
            channel.send(number, wait_is_an_error)
            assert [reader() for reader in readers] == [number] * 2


def test_a_lost_part_is_noticed():
    """Messages carry numbers: a reader that missed one says so and doesn't take another for it."""
    with channel_and_readers() as (channel, [reader]):
        channel.number += 1
        channel.send("after a gap")
        with pytest.raises(RuntimeError, match=r"\b2\b.*\b1\b"):
            reader()


# ---- what ranks do together


def collect(rank, size, port, answers):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = Group(rank, size)
    pair = torch.tensor([[rank, 10 * rank, 5], [7, 8, rank]])
    answers.send((
        group.all_reduce(torch.tensor([1.5, float(rank)])).tolist(),
        int(group.all_min(torch.tensor(300 - 7 * rank))),
        int(group.all_min(torch.tensor(300 + 7 * rank))),
        group.all_gather(torch.tensor([rank, 10 + rank])).tolist(),
        group.all_gather(pair.double().T).tolist(),
    ))  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_minima_and_gathers(size):
    """Case 34: whoever has least memory decides how many blocks there are, be it the first rank or the last."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends, processes = [], []
    for rank in range(size):
        mine, theirs = SPAWN.Pipe(duplex=False)
        args = (rank, size, store.port, theirs)
        processes.append(SPAWN.Process(target=collect, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(mine)
    try:
        with within(60):
            answers = [end.recv() for end in ends]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    ranks = range(size)
    for rank, (total, least, same, gathered, pairs) in enumerate(answers):
        assert total == [1.5 * size, sum(ranks)]
        assert (least, same) == (300 - 7 * (size - 1), 300)
        assert gathered == [[r, 10 + r] for r in ranks]
        assert pairs == [[[r, 7], [10 * r, 8], [5, r]] for r in ranks]


def test_one_rank_talks_to_nobody():
    """No process group, no process, no port."""
    x = torch.arange(6.0).view(2, 3)
    assert Group().all_reduce(x) is x and Group().all_min(x) is x
    assert Group().all_gather(x).tolist() == [x.tolist()]


def test_when_a_rank_is_gone_collectives_fail_at_once():
    """NCCL's would wait for a lock that whoever ends them holds."""
    group, x = Group(0, 2), torch.zeros(3)
    group.release()
    for collective in (lambda: group.all_reduce(x), lambda: group.all_min(x), lambda: group.all_gather(x)):
        with pytest.raises(TypeError):
            collective()


# ---- in a peer


class InPeers(str):
    """An argument that a peer, reading the message, makes by a call: function(*args), there and not here."""

    def __new__(cls, function, *args):
        self = super().__new__(cls, "config")
        self.call = function, args
        return self

    def __reduce__(self):
        return call_and_name, self.call


def call_and_name(function, args):
    function(*args)
    return "config"


def in_peers(llm, function, *args):
    """Run function(*args) in every peer, before what it is told next. Rank 0 only looks at an attribute."""
    llm._ranks.call("__getattribute__", InPeers(function, *args))


def shrink_memory():
    """What this process says from now on: 1 MB."""
    os.sysconf = {"SC_PHYS_PAGES": 256, "SC_PAGE_SIZE": 4096}.__getitem__


def test_the_rank_with_least_memory_decides(checkpoint):
    """Case 34."""
    with start(checkpoint("llama")) as llm:
        assert llm._ranks.call("measure") == 64 * llm._ranks.runner.block_tables.shape[1]      # all that is useful
        in_peers(llm, shrink_memory)
        num_blocks = llm._ranks.call("measure")
        assert num_blocks == (1 << 20) // 4 // llm._ranks.runner.kv_cache.nbytes
        llm._ranks.call("allocate", num_blocks)
        assert llm._ranks.runner.kv_cache.shape[2] == num_blocks + 1


def test_an_engine_refused_for_too_little_memory_leaves_nothing(checkpoint, monkeypatch):
    """Though a notebook keeps the traceback, and with it all that the constructor had made."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 1)
        with pytest.raises(RuntimeError, match="left for 0 KV blocks.*max_model_len=128: lower it") as kept:
            tiny.make_llm(checkpoint("llama"), tensor_parallel_size=2, num_kvcache_blocks=None)
    assert kept.traceback and children_of(os.getpid()) == []
    with start(checkpoint("llama")) as llm:
        check_works(llm, checkpoint("llama"))


def test_an_error_while_a_step_is_awaited_closes_the_engine(checkpoint, monkeypatch):
    with start(checkpoint("llama")) as llm:
        llm.add_request(PROMPT, greedy(5))
        llm.step()
        with monkeypatch.context() as patch:
            patch.setattr(model_runner.Launch, "is_done", lambda self: trip("no event"))
            with pytest.raises(LookupError, match="no event"):
                llm.step()
        with pytest.raises(RuntimeError, match="the engine is closed: LookupError.*no event"):
            llm.step()


def poison_caches(llm):
    """NaN into the cache of every rank (tiny.make_llm does it for rank 0): what was never written is loud."""
    in_peers(llm, poison_this_process)


def poison_this_process():
    for thing in gc.get_objects():
        if type(thing) is model_runner.ModelRunner:
            thing.kv_cache.fill_(float("nan"))


def before_step(number, rank, act, *args):
    """In a peer: its `number`th step from now, counted from 1, begins with act(*args)."""
    run, seen = model_runner.ModelRunner.run, []

    def run_or_act(self, step):
        seen.append(step)
        if len(seen) == number and self.group.rank == rank:
            act(*args)
        return run(self, step)

    model_runner.ModelRunner.run = run_or_act


def trip(text):
    raise LookupError(text)


# ---- what an engine holds


def process_state(pid):
    """(state, parent) of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def children_of(pid):
    """Its children and theirs, but for multiprocessing's resource tracker, which lives as long as its process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process_state(entry.name) or (None, None))[1] == pid:
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in (entry / "cmdline").read_bytes():
                    found += [int(entry.name), *children_of(int(entry.name))]
    return found


def shared_names(pid):
    """Files of /dev/shm that the process has mapped, and that have a name (maybe another than when it was mapped)."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
    inodes = {int(fields[4]) for fields in lines}
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def listening(pid):
    """Inodes of the TCP sockets on which the process listens."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
    return sockets & all_listening()


def listeners_at(port):
    """Hexadecimal addresses at which somebody listens on this TCP port."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return [fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")]


def all_listening():
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {fields[9] for fields in lines if fields[3] == "0A"}


class Holdings:
    """What a process and its children hold, beyond what it held before; `note` adds what there is now."""

    def __init__(self, pid):
        self.pid, self.before = pid, set()
        self.before, self.noted = self._now(), set()

    def _now(self):
        children = children_of(self.pid)
        held = {("process", pid) for pid in children}
        for pid in (self.pid, *children):
            with contextlib.suppress(OSError):
                held |= {("name", name) for name in shared_names(pid)} | {("port", n) for n in listening(pid)}
        return held

    def note(self):
        self.noted |= self._now() - self.before

    def peers(self):
        return sorted(pid for kind, pid in self.noted if kind == "process")

    def left(self):
        listeners = all_listening()
        return {(kind, what) for kind, what in self.noted if {
            "process": lambda: self._runs(what), "name": lambda: os.path.exists(what),
            "port": lambda: what in listeners}[kind]()}  # fmt: skip

    def _runs(self, pid):
        """An orphan that ended is its adopter's to reap; a child of ours that ended should have been joined."""
        state, parent = process_state(pid) or ("Z", None)
        return state != "Z" or parent == self.pid

    def assert_gone(self, seconds=5.0):
        """Everything noted is gone within `seconds`; and there was something of each kind."""
        assert {kind for kind, _ in self.noted} == {"process", "name", "port"}
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.left() == set()


@contextlib.contextmanager
def nothing_stays():
    """Yields the Holdings of this process; nothing that was noted is left when the block has ended."""
    import torch.distributed.nn.functional  # noqa: F401  its default arguments keep the group that is there at import

    holdings = Holdings(os.getpid())
    yield holdings
    holdings.assert_gone()


def start(folder, size=2, **options):
    return tiny.make_llm(folder, tensor_parallel_size=size, **options)


PROMPT = random_ids(900, 9)
ASYNC_AND_SLOWLY_SYNC = pytest.mark.parametrize(
    "is_async", [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.slow)]
)


def check_works(llm, folder, max_tokens=5):
    (output,) = llm.generate([PROMPT], greedy(max_tokens), use_tqdm=False)
    assert_same_tokens(output, oracle_for(folder, PROMPT, greedy(max_tokens)))


# ---- engines that end well


@needs_proc
def test_close_leaves_nothing(checkpoint):
    """Case 38; the engine object is still there."""
    folder = checkpoint("llama")
    with nothing_stays() as holdings:
        llm = start(folder)
        holdings.note()
        assert len(holdings.peers()) == 1
        assert listeners_at(llm._ranks._server.port) == ["0100007F"]  # 127.0.0.1 and no other
        check_works(llm, folder)
        with within(10):
            llm.close()
            llm.close()
        holdings.assert_gone()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([PROMPT], greedy(1), use_tqdm=False)


@needs_proc
def test_del_leaves_nothing(checkpoint):
    """Case 38."""
    folder = checkpoint("llama")
    with nothing_stays() as holdings:
        llm = start(folder)
        holdings.note()
        check_works(llm, folder)
        del llm


@needs_proc
def test_an_exception_in_a_with_block_leaves_nothing(checkpoint):
    """Case 38; a step is in flight."""
    with nothing_stays() as holdings:
        with pytest.raises(KeyError, match="mine"), start(checkpoint("llama")) as llm:
            holdings.note()
            llm.add_request(PROMPT, greedy(50))
            for _ in range(3):
                llm.step()
            raise KeyError("mine")


@needs_proc
def test_one_rank_opens_nothing(checkpoint):
    holdings = Holdings(os.getpid())
    with tiny.engine(checkpoint("llama")) as llm:
        holdings.note()
        assert not dist.is_initialized()
        check_works(llm, checkpoint("llama"))
        holdings.note()
    assert holdings.noted == set()


@needs_proc
def test_two_engines_in_one_process_are_refused(checkpoint):
    """torch has one process group to a process. The refusal says so, and hurts nobody; one rank needs none."""
    folder = checkpoint("llama")
    with nothing_stays() as holdings:
        with start(folder) as llm:
            holdings.note()
            with within(5), pytest.raises(RuntimeError, match="process group"):
                start(folder)
            check_works(llm, folder)
            with tiny.engine(folder) as single:
                check_works(single, folder)
            check_works(llm, folder)


# ---- engines that fail (case 30)


@contextlib.contextmanager
def fails(match, kind=RuntimeError):
    """The block raises within 10 s after the failure, and the message holds the cause.

    Yields a function to call at the moment of the failure, if that isn't the start of the block. No frame of the
    engine outlives the block.
    """
    times = [time.monotonic()]
    with within(60), pytest.raises(kind) as caught:
        yield lambda: times.append(time.monotonic())
    assert time.monotonic() - times[-1] < 10
    text = str(caught.value)
    del caught
    gc.collect()
    assert re.search(match, text, re.DOTALL), text


@needs_proc
@ASYNC_AND_SLOWLY_SYNC
def test_a_peer_raises_in_the_third_step(checkpoint, is_async):
    with nothing_stays() as holdings:
        llm = start(checkpoint("llama"), async_scheduling=is_async)
        holdings.note()
        in_peers(llm, before_step, 3, 1, trip, "the third")
        with fails(r"rank 1.*Traceback.*in trip.*LookupError: 'the third'|rank 1.*LookupError: the third"):
            llm.generate([PROMPT] * 3, greedy(20), use_tqdm=False)
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([PROMPT], greedy(1), use_tqdm=False)


@needs_proc
def test_the_second_of_two_peers_raises(checkpoint):
    folder = checkpoint("llama", **THREE_WAYS)
    with nothing_stays() as holdings:
        llm = start(folder, size=3)
        holdings.note()
        assert len(holdings.peers()) == 2
        check_works(llm, folder)
        in_peers(llm, before_step, 2, 2, trip, "of rank two")
        with fails("rank 2 .*Traceback.*LookupError: of rank two"):
            llm.generate([PROMPT] * 3, greedy(20), use_tqdm=False)


THREE_WAYS = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=16, vocab_size=129)


@needs_proc
def test_a_peer_raises_between_two_calls(checkpoint):
    """Nobody is waiting for it then: the next call tells."""
    folder = checkpoint("llama")
    with nothing_stays() as holdings:
        llm = start(folder)
        holdings.note()
        check_works(llm, folder)
        in_peers(llm, trip, "while idle")
        with fails("rank 1.*Traceback.*LookupError: while idle"):
            llm.generate([PROMPT], greedy(20), use_tqdm=False)


@needs_proc
def test_a_killed_peer_is_noticed_between_two_steps(checkpoint):
    with nothing_stays() as holdings:
        llm = start(checkpoint("llama"))
        holdings.note()
        llm.add_request(PROMPT, greedy(50))
        for _ in range(3):
            llm.step()
        os.kill(holdings.peers()[0], signal.SIGKILL)
        with fails(r"rank 1.*-9"):
            tiny.drain(llm)
        with pytest.raises(RuntimeError, match="closed|rank 1"):
            llm.step()


@needs_proc
def test_a_killed_peer_is_noticed_inside_a_collective(checkpoint):
    """Rank 0 stands in an all-reduce to which the peer, asleep in its step, will never come."""
    with nothing_stays() as holdings:
        llm = start(checkpoint("llama"))
        holdings.note()
        in_peers(llm, before_step, 3, 1, time.sleep, 60)
        timer = threading.Timer(0.5, os.kill, (holdings.peers()[0], signal.SIGKILL))
        timer.start()
        with fails(r"rank 1.*-9"):
            llm.generate([PROMPT], greedy(20), use_tqdm=False)
        timer.join()


class SmallChannel(rpc.Channel):
    """Case 32: a segment of 200 bytes, so that nearly every message goes in parts."""

    def __init__(self, num_peers, spawn):
        super().__init__(num_peers, spawn, segment_bytes=200)


@needs_proc
def test_a_killed_peer_is_noticed_in_the_middle_of_a_message(checkpoint, monkeypatch):
    """Rank 0 waits for the peer, asleep after the message before, to take the first part."""
    with nothing_stays() as holdings:
        monkeypatch.setattr(rpc, "Channel", SmallChannel)
        llm = start(checkpoint("llama"))
        holdings.note()
        in_peers(llm, time.sleep, 60)
        timer = threading.Timer(0.5, os.kill, (holdings.peers()[0], signal.SIGKILL))
        timer.start()
        with fails(r"rank 1.*-9"):
            llm.generate([PROMPT], greedy(20), use_tqdm=False)
        timer.join()


@needs_proc
@ASYNC_AND_SLOWLY_SYNC
def test_rank_0_raises_in_a_step(checkpoint, monkeypatch, is_async):
    """Its own error, not the peer's, which waits for it in a collective."""
    with nothing_stays() as holdings:
        llm = start(checkpoint("llama"), async_scheduling=is_async)
        holdings.note()
        monkeypatch.setattr(llm._ranks.runner.model, "forward", lambda *args: trip("here"))
        with fails("here", kind=LookupError):
            llm.generate([PROMPT], greedy(20), use_tqdm=False)


def without(name):
    def edit(state):
        del state[name]

    return edit


@needs_proc
def test_a_tensor_that_no_rank_finds(checkpoint, tmp_path):
    """Case 18 with two ranks: the error names it."""
    name = "model.layers.1.mlp.down_proj.weight"
    folder = tiny.copy_checkpoint(checkpoint("llama"), tmp_path / "broken", edit=without(name))
    holdings = Holdings(os.getpid())
    with fails(re.escape(name), kind=(RuntimeError, ValueError)):
        start(folder)
    gc.collect()        # the error's traceback held the frames that hold the store
    assert children_of(os.getpid()) == [] and listening(os.getpid()) <= {what for _, what in holdings.before}


@pytest.fixture
def only_rank_0_loads(checkpoint, monkeypatch, tmp_path):
    """only_rank_0_loads(prepare, act) -> a folder that prepare(folder) spoils for the peers; rank 0 reads another,
    and runs act() when it has."""
    load_weights = model_runner.load_weights

    def make(prepare, act):
        def load(folder, sources):
            load_weights(checkpoint("llama"), sources)
            act()

        monkeypatch.setattr(model_runner, "load_weights", load)
        folder = tiny.copy_checkpoint(checkpoint("llama"), tmp_path / "spoilt")
        prepare(folder / "model.safetensors")
        return folder

    return make


def start_and_generate(folder):
    """What fails in a peer that is still loading may be told by the constructor or by the first step."""
    start(folder).generate([PROMPT], greedy(5), use_tqdm=False)


def serve_with_a_fault(name, *args):
    """A peer's life, but that the function or class of this name raises."""
    module, _, name = name.rpartition(".")
    setattr(importlib.import_module(module), name, lambda *args, **kwargs: trip(f"no {name}"))
    rpc.serve(*args)


@needs_proc
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch.distributed.TCPStore", marks=pytest.mark.slow),
        "nanoengine.rpc.join",
        "nanoengine.rpc.ModelRunner",
    ],
)
def test_a_peer_raises_while_starting(checkpoint, monkeypatch, name):
    """Before it has found the others, before it has joined them, and while it loads."""
    monkeypatch.setattr(rpc, "serve", partial(serve_with_a_fault, name))
    holdings = Holdings(os.getpid())
    with fails(f"rank 1.*Traceback.*LookupError: no {name.rpartition('.')[2]}"):
        start_and_generate(checkpoint("llama"))
    assert children_of(os.getpid()) == [] and listening(os.getpid()) <= {what for _, what in holdings.before}


def replace_by_fifo(file):
    """Whoever opens it waits for ever."""
    file.unlink()
    os.mkfifo(file)


@needs_proc
def test_a_peer_is_killed_while_loading(only_rank_0_loads):
    with nothing_stays() as holdings:

        def kill():
            holdings.note()
            now()
            os.kill(holdings.peers()[0], signal.SIGKILL)

        with fails(r"rank 1.*-9") as now:
            start_and_generate(only_rank_0_loads(replace_by_fifo, kill))


@needs_proc
@pytest.mark.slow
def test_rank_0_fails_to_load_while_its_peer_still_does(only_rank_0_loads):
    with nothing_stays() as holdings:

        def note_and_trip():
            holdings.note()
            now()
            trip("rank 0 alone")

        with fails("rank 0 alone", kind=LookupError) as now:
            start(only_rank_0_loads(replace_by_fifo, note_and_trip))


@contextlib.contextmanager
def first_child_is_killed(holdings, delay, now):
    """`delay` seconds after it has appeared, whatever this process does meanwhile."""

    def kill():
        while not holdings.peers():
            holdings.note()
            time.sleep(0.01)
        time.sleep(delay)
        holdings.note()
        now()
        os.kill(holdings.peers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()


@needs_proc
@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 0.3])
def test_a_peer_is_killed_before_it_has_joined(checkpoint, delay):
    """It is importing torch then."""
    with nothing_stays() as holdings:
        with fails(r"rank 1.*-9") as now, first_child_is_killed(holdings, delay, now):
            start(checkpoint("llama"))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("delay", np.linspace(0.1, 2.4, 24).round(1))
def test_a_peer_is_killed_at_any_moment(checkpoint, delay):
    """While it starts, joins, loads or computes."""
    with nothing_stays() as holdings:
        with fails(r"rank 1.*-9") as now, first_child_is_killed(holdings, delay, now):
            llm = start(checkpoint("llama"))
            while True:
                llm.generate([PROMPT], greedy(20), use_tqdm=False)
        llm = None


@needs_proc
@pytest.mark.slow
def test_close_ends_a_peer_that_does_not_answer(checkpoint, caplog):
    with nothing_stays() as holdings:
        llm = start(checkpoint("llama"))
        holdings.note()
        os.kill(holdings.peers()[0], signal.SIGSTOP)
        with within(15), caplog.at_level(logging.WARNING):
            llm.close()


# ---- engines in processes of their own


SCRIPT = """
import json, os, signal, sys, time
from nanoengine import LLM, SamplingParams

def greedy(n):
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)

def say(*words):
    print(*words, flush=True)

def start():
    say("starting")
    return LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", max_model_len=512, kvcache_block_size=4,
               num_kvcache_blocks=1024)

def answer(llm, n=5):
    return json.dumps(llm.generate([json.loads(sys.argv[2])], greedy(n), use_tqdm=False)[0].token_ids)
"""


class Script:
    """A script with an engine, in a process group of its own."""

    def __init__(self, folder, tmp_path, body, name="script.py"):
        file = tmp_path / name
        file.write_text(SCRIPT + body)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.errors = open(tmp_path / f"{name}.err", "w+")
        command = [sys.executable, file, str(folder), json.dumps(PROMPT)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                        start_new_session=True)  # fmt: skip
        self.holdings = Holdings(self.process.pid)

    def wait_for(self, word):
        """The rest of the next line that begins with the word, which must come."""
        for line in self.process.stdout:
            if line.split()[:1] == [word]:
                self.holdings.note()
                return line.removeprefix(word).strip()
        raise AssertionError(f"no {word!r}: {self.stderr()}")

    def end(self):
        """Exit status, when nothing it held is left."""
        status = self.process.wait(timeout=30)
        self.holdings.assert_gone()
        return status

    def stderr(self):
        self.errors.seek(0)
        return self.errors.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Kills rank 0 and peers, if a failed test left them; not the resource tracker, which tidies /dev/shm."""
        for pid in [*children_of(self.process.pid), *self.holdings.peers(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == self.process.pid:  # still the same process
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def guarded(body):
    return 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in body.strip().splitlines())


def check_answer(folder, answer, max_tokens=5):
    assert_same_tokens(json.loads(answer), oracle_for(folder, PROMPT, greedy(max_tokens)))


FOR_EVER = guarded("""
llm = start()
say("tokens", answer(llm))
while True:
    say("again", answer(llm))
""")


@needs_proc
def test_two_engines_at_once_and_a_killed_rank_0(checkpoint, tmp_path):
    """Case 31: they don't collide; one's sudden end leaves nothing and doesn't touch the other; a new one starts."""
    folder, idle = checkpoint("llama"), guarded("llm = start(); say('tokens', answer(llm)); time.sleep(600)")
    with Script(folder, tmp_path, idle, "a.py") as first, Script(folder, tmp_path, FOR_EVER, "b.py") as second:
        for script in (first, second):
            check_answer(folder, script.wait_for("tokens"))
        first.process.kill()
        assert first.end() == -signal.SIGKILL
        with nothing_stays() as holdings, start(folder) as llm:
            holdings.note()
            check_works(llm, folder)
        for _ in range(20):  # more than the pipe may have held
            check_answer(folder, second.wait_for("again"))
        second.process.kill()
        assert second.end() == -signal.SIGKILL


@needs_proc
@pytest.mark.slow
def test_rank_0_is_killed_while_its_peer_is_inside_a_collective(checkpoint, tmp_path):
    body = """
llm = start()
run = type(llm._ranks.runner).run
type(llm._ranks.runner).run = lambda self, step: say("asleep") or time.sleep(60)
answer(llm)
"""
    with Script(checkpoint("llama"), tmp_path, guarded(body)) as script:
        script.wait_for("asleep")
        time.sleep(0.3)
        script.process.kill()
        assert script.end() == -signal.SIGKILL


@needs_proc
def test_ctrl_c_stops_generate_and_the_engine_lives(checkpoint, tmp_path):
    """A terminal sends it to the whole process group; only rank 0 reacts, and says it once."""
    body = """
llm = start()
answer(llm)
say("running")
try:
    for _ in range(1000):
        llm.generate([[1, 2, 3]] * 8, greedy(400), use_tqdm=False)
except KeyboardInterrupt:
    say("interrupted")
say("tokens", llm.has_unfinished(), answer(llm))
llm.close()
"""
    folder = checkpoint("llama")
    with Script(folder, tmp_path, guarded(body)) as script:
        script.wait_for("running")
        time.sleep(0.5)
        with within(10):
            os.killpg(script.process.pid, signal.SIGINT)
            script.wait_for("interrupted")
        is_unfinished, answer = script.wait_for("tokens").split(maxsplit=1)
        assert is_unfinished == "False"
        check_answer(folder, answer)
        assert script.end() == 0
        assert script.stderr() == ""


@needs_proc
@pytest.mark.slow
def test_ctrl_c_that_nobody_catches(checkpoint, tmp_path):
    """One traceback, rank 0's."""
    with Script(checkpoint("llama"), tmp_path, FOR_EVER) as script:
        script.wait_for("again")
        os.killpg(script.process.pid, signal.SIGINT)
        assert script.end() in (-signal.SIGINT, 130)
        assert script.stderr().count("Traceback") == len(re.findall("KeyboardInterrupt$", script.stderr(), re.M)) == 1


@needs_proc
@pytest.mark.parametrize("delay", [0.5, pytest.param(1.5, marks=pytest.mark.slow)])
def test_ctrl_c_while_starting(checkpoint, tmp_path, delay):
    with Script(checkpoint("llama"), tmp_path, FOR_EVER) as script:
        script.wait_for("starting")
        time.sleep(delay)
        script.holdings.note()
        os.killpg(script.process.pid, signal.SIGINT)
        with within(10):
            assert script.end() in (-signal.SIGINT, 130)
        assert len(re.findall("KeyboardInterrupt$", script.stderr(), re.M)) == 1, script.stderr()


ENDINGS = {
    "in flight": ("llm.add_request([1, 2, 3], greedy(9)); llm.step(); llm.step()", 0),
    "close": ("llm.close()", 0),
    "return": ("", 0),
    "kept in a cycle": ("llm.me = llm; del llm", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise KeyError('mine')", 1),
}


@needs_proc
@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=[pytest.mark.slow] * (name != "in flight")) for name in ENDINGS]
)
def test_exit(checkpoint, tmp_path, ending):
    """Case 38: with close and without, no child stays, and nothing is said: by torch, multiprocessing, or us."""
    folder, (code, status) = checkpoint("llama"), ENDINGS[ending]
    body = f"""
llm = start()
sampled = SamplingParams(temperature=1.0, top_k=5, max_tokens=5)
llm.generate([[1, 2, 3], [4]], [sampled, greedy(5)], use_tqdm=False)
say("tokens", answer(llm))
time.sleep(0.3)
{code}
"""
    with Script(folder, tmp_path, guarded(body)) as script:
        check_answer(folder, script.wait_for("tokens"))
        assert script.end() == status
        if ending == "exception":
            assert script.stderr().count("Traceback") == script.stderr().count("KeyError: 'mine'") == 1
        else:
            assert script.stderr() == ""


def test_a_script_without_a_main_guard_is_told(checkpoint, tmp_path):
    """Its peers would run it again. The error of rank 0 says what to do."""
    with Script(checkpoint("llama"), tmp_path, "\nllm = start()\nsay(answer(llm))\n") as script:
        assert script.process.wait(timeout=30) == 1
        last = script.stderr().rstrip().splitlines()[-12:]
    assert any('if __name__ == "__main__"' in line or "if __name__ == '__main__'" in line for line in last), last

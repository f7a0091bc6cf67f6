"""Rank 0 calls its peers (the tensor-parallel processes) by pickled messages in shared memory.

A message goes to all peers at once, in parts that fit the segment. A semaphore per peer says "a part is there", another one
"I have copied it": rank 0 writes only what nobody reads any more, and peers sleep while they wait. The memory is
anonymous and ports are the system's choice, so two engines can't collide and nothing is left behind. On either side
a thread watches the other: a dead peer aborts the communicator, so that no collective waits for it for ever.

    segment   | sequence number | bytes of this part | bytes to come after it | part ... |
"""

import logging
import multiprocessing
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import torch
import torch.distributed as dist

from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.linear import Group
from nanoengine.model_runner import ModelRunner

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 1 << 20
HEADER = struct.Struct("<QQQ")


class Channel:
    """One writer (rank 0), `num_peers` readers. Pass it to the peers' processes when they are started."""

    def __init__(self, num_peers: int, spawn, segment_bytes: int = SEGMENT_BYTES):
        self.segment = spawn.RawArray("B", segment_bytes)
        self.written = [spawn.Semaphore(0) for _ in range(num_peers)]
        self.copied = [spawn.Semaphore(1) for _ in range(num_peers)]
        self.number = 0

    def send(self, message, check=lambda: None) -> None:
        """Write for all peers; `check` is called while one of them makes us wait, and may raise."""
        data = memoryview(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        view, room = memoryview(self.segment).cast("B"), len(self.segment) - HEADER.size
        for start in range(0, len(data), room):
            part = data[start:start + room]
            for copied in self.copied:
                while not copied.acquire(timeout=0.2):
                    check()
            self.number += 1
            HEADER.pack_into(view, 0, self.number, len(part), len(data) - start - len(part))
            view[HEADER.size:HEADER.size + len(part)] = part
            for written in self.written:
                written.release()

    def receive(self, peer: int):
        """The next message, whole. Blocks until it is there."""
        view, data, rest = memoryview(self.segment).cast("B"), bytearray(), 1
        while rest:
            self.written[peer].acquire()
            self.number += 1
            number, length, rest = HEADER.unpack_from(view)
            if number != self.number:
                raise RuntimeError(f"message {number} arrived where {self.number} was expected")
            data += view[HEADER.size:HEADER.size + length]
            self.copied[peer].release()
        return pickle.loads(data)


class Ranks:
    """The model runners of all ranks, called as one. With one rank there is nothing but the runner.

    Errors: a peer that raises or dies, in whatever it was doing, makes the call under way raise RuntimeError with the
    peer's traceback; after that only `close` is of use.
    """

    def __init__(self, folder: Path, model_config: ModelConfig, config: EngineConfig):
        self.size = config.tensor_parallel_size
        self.failure: str | None = None
        self._processes, self._reports, self._has_failed = [], [], threading.Event()
        self._is_closed = False
        try:
            if self.size > 1:
                self._start_peers(folder, model_config, config)
            self.runner = self._guard(ModelRunner, folder, model_config, config, Group(0, self.size))
        except BaseException:
            self.close()
            raise

    def _start_peers(self, folder, model_config, config) -> None:
        if dist.is_initialized():
            raise RuntimeError("tensor_parallel_size > 1 needs torch's process group for itself, but this process has "
                               "one already (another engine's? close it first)")
        spawn = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)     # a free port
        self.channel = Channel(self.size - 1, spawn)
        for rank in range(1, self.size):
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=serve, name=f"nanoengine-rank-{rank}", daemon=True,
                                    args=(rank, store.port, self.channel, theirs, folder, model_config, config))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._reports.append(ours)
        threading.Thread(target=self._watch, daemon=True).start()
        for report in self._reports:
            while not report.poll(0.2):
                self._check()
            report.recv()
        join(store, 0, config)

    def _watch(self) -> None:
        """Runs in a thread: when a peer ends unasked, note why, and wake whoever waits for it in a collective."""
        sentinels = [process.sentinel for process in self._processes]
        rank = sentinels.index(wait_for_any(sentinels)[0]) + 1
        if self._is_closed:
            return
        report, process = self._reports[rank - 1], self._processes[rank - 1]
        process.join()
        reason = f"exit code {process.exitcode}"
        while report.poll():
            reason = report.recv() or reason
        self.failure = f"rank {rank} of {self.size} failed: {reason}"
        self._has_failed.set()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def _guard(self, function, *args):
        try:
            result = function(*args)
        except Exception:
            self._has_failed.wait(3 if self._processes else 0)      # if a peer is to blame, we will know soon
            self._check()
            raise
        self._check()
        return result

    def call(self, method: str, *args):
        """`ModelRunner.method(*args)` on every rank; returns rank 0's result, maybe before the peers are done."""
        if self._processes:
            self.channel.send((method, args), self._check)
        return self._guard(getattr(self.runner, method), *args)

    def token_ids(self, launch) -> list[int]:
        return self._guard(launch.token_ids)

    def close(self) -> None:
        """End the peers (by force if one has failed or doesn't answer) and free everything. May be called twice."""
        if self._is_closed:
            return
        self._is_closed, self.runner = True, None
        try:
            if self._processes and not self.failure and dist.is_initialized():
                self.channel.send(("close", ()), self._give_up_after(time.monotonic() + 5))
        except TimeoutError:
            logger.warning("peers don't answer and are ended by force")
        for process in self._processes:
            process.join(timeout=0 if self.failure else 5)
            process.kill()
            process.join()
        if self._processes and dist.is_initialized():
            dist.destroy_process_group()

    def _give_up_after(self, deadline: float):
        def check():
            if self.failure or time.monotonic() > deadline:
                raise TimeoutError
        return check


def join(store, rank: int, config: EngineConfig) -> None:
    backend = "nccl" if config.device == "cuda" else "gloo"
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.tensor_parallel_size,
                            timeout=timedelta(minutes=2))


def serve(rank: int, port: int, channel: Channel, report, folder: Path, model_config: ModelConfig,
          config: EngineConfig) -> None:
    """A peer's whole life: join, load, then do as rank 0 does. Ctrl-C is rank 0's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        report.send(None)
        join(store, rank, config)
        runner = ModelRunner(folder, model_config, config, Group(rank, config.tensor_parallel_size))
        while (message := channel.receive(rank - 1))[0] != "close":
            method, args = message
            getattr(runner, method)(*args)
        dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        os._exit(1)         # at once, without waiting for collectives that can't end


def _die_with_parent() -> None:
    wait_for_any([multiprocessing.parent_process().sentinel])
    os._exit(1)

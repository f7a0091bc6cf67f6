"""Rank 0 calls its peers (the tensor-parallel processes) by pickled messages in shared memory.

A message goes to all peers at once, in parts that fit the segment. A semaphore per peer says "a part is there", another
"I have copied it": rank 0 overwrites only what nobody reads any more, and whoever waits sleeps. The memory is anonymous
and the port the system's choice, so two engines can't collide and nothing is left behind. On either side a thread
watches the other: a dead peer aborts the communicator, so that no collective waits for it for ever.

    segment   | sequence number | bytes of this part | bytes to come after it | part ... |
"""

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

import torch
import torch.distributed as dist

from nanoengine.linear import Group
from nanoengine.model_runner import ModelRunner

HEADER = struct.Struct("<QQQ")

class Channel:
    """One writer (rank 0), `num_peers` readers. Pass it to the peers' processes when they are started."""

    def __init__(self, num_peers: int, spawn, segment_bytes: int = 1 << 20):
        self.segment, self.number = spawn.RawArray("B", segment_bytes), 0
        self.written = [spawn.Semaphore(0) for _ in range(num_peers)]
        self.copied = [spawn.Semaphore(1) for _ in range(num_peers)]

    def send(self, message, check=lambda: None) -> None:
        """Write for all peers; `check` is called now and then while one of them makes us wait, and may raise."""
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
        view, data, rest = memoryview(self.segment).cast("B"), bytearray(), True
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
    """The model runners of all ranks, called as one. `arguments` are ModelRunner's (folder, model_config, config).

    A peer that raises or dies, in whatever it was doing, makes the call under way close everything and raise
    RuntimeError with the peer's traceback. An error of rank 0 closes everything too, but one of a single rank in a step
    leaves it usable (unless it is the device's).
    """

    def __init__(self, *arguments):
        self.size, self.is_closed, self.runner, self.failure = arguments[-1].tensor_parallel_size, False, None, None
        self._peers, self._has_failed = [], threading.Event()       # of (process, the pipe that it reports through)
        self._guard(self._start, arguments)

    def _start(self, arguments) -> None:
        if self.size > 1:
            if dist.is_initialized():
                raise RuntimeError("tensor_parallel_size > 1 needs torch's process group, but this process has one "
                                   "already (of another engine? close it first)")
            spawn = multiprocessing.get_context("spawn")
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)     # a free port
            self.channel = Channel(self.size - 1, spawn)
            for rank in range(1, self.size):
                report, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=serve, daemon=True,
                                        args=(rank, store.port, self.channel, theirs, arguments))
                process.start()
                theirs.close()
                self._peers.append((process, report))
            threading.Thread(target=self._watch, daemon=True).start()
            for _, report in self._peers:
                while not report.poll(0.2):
                    self._check()
                report.recv()
            join(store, 0, arguments[-1])
        self.runner = ModelRunner(*arguments, Group(0, self.size))

    def _watch(self) -> None:
        """Runs in a thread: when a peer ends unasked, note why, and wake whoever waits for it in a collective."""
        sentinels = [process.sentinel for process, _ in self._peers]
        index = sentinels.index(wait_for_any(sentinels)[0])
        if self.is_closed:
            return
        process, report = self._peers[index]
        process.join()
        reason = f"exit code {process.exitcode} (does your script lack `if __name__ == '__main__':`?)"
        try:
            while report.poll():
                reason = report.recv() or reason
        except EOFError:
            pass
        self.failure = f"rank {index + 1} of {self.size} failed: {reason}"
        self._has_failed.set()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def _guard(self, function, *args):
        try:
            result = function(*args)
            self._check()
            return result
        except BaseException as error:
            self._has_failed.wait(3 if self._peers else 0)      # if a peer is to blame, we will know soon
            if self._peers or function == self._start or isinstance(error, getattr(torch, "AcceleratorError", ())):
                self.close()
            self._check()
            raise

    def call(self, method: str, *args):
        """`ModelRunner.method(*args)` on every rank; returns rank 0's result, maybe before the peers are done."""
        if self._peers:
            self._guard(self.channel.send, (method, args), self._check)
        return self._guard(getattr(self.runner, method), *args)

    def token_ids(self, launch) -> list[int]:
        """A launched step's tokens. With peers, the wait is no call into CUDA that a dead one could make endless."""
        while self._peers and not launch.is_done():
            self._guard(time.sleep, 2e-5)
        return self._guard(launch.token_ids)

    def close(self) -> None:
        """End the peers (by force if one has failed or doesn't answer) and free everything. May be called twice."""
        if self.is_closed:
            return
        deadline, is_up = time.monotonic() + 5, self.runner is not None and not self.failure
        self.is_closed, self.runner = True, None

        def check():
            if self.failure or time.monotonic() > deadline:
                raise TimeoutError
        try:
            if self._peers and is_up:
                self.channel.send(("close", ()), check)
        except TimeoutError:
            deadline = 0
        for process, _ in self._peers:
            process.join(timeout=max(0, deadline - time.monotonic()) if is_up else 0)
            process.kill()
            process.join()
        if self._peers and dist.is_initialized():
            dist.destroy_process_group()

def join(store, rank: int, config) -> None:
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo", store=store, rank=rank,
                            world_size=config.tensor_parallel_size, timeout=timedelta(minutes=2))

def serve(rank: int, port: int, channel: Channel, report, arguments) -> None:
    """A peer's whole life: join, load, then do as rank 0 does. Ctrl-C is rank 0's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        size = arguments[-1].tensor_parallel_size
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        report.send(None)
        join(store, rank, arguments[-1])
        runner = ModelRunner(*arguments, Group(rank, size))
        while (message := channel.receive(rank - 1))[0] != "close":
            getattr(runner, message[0])(*message[1])
        dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        os._exit(1)         # at once, without waiting for collectives that can't end

def _die_with_parent() -> None:
    wait_for_any([multiprocessing.parent_process().sentinel])
    os._exit(1)

"""Rank 0 calls its peers (the tensor-parallel processes) by pickled messages in shared memory.

A message goes to all peers at once, in parts that fit the segment. One semaphore per peer says "a part is there", one
"I have copied it": nothing is overwritten that is still read, and whoever waits sleeps. On either side a thread watches
the other: when a peer ends, rank 0's store and communicator end too, so that nothing waits for it for ever.
"""

import multiprocessing.connection
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from nanoengine.linear import Group
from nanoengine.model_runner import ModelRunner

HEADER = struct.Struct("<QQQ")      # of a part: its number, its bytes, the bytes to come after it

class Channel:
    """One writer (rank 0), `num_peers` readers. Pass it to the peers' processes when they are started."""

    def __init__(self, num_peers: int, spawn, segment_bytes: int = 1 << 20):
        self.segment, self.number = spawn.RawArray("B", segment_bytes), 0
        self.signals = [(spawn.Semaphore(0), spawn.Semaphore(1)) for _ in range(num_peers)]     # (written, copied)

    def send(self, message, check=lambda: None) -> None:
        """Write for all peers; `check` is called now and then while one of them makes us wait, and may raise."""
        data, room = pickle.dumps(message, pickle.HIGHEST_PROTOCOL), len(self.segment) - HEADER.size
        for start in range(0, len(data), room):
            part = data[start:start + room]
            for _, copied in self.signals:
                while not copied.acquire(timeout=0.2):
                    check()
            self.number += 1
            header = HEADER.pack(self.number, len(part), len(data) - start - len(part))
            memoryview(self.segment).cast("B")[:HEADER.size + len(part)] = header + part
            for written, _ in self.signals:
                written.release()

    def receive(self, peer: int):
        """The next message, whole. Blocks until it is there; raises RuntimeError if a part was missed."""
        view, data, rest = memoryview(self.segment).cast("B"), bytearray(), True
        written, copied = self.signals[peer]
        while rest:
            written.acquire()
            self.number += 1
            number, length, rest = HEADER.unpack_from(view)
            if number != self.number:
                raise RuntimeError(f"message {number} arrived where {self.number} was expected")
            data += view[HEADER.size:HEADER.size + length]
            copied.release()
        return pickle.loads(data)

class Ranks:
    """The model runners of all ranks, called as one. `arguments` are ModelRunner's (folder, model_config, config).
    A peer that raises or dies at any time makes the call under way, or the next, close everything and raise a
    RuntimeError with its traceback. An error of rank 0 closes everything too; only a single rank survives one in a step
    (unless it is the device's)."""

    def __init__(self, *arguments):
        self.size, self.is_closed, self.failure = arguments[-1].tensor_parallel_size, False, None
        self.runner = self.channel = self._server = None
        self._peers, self._has_failed = [], threading.Event()       # of (process, the pipe that it reports through)
        self._guard(self._start, arguments)

    def _start(self, arguments) -> None:
        if self.size > 1 and dist.is_initialized():
            raise RuntimeError("tensor_parallel_size > 1 needs torch's process group, but this process has one already "
                               "(of another engine? close it first)")
        if self.size > 1:
            spawn = multiprocessing.get_context("spawn")
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)     # a free port
            self.channel, port = Channel(self.size - 1, spawn), self._server.port
            store = dist.TCPStore("127.0.0.1", port)        # a connection of its own: it breaks when the server ends
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])    # inherited: Ctrl-C is rank 0's alone
            try:
                for rank in range(1, self.size):
                    report, pipe = spawn.Pipe(duplex=False)
                    process = spawn.Process(target=serve, args=(rank, port, self.channel, pipe, arguments), daemon=True)
                    process.start()
                    self._peers.append((process, report))
                    pipe.close()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            threading.Thread(target=self._watch, daemon=True).start()
            for _, report in self._peers:
                while not report.poll(0.2):         # until it is up: unlike `join`, this can be interrupted
                    self._check()
            join(store, 0, arguments[-1])
        self.runner = ModelRunner(*arguments, Group(0, self.size))

    def _watch(self) -> None:
        """Runs in a thread: when a peer ends unasked, note why, and wake whoever waits for it."""
        sentinels = [process.sentinel for process, _ in self._peers]
        index = sentinels.index(multiprocessing.connection.wait(sentinels)[0])
        if self.is_closed:
            return
        process, report = self._peers[index]
        process.join()
        reason = f"exit code {process.exitcode}"
        if process.exitcode == 1:
            reason += " (does your script lack `if __name__ == '__main__':`?)"
        with suppress(EOFError):
            while report.poll():
                reason = report.recv() or reason
        self.failure = f"rank {index + 1} of {self.size} failed: {reason}"
        self._server = None         # ends waits in `join`
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        self._has_failed.set()

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def _guard(self, function, *args):
        try:
            result = function(*args)
            self._check()
            return result
        except BaseException as error:
            if self._peers and isinstance(error, Exception):
                self._has_failed.wait(3)        # if a peer is to blame, we will know soon
            if self._peers or function == self._start or isinstance(error, getattr(torch, "AcceleratorError", ())):
                self.close(is_up=False)
            self._check()
            raise

    def call(self, method: str, *args):
        """`ModelRunner.method(*args)` on every rank; returns rank 0's result, maybe before the peers are done."""
        if self.is_closed:
            raise RuntimeError(self.failure or "the engine is closed")
        if self._peers:
            self._guard(self.channel.send, (method, args), self._check)
        return self._guard(getattr(self.runner, method), *args)

    def token_ids(self, launch) -> list[int]:
        """A launched step's tokens. With peers, the wait is no call into CUDA that a dead one could make endless."""
        while self._peers and not launch.is_done():
            self._guard(time.sleep, 2e-5)
        return self._guard(launch.token_ids)

    def close(self, is_up: bool = True) -> None:
        """End the peers (by force if one has failed or doesn't answer) and free everything. May be called twice."""
        if self.is_closed:
            return
        is_up = is_up and self.runner is not None and not self.failure
        self.is_closed, self.runner = True, None
        deadline = time.monotonic() + (5 if is_up else 0)

        def check():
            if time.monotonic() > deadline:
                raise TimeoutError
        with suppress(TimeoutError):
            if self._peers and is_up:
                self.channel.send(("close", ()), check)
        for process, _ in self._peers:
            process.join(timeout=max(0, deadline - time.monotonic()))
            process.kill()
            process.join()
        if self._peers and dist.is_initialized():
            dist.destroy_process_group()
        self.channel = self._server = None      # the semaphores' names and the port go with them

def join(store, rank: int, config) -> None:
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    dist.distributed_c10d._world.group_count = 0    # part of the keys; a join that failed here before has raised it
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo", store=store, rank=rank,
                            world_size=config.tensor_parallel_size, timeout=timedelta(minutes=2))

def serve(rank: int, port: int, channel: Channel, report, arguments) -> None:
    """A peer's whole life: join, load, then do as rank 0 does, until that says "close" or dies."""
    def die_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=die_with_parent, daemon=True).start()
    try:
        report.send(None)
        torch.set_num_threads(max(1, torch.get_num_threads() // arguments[-1].tensor_parallel_size))
        join(dist.TCPStore("127.0.0.1", port), rank, arguments[-1])
        runner = ModelRunner(*arguments, Group(rank, arguments[-1].tensor_parallel_size))
        while (message := channel.receive(rank - 1))[0] != "close":
            getattr(runner, message[0])(*message[1])
        dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        os._exit(1)         # at once, without waiting for collectives that can't end

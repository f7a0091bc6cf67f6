"""Rank 0 calls its peers (the tensor-parallel processes) by pickled messages in shared memory: to all of them, in parts
that fit, which each peer acknowledges. Either side watches the other: when one ends, all that waits for it ends too."""
import multiprocessing.connection
import os
import pickle
import signal
import socket
import threading
import traceback
import torch
import torch.distributed as dist
from nanoengine.group import Group
from nanoengine.model_runner import ModelRunner

class Channel:
    """One writer (rank 0), `num_peers` readers: they wait for a message. Pass it to their processes at their start."""
    def __init__(self, num_peers: int, spawn, segment_bytes: int = 1 << 20):
        self.segment, self.number = spawn.RawArray("B", segment_bytes), 0
        self.header = spawn.RawArray("Q", 2)        # of a part: its number, and the bytes of its whole message
        self.written, self.copied = [spawn.Semaphore(0) for _ in range(num_peers)], spawn.Semaphore(num_peers)
    def send(self, message, check=lambda: None) -> None:
        """Write for all peers; `check` is called now and then while one of them makes us wait, and may raise."""
        data, room = pickle.dumps(message, pickle.HIGHEST_PROTOCOL), len(self.segment)
        for part in (data[start:start + room] for start in range(0, len(data), room)):
            for _ in self.written:
                while not self.copied.acquire(timeout=0.2):
                    check()
            self.number += 1
            self.header[:] = self.number, len(data)
            memoryview(self.segment).cast("B")[:len(part)] = part
            for written in self.written:
                written.release()
    def receive(self, peer: int):
        """The next message, whole. Blocks until it is there; raises RuntimeError if a part was missed."""
        data, num_bytes = bytearray(), 1
        while len(data) < num_bytes:
            self.written[peer].acquire()
            self.number += 1
            number, num_bytes = self.header
            if number != self.number:
                raise RuntimeError(f"message {number} arrived where {self.number} was expected")
            data += memoryview(self.segment).cast("B")[:num_bytes - len(data)]
            self.copied.release()
        return pickle.loads(data)

class Ranks:
    """All ranks' model runners, called as one. A peer that raises or dies makes this call or the next close everything
    and raise a RuntimeError that says why; so does rank 0's error, but a single rank survives any but the device's."""
    def __init__(self, *arguments):
        self._group, self._peers = Group(0, arguments[-1].tensor_parallel_size), {}
        self.runner = self.channel = self.failure = self._server = self._watcher = None     # failure: why it is closed
        self.runner = self._guard(self._start, arguments) if self._group.size > 1 else ModelRunner(*arguments)
    def _start(self, arguments) -> ModelRunner:
        if dist.is_initialized():
            raise RuntimeError("tensor_parallel_size > 1: torch has a process group already; close its engine first")
        spawn, listener = multiprocessing.get_context("spawn"), socket.create_server(("127.0.0.1", 0))  # a free port
        self.channel, port = Channel(self._group.size - 1, spawn), listener.getsockname()[1]
        self._server = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
        store = dist.TCPStore("127.0.0.1", port)        # a connection of its own: it breaks when the server ends
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])    # inherited: Ctrl-C is rank 0's alone
        try:
            for group in (Group(rank, self._group.size) for rank in range(1, self._group.size)):
                error = spawn.RawArray("u", 1 << 14)        # the traceback of what ends it
                process = spawn.Process(target=serve, args=(group, port, self.channel, error, arguments), daemon=True)
                process.start()
                self._peers[process.sentinel] = group.rank, process, error
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return join(store, self._group, *arguments)
    def _watch(self) -> None:   # in a thread: when a peer has ended, note why (unless we end it); no more waiting
        rank, process, error = self._peers[multiprocessing.connection.wait(self._peers)[0]]
        process.join()
        if not self.failure:
            why = error.value or f"exit code {process.exitcode} (if 1: has your script `if __name__ == '__main__':`?)"
            self.failure = f"rank {rank} of {self._group.size} failed, so the engine is closed: {why}"
        self._group.release()
        threading.Event().wait(0.1)     # till a collective that was being launched is under way: then it can be ended
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        self._server = None         # ends waits in `join`
    def check(self) -> None:
        if self.failure:
            self.close()
            raise RuntimeError(self.failure) from None
    def _guard(self, function, *args):
        try:
            result = function(*args)
            self.check()
            return result
        except BaseException as error:
            if self._watcher and isinstance(error, Exception):
                traceback.clear_frames(error.__traceback__)     # graphs in there would make the communicator's end wait
                self._watcher.join(0 if self.failure else 3)    # if a peer is to blame, we will know soon
            self.check()
            if self._peers or "CUDA error" in str(error):      # such errors stay
                self.close(f"the engine is closed: {error!r:.500}")
            raise
    def call(self, method: str, *args):
        """`ModelRunner.method(*args)` on every rank; returns rank 0's result, maybe before the peers are done."""
        self.check()
        if self._peers:
            self._guard(self.channel.send, (method, args), self.check)
        return self._guard(getattr(self.runner, method), *args)
    def token_ids(self, launch) -> list[int]:
        """A launched step's tokens. With peers, the wait is no call into CUDA that a dead one could make endless."""
        while self._peers and not self._guard(launch.is_done):
            self._guard(self._watcher.join, 2e-5)
        return self._guard(launch.token_ids)
    def close(self, why: str = "the engine is closed") -> None:
        """End the peers, whatever they do, and free everything. May be called twice."""
        self.runner, self.failure = None, self.failure or why
        for _, process, _ in self._peers.values():
            process.kill()
            process.join()
        if self._watcher:
            self._watcher.join(10)
        self.channel = None     # the semaphores' names go with it

def join(store, group: Group, *arguments) -> ModelRunner:
    """Meet the other ranks at the store, then load this rank's share."""
    on_gpu = arguments[-1].device == "cuda"
    torch.cuda.set_device(group.rank if on_gpu else -1)     # -1: none
    dist.distributed_c10d._world.group_count = 0    # part of the keys; a join that failed here before has raised it
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=group.rank, world_size=group.size)
    return ModelRunner(*arguments, group)

def serve(group: Group, port: int, channel: Channel, error, arguments) -> None:
    """A peer's whole life: join, load, then do as rank 0 does, until that ends it, or ends."""
    threading.Thread(target=lambda: os._exit(multiprocessing.parent_process().join() or 1), daemon=True).start()
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // group.size))
        runner = join(dist.TCPStore("127.0.0.1", port), group, *arguments)
        while True:
            method, args = channel.receive(group.rank - 1)
            getattr(runner, method)(*args)
    except BaseException:
        error.value = traceback.format_exc()[-len(error):]
        os._exit(1)         # at once, without waiting for collectives that can't end

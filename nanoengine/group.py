"""This rank's place among the ranks, and what they do together: collectives of torch.distributed (NCCL, gloo), and on
GPUs memory that all of them read, so that the norm behind a row-parallel product adds the ranks' parts up by itself."""
import logging
import weakref
from ctypes import CDLL, Structure, byref, c_char, c_uint64
import torch
import torch.distributed as dist
from torch import Tensor

Handle = type("Handle", (Structure,), {"_fields_": [("bytes", c_char * 64)]})     # CUDA passes it by value

class Group:
    """`rank` of `size` ranks. With one rank every call is free."""
    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self.bases, self._stop = rank, size, None, [0]
    def all_reduce(self, x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:        # in place
        if self.size > 1:
            dist.all_reduce(x, op)
        return x
    all_min = lambda self, x: self.all_reduce(x, dist.ReduceOp.MIN)
    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, stacked in rank order: [size, *x.shape]."""
        out = x[None] if self.size == 1 else x.new_empty(self.size, *x.shape)
        if self.size > 1:
            dist.all_gather(list(out), x.contiguous())
        return out
    def share_memory(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Let GPUs read and write each other's | arrivals [num_tokens, size] int32 | parts [2, num_tokens, width] | (by
        CUDA IPC). num_tokens % 16 == 0 aligns the parts to 16 bytes. If one can't, all sums go through NCCL."""
        num_bytes, cuda, base, handle = num_tokens * self.size * 4, CDLL("libcuda.so.1"), c_uint64(), Handle()
        memory = torch.zeros(num_bytes + 2 * num_tokens * width * dtype.itemsize, dtype=torch.uint8, device=device)
        own, offers, bases = c_uint64(memory.data_ptr()), [None] * self.size, [memory.data_ptr()] * self.size
        codes = [cuda.cuMemGetAddressRange_v2(byref(base), None, own), cuda.cuIpcGetMemHandle(byref(handle), own)]
        dist.all_gather_object(offers, (bytes(handle), own.value - base.value))     # behind its allocation's beginning
        for rank, (offer, distance) in enumerate(offers):
            if rank != self.rank:
                codes.append(cuda.cuIpcOpenMemHandle_v2(byref(base), Handle.from_buffer_copy(offer), 1))
                bases[rank] = base.value + distance
                weakref.finalize(self, cuda.cuIpcCloseMemHandle, c_uint64(base.value))
        if self.all_min(torch.tensor(-max(codes), device=device)) < 0:
            return logging.getLogger(__name__).warning(
                "GPUs can't read each other's memory (CUDA errors %s here), sums go through NCCL", codes)
        self._parts = list(memory[num_bytes:].view(dtype).view(2, num_tokens, width))
        self._stop = torch.tensor(self._stop, dtype=torch.int32).pin_memory()   # [1]: a rank is gone. GPUs can read it
        self.bases = torch.tensor([*bases, self._stop.data_ptr()], device=device)   # of each rank's memory, and `_stop`
    def part(self, num_tokens: int) -> Tensor | None:
        """Where this rank's part of a sum goes, or None: anywhere. Two buffers take turns: when one is written again,
        every rank has met the others in the sum between, after it had read this one."""
        if self.bases is not None:
            self._parts.reverse()
            return self._parts[0][:num_tokens]
    def release(self) -> None:
        """A rank is gone: let kernels end that wait for it. Not through CUDA: who waits for them may hold its lock."""
        self.all_reduce = self.all_gather = None        # whoever calls them now would wait for ever
        self._stop[0] = 1

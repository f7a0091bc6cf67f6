"""Decode steps as CUDA graphs, one per bucket of batch sizes.

A decode step of a small model is hundreds of kernels of a few microseconds; launched from Python one by one they leave
the GPU idle most of the time. A graph records them once and replays all with one call. It has fixed shapes and
addresses, so a batch is padded up to the next captured size, and inputs are copied to where the graph reads them. What a
step computes, and what padding means, is the model runner's business.
"""

import bisect
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
LARGEST = 512


def default_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 16 (a matrix product's cost changes in such steps), up to the largest batch."""
    largest = min(max_num_seqs, LARGEST)
    return sorted({size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest} | {largest})


class CudaGraphs:
    """Captured `decode(inputs)` for each of `batch_sizes`.

    decode: takes [5, n] int64 inputs on the device, returns a tuple of tensors; runs without synchronising.
    padding: [5] ints, the input column of a row that isn't there.
    """

    def __init__(self, decode, batch_sizes: list[int], padding: list[int], device: torch.device):
        self.decode, self.padding, self.device = decode, padding, device
        self.batch_sizes = sorted(batch_sizes)
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]] = {}
        largest = self.batch_sizes[-1]
        self._capture()
        self.bucket_of = [self.batch_sizes[bisect.bisect_left(self.batch_sizes, n)] for n in range(largest + 1)]

    def _capture(self) -> None:
        """Largest first, from one memory pool: smaller graphs then fit into what the largest one needed."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.batch_sizes):
            inputs = torch.tensor(self.padding, device=self.device)[:, None].repeat(1, size)
            self.decode(inputs)                     # compiles kernels and fills caches outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self.decode(inputs)
            self.captured[size] = graph, inputs, outputs
        torch.cuda.synchronize(self.device)

    def bucket(self, num_seqs: int) -> int | None:
        """The captured size that serves this batch, or None if it is larger than all."""
        return self.bucket_of[num_seqs] if num_seqs < len(self.bucket_of) else None

    def replay(self, size: int, inputs: Tensor) -> tuple[Tensor, ...]:
        """inputs [5, size] int64, pinned. Returns the graph's own output tensors, valid until the next replay."""
        graph, static_inputs, outputs = self.captured[size]
        static_inputs.copy_(inputs, non_blocking=True)
        graph.replay()
        return outputs

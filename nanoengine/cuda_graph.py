"""Decode steps as CUDA graphs, one per bucket of batch sizes.

A small model's decode step is hundreds of kernels of a few microseconds; launched one by one from Python they leave the
GPU idle most of the time. A graph replays them all with one call, with fixed shapes and addresses: a batch is padded to
the next captured size, inputs are copied to where the graph reads. What is computed is the model runner's business.
"""

import torch
from torch import Tensor

def default_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 16 up to 512: a matrix product's cost changes in such steps."""
    return [size for size in (1, 2, 4, 8, *range(16, 513, 16)) if size < max_num_seqs] + [min(max_num_seqs, 512)]

class CudaGraphs:
    """Captured `decode(inputs)` for each of `batch_sizes` (ascending); padding: the 5 inputs of a row that isn't there.
    decode: takes [5, n] int64 inputs on the device, returns a tuple of tensors; runs without synchronising."""

    def __init__(self, decode, batch_sizes: list[int], padding: list[int], device: torch.device):
        self.captured, pool = {}, torch.cuda.graph_pool_handle()       # by size: (graph, inputs, outputs)
        self._bucket_of = [min(size for size in batch_sizes if size >= n) for n in range(batch_sizes[-1] + 1)]
        for size in reversed(batch_sizes):      # largest first: the smaller ones fit into the memory that it took
            inputs = torch.tensor(padding, device=device)[:, None].repeat(1, size)
            decode(inputs)                      # compiles kernels and fills caches outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = decode(inputs)
            self.captured[size] = graph, inputs, outputs

    def bucket(self, num_seqs: int) -> int | None:
        """The captured size that serves this batch, or None if it is larger than all."""
        return self._bucket_of[num_seqs] if num_seqs < len(self._bucket_of) else None

    def replay(self, size: int, inputs: Tensor) -> tuple[Tensor, ...]:
        """inputs [5, size] int64, pinned. Returns the graph's own output tensors, valid until the next replay."""
        graph, static_inputs, outputs = self.captured[size]
        static_inputs.copy_(inputs, non_blocking=True)
        graph.replay()
        return outputs

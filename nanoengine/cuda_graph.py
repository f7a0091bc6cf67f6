"""Decode steps as CUDA graphs. Launched from Python, a small model's hundreds of kernels of a few microseconds leave
the GPU idle; a graph replays all with one call, at fixed shapes and addresses: batches are padded, inputs copied in."""
import torch

def batch_sizes(max_num_seqs: int, chosen=None) -> list[int]:
    """1, 2, 4, 8, multiples of 16 up to 512 (a matrix product's cost changes in such steps), or the chosen ones."""
    return sorted({min(size, max_num_seqs) for size in chosen or (1, 2, 4, 8, *range(16, 513, 16))})

class CudaGraphs:
    """decode([5, n] int64 inputs) -> a tuple of tensors, without synchronising; captured for `batch_sizes` (ascending).
    padding: the 5 inputs of a row that isn't there. bucket(n): the size to replay for n rows, None if too large."""
    def __init__(self, decode, batch_sizes: list[int], padding: list[int], device: torch.device):
        self.captured, pool = {}, torch.cuda.graph_pool_handle()       # by size: (graph, inputs, outputs)
        self.bucket = {n: min(size for size in batch_sizes if size >= n) for n in range(batch_sizes[-1] + 1)}.get
        for size in reversed(batch_sizes):      # largest first: the smaller ones fit into the memory that it took
            inputs = torch.tensor(padding, device=device)[:, None].repeat(1, size)
            decode(inputs)                      # compiles kernels and fills caches outside the capture
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), pool=pool, capture_error_mode="thread_local"):
                outputs = decode(inputs)
            self.captured[size] = graph, inputs, outputs
    def replay(self, size: int, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inputs [5, size] int64, pinned. Returns the graph's own output tensors, valid until the next replay."""
        graph, static_inputs, outputs = self.captured[size]
        static_inputs.copy_(inputs, non_blocking=True)
        graph.replay()
        return outputs

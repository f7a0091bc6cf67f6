"""One rank: the model, its KV cache, and the persistent state of the batch; turns a StepInput into tokens.

The token history lives here, on the device: a step gathers its inputs from it and writes drawn tokens into it, so the
next step can be launched before anybody has read them. So does the block table: each token's slot tells the block that
its position is in. Nothing here decides anything.

    history   row 3 | 11 42 7 99 23 .  .  . |      a decode step of row 3 reads position 4 (23), computes it,
                                 ^  ^              and writes the token it draws to position 5
"""

import gc
import logging
import math
import os
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanoengine import attention, kernels, sampler
from nanoengine.config import EngineConfig, ModelConfig, refuse_if
from nanoengine.context import Context, reset_context, set_context
from nanoengine.cuda_graph import CudaGraphs, default_batch_sizes
from nanoengine.decoder import Decoder
from nanoengine.linear import Group
from nanoengine.loader import load_weights
from nanoengine.step_input import FlatStep, NewRow, StepInput, flatten

logger = logging.getLogger(__name__)

class Launch:
    """A launched step's tokens, one per chunk, on their way to the host."""

    def __init__(self, ids: Tensor, num_padding_rows: int):
        self.num_padding_rows = num_padding_rows
        self._host = torch.empty_like(ids, device="cpu", pin_memory=ids.is_cuda).copy_(ids, non_blocking=True)
        self._event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def token_ids(self) -> list[int]:
        """Waits for this step alone, not for what was launched after it."""
        if self._event:
            self._event.synchronize()
        return self._host.tolist()

class ModelRunner:
    """Only this class writes tensors. Use: `measure`, then `allocate`, then `run` once per step. config: of `resolve`.

    Row `max_num_seqs` of the state belongs to nobody, position `max_model_len` to no token: what must not be kept is
    written there.
    """

    def __init__(self, folder, model_config: ModelConfig, config: EngineConfig, group: Group = Group()):
        self.config, self.model_config, self.group = config, model_config, group
        self.device = torch.device("cuda", group.rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype, self.block_size = getattr(torch, config.dtype), config.kvcache_block_size
        num_rows, length = config.max_num_seqs + 1, config.max_model_len
        default_dtype = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.dtype)
            with self.device:
                self.model = Decoder(model_config, length, group)
        finally:
            torch.set_default_dtype(default_dtype)
        with self.device:
            self.history = torch.zeros(num_rows, length + 1, dtype=torch.int32)
            self.block_tables = torch.zeros(num_rows, -(-length // self.block_size), dtype=torch.int32)
            self.seeds = torch.zeros(num_rows, dtype=torch.int64)
            self.settings = torch.zeros(4, num_rows)                # temperature, top_k, top_p, min_p
        load_weights(folder, self.model.sources())
        reason = attention.reason_against_flash(self.device, self.dtype, model_config.head_dim, self.block_size)
        self.uses_flash = reason is None
        logger.info("attention: %s", "flash-attn for prefill" if self.uses_flash else f"no flash-attn, as {reason}")
        self.spare_row, self.no_position = num_rows - 1, length

    def measure(self) -> int:
        """How many KV blocks fit on the rank that has least room: on a GPU what weights, the largest step, the graphs
        and other processes leave; on the CPU min(2 GiB, a quarter of the memory). Never more than useful."""
        most = self.config.max_num_seqs * self.block_tables.shape[1]
        spare = (self._spare_gpu_memory() if self.device.type == "cuda" else
                 min(2 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4))
        block_bytes = math.prod(self._cache_shape(1)) * self.dtype.itemsize
        fits = torch.tensor(max(0, min(most, spare // block_bytes)), device=self.device)
        return int(self.group.all_min(fits))

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        model, num_kv_heads = self.model_config, self.model_config.num_key_value_heads // self.group.size
        return 2, model.num_hidden_layers, num_blocks, self.block_size, num_kv_heads, model.head_dim

    def _spare_gpu_memory(self) -> int:
        """Bytes left for KV blocks, found by running the largest step and capturing the largest graph (whose memory
        the smaller ones share) with no pool but the spare block."""
        self.allocate(0, capture=False)
        torch.cuda.reset_peak_memory_stats(self.device)
        n = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        num_tokens = np.full(n, min(self.config.max_num_batched_tokens // n, self.config.max_model_len))
        block_ids = np.zeros(n * -(-num_tokens[0] // self.block_size), int)
        self.run(StepInput([], np.full(n, self.spare_row), np.zeros(n, int), num_tokens, np.zeros(n, bool), block_ids,
                           list(range(n)))).token_ids()
        gc.collect()
        torch.cuda.empty_cache()
        activations = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)          # what other processes hold is not free
        self._capture(largest_only=True)
        graphs = free - torch.cuda.mem_get_info(self.device)[0]
        spare = int(total * self.config.gpu_memory_utilization) - (total - free) - activations - graphs
        logger.info("GPU memory in GiB: total %.2f, taken %.2f, largest step %.2f, graphs %.2f, left for KV %.2f",
                    *(amount / 2**30 for amount in (total, total - free, activations, graphs, spare)))
        return spare

    def allocate(self, num_blocks: int, capture: bool = True) -> None:
        """The KV cache, with a spare block that padding writes to, and the graphs that know its address."""
        self.kv_cache = self.graphs = None          # free the old ones first
        self.kv_cache = torch.zeros(self._cache_shape(num_blocks + 1), dtype=self.dtype, device=self.device)
        self.model.bind_kv_cache(self.kv_cache)
        self.block_tables.fill_(num_blocks)
        self.padding = [self.spare_row, 0, num_blocks * self.block_size, 0, self.no_position]
        if capture:
            self._capture()
        self.group.all_min(torch.zeros(1, device=self.device))      # every rank has come so far

    def _capture(self, largest_only: bool = False) -> None:
        if self.config.enforce_eager or self.device.type != "cuda" or not kernels.has_triton(self.kv_cache):
            return
        most = self.config.max_num_seqs
        sizes = sorted({min(size, most) for size in self.config.cuda_graph_batch_sizes or default_batch_sizes(most)})
        try:
            self.graphs = CudaGraphs(self._decode, sizes[-1:] if largest_only else sizes, self.padding, self.device)
        except RuntimeError as error:       # out of memory is one too
            logger.warning("no CUDA graphs, decode runs eagerly: %s", error)

    @torch.inference_mode()
    def run(self, step: StepInput) -> Launch:
        """Launch one step; returns before the device is done."""
        if step.new_rows:
            self._fill_rows(step.new_rows)
        flat = flatten(step, self.block_size, self.no_position)
        num_chunks = len(flat.rows)
        size = self.graphs.bucket(num_chunks) if self.graphs and flat.num_decodes == num_chunks else None
        if size:
            inputs = np.repeat(np.array(self.padding)[:, None], size, axis=1)
            inputs[:, :num_chunks] = (flat.rows, flat.positions, flat.slot_mapping, flat.context_lens,
                                      flat.draw_positions)
            token_ids, logits = self.graphs.replay(size, self._pinned(inputs.ravel()).view(5, size))
        else:
            token_rows, positions, slots, rows, lens, draw_positions, last, cu_q, cu_k = self._to_device(*flat[:9])
            context = Context(slots, self.block_tables, rows, lens, flat.num_decodes, self.uses_flash, cu_q, cu_k,
                              flat.max_seqlen_q, flat.max_seqlen_k)
            token_ids, logits = self._compute(context, token_rows, positions, draw_positions, last)
        if step.filtered:
            self._draw_again(step.filtered, flat, token_ids, logits)
        return Launch(token_ids[:num_chunks], len(token_ids) - num_chunks)

    def _decode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What a graph holds: a whole step of one-token chunks. inputs [5, num_seqs] int64."""
        rows, positions, slots, context_lens, draw_positions = inputs
        return self._compute(Context(slots, self.block_tables, rows, context_lens, len(rows)), rows, positions,
                             draw_positions)

    def _compute(self, context: Context, token_rows: Tensor, positions: Tensor, draw_positions: Tensor,
                 last_indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gather the inputs, run the model, draw: token ids [num_chunks] and this rank's logits [num_chunks, vocab]."""
        self.block_tables[token_rows, positions // self.block_size] = (context.slot_mapping // self.block_size).int()
        set_context(context)
        try:
            hidden = self.model(self.history[token_rows, positions], positions)
        finally:
            reset_context()
        logits, rows = self.model.logits(hidden if last_indices is None else hidden[last_indices]), context.rows
        scores, drawn = kernels.sample(logits, self.settings[0, rows], self.seeds[rows], draw_positions,
                                       self.model.lm_head.vocab_start)
        if self.group.size > 1:     # each rank drew the best of its part of the vocabulary: the best of these wins
            pairs = self.group.all_gather(torch.stack((scores.double(), drawn.double())))       # [size, 2, num_chunks]
            drawn = pairs[:, 1].gather(0, pairs[:, 0].argmax(0, keepdim=True))[0].int()
        self.history[rows, draw_positions] = drawn
        return drawn, logits

    def _draw_again(self, filtered: list[int], flat: FlatStep, token_ids: Tensor, logits: Tensor) -> None:
        """Replace what chunks `filtered` drew by draws from filtered logits."""
        chunks, rows, positions = self._to_device(filtered, flat.rows[filtered], flat.draw_positions[filtered])
        logits = self.group.all_gather(logits[chunks]).movedim(0, 1).flatten(1)     # [len(filtered), vocab_size]
        token_ids[chunks] = sampler.draw_filtered(logits, self.seeds[rows], positions, *self.settings[:, rows])
        self.history[rows, positions] = token_ids[chunks]

    def _fill_rows(self, new_rows: list[NewRow]) -> None:
        """Write what new rows bring: known tokens, blocks of the cached prefix, settings (as the bits of float64)."""
        rows, known, hits, params, seeds = zip(*new_rows)
        num_known, num_hits = [len(ids) for ids in known], [len(ids) for ids in hits]
        settings = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], np.float64)
        at, seeds, settings, token_rows, positions, token_ids, hit_rows, columns, block_ids = self._to_device(
            rows, seeds, settings.ravel().view(np.int64),
            np.repeat(rows, num_known), np.concatenate([np.arange(n) for n in num_known]), np.concatenate(known),
            np.repeat(rows, num_hits), np.concatenate([np.arange(n) for n in num_hits]), np.concatenate(hits))
        self.history[token_rows, positions] = token_ids.int()
        self.block_tables[hit_rows, columns] = block_ids.int()
        self.seeds[at] = seeds
        self.settings[:, at] = settings.view(torch.float64).view(-1, 4).T.float()

    def _to_device(self, *arrays) -> tuple[Tensor, ...]:
        """int64 tensors on the device, in one copy. Each begins at a multiple of 16 bytes: Triton compiles a kernel
        anew for pointers that don't."""
        padded = [np.append(array, 0) if len(array) % 2 else array for array in arrays]
        packed = self._pinned(np.concatenate(padded, dtype=np.int64, casting="unsafe")).to(self.device, non_blocking=True)
        parts = packed.split([len(array) for array in padded])
        return tuple(part[:len(array)] for part, array in zip(parts, arrays))

    def _pinned(self, array: np.ndarray) -> Tensor:
        """A host copy that the device can read by itself. torch's pinned allocator reuses it only after that."""
        tensor = torch.empty(len(array), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        tensor.numpy()[:] = array
        return tensor

def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Fill in what the user left to the engine, for this machine and model."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    num_gpus = torch.cuda.device_count()
    refuse_if(on_gpu and num_gpus < config.tensor_parallel_size,
              f"tensor_parallel_size={config.tensor_parallel_size}, but {num_gpus} GPUs are visible")
    device, dtype = "cuda" if on_gpu else "cpu", config.dtype
    if dtype == "auto":
        dtype = model.dtype if on_gpu else "float32"
    block_size = config.kvcache_block_size or attention.FLASH_BLOCK_SIZE
    reason = attention.reason_against_flash(torch.device(device), getattr(torch, dtype), model.head_dim, block_size)
    return replace(
        config, device=device, dtype=dtype, max_model_len=config.max_model_len or model.max_position_embeddings,
        max_num_seqs=config.max_num_seqs or (512 if on_gpu else 64),
        max_num_batched_tokens=config.max_num_batched_tokens or (16384 if on_gpu else 2048),
        kvcache_block_size=config.kvcache_block_size or (16 if reason else block_size))

"""One rank: the model, its KV cache, and the persistent state of the batch; turns a StepInput into tokens. Nothing here
decides anything. The token history lives here, on the device: a step gathers its inputs from it and writes drawn tokens
into it, so the next step can be launched before anybody has read them. So does the block table: each token's slot tells
the block that its position is in.
    history   row 3 | 11 42 7 99 23 .  .  . |      a decode step of row 3 reads position 4 (23), computes it,
                                 ^  ^              and writes the token it draws to position 5"""
import gc
import logging
import math
import os
from dataclasses import replace
import numpy as np
import torch
from torch import Tensor
from nanoengine import attention, kernels, sampler
from nanoengine.attention import reset_context, set_context
from nanoengine.config import EngineConfig, ModelConfig, refuse_if
from nanoengine.cuda_graph import CudaGraphs, batch_sizes
from nanoengine.decoder import Decoder
from nanoengine.group import Group
from nanoengine.loader import load_weights
from nanoengine.step_input import FlatStep, NewRow, StepInput, flatten

logger = logging.getLogger(__name__)

class Launch:
    """A launched step's tokens, one per chunk, and the log-probabilities that some asked for, on their way to the host.
    logprobs: of chunks, their wanted number, and `sampler.top_logprobs`."""
    def __init__(self, ids: Tensor, num_padding_rows: int, logprobs: list[tuple[list, list, Tensor, Tensor]]):
        self.num_padding_rows, self._ids = num_padding_rows, to_host(ids)
        self._logprobs = [(chunks, nums, *map(to_host, tensors)) for chunks, nums, *tensors in logprobs]
        self._event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
    def is_done(self) -> bool:
        return self._event is None or self._event.query()
    def token_ids(self) -> list[int]:
        """Waits for this step alone, not for what was launched after it."""
        if self._event:
            self._event.synchronize()
        return self._ids.tolist()
    def logprobs(self):
        """(chunk, {token id: log-probability}) of those that asked; the drawn token first. After `token_ids`."""
        for part in self._logprobs:
            for chunk, num, ids, values in zip(*part):
                if num is not None:
                    yield chunk, dict(zip(ids[:1 + num].tolist(), values[:1 + num].tolist()))

class ModelRunner:
    """Only this class writes tensors. Use: `measure`, then `allocate`, then `run` once per step. config: of `resolve`.
    Row `max_num_seqs` of the state belongs to nobody, position `max_model_len` to no token: what must not be kept is
    written there."""
    def __init__(self, folder, model_config: ModelConfig, config: EngineConfig, group: Group = Group()):
        self.config, self.model_config, self.group = config, model_config, group
        self.device = torch.device("cuda", group.rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype, self.block_size = getattr(torch, config.dtype), config.kvcache_block_size
        num_rows, length = config.max_num_seqs + 1, config.max_model_len
        self.spare_row, self.no_position, default_dtype = num_rows - 1, length, torch.get_default_dtype()
        with self.device:
            try:
                torch.set_default_dtype(self.dtype)
                self.model = Decoder(model_config, length, group)
            finally:
                torch.set_default_dtype(default_dtype)
            self.history = torch.zeros(num_rows, length + 1, dtype=torch.int32)
            self.block_tables = torch.zeros(num_rows, -(-length // self.block_size), dtype=torch.int32)
            self.seeds = torch.zeros(num_rows, dtype=torch.int64)
            self.settings = torch.zeros(len(sampler.SETTINGS) + 1, num_rows)    # those, and num_prompt_tokens
        self.wishes = {}            # row -> (its SamplingParams, its rules), for draws that aren't plain
        load_weights(folder, self.model.sources())
        if group.size > 1 and kernels.has_triton(self.history):
            most = max(config.max_num_batched_tokens, config.max_num_seqs)
            group.share_memory(most, model_config.hidden_size, self.dtype, self.device)
        reason = attention.reason_against_flash(self.device, self.dtype, model_config.head_dim, self.block_size)
        logger.info("attention: %s", f"no flash-attn, as {reason}" if reason else "flash-attn for prefill")
    def measure(self) -> int:
        """How many KV blocks fit on the rank that has least room: on a GPU what weights, the largest step, the graphs
        and other processes leave; on the CPU min(2 GiB, a quarter of the memory). Never more than useful."""
        most = self.config.max_num_seqs * self.block_tables.shape[1]
        spare = (self._spare_gpu_memory() if self.device.type == "cuda" else
                 min(2 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4))
        fits = max(0, min(most, spare // (math.prod(self._cache_shape(1)) * self.dtype.itemsize)))
        return int(self.group.all_min(torch.tensor(fits, device=self.device)))
    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        model, num_kv_heads = self.model_config, self.model_config.num_key_value_heads // self.group.size
        return 2, model.num_hidden_layers, num_blocks, self.block_size, num_kv_heads, model.head_dim
    def _spare_gpu_memory(self) -> int:
        """Bytes left for KV blocks, found by capturing the largest graph (whose memory the smaller ones share) and
        running the largest and most costly step with no pool but the spare block."""
        before = torch.cuda.mem_get_info(self.device)[0]
        self.allocate(0, largest_only=True)
        torch.cuda.reset_peak_memory_stats(self.device)
        n = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        num_tokens = np.full(n, min(self.config.max_num_batched_tokens // n, self.config.max_model_len))
        block_ids = np.zeros(n * -(-num_tokens[0] // self.block_size), int)
        self.wishes[self.spare_row] = sampler.COSTLY, []
        self.run(StepInput([], np.full(n, self.spare_row), np.zeros(n, int), num_tokens, np.zeros(n, bool), block_ids,
                           list(range(n)))).token_ids()
        gc.collect()
        torch.cuda.empty_cache()
        largest_step = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)          # what other processes hold is not free
        spare = int(total * self.config.gpu_memory_utilization) - (total - free) - largest_step
        logger.info("GPU memory in GiB: total %.2f, taken %.2f, graphs %.2f, largest step %.2f, left for KV %.2f",
                    *(x / 2**30 for x in (total, total - before, before - free, largest_step, spare)))
        return spare
    def allocate(self, num_blocks: int, largest_only: bool = False) -> None:
        """The KV cache, with a spare block that padding writes to, and the CUDA graphs that know its address."""
        self.kv_cache = self.graphs = None          # free the old ones first
        self.kv_cache = torch.zeros(self._cache_shape(num_blocks + 1), dtype=self.dtype, device=self.device)
        self.model.bind_kv_cache(self.kv_cache, self.block_tables.fill_(num_blocks))
        self.padding = [self.spare_row, 0, num_blocks * self.block_size, 0, self.no_position]
        self._capture(batch_sizes(self.config.max_num_seqs, self.config.cuda_graph_batch_sizes)[-1 if largest_only else 0:])
        self.group.all_min(torch.zeros(1, device=self.device))      # every rank has come so far
    def _capture(self, sizes: list[int]) -> None:
        if not self.config.enforce_eager and self.device.type == "cuda" and kernels.has_triton(self.kv_cache):
            try:
                self.graphs = CudaGraphs(self._decode, sizes, self.padding, self.device)
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
            inputs[:, :num_chunks] = flat[:5]
            token_ids, logits = self.graphs.replay(size, self._pinned(inputs.ravel()).view(5, size))
        else:
            token_ids, logits = self._compute(FlatStep(*self._to_device(*flat[:9]), *flat[9:]))
        logprobs = [self._draw_again(step.special[i:i + sampler.ROWS_AT_A_TIME], flat, token_ids, logits)
                    for i in range(0, len(step.special), sampler.ROWS_AT_A_TIME)]
        return Launch(token_ids[:num_chunks], len(token_ids) - num_chunks, [part for part in logprobs if part])
    def _decode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What a graph holds: a step of one-token chunks. inputs [5, num_seqs] int64, FlatStep's first five."""
        return self._compute(FlatStep(*inputs, inputs[0], None, None, None, inputs.shape[1], 1, 1))
    def _compute(self, step: FlatStep) -> tuple[Tensor, Tensor]:
        """Gather the inputs, run the model, draw: token ids [num_chunks] and this rank's logits [num_chunks, vocab].
        step: its arrays as int64 tensors on the device; last_indices None: all."""
        blocks, rows, lm_head = step.slot_mapping // self.block_size, step.rows, self.model.lm_head
        self.block_tables[step.token_rows, step.positions // self.block_size] = blocks.int()
        set_context(step)
        try:
            hidden = self.model(self.history[step.token_rows, step.positions], step.positions)
        finally:
            reset_context()
        logits = lm_head.logits(hidden if step.last_indices is None else hidden[step.last_indices])
        scores, drawn = kernels.sample(logits, self.settings[0, rows], self.seeds[rows], step.draw_positions,
                                       lm_head.vocab_start)
        if self.group.size > 1:     # each rank drew the best of its part of the vocabulary: the best of these wins
            pairs = self.group.all_gather(torch.stack((scores.double(), drawn.double())))       # [size, 2, num_chunks]
            drawn = pairs[:, 1].gather(0, pairs[:, 0].argmax(0, keepdim=True))[0].int()
        self.history[rows, step.draw_positions] = drawn
        return drawn, logits
    def _draw_again(self, chunks: list[int], flat: FlatStep, token_ids: Tensor, logits: Tensor):
        """Replace what these chunks drew by draws from changed logits (see `sampler`). Returns what `Launch` wants to
        know of their log-probabilities, or None if nobody asked."""
        places = flat.draw_positions[chunks]
        params, rules = zip(*(self.wishes[row] for row in flat.rows[chunks].tolist()))
        chunk_ids, rows, positions, *packed = self._to_device(chunks, flat.rows[chunks], places, *sampler.pack_rules(rules))
        raw = self.group.all_gather(logits[chunk_ids]).movedim(0, 1).flatten(1).float()     # [len(chunks), vocab_size]
        changed, settings, history = raw, self.settings[:, rows], self.history[rows, :places.max()]
        if packed:
            changed = sampler.apply_rules(changed, history, positions, *packed)
        if any(p.has_penalties for p in params):
            changed = sampler.penalise(changed, history, positions, *settings[4:])
        if any(p.has_filters for p in params):
            changed = sampler.filter_logits(changed, *settings[:4])
        drawn = kernels.sample(changed, settings[0], self.seeds[rows], positions)[1]
        token_ids[chunk_ids] = self.history[rows, positions] = drawn
        wanted = [p.logprobs for p in params]
        if any(num is not None for num in wanted):
            return chunks, wanted, *sampler.top_logprobs(raw, drawn, max(num or 0 for num in wanted))
    def _fill_rows(self, new_rows: list[NewRow]) -> None:
        """Write what new rows bring: known tokens, blocks of the cached prefix, settings (as the bits of float64)."""
        rows, known, hits, params, seeds, rules, num_prompt = zip(*new_rows)
        self.wishes |= zip(rows, zip(params, rules))
        num_known, num_hits = [len(ids) for ids in known], [len(ids) for ids in hits]
        settings = [(*(getattr(p, name) for name in sampler.SETTINGS), num) for p, num in zip(params, num_prompt)]
        at, seeds, settings, token_rows, positions, token_ids, hit_rows, columns, block_ids = self._to_device(
            rows, seeds, np.array(settings, np.float64).ravel().view(np.int64),
            np.repeat(rows, num_known), np.concatenate([np.arange(n) for n in num_known]), np.concatenate(known),
            np.repeat(rows, num_hits), np.concatenate([np.arange(n) for n in num_hits]), np.concatenate(hits))
        self.history[token_rows, positions] = token_ids.int()
        self.block_tables[hit_rows, columns] = block_ids.int()
        self.seeds[at] = seeds
        self.settings[:, at] = settings.view(torch.float64).view(len(rows), -1).T.float()
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

def to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Fill in what the user left to the engine, for this machine and model."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    refuse_if(on_gpu and torch.cuda.device_count() < config.tensor_parallel_size,
              f"tensor_parallel_size={config.tensor_parallel_size}, but {torch.cuda.device_count()} GPUs are visible")
    device, block_size = "cuda" if on_gpu else "cpu", config.kvcache_block_size or attention.FLASH_BLOCK_SIZE
    dtype = config.dtype if config.dtype != "auto" else model.dtype if on_gpu else "float32"
    reason = attention.reason_against_flash(torch.device(device), getattr(torch, dtype), model.head_dim, block_size)
    return replace(
        config, device=device, dtype=dtype, max_model_len=config.max_model_len or model.max_position_embeddings,
        max_num_seqs=config.max_num_seqs or (512 if on_gpu else 64),
        max_num_batched_tokens=config.max_num_batched_tokens or (16384 if on_gpu else 2048),
        kvcache_block_size=config.kvcache_block_size or (16 if reason else block_size))

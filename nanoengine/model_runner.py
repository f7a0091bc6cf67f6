"""One rank: the model, its KV cache, and the persistent state of the batch; turns a StepInput into tokens, decides
nothing. The token history lives here, on the device: a step gathers its inputs from it and writes drawn tokens into it,
so the next step can be launched before anybody has read them. `kernels.rope_and_store` fills in the block tables.
    history   row 3 | 11 42 7 99 23 .  .  . |      a decode step of row 3 reads position 4 (23), computes it,
                                 ^  ^              and writes the token it draws to position 5"""
import logging
import os
from contextlib import ExitStack
from dataclasses import replace
import numpy as np
import torch
from torch import Tensor
from nanoengine import attention, kernels, sampler
from nanoengine.config import EngineConfig, ModelConfig, refuse_if
from nanoengine.cuda_graph import CudaGraphs, batch_sizes
from nanoengine.decoder import Decoder
from nanoengine.group import Group
from nanoengine.loader import load_weights
from nanoengine.step_input import FlatStep, NewRow, StepInput, flatten

logger = logging.getLogger(__name__)

class Launch:
    """A launched step's tokens, one per chunk, and (chunk, ids, values) of wanted logprobs, on the way to the host."""
    def __init__(self, ids: Tensor, num_padding_rows: int, logprobs: list[tuple[int, Tensor, Tensor]]):
        self.num_padding_rows, self._ids, self._logprobs = num_padding_rows, to_host(ids), logprobs
        self._event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
    def is_done(self) -> bool:
        return self._event is None or self._event.query()
    def token_ids(self) -> list[int]:
        """Waits for this step alone, not for what was launched after it."""
        if self._event:
            self._event.synchronize()
        return self._ids.tolist()
    def logprobs(self) -> dict[int, dict[int, float]]:
        """After `token_ids`: {chunk: {token id: log-probability}} of those that asked; the drawn token first."""
        return {chunk: dict(zip(ids.tolist(), values.tolist())) for chunk, ids, values in self._logprobs}

class ModelRunner:
    """Only this class writes tensors. Use: `measure`, `allocate`, then `run` once per step. config: of `resolve`. Row
    `max_num_seqs` of the state is nobody's, position `max_model_len` no token's: what must not be kept goes there."""
    def __init__(self, folder, model_config: ModelConfig, config: EngineConfig, group: Group = Group()):
        self.config, self.model_config, self.group = config, model_config, group
        self.device = torch.device("cuda", group.rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype, self.block_size = getattr(torch, config.dtype), config.kvcache_block_size
        num_rows, self.spare_row, self.no_position = config.max_num_seqs + 1, config.max_num_seqs, config.max_model_len
        with self.device, ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self.model = Decoder(model_config, self.no_position, group)
            self.history = torch.zeros(num_rows, self.no_position + 1, dtype=torch.int32)
            self.block_tables = torch.zeros(num_rows, -(-self.no_position // self.block_size), dtype=torch.int32)
            self.seeds = torch.zeros(num_rows, dtype=torch.int64)
            self.settings = torch.zeros(len(sampler.SETTINGS) + 1, num_rows, dtype=torch.float32)  # + prompt length
        self.wishes = {}            # row -> (its SamplingParams, its rules), for draws that aren't plain
        load_weights(folder, self.model.sources())
        if group.size > 1 and self.history.is_cuda and kernels.has_triton(self.history):
            most = max(config.max_num_batched_tokens, config.max_num_seqs) + 15 & -16      # rounded up to 16
            group.share_memory(most, model_config.hidden_size, self.dtype, self.device)
    def measure(self) -> int:
        """How many KV blocks fit on the rank that has least room: on a GPU what weights, graphs, the largest step and
        other processes leave; on the CPU min(2 GiB, a quarter of the memory). Never more than useful."""
        self.allocate(0)        # with the largest graph, whose memory the smaller ones share
        spare = (self._spare_gpu_memory() if self.device.type == "cuda" else
                 min(2 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4))
        fits = min(self.config.max_num_seqs * self.block_tables.shape[1], spare // self.kv_cache.nbytes)
        return int(self.group.all_min(torch.tensor(max(0, fits), device=self.device)))
    def _spare_gpu_memory(self) -> int:
        """Bytes left for KV blocks beside the largest and most costly step, which is run on the spare block alone."""
        torch.cuda.reset_peak_memory_stats(self.device)
        n = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        num_tokens = np.full(n, min(self.config.max_num_batched_tokens // n, self.config.max_model_len))
        block_ids = np.zeros(n * -(-num_tokens[0] // self.block_size), int)
        self.wishes[self.spare_row] = sampler.COSTLY, []
        self.run(StepInput([], np.full(n, self.spare_row), np.zeros(n, int), num_tokens, np.zeros(n, bool), block_ids,
                           list(range(n)))).token_ids()
        torch.cuda.empty_cache()
        largest_step = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)          # what other processes hold is not free
        spare = int(total * self.config.gpu_memory_utilization) - (total - free) - largest_step
        logger.info("GPU memory in GiB: total %.2f, taken (with graphs) %.2f, largest step %.2f, left for KV %.2f",
                    *(x / 2**30 for x in (total, total - free, largest_step, spare)))
        return spare
    def allocate(self, num_blocks: int) -> None:
        """The KV cache, with a spare block that padding writes to, and the CUDA graphs (num_blocks 0: the largest)."""
        self.kv_cache, self.graphs, model, config = None, None, self.model_config, self.config     # free the old
        shape = num_blocks + 1, self.block_size, model.num_key_value_heads // self.group.size, model.head_dim
        self.kv_cache = torch.zeros(2, model.num_hidden_layers, *shape, dtype=self.dtype, device=self.device)
        self.model.bind_kv_cache(self.kv_cache, self.block_tables.fill_(num_blocks))
        self.padding = [self.spare_row, 0, num_blocks * self.block_size, 0, self.no_position]
        self._capture(batch_sizes(config.max_num_seqs, config.cuda_graph_batch_sizes)[0 if num_blocks else -1:])
        self.group.all_min(torch.zeros(1, device=self.device))      # every rank has come so far
    def _capture(self, sizes: list[int]) -> None:
        if not self.config.enforce_eager and self.device.type == "cuda" and kernels.has_triton(self.kv_cache):
            try:
                self.graphs = CudaGraphs(self._decode, sizes, self.padding, self.device)
            except RuntimeError if self.group.size == 1 else () as error:       # peers would wait in its collectives
                logger.warning("no CUDA graphs, decode runs eagerly: %s", error)
                self.config = replace(self.config, enforce_eager=True)
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
            token_ids, logits = self.graphs.replay(size, self._pinned(inputs))
        else:
            token_ids, logits = self._compute(FlatStep(*self._to_device(*flat[:9]), *flat[9:]))
        logprobs = [one for i in range(0, len(step.special), sampler.ROWS_AT_A_TIME) for one in
                    self._draw_again(step.special[i:i + sampler.ROWS_AT_A_TIME], flat, token_ids, logits)]
        return Launch(token_ids[:num_chunks], len(token_ids) - num_chunks, logprobs)
    def _decode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What a graph holds: a step of one-token chunks. inputs [5, num_seqs] int64, FlatStep's first five."""
        return self._compute(FlatStep(*inputs, inputs[0], None, None, None, inputs.shape[1], 1, 1))
    def _compute(self, step: FlatStep) -> tuple[Tensor, Tensor]:
        """Gather the inputs, run the model, draw: token ids [num_chunks] and this rank's logits [num_chunks, vocab].
        step: its arrays as int64 tensors on the device; last_indices None: all."""
        rows, places, head = step.rows, step.draw_positions, self.model.lm_head
        attention.set_context(step)
        try:
            hidden = self.model(self.history[step.token_rows, step.positions], step.positions)
        finally:
            attention.reset_context()
        logits = head.logits(hidden if step.last_indices is None else hidden[step.last_indices])
        scores, drawn = kernels.sample(logits, rows, self.settings[0], self.seeds, places, head.vocab_start)
        if self.group.size > 1:     # each rank drew the best of its part of the vocabulary: the best of these wins
            pairs = self.group.all_gather(torch.stack((scores.double(), drawn.double())))       # [size, 2, num_chunks]
            drawn = pairs[:, 1].gather(0, pairs[:, 0].argmax(0, keepdim=True))[0].int()
        self.history[rows, places] = drawn
        return drawn, logits
    def _draw_again(self, chunks: list[int], flat: FlatStep, token_ids: Tensor, logits: Tensor) -> list[tuple]:
        """Replace what these chunks drew by draws from changed logits (see `sampler`). Returns `Launch`'s logprobs."""
        rows, positions = flat.rows[chunks], flat.draw_positions[chunks]
        params, rules = zip(*(self.wishes[row] for row in rows.tolist()))
        rules, length = sampler.pack_rules(rules), positions.max()
        chunk_ids, rows, positions, bits = self._to_device(chunks, rows, positions, rules.ravel().view(int))
        raw = self.group.all_gather(logits[chunk_ids]).movedim(0, 1).flatten(1).float()     # [len(chunks), vocab_size]
        changed, settings, history = raw, self.settings[:, rows], self.history[rows, :length]
        if len(rules):
            changed = sampler.apply_rules(changed, history, positions, bits.view(torch.float64).view(rules.shape))
        if any(p.has_penalties for p in params):
            changed = sampler.penalise(changed, history, positions, settings)
        if any(p.has_filters for p in params):
            changed = sampler.filter_logits(changed, settings)
        drawn = kernels.sample(changed, rows, self.settings[0], self.seeds, positions)[1]
        token_ids[chunk_ids] = self.history[rows, positions] = drawn
        wanted = {i: 1 + p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        ids, values = map(to_host, sampler.top_logprobs(raw, drawn, max(wanted.values()))) if wanted else ((), ())
        return [(chunks[i], ids[i, :num], values[i, :num]) for i, num in wanted.items()]
    def _fill_rows(self, new_rows: list[NewRow]) -> None:
        """Write what new rows bring: known tokens, blocks of the cached prefix, settings (as the bits of float64)."""
        rows, known, hits, params, seeds, rules, lens = zip(*new_rows)
        self.wishes |= zip(rows, zip(params, rules))
        settings = np.array([(*(getattr(p, key) for key in sampler.SETTINGS), n) for p, n in zip(params, lens)], float)
        at, seeds, bits, *lists = self._to_device(rows, seeds, settings.ravel().view(int), *known, *hits)
        for row, token_ids, block_ids in zip(rows, lists[:len(rows)], lists[len(rows):]):
            self.history[row, :len(token_ids)] = token_ids
            self.block_tables[row, :len(block_ids)] = block_ids
        self.seeds[at] = seeds
        self.settings[:, at] = bits.view(torch.float64).view(settings.shape).T.float()
    def _to_device(self, *arrays) -> tuple[Tensor, ...]:
        """int64 tensors on the device, in one copy, each at a multiple of 16 bytes (else Triton compiles anew)."""
        padded = [np.append(array, 0) if len(array) % 2 else array for array in arrays]
        packed = self._pinned(np.concatenate(padded, dtype=np.int64, casting="unsafe"))
        parts = packed.to(self.device, non_blocking=True).split([len(array) for array in padded])
        return tuple(part[:len(array)] for part, array in zip(parts, arrays))
    def _pinned(self, array: np.ndarray) -> Tensor:     # a copy the device reads by itself; reused only after that
        return torch.from_numpy(array).pin_memory() if self.device.type == "cuda" else torch.from_numpy(array)

def to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Fill in what the user left to the engine, for this machine and model."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    refuse_if(on_gpu and torch.cuda.device_count() < config.tensor_parallel_size,
              f"{config.device=} and {config.tensor_parallel_size=}, but {torch.cuda.device_count()} GPUs are visible")
    device, num_seqs, num_tokens = ("cuda", 512, 16384) if on_gpu else ("cpu", 64, 2048)
    dtype = config.dtype if config.dtype != "auto" else model.dtype if on_gpu else "float32"
    block_size = config.kvcache_block_size or attention.FLASH_BLOCK_SIZE
    reason = attention.reason_against_flash(torch.device(device), getattr(torch, dtype), model.head_dim, block_size)
    logger.info("attention: %s", f"no flash-attn, as {reason}" if reason else "flash-attn for prefill")
    return replace(config, device=device, dtype=dtype, max_num_seqs=config.max_num_seqs or num_seqs,
                   max_model_len=config.max_model_len or model.max_position_embeddings,
                   max_num_batched_tokens=config.max_num_batched_tokens or num_tokens,
                   kvcache_block_size=config.kvcache_block_size or (16 if reason else block_size))

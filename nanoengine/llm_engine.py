"""The engine: requests in, tokens out. Start reading here, at `_advance`: a step is scheduled, launched, and taken in
one step later, while the device computes the next. Who computes what the Scheduler says, how the ModelRunner."""
import logging
import random
import signal
import threading
import time
import weakref
from collections import Counter, namedtuple
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from pathlib import Path
from huggingface_hub import snapshot_download
from tqdm import tqdm
from nanoengine.block_manager import BlockManager
from nanoengine.config import EngineConfig, ModelConfig, refuse_if
from nanoengine.model_runner import resolve
from nanoengine.rpc import Ranks
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import Chunk, Sequence
from nanoengine.step_input import StepInput
from nanoengine.text import OutputText

logger = logging.getLogger(__name__)

# What became of a request. token_ids: the new ones, also a stop token, whose text isn't shown. finish_reason: "stop",
# "length", "abort" or "error". num_cached_tokens: those of the prompt found in the prefix cache. logprobs: None or, per
# new token, {token id: log-probability}, the drawn one's first, then the likeliest.
RequestOutput = namedtuple("RequestOutput", "request_id prompt_token_ids text token_ids finish_reason "
                           "num_cached_tokens logprobs")

class LLMEngine(AbstractContextManager):
    """An engine (`LLM`) for one model, a folder or an id on the hub, and one thread. Options: `EngineConfig`. Raises,
    before it loads, TypeError (unknown option), ValueError (bad value or model), FileNotFoundError."""
    def __init__(self, model: str | Path, **options):
        asked, folder = EngineConfig.from_options(options), model_folder(model)
        self.model_config, self.tokenizer = ModelConfig.from_folder(folder), None     # without one: only token ids
        asked.check_model(self.model_config)
        self.config = resolve(asked, self.model_config)
        if any(folder.glob("tokenizer*")):
            from transformers import AutoTokenizer      # takes seconds to import: only who needs text pays
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._ranks = Ranks(folder, self.model_config, self.config)
        self._finalizer = weakref.finalize(self, self._ranks.close)
        block_size, num_blocks = self.config.kvcache_block_size, asked.num_kvcache_blocks or self._ranks.call("measure")
        if num_blocks * block_size < (asked.max_model_len or 1) and not asked.num_kvcache_blocks:
            self._ranks.close(f"memory is left for {num_blocks} KV blocks of {block_size} tokens, too few for "
                              f"max_model_len={self.config.max_model_len}: lower it, or raise gpu_memory_utilization")
        self._ranks.call("allocate", num_blocks)        # raises that
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, block_size)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size, self.config.enable_prefix_caching),
                                   self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self._eos_token_ids = self.model_config.eos_token_ids | {getattr(self.tokenizer, "eos_token_id", None)} - {None}
        self._live, self._outputs = {}, []          # id -> Sequence; of requests that ended, until `step` returns them
        self._in_flight = self.on_step = None       # (chunks, Launch) not taken in yet; yours: on_step(chunks, launch)
        self._ids, self._seeds, self._counts = map(str, range(1 << 62)), random.Random(self.config.seed), Counter()
    def _advance(self) -> None:
        """One step: choose, launch, and take in the step before (or, without async scheduling, this one)."""
        start = time.perf_counter()
        with interrupts_deferred():
            chunks = self.scheduler.schedule()
            launched = self._launch(chunks) if chunks else self._ranks.check()
            if self.config.async_scheduling:
                launched, self._in_flight = self._in_flight, launched
            if launched:
                self._take_in(*launched)
        self._counts["seconds"] += time.perf_counter() - start
    def _launch(self, chunks: list[Chunk]):
        """Start the step on every rank. If it fails, its requests alone end, unless all had to close (see `Ranks`)."""
        try:
            return chunks, self._ranks.call("run", StepInput.from_chunks(chunks, self.config.kvcache_block_size))
        except Exception:
            if self._ranks.failure:
                raise
            logger.exception("a step failed; its %d requests end with finish_reason 'error'", len(chunks))
            for chunk in chunks:
                self._end(chunk.sequence, "error")
    def _take_in(self, chunks: list[Chunk], launch) -> None:
        start = time.perf_counter()
        token_ids = self._ranks.token_ids(launch)
        self._counts["seconds"] -= time.perf_counter() - start      # which was the device's
        for i, logprobs in launch.logprobs().items():
            chunks[i].sequence.logprobs.append(logprobs)
        advanced = self.scheduler.update(chunks, token_ids)
        for sequence in advanced:
            if sequence.finish_reason != "stop":        # a stop token's text isn't shown
                sequence.text.append(sequence.token_ids[-1])
            if sequence.text.is_stopped or sequence.finish_reason:
                self._end(sequence, sequence.finish_reason or "stop")
        self._counts.update(steps=1, output_tokens=len(advanced), computed_tokens=sum(c.num_tokens for c in chunks))
        if self.on_step:
            self.on_step(chunks, launch)
    def _end(self, sequence: Sequence, reason: str) -> None:
        """End a live sequence, in whatever state it is, and make its output."""
        self._live.pop(sequence.request_id, None)
        self.scheduler.finish(sequence, reason)
        prompt, token_ids = sequence.token_ids[:sequence.num_prompt_tokens], sequence.output_token_ids
        sequence.text.flush(token_ids[:-1] if reason == "stop" else token_ids)
        sequence.output = RequestOutput(
            sequence.request_id, prompt, sequence.text.text, token_ids, "stop" if sequence.text.is_stopped else reason,
            sequence.num_cached_tokens or 0, None if sequence.params.logprobs is None else sequence.logprobs[:])
        self._counts.update(requests=1, prompt_tokens=len(prompt), cached_tokens=sequence.output.num_cached_tokens)
        if not sequence.is_owned:
            self._outputs.append(sequence.output)
    def add_request(self, prompt: str | list[int], params: SamplingParams | None = None, request_id=None) -> str:
        """Queue a prompt (text or token ids); returns the request's id, a new one if none is given. The output ends at
        `max_model_len` if `max_tokens` would take it further. ValueError, and nothing queued, for an empty or too long
        prompt, ids outside the vocabulary, what the KV pool can't hold, a live id; TypeError for what is no prompt."""
        sequence = self._sequence(prompt, params, request_id)
        self.scheduler.add(sequence)        # first: if Ctrl-C comes between, nothing waits for ever
        self._live[sequence.request_id] = sequence
        return sequence.request_id
    def _sequence(self, prompt, params: SamplingParams | None, request_id: str | None = None) -> Sequence:
        self._ranks.check()
        params, is_text = SamplingParams() if params is None else params, isinstance(prompt, (str, bytes))
        refuse_if(not isinstance(params, SamplingParams), f"sampling_params must be SamplingParams, not {params!r:.60}")
        refuse_if(self.tokenizer is None and (is_text or params.stop or params.bad_words),
                  f"the model folder has no tokenizer: give token ids, no {params.stop=} and no {params.bad_words=}")
        ids = self.tokenizer.encode(prompt) if is_text else list(prompt)
        if not all(issubclass(kind, Integral) and kind is not bool for kind in set(map(type, ids))):
            raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r:.60}")
        limit, size, manager = self.config.max_model_len, self.model_config.vocab_size, self.scheduler.block_manager
        max_num_tokens = min(len(ids) + params.max_tokens, limit)
        needed = manager.num_blocks_for(max_num_tokens - 1)      # the last token's KV is never needed
        refuse_if(not ids, "the prompt is empty: it must hold at least one token")
        refuse_if(len(ids) >= limit, f"the prompt has {len(ids)} tokens: max_model_len={limit} leaves no room for more")
        refuse_if(request_id in self._live, f"request_id {request_id!r} is in use by a request that hasn't ended")
        for i in (min(ids), max(ids), *(params.logit_bias or ())):
            refuse_if(not 0 <= i < size, f"token id {i} (prompt, logit_bias) is outside the vocabulary of {size}")
        refuse_if((params.logprobs or 0) > size, f"logprobs={params.logprobs} exceeds the vocabulary of {size}")
        refuse_if(needed > manager.num_blocks, f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} need "
                  f"{needed} KV blocks of {manager.block_size} tokens, but num_kvcache_blocks={manager.num_blocks}")
        request_id = next(i for i in self._ids if i not in self._live) if request_id is None else request_id
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        forms = (self.tokenizer.encode(f, add_special_tokens=False) for w in params.bad_words for f in (w, f" {w}"))
        bad_words = {tuple(form) for form in forms if form and max(form) < size}
        sequence = Sequence(request_id, list(map(int, ids)), params, seed, max_num_tokens, stop_ids)
        sequence.rules = params.rules(len(ids), [i for i in stop_ids if 0 <= i < size], bad_words)
        sequence.text = OutputText(self.tokenizer, params.stop)
        return sequence
    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that ended since the last `step`, aborted ones too, each once."""
        self._advance()
        outputs, self._outputs = self._outputs, []
        return outputs
    def has_unfinished(self) -> bool:       # whether `step` has anything left to compute or to return
        return bool(self._live or self._outputs)
    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its blocks are free at once. False if there is no such live one."""
        if is_live := request_id in self._live:
            self._end(self._live[request_id], "abort")
        return is_live
    def generate(self, prompts, sampling_params=None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete one prompt or many (each text or token ids), with one SamplingParams or one per prompt. Returns
        outputs in this order. If it is interrupted, or a prompt is invalid, nothing of it stays in the engine."""
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        prompts, is_shared = [prompts] if is_one else list(prompts), isinstance(sampling_params, SamplingParams | None)
        params = [sampling_params] * len(prompts) if is_shared else list(sampling_params)
        refuse_if(len(params) != len(prompts), f"{len(prompts)} prompts, but {len(params)} sampling_params")
        sequences, before = list(map(self._sequence, prompts, params)), self._counts.copy()
        with (interrupts_deferred() as interrupted, self._running(sequences),
              tqdm(total=len(sequences), disable=not use_tqdm) as bar):
            while any(sequence.output is None for sequence in sequences) and not interrupted:
                self._advance()
                if use_tqdm:
                    new, took = self._counts - before, time.time() - bar.start_t + 1e-9
                    output, prompt = new["output_tokens"], new["computed_tokens"] - new["output_tokens"]
                    bar.set_postfix_str(f"{prompt / took:,.0f} prompt and {output / took:,.0f} output tok/s", False)
                    bar.update(sum(sequence.output is not None for sequence in sequences) - bar.n)
        return [sequence.output for sequence in sequences]
    def stream(self, prompt, params: SamplingParams | None = None):
        """Yield the text of one request in pieces as they come; their join is its text, even if it failed."""
        sequence, num_shown = self._sequence(prompt, params), 0
        with self._running([sequence]):
            while sequence.output is None or num_shown < len(sequence.text.text):
                if piece := sequence.text.text[num_shown:]:
                    num_shown += len(piece)
                    yield piece
                else:
                    self._advance()
    def chat(self, messages, sampling_params=None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or many, through the tokenizer's chat template."""
        refuse_if(not getattr(self.tokenizer, "chat_template", None), "there is no tokenizer with a chat template")
        prompts = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return self.generate(prompts, sampling_params, use_tqdm)
    @contextmanager
    def _running(self, sequences: list[Sequence]):
        """Queue sequences; those that haven't ended when the block is left, in whatever way, are aborted."""
        try:
            for sequence in sequences:
                sequence.is_owned = True
                self.scheduler.add(sequence)
                self._live[sequence.request_id] = sequence
            yield
        finally:
            for sequence in [s for s in sequences if self._live.get(s.request_id) is s]:     # its id may be another's
                self.abort(sequence.request_id)
    def stats(self) -> dict[str, float]:
        """What it holds now, and counts since its start. Blocks are used, cached (free, but findable) or free."""
        scheduler, manager, counts = self.scheduler, self.scheduler.block_manager, self._counts
        cached, free = sum(i in manager.free_blocks for i in manager.index.values()), manager.num_free_blocks
        return {"running": len(scheduler.running), "waiting": len(scheduler.waiting), "blocks_free": free - cached,
                "blocks_used": manager.num_blocks - free, "preemptions": scheduler.num_preemptions,
                **{name: counts[name] for name in ("requests", "steps", "computed_tokens", "output_tokens")},
                "blocks_cached": cached, "host_ms_per_step": 1e3 * counts["seconds"] / max(1, counts["steps"]),
                "cache_hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"])}     # of ended requests
    def close(self, *_) -> None:
        """End peers and free memory. May be called twice; `with LLM(...) as llm` calls it."""
        self._in_flight = None
        self._finalizer()
    __exit__ = close

@contextmanager
def interrupts_deferred():
    """Ctrl-C acts at the end of the block. Yields a list that isn't empty any more once one has come."""
    kept, handler = [], threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT)
    if callable(handler):       # else Ctrl-C is ignored, or ends the process
        signal.signal(signal.SIGINT, lambda *args: kept.append(args))
    try:
        yield kept
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        if kept:
            handler(*kept[0])

def model_folder(model: str | Path) -> Path:
    """The folder of a model: itself, or the hub's snapshot of a model id. Raises FileNotFoundError."""
    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(model if Path(model).is_dir() else snapshot_download(str(model), allow_patterns=files))
    except (OSError, ValueError) as error:      # the hub's own errors are among these
        raise FileNotFoundError(f"{str(model)!r} is no folder here and no model that the hub gives: {error}") from error

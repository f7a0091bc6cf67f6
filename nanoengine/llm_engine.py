"""The engine: requests in, tokens out. Start reading here, at `_advance`. A step is scheduled, launched on the device,
and taken in one step later, while the device computes the next one. This file knows requests, text and results; who
computes what is the Scheduler's business, how is the ModelRunner's."""
import itertools
import logging
import random
import signal
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
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

@dataclass
class RequestOutput:
    """What became of a request. `token_ids` are the new ones; a stop token stays in them, its text doesn't show."""
    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str          # "stop", "length", "abort" or "error"
    num_cached_tokens: int      # prompt tokens whose KV was found in the prefix cache
    logprobs: list[dict[int, float]] | None = None      # per new token, if asked for: the drawn one's, then the likeliest

class LLMEngine:
    """An engine for one model: a folder, or an id on the hub. Options: see `EngineConfig`. Not for several threads.
    Raises before anything is loaded: TypeError for an unknown option, ValueError for a bad value or a model that isn't
    supported, FileNotFoundError for one that isn't there; RuntimeError if memory doesn't suffice."""
    def __init__(self, model: str | Path, **options):
        config, folder = EngineConfig.from_options(options), model_folder(model)
        self.model_config = ModelConfig.from_folder(folder)
        config.check_model(self.model_config)
        self.tokenizer, self.config = load_tokenizer(folder), resolve(config, self.model_config)
        self._ranks = Ranks(folder, self.model_config, self.config)
        self._finalizer = weakref.finalize(self, self._ranks.close)
        num_blocks, block_size = self.config.num_kvcache_blocks, self.config.kvcache_block_size
        if num_blocks is None:
            num_blocks, wanted = self._ranks.call("measure"), -(-(config.max_model_len or 1) // block_size)
            if num_blocks < wanted:
                raise RuntimeError(
                    f"memory is left for {num_blocks} KV blocks of {block_size} tokens, but max_model_len="
                    f"{config.max_model_len} needs {wanted}: lower it, or raise gpu_memory_utilization")
        self._ranks.call("allocate", num_blocks)
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, block_size)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size, self.config.enable_prefix_caching),
                                   self.config.max_num_seqs, self.config.max_num_batched_tokens)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        self._eos_token_ids = self.model_config.eos_token_ids | ({eos} if eos is not None else set())
        self._live: dict[str, Sequence] = {}
        self._outputs: list[RequestOutput] = []     # of requests that ended, until `step` returns them
        self._in_flight = None                      # (chunks, Launch) of the step whose result isn't taken in yet
        self._ids, self._seeds, self._counts = itertools.count(), random.Random(self.config.seed), Counter()
        self.on_step = None                         # for who wants to watch: called as on_step(chunks, launch)
    def _advance(self) -> None:
        """One step: choose, launch, and take in the step before (or, without async scheduling, this one)."""
        start = time.perf_counter()
        with interrupts_deferred():
            chunks = self.scheduler.schedule()
            launched = self._launch(chunks) if chunks else None
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
            if self._ranks.is_closed:
                raise
            logger.exception("a step failed; its %d requests end with finish_reason 'error'", len(chunks))
            for chunk in chunks:
                self._end(chunk.sequence, "error")
    def _take_in(self, chunks: list[Chunk], launch) -> None:
        start = time.perf_counter()
        token_ids = self._ranks.token_ids(launch)
        self._counts["seconds"] -= time.perf_counter() - start      # which was the device's
        advanced, logprobs = self.scheduler.update(chunks, token_ids), dict(launch.logprobs())
        for i in logprobs:
            if chunks[i].sequence in advanced:
                chunks[i].sequence.logprobs.append(logprobs[i])
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
        self.scheduler.finish(sequence, reason)
        del self._live[sequence.request_id]
        prompt, token_ids = sequence.token_ids[:sequence.num_prompt_tokens], sequence.output_token_ids
        sequence.text.flush(token_ids[:-1] if reason == "stop" else token_ids)
        sequence.output = RequestOutput(
            sequence.request_id, prompt, sequence.text.text, token_ids,
            "stop" if sequence.text.is_stopped else reason, sequence.num_cached_tokens or 0,
            None if sequence.params.logprobs is None else sequence.logprobs)
        self._counts.update(requests=1, prompt_tokens=len(prompt), cached_tokens=sequence.output.num_cached_tokens)
        if not sequence.is_owned:
            self._outputs.append(sequence.output)
    def add_request(self, prompt: str | list[int], params: SamplingParams | None = None,
                    request_id: str | None = None) -> str:
        """Queue a prompt (text or token ids); returns the request's id, a new one if none is given. The output ends at
        `max_model_len` if `max_tokens` would take it further. ValueError, and nothing queued, for an empty or too long
        prompt, ids outside the vocabulary, what the KV pool can't hold, a live request's id; TypeError for no prompt."""
        sequence = self._sequence(prompt, params or SamplingParams(), request_id)
        self._add(sequence)
        return sequence.request_id
    def _add(self, sequence: Sequence) -> None:
        self._live[sequence.request_id] = sequence
        self.scheduler.add(sequence)
    def _sequence(self, prompt, params: SamplingParams, request_id: str | None = None, is_owned=False) -> Sequence:
        if self._ranks.is_closed:
            raise RuntimeError("the engine is closed")
        refuse_if(self.tokenizer is None and (isinstance(prompt, str) or params.stop or params.bad_words),
                  f"the model folder has no tokenizer: give token ids, no {params.stop=} and no {params.bad_words=}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not all(issubclass(kind, Integral) and kind is not bool for kind in set(map(type, ids))):
            raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r:.60}")
        limit, vocab_size, manager = self.config.max_model_len, self.model_config.vocab_size, self.scheduler.block_manager
        max_num_tokens = min(len(ids) + params.max_tokens, limit)
        needed = manager.num_blocks_for(max_num_tokens - 1)      # the last token's KV is never needed
        refuse_if(not ids, "the prompt is empty: it must hold at least one token")
        refuse_if(request_id in self._live, f"request_id {request_id!r} is in use by a request that hasn't ended")
        for token_id in (min(ids), max(ids), *(params.logit_bias or ())):
            refuse_if(not 0 <= token_id < vocab_size, f"token id {token_id} is outside the vocabulary of {vocab_size}")
        refuse_if((params.logprobs or 0) > vocab_size, f"logprobs={params.logprobs} exceeds the vocabulary of {vocab_size}")
        refuse_if(len(ids) >= limit, f"the prompt has {len(ids)} tokens: max_model_len={limit} leaves no room for more")
        refuse_if(needed > manager.num_blocks,
                  f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} need {needed} KV blocks, but the pool "
                  f"has {manager.num_blocks} of {manager.block_size} tokens (num_kvcache_blocks)")
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._live)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        sequence = Sequence(request_id, list(map(int, ids)), params, seed, max_num_tokens, stop_ids)
        bad_words = {tuple(self.tokenizer.encode(form, add_special_tokens=False))
                     for word in params.bad_words for form in (word, f" {word}")}
        sequence.rules = params.rules(len(ids), [i for i in stop_ids if i < vocab_size], bad_words)
        sequence.text, sequence.is_owned = OutputText(self.tokenizer, params.stop), is_owned
        return sequence
    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that ended since the last `step`, aborted ones too, each once."""
        self._advance()
        outputs, self._outputs = self._outputs, []
        return outputs
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to compute or to return."""
        return bool(self._live or self._outputs)
    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its blocks are free at once. False if there is no such live one."""
        sequence = self._live.get(request_id)
        if sequence:
            self._end(sequence, "abort")
        return sequence is not None
    def generate(self, prompts, sampling_params=None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete one prompt or many (each text or token ids), with one SamplingParams or one per prompt. Returns outputs
        in the order of the prompts. If it is interrupted, or a prompt is invalid, nothing of it stays in the engine."""
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        prompts = [prompts] if is_one else list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        refuse_if(len(params) != len(prompts), f"{len(prompts)} prompts, but {len(params)} sampling_params")
        sequences = [self._sequence(prompt, p, is_owned=True) for prompt, p in zip(prompts, params)]
        with (interrupts_deferred() as interrupted, self._running(sequences),
              tqdm(total=len(sequences), disable=not use_tqdm) as bar):
            while any(sequence.output is None for sequence in sequences) and not interrupted:
                self._advance()
                if use_tqdm:
                    show_speed(bar, sequences)
        return [sequence.output for sequence in sequences]
    def stream(self, prompt, params: SamplingParams | None = None):
        """Yield the text of one request in pieces as they come; their join is its text."""
        sequence, num_shown = self._sequence(prompt, params or SamplingParams(), is_owned=True), 0
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
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False)
                   for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)
    @contextmanager
    def _running(self, sequences: list[Sequence]):
        """Queue sequences; those that haven't ended when the block is left, in whatever way, are aborted."""
        try:
            for sequence in sequences:
                self._add(sequence)
            yield
        finally:
            for sequence in sequences:
                self.abort(sequence.request_id)
    def stats(self) -> dict[str, float]:
        """What the engine holds now, and counts since its start. Blocks are used, cached (free, but findable) or free."""
        scheduler, manager, counts = self.scheduler, self.scheduler.block_manager, self._counts
        cached = sum(manager.blocks[block_id].key is not None for block_id in manager.free_blocks)
        return {"running": len(scheduler.running), "waiting": len(scheduler.waiting), "preemptions": scheduler.num_preemptions,
                "blocks_used": manager.num_blocks - manager.num_free_blocks, "blocks_cached": cached,
                "blocks_free": manager.num_free_blocks - cached,
                "cache_hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),    # of ended requests
                "host_ms_per_step": 1e3 * counts["seconds"] / max(1, counts["steps"]),
                **{name: counts[name] for name in ("requests", "steps", "computed_tokens", "output_tokens")}}
    def close(self) -> None:
        """End peers and free memory. May be called twice; `with LLM(...) as llm` calls it."""
        self._in_flight = None
        self._finalizer()
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.close()

LLM = LLMEngine

@contextmanager
def interrupts_deferred():
    """Ctrl-C acts at the end of the block. Yields a list that isn't empty any more once one has come."""
    kept = []
    if threading.current_thread() is not threading.main_thread():
        yield kept
        return
    handler = signal.signal(signal.SIGINT, lambda *args: kept.append(args)) or signal.SIG_DFL
    try:
        yield kept
    finally:
        signal.signal(signal.SIGINT, handler)
        if kept and callable(handler):
            handler(*kept[0])

def show_speed(bar: tqdm, sequences: list[Sequence]) -> None:
    seconds = time.time() - bar.start_t + 1e-9
    num_prompt = sum(s.num_prompt_tokens for s in sequences if len(s.token_ids) > s.num_prompt_tokens)
    num_output = sum(len(s.token_ids) - s.num_prompt_tokens for s in sequences)
    bar.set_postfix_str(f"prompt {num_prompt / seconds:,.0f} tok/s, output {num_output / seconds:,.0f} tok/s", False)
    bar.update(sum(sequence.output is not None for sequence in sequences) - bar.n)

def model_folder(model: str | Path) -> Path:
    """The folder of a model: itself, or the hub's snapshot of a model id. Raises FileNotFoundError."""
    if Path(model).is_dir():
        return Path(model)
    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=files))
    except (OSError, ValueError) as error:      # the hub's own errors are among these
        raise FileNotFoundError(f"{str(model)!r} is no folder here, and no model that the hub gives: {error}") from error

def load_tokenizer(folder: Path):
    """The folder's tokenizer, or None if it has none: then only token ids are served."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer      # takes seconds to import: only who needs text pays
    return AutoTokenizer.from_pretrained(folder)

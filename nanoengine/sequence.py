"""The engine's record of a request. There is no prefill and no decode: a step computes some more, a `Chunk`.
    tokens    |0                                    len(token_ids)| + num_in_flight (drawn, not known here) = num_tokens
    computed  |-------------------|- - - chunk - - -|               (their KV is in the cache or soon will be)
              0              num_computed      num_computed + chunk.num_tokens"""
from collections import namedtuple
from enum import Enum
from nanoengine.sampling_params import SamplingParams

Status = Enum("Status", "WAITING RUNNING FINISHED")

class Sequence:
    """Only the BlockManager writes `block_table`, the LLMEngine the last two lines', the Scheduler the others."""
    def __init__(self, request_id: str, token_ids: list[int], params: SamplingParams, seed: int, max_num_tokens: int,
                 stop_token_ids: frozenset[int] = frozenset()):
        self.request_id, self.params, self.seed = request_id, params, seed
        self.max_num_tokens, self.stop_token_ids = max_num_tokens, stop_token_ids   # prompt and output together
        self.token_ids, self.num_prompt_tokens = list(token_ids), len(token_ids)    # the prompt, then what is drawn
        self.num_computed, self.num_in_flight, self.num_cached_tokens = 0, 0, None  # cached when first admitted
        self.block_table, self.row = [], None           # the row of the persistent batch, while RUNNING
        self.status, self.finish_reason = Status.WAITING, None
        self.rules, self.is_plain, self.logprobs = (), params.is_plain, []  # see `SamplingParams`; a dict per new token
        self.text, self.output, self.is_owned = None, None, False   # OutputText; RequestOutput; for one call alone?
    num_tokens = property(lambda self: len(self.token_ids) + self.num_in_flight)
    output_token_ids = property(lambda self: self.token_ids[self.num_prompt_tokens:])
    # Tokens that a step could compute now. The KV of the last permitted one is never needed.
    num_uncomputed = property(lambda s: 0 if s.num_tokens >= s.max_num_tokens else s.num_tokens - s.num_computed)

class Chunk(namedtuple("Chunk", "sequence start num_tokens draws_token is_new_row")):
    """A sequence's share of one step: its tokens [start, end). draws_token: it reaches the end of the tokens, so the
    step draws the next one. is_new_row: the sequence has just been given its row."""
    end = property(lambda self: self.start + self.num_tokens)

"""The engine's record of one request.

A sequence has tokens; the first `num_computed` of them have keys and values in the cache (or will, once the steps
already launched are done); the rest are still to compute. There is no prefill and no decode: a step takes some more
of the rest, a `Chunk`. Nothing here knows how chunks are chosen, or what a block holds.

    tokens          |0                                    len(token_ids)| + num_in_flight (drawn, value unknown here)
    computed        |-------------------|- - - chunk - - -|
                    0             num_computed   num_computed + chunk.num_tokens
"""

from dataclasses import dataclass
from enum import Enum

from nanoengine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's tokens and progress.

    Only the Scheduler writes `status`, `row`, `num_computed`, `num_in_flight` and appends to `token_ids`; only the
    BlockManager writes `block_table`; only the LLMEngine reads the text-related fields.
    """

    def __init__(self, request_id, prompt_token_ids: list[int], params: SamplingParams, seed: int, max_num_tokens: int,
                 stop_token_ids: frozenset[int] = frozenset()):
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens        # prompt and output together
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed = 0
        self.num_in_flight = 0                      # tokens drawn by a launched step, value not on the host yet
        self.num_cached_tokens: int | None = None   # prompt tokens found in the prefix cache at first admission
        self.block_table: list[int] = []
        self.row: int | None = None                 # place in the persistent batch, while RUNNING
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.text = self.output = None              # OutputText and RequestOutput, for the engine
        self.is_owned = False                       # the output belongs to one call, not to the next `step`

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens a step could compute now. 0 once the last permitted token is drawn: its KV is never needed."""
        return 0 if self.num_tokens >= self.max_num_tokens else self.num_tokens - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's share of one step: its tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    draws_token: bool      # reaches the end of the tokens, so the step draws the next one
    is_new_row: bool       # the sequence has just been given its row

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

"""The engine's record of a request. There is no prefill and no decode: a step computes some more, a `Chunk`.

    tokens    |0                                    len(token_ids)| + num_in_flight (drawn, not known here)
    computed  |-------------------|- - - chunk - - -|               (their KV is in the cache or soon will be)
              0              num_computed      num_computed + chunk.num_tokens
"""

from dataclasses import dataclass, field
from enum import Enum

from nanoengine.sampling_params import SamplingParams

Status = Enum("Status", {"WAITING": "waiting", "RUNNING": "running", "FINISHED": "finished"})

@dataclass(eq=False)
class Sequence:
    """Only the BlockManager writes `block_table`, the LLMEngine the last three, the Scheduler the others."""

    request_id: str
    token_ids: list[int]                    # the prompt, to which drawn tokens are appended
    params: SamplingParams
    seed: int
    max_num_tokens: int                     # prompt and output together
    stop_token_ids: frozenset[int] = frozenset()
    num_computed: int = 0
    num_in_flight: int = 0                  # tokens drawn by a launched step, value not on the host yet
    num_cached_tokens: int | None = None    # prompt tokens found in the prefix cache at first admission
    block_table: list[int] = field(default_factory=list)
    row: int | None = None                  # place in the persistent batch, while RUNNING
    status: Status = Status.WAITING
    finish_reason: str | None = None
    text: object = None                     # its OutputText
    output: object = None                   # its RequestOutput
    is_owned: bool = False                  # the output belongs to one call, not to the next `step`

    def __post_init__(self):
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens a step could compute now. 0 once the last permitted one is drawn: its KV is never needed."""
        return 0 if self.num_tokens >= self.max_num_tokens else self.num_tokens - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's share of one step: its tokens [start, end)."""

    sequence: Sequence
    start: int
    num_tokens: int
    draws_token: bool      # reaches the end of the tokens, so the step draws the next one
    is_new_row: bool       # the sequence has just been given its row

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

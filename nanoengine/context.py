"""This step's attention metadata: a global, set and reset once per step, so that layers pass only hidden states."""

from typing import NamedTuple

from torch import Tensor

class Context(NamedTuple):
    """Chunks in order, the `num_decodes` one-token ones first. int64 on the device unless noted."""
    slot_mapping: Tensor                    # [num_tokens]  slot that each token's keys and values go to
    block_tables: Tensor                    # [max_num_seqs + 1, max_blocks] int32  of all rows
    rows: Tensor                            # [num_chunks]  row of each chunk in block_tables
    context_lens: Tensor                    # [num_chunks]  keys that a chunk's last token sees; 0 for padding
    num_decodes: int
    uses_flash: bool = False
    cu_seqlens_q: Tensor | None = None      # [num_chunks - num_decodes + 1]  query bounds of the other chunks
    cu_seqlens_k: Tensor | None = None      # the same for their keys
    max_seqlen_q: int = 1
    max_seqlen_k: int = 1

_current: list[Context] = []                # this step's, or none between steps
set_context, reset_context = _current.append, _current.clear

def get_context() -> Context:
    assert _current, "attention ran outside a step: set_context(...) must come first"
    return _current[-1]

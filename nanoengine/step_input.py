"""A step as plain data: what rank 0 sends to every rank, and the flat arrays that every rank makes of it.

Only differences travel: a sequence's tokens and settings once, when it gets its row; afterwards, per step, where its
chunk lies and which blocks the chunk writes to. Everything else (earlier tokens, the block table) is in the ranks'
persistent state. No Python loop runs over tokens, and nothing here knows torch.

    three chunks   num_tokens [1, 3, 2], starts [6, 0, 4]
    positions      | 6 | 0 1 2 | 4 5 |
    cu_seqlens_q   0   1       4     6         context_lens (keys seen by a chunk's last token)  [7, 3, 6]
"""

from typing import NamedTuple

import numpy as np

from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Chunk

class NewRow(NamedTuple):
    """What a row holds from now on."""

    row: int
    token_ids: np.ndarray       # all that are known
    block_ids: list[int]        # blocks of the cached prefix, before the first chunk's; later ones come with the chunks
    params: SamplingParams
    seed: int

class StepInput(NamedTuple):
    """One step, as arrays of length num_chunks unless noted. One-token chunks come first."""

    new_rows: list[NewRow]
    rows: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    draws_token: np.ndarray     # bool
    block_ids: np.ndarray       # the blocks that the chunks write to, one chunk after the other
    filtered: list[int]         # chunks whose drawing needs more than temperature and noise

    @classmethod
    def from_chunks(cls, chunks: list[Chunk], block_size: int) -> "StepInput":
        new_rows, block_ids, filtered = [], [], []
        for i, chunk in enumerate(chunks):
            sequence, first_block = chunk.sequence, chunk.start // block_size
            block_ids += sequence.block_table[first_block:(chunk.end - 1) // block_size + 1]
            if chunk.is_new_row:
                new_rows.append(NewRow(sequence.row, np.array(sequence.token_ids, np.int32),
                                       sequence.block_table[:first_block], sequence.params, sequence.seed))
            if chunk.draws_token and sequence.params.has_filters:
                filtered.append(i)
        numbers = np.array([(c.sequence.row, c.start, c.num_tokens, c.draws_token) for c in chunks], np.int32).T
        return cls(new_rows, *numbers[:3], numbers[3].astype(bool), np.array(block_ids, np.int32), filtered)

class FlatStep(NamedTuple):
    """The step with one entry per token (the first three) or per chunk."""

    token_rows: np.ndarray          # row of each token
    positions: np.ndarray           # its position in its sequence
    slot_mapping: np.ndarray        # where its keys and values go: block * block_size + offset
    rows: np.ndarray
    context_lens: np.ndarray        # keys that the last token of the chunk sees, itself included
    draw_positions: np.ndarray      # where the drawn token will stand; `no_draw` if nothing is drawn
    last_indices: np.ndarray        # index of the chunk's last token among all tokens
    cu_seqlens_q: np.ndarray        # [num_chunks - num_decodes + 1]  bounds of the chunks after the decodes
    cu_seqlens_k: np.ndarray        # the same for the keys they see
    num_decodes: int                # one-token chunks at the front
    max_seqlen_q: int
    max_seqlen_k: int

def flatten(step: StepInput, block_size: int, no_draw: int) -> FlatStep:
    """Flat arrays of a step. `no_draw` is the position that stands for none."""
    starts, num_tokens = step.starts.astype(int), step.num_tokens.astype(int)
    ends, cu_tokens, first_blocks = starts + num_tokens, np.concatenate(([0], num_tokens.cumsum())), starts // block_size
    num_blocks = (ends - 1) // block_size - first_blocks + 1
    positions = np.arange(cu_tokens[-1]) + np.repeat(starts - cu_tokens[:-1], num_tokens)
    block_index = positions // block_size + np.repeat(num_blocks.cumsum() - num_blocks - first_blocks, num_tokens)
    num_decodes = int((num_tokens == 1).sum())
    return FlatStep(
        token_rows=np.repeat(step.rows, num_tokens), positions=positions, rows=step.rows,
        slot_mapping=step.block_ids[block_index] * block_size + positions % block_size, context_lens=ends,
        draw_positions=np.where(step.draws_token, ends, no_draw), last_indices=cu_tokens[1:] - 1,
        cu_seqlens_q=cu_tokens[num_decodes:] - num_decodes,
        cu_seqlens_k=np.concatenate(([0], ends[num_decodes:].cumsum())), num_decodes=num_decodes,
        max_seqlen_q=int(num_tokens.max()), max_seqlen_k=int(ends.max()))

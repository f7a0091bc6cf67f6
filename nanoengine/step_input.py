"""A step as plain data: what rank 0 sends to every rank, and the flat arrays that every rank makes of it.

Only differences travel: a sequence's tokens and settings once, when it gets its row; afterwards, per step, where its
chunk lies and which blocks the chunk writes to. Everything else (earlier tokens, the block table) is in the ranks'
persistent state. No Python loop runs over tokens, and nothing here knows torch.

    three chunks   num_tokens [1, 3, 2], starts [6, 0, 4]
    positions      | 6 | 0 1 2 | 4 5 |
    cu_seqlens_q   0   1       4     6         context_lens (keys seen by a chunk's last token)  [7, 3, 6]
"""

from dataclasses import dataclass

import numpy as np

from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Chunk


@dataclass(slots=True)
class NewRow:
    """What a row holds from now on: known tokens, the blocks of its cached prefix, how to draw."""

    row: int
    token_ids: np.ndarray       # [num known tokens] int32
    block_ids: list[int]        # blocks before the first chunk's; later ones come with the chunks
    params: SamplingParams
    seed: int


@dataclass(slots=True)
class StepInput:
    """One step. All arrays are int32 of length num_chunks, but `block_ids`."""

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
        return cls(new_rows, np.array([c.sequence.row for c in chunks], np.int32),
                   np.array([c.start for c in chunks], np.int32), np.array([c.num_tokens for c in chunks], np.int32),
                   np.array([c.draws_token for c in chunks], bool), np.array(block_ids, np.int32), filtered)

    @property
    def is_decode(self) -> bool:
        """Does every chunk hold exactly one token?"""
        return bool((self.num_tokens == 1).all())


@dataclass(slots=True)
class FlatStep:
    """The step with one entry per token (first three) or per chunk (the others), all int32."""

    token_rows: np.ndarray          # [num_tokens]  row of each token
    positions: np.ndarray           # [num_tokens]  its position in its sequence
    slot_mapping: np.ndarray        # [num_tokens]  where its keys and values go: block * block_size + offset
    rows: np.ndarray                # [num_chunks]
    context_lens: np.ndarray        # [num_chunks]  keys that the last token of the chunk sees, itself included
    draw_positions: np.ndarray      # [num_chunks]  where the drawn token will stand; `no_draw` if nothing is drawn
    last_indices: np.ndarray        # [num_chunks]  index of the chunk's last token among all tokens
    cu_seqlens_q: np.ndarray        # [num_chunks - num_decodes + 1]  bounds of the chunks after the decodes
    cu_seqlens_k: np.ndarray        # the same for the keys they see
    num_decodes: int                # one-token chunks at the front
    max_seqlen_q: int
    max_seqlen_k: int


def flatten(step: StepInput, block_size: int, no_draw: int) -> FlatStep:
    """Flat arrays of a step whose one-token chunks come first. `no_draw` is the position that stands for none."""
    ends = step.starts + step.num_tokens
    cu_tokens = np.concatenate(([0], np.cumsum(step.num_tokens)))
    first_blocks = step.starts // block_size
    num_blocks = (ends - 1) // block_size - first_blocks + 1
    cu_blocks = np.cumsum(num_blocks) - num_blocks
    positions = np.arange(cu_tokens[-1]) + np.repeat(step.starts - cu_tokens[:-1], step.num_tokens)
    block_index = positions // block_size + np.repeat(cu_blocks - first_blocks, step.num_tokens)
    num_decodes = int((step.num_tokens == 1).sum())
    rest = ends[num_decodes:]
    return FlatStep(
        token_rows=np.repeat(step.rows, step.num_tokens), positions=positions, rows=step.rows,
        slot_mapping=step.block_ids[block_index] * block_size + positions % block_size,
        context_lens=ends, draw_positions=np.where(step.draws_token, ends, no_draw), last_indices=cu_tokens[1:] - 1,
        cu_seqlens_q=cu_tokens[num_decodes:] - num_decodes, cu_seqlens_k=np.concatenate(([0], np.cumsum(rest))),
        num_decodes=num_decodes, max_seqlen_q=int(step.num_tokens.max()), max_seqlen_k=int(ends.max()))

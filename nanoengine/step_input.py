"""A step as plain data: what rank 0 sends to every rank, and the flat arrays that each makes of it. Only differences
travel: a sequence's tokens and settings once, when it gets its row; per step, its chunk's place and its blocks.
    three chunks   num_tokens [1, 3, 2], starts [6, 0, 4]
    positions      | 6 | 0 1 2 | 4 5 |
    cu_seqlens_q   0   1       4     6         context_lens (keys seen by a chunk's last token)  [7, 3, 6]"""
from collections import namedtuple
import numpy as np
from nanoengine.sequence import Chunk

# What a row holds from now on: all known tokens (an array), the blocks of the cached prefix (before the first chunk's).
NewRow = namedtuple("NewRow", "row token_ids block_ids params seed rules num_prompt_tokens")

class StepInput(namedtuple("StepInput", "new_rows rows starts num_tokens draws_token block_ids special")):
    """One step. new_rows: NewRows. Arrays of length num_chunks, one-token chunks first: rows, starts, num_tokens,
    draws_token (bool). block_ids: the blocks that the chunks write to, one chunk after the other. special: a list of
    the chunks whose drawing needs more than temperature and noise."""
    @classmethod
    def from_chunks(cls, chunks: list[Chunk], block_size: int) -> "StepInput":
        new_rows, block_ids = [], []
        for chunk in chunks:
            sequence, first_block = chunk.sequence, chunk.start // block_size
            block_ids += sequence.block_table[first_block:(chunk.end - 1) // block_size + 1]
            if chunk.is_new_row:
                new_rows.append(NewRow(sequence.row, np.array(sequence.token_ids, np.int32),
                                       sequence.block_table[:first_block], sequence.params, sequence.seed,
                                       sequence.rules, sequence.num_prompt_tokens))
        special = [i for i, c in enumerate(chunks) if c.draws_token and not c.sequence.is_plain]
        numbers = np.array([(c.sequence.row, c.start, c.num_tokens, c.draws_token) for c in chunks], np.int32).T
        return cls(new_rows, *numbers[:3], numbers[3].astype(bool), np.array(block_ids, np.int32), special)

FlatStep = namedtuple("FlatStep", "token_rows positions slot_mapping context_lens draw_positions rows last_indices "
                      "cu_seqlens_q cu_seqlens_k num_decodes max_seqlen_q max_seqlen_k")

def flatten(step: StepInput, block_size: int, no_draw: int) -> FlatStep:
    """A step's flat arrays, in order. Per token: its row, its position, its slot (block * block_size + offset). Per
    chunk: its row; the keys that its last token sees, itself included; where the drawn token will stand (`no_draw` if
    none is drawn); the index of its last token. `cu_seqlens_q`, `cu_seqlens_k` [num_chunks - num_decodes + 1]: bounds
    of the tokens, and of the keys seen, of the chunks after the `num_decodes` one-token ones. Maxima of all chunks."""
    starts, num_tokens, first_blocks = step.starts.astype(int), step.num_tokens.astype(int), step.starts // block_size
    ends, cu_tokens = starts + num_tokens, np.concatenate(([0], num_tokens.cumsum()))
    num_blocks, num_decodes = (ends - 1) // block_size - first_blocks + 1, int((num_tokens == 1).sum())
    positions = np.arange(cu_tokens[-1]) + np.repeat(starts - cu_tokens[:-1], num_tokens)
    block_index = positions // block_size + np.repeat(num_blocks.cumsum() - num_blocks - first_blocks, num_tokens)
    return FlatStep(
        token_rows=np.repeat(step.rows, num_tokens), rows=step.rows, positions=positions,
        slot_mapping=step.block_ids[block_index] * block_size + positions % block_size, context_lens=ends,
        draw_positions=np.where(step.draws_token, ends, no_draw), last_indices=cu_tokens[1:] - 1,
        cu_seqlens_q=cu_tokens[num_decodes:] - num_decodes, num_decodes=num_decodes, max_seqlen_k=int(ends.max()),
        cu_seqlens_k=np.concatenate(([0], ends[num_decodes:].cumsum())), max_seqlen_q=int(num_tokens.max()))

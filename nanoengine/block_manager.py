"""Who owns which block of the KV cache, and which blocks hold a prefix that somebody may need again.

A block holds the keys and values of `block_size` tokens. A full one is findable by the xxhash of its tokens,
chained with its parent's, until it is reused; blocks are reused in the order in which they were freed.

    tokens       | 0 1 2 3 | 4 5 6 7 | 8 9     |      block_size 4, 10 tokens: ceil(10 / 4) = 3 blocks
    block_table  |   7     |   2     |   5     |      slot of token 6 = 2 * 4 + 2 = 10
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import numpy as np
from xxhash import xxh3_64_intdigest

from nanoengine.sequence import Sequence

@dataclass(slots=True)
class Block:
    ref_count: int = 0
    key: int | None = None          # chained hash of the tokens; None while not full (or when caching is off)
    token_ids: tuple[int, ...] = ()
    parent_id: int = 0              # content id of the block before; 0 is the empty prefix
    content_id: int = 0             # names the whole prefix that ends here: equal ids, equal tokens

class BlockManager:
    """Gives blocks to sequences and takes them back. Only this class writes `Sequence.block_table`."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))      # oldest first
        self.index: dict[int, int] = {}                                 # key -> the block to find under it
        self._content_ids = count(1)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: list[int]) -> list[int]:
        """Blocks of the longest cached prefix of `token_ids`, in order; at least one token is left out.
        A hit compares tokens and prefix too: a collision of hashes costs a miss, never a wrong answer."""
        hits, key, content_id = [], 0, 0
        for end in range(self.block_size, len(token_ids), self.block_size):
            tokens = tuple(token_ids[end - self.block_size:end])
            key = self._key(tokens, key)
            block_id = self.index.get(key)
            if block_id is None or not self._holds(self.blocks[block_id], tokens, content_id):
                break
            hits.append(block_id)
            content_id = self.blocks[block_id].content_id
        return hits

    def allocate(self, sequence: Sequence, num_tokens: int, hits: list[int] = ()) -> bool:
        """Extend the sequence's table, by `hits` first, until it holds `num_tokens` tokens. Returns False and
        changes nothing if too few blocks are free; a hit that is free can't serve as a new block too."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(hits)
        if num_new <= 0 and not hits:       # the usual case in a decode step
            return True
        num_free_hits = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        if num_new > len(self.free_blocks) - num_free_hits:
            return False
        for block_id in hits:
            self.free_blocks.pop(block_id, None)
        new = [self._take_oldest() for _ in range(num_new)]
        for block_id in (*hits, *new):
            self.blocks[block_id].ref_count += 1
            sequence.block_table.append(block_id)
        return True

    def free(self, sequence: Sequence) -> None:
        """Give all blocks back, the last one first: a prefix's end is reused before its beginning."""
        for block_id in reversed(sequence.block_table):
            self.blocks[block_id].ref_count -= 1
            if self.blocks[block_id].ref_count == 0:
                self.free_blocks[block_id] = None
        sequence.block_table.clear()

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks findable that tokens [start, end) have filled: their KV is written. A second block
        of the same content (a twin) gets key and content id too, so that its children are found, but the
        index goes on pointing at the first one."""
        if not (self.enable_prefix_caching and sequence.block_table):       # it was preempted meanwhile
            return
        for i in range(start // self.block_size, end // self.block_size):
            block = self.blocks[sequence.block_table[i]]
            parent = self.blocks[sequence.block_table[i - 1]] if i else Block(key=0)
            tokens = tuple(sequence.token_ids[i * self.block_size:(i + 1) * self.block_size])
            key = self._key(tokens, parent.key)
            first = self.blocks[self.index[key]] if key in self.index else None
            is_twin = first is not None and self._holds(first, tokens, parent.content_id)
            block.key, block.token_ids, block.parent_id = key, tokens, parent.content_id
            block.content_id = first.content_id if is_twin else next(self._content_ids)
            if not is_twin:
                self.index[key] = sequence.block_table[i]

    @staticmethod
    def _key(tokens: tuple[int, ...], parent_key: int) -> int:
        return xxh3_64_intdigest(np.array(tokens, np.int32).tobytes(), seed=parent_key)

    @staticmethod
    def _holds(block: Block, tokens: tuple[int, ...], parent_id: int) -> bool:
        return block.token_ids == tokens and block.parent_id == parent_id

    def _take_oldest(self) -> int:
        block_id, _ = self.free_blocks.popitem(last=False)
        block = self.blocks[block_id]
        if block.key is not None and self.index.get(block.key) == block_id:     # or it is a twin
            del self.index[block.key]
        self.blocks[block_id] = Block()
        return block_id

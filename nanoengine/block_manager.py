"""Who owns which block of the KV cache. A block holds `block_size` tokens' keys and values; a full one is findable by
a hash of its tokens and all before them, until it is reused. What was freed first is reused first.
    tokens       | 0 1 2 3 | 4 5 6 7 | 8 9     |      block_size 4, 10 tokens: ceil(10 / 4) = 3 blocks
    block_table  |   7     |   2     |   5     |      slot of token 6 = 2 * 4 + 2 = 10"""
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
import numpy as np
from xxhash import xxh3_64_intdigest
from nanoengine.sequence import Sequence

@dataclass(slots=True)
class Block:
    ref_count: int = 0
    key: int | None = None          # hash of the content; None while not full (or when caching is off)
    content: tuple[int, ...] = ()   # content id of the block before, then the tokens
    content_id: int = 0     # names the whole prefix that ends here: equal ids, equal tokens; 0 is the empty prefix

class BlockManager:
    """Gives blocks to sequences and takes them back. Only this class writes `Sequence.block_table`."""
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))      # oldest first
        self.index, self._content_ids = {}, count(1)                    # key -> the block to find under it
    num_free_blocks = property(lambda self: len(self.free_blocks))
    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
    def find_prefix(self, token_ids: list[int]) -> list[int]:
        """Blocks of the longest cached prefix of `token_ids`, in order; at least one token is left out."""
        hits, limit = [], (len(token_ids) - 1) // self.block_size
        while len(hits) < limit and (hit := self._look_up(token_ids, len(hits), hits)[-1]) is not None:
            hits.append(hit)
        return hits
    def allocate(self, sequence: Sequence, num_tokens: int, hits: list[int] = ()) -> bool:
        """Extend the sequence's table, by `hits` first, until it holds `num_tokens` tokens. Returns False and changes
        nothing if too few blocks are free; a hit that is free can't serve as a new block too."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(hits)
        if num_new <= 0 and not hits:       # the usual case in a decode step
            return True
        if num_new > len(self.free_blocks) - sum(self.blocks[hit].ref_count == 0 for hit in hits):
            return False
        for hit in hits:
            self.free_blocks.pop(hit, None)
            self.blocks[hit].ref_count += 1
        new = [self.free_blocks.popitem(last=False)[0] for _ in range(num_new)]
        for block_id in new:
            if self.index.get(self.blocks[block_id].key) == block_id:       # or it is a twin
                del self.index[self.blocks[block_id].key]
            self.blocks[block_id] = Block(ref_count=1)
        sequence.block_table += [*hits, *new]
        return True
    def free(self, sequence: Sequence) -> None:
        """Give all blocks back, the last one first: a prefix's end is reused before its beginning."""
        for block_id in reversed(sequence.block_table):
            self.blocks[block_id].ref_count -= 1
            if self.blocks[block_id].ref_count == 0:
                self.free_blocks[block_id] = None
        sequence.block_table.clear()
    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks findable that tokens [start, end) have filled: their KV is written. A second block of equal
        content (a twin) gets key and content id too, so that its children are found, but the index keeps the first."""
        table = sequence.block_table
        if self.enable_prefix_caching and table:        # it is empty if the sequence was preempted meanwhile
            for i in range(start // self.block_size, end // self.block_size):
                block = self.blocks[table[i]]
                block.key, block.content, twin = self._look_up(sequence.token_ids, i, table)
                block.content_id = next(self._content_ids) if twin is None else self.blocks[twin].content_id
                self.index[block.key] = table[i] if twin is None else twin
    def _look_up(self, token_ids: list[int], i: int, table: list[int]) -> tuple:
        """Key and content of block i of `token_ids`, behind table[:i]; the block that the index has for it, or None.
        Contents are compared too: a collision of hashes costs a miss, never a wrong answer."""
        start, parent_id = i * self.block_size, self.blocks[table[i - 1]].content_id if i else 0
        content = parent_id, *token_ids[start:start + self.block_size]
        found = self.index.get(key := self._key(content))
        return key, content, found if found is not None and self.blocks[found].content == content else None
    @staticmethod
    def _key(content: tuple[int, ...]) -> int:
        return xxh3_64_intdigest(np.array(content).tobytes())

"""BlockPool: who holds which block, and which full blocks can be found again by what they hold (the prefix cache).

A block is free or held by one or more sequences. A full block carries the digest of every token up to its end; when
its last holder lets go, it stays findable until it is the least recently used and its place is needed. The pool
moves numbers only: it never touches keys or values (`kv_cache.py`). Read next: `scheduler.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["BlockPool", "chain_digest"]


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block: 128-bit BLAKE2b of its parent's digest and its token ids.

    Equal digests mean equal tokens from position 0 on, so keys and values are equal too (law 2).
    """
    return hashlib.blake2b(parent + np.asarray(token_ids, "<i4").tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    Every block is in exactly one place: `_empty` (free, holds nothing), `_cached` (free, findable, oldest first), or
    held (`references` > 0).
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those of the prefix cache included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their digest, held or free."""
        return len(self._block_of)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest findable prefix. Changes nothing."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks` (as `find` gave them)."""
        for block in blocks:
            self._cached.pop(block, None)
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for one holder. Empty ones first, then the least recently used of the prefix cache.

        All or nothing: asking for more than `num_free` is a broken plan and changes nothing.
        """
        assert 0 <= count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each. Later blocks of a sequence become the older ones: a prefix outlives its tail."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._digest_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def freed_by(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become free if this holder let go."""
        return sum(self.references[block] == 1 for block in blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a held, full block findable. The first block with a digest stays the findable one."""
        if self.prefix_cache and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def clear(self) -> None:
        """Forget the prefix cache; held blocks stay held."""
        for block in list(self._digest_of):
            self._forget(block)
        self._empty.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

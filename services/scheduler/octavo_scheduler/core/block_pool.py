"""Blocks of the device tier: who holds references, what content they hold, which may be reused.

A block is in exactly one of two places: referenced (refcount > 0) or in the free list. A block whose content is known
(hashed) stays findable while it waits in the free list; it loses its hash when it is handed out again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.free_list import FreeList
from octavo_shared.records import Int32Array

# What a block continues: the commit number of the block before it, or the root of the chain.
Parent = int | bytes


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens.

    ``generation`` uint32[num_blocks] counts how often a block was handed out: a (block, generation) pair names one life of
    it, so that what was said of an earlier life can be told apart (rule R1).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generation: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        self._refcount = array("i", bytes(4 * num_blocks))
        self._free = FreeList(num_blocks)
        # Content of hashed blocks. What a block holds depends on all tokens before it, so beside its own token ids each
        # keeps whom it continues: the commit number of the block before it, or the root of its chain. Both are compared,
        # so that a collision of hashes cannot leak, however far up the chain it lies.
        self._hash: list[bytes | None] = [None] * num_blocks
        self._parent: list[Parent | None] = [None] * num_blocks
        self._commit_number: list[int] = [0] * num_blocks
        self._commits = 0
        self._content: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self._free.size

    @property
    def num_used(self) -> int:
        """Blocks that some sequence refers to."""
        return self.num_blocks - self._free.size

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found."""
        return len(self._by_hash)

    def free_blocks(self) -> list[int]:
        """Free blocks in the order they will be taken."""
        return list(self._free)

    def allocate(self, count: int) -> Int32Array:
        """Hand out ``count`` blocks (there must be as many), with one reference each: int32[count]."""
        taken = self._free.pop_many(count)
        refcount, digests = self._refcount, self._hash
        for block in taken:
            refcount[block] = 1
            if digests[block] is not None:
                self._forget(block)
        blocks = np.array(taken, np.int32)
        self.generation[blocks] += 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, the tail first: the head of a chain is worth keeping longest."""
        refcount, free = self._refcount, self._free
        for block in reversed(blocks):
            left = refcount[block] - 1
            assert left >= 0, "released more often than held"
            refcount[block] = left
            if left == 0:
                if self._hash[block] is None:
                    free.push_front(block)
                else:
                    free.push_back(block)

    def match(self, chain: Sequence[bytes], root: bytes, tokens: Int32Array) -> Int32Array:
        """The longest cached prefix: ids of the blocks that hold it, int32[hits]. No reference is taken.

        ``chain`` are the hashes of successive blocks of ``tokens`` int32[>= len(chain) * block_size], from ``root`` on.
        """
        size = self.block_size * 4
        data = tokens[: len(chain) * self.block_size].tobytes()
        found: list[int] = []
        parent: Parent = root
        for start, digest in zip(range(0, len(data), size), chain, strict=True):
            block = self._by_hash.get(digest)
            if block is None or self._parent[block] != parent or self._content[block] != data[start : start + size]:
                break
            found.append(block)
            parent = self._commit_number[block]
        return np.array(found, np.int32)

    def as_parent(self, block: int) -> Parent:
        """What a block that continues the cached ``block`` gives as its parent."""
        return self._commit_number[block]

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of them wait in the free list (taking them makes ``num_free`` smaller)."""
        refcount = self._refcount
        return sum(1 for block in blocks if refcount[block] == 0)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each (cached) block."""
        refcount = self._refcount
        for block in blocks:
            if refcount[block] == 0:
                self._free.remove(block)
            refcount[block] += 1

    def commit(self, block: int, generation: int, digest: bytes, parent: Parent, content: bytes) -> Parent | None:
        """A full block's content is on the device: make it findable. Returns the parent of what continues it.

        When another block holds the same content already, that one stays the one that is found, and becomes the parent.
        None: it cannot be found, and so neither can what continues it, because it has been handed out again since
        ``generation`` or because other content has the same hash. ``content`` are its token ids, int32[block_size].
        """
        holder = self._by_hash.get(digest)
        if holder is not None:
            same = self._parent[holder] == parent and self._content[holder] == content
            return self._commit_number[holder] if same else None
        if self.generation[block] != generation or self._hash[block] is not None:
            return None
        self._commits += 1
        self._by_hash[digest] = block
        self._hash[block] = digest
        self._parent[block] = parent
        self._commit_number[block] = self._commits
        self._content[block] = content
        if self._refcount[block] == 0:
            # Let go before it was known to be worth keeping: it had been put first in line.
            self._free.remove(block)
            self._free.push_back(block)
        return self._commits

    def reset_cache(self) -> bool:
        """Forget all content, also what plans in flight will have computed; False (and no change) while any block is held."""
        if self.num_used:
            return False
        for block in list(self._by_hash.values()):
            self._forget(block)
        # Plans still in flight may fill blocks that were let go meanwhile: what they hold is of the old days too.
        self.generation += 1
        return True

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = self._parent[block] = self._content[block] = None

    def check_integrity(self, references: npt.NDArray[np.int64]) -> None:
        """Compare with the references that sequences really hold, int64[num_blocks].

        Raises:
            IntegrityError: a refcount is wrong, a block is in two places or in none, or the cache names a wrong block.
        """
        refcount = np.frombuffer(self._refcount, np.int32)
        if not np.array_equal(refcount, references):
            wrong = np.flatnonzero(refcount != references)[:8].tolist()
            raise IntegrityError(f"refcounts differ from references held at blocks {wrong}")
        free = list(self._free)
        if len(free) != len(set(free)) or len(free) != self._free.size:
            raise IntegrityError("the free list is broken")
        if set(free) != set(np.flatnonzero(refcount == 0).tolist()):
            raise IntegrityError("a block is in two places or in none")
        if any(self._hash[block] != digest for digest, block in self._by_hash.items()):
            raise IntegrityError("the cache names a block with other content")
        if len(self._by_hash) != sum(digest is not None for digest in self._hash):
            raise IntegrityError("a hashed block cannot be found")

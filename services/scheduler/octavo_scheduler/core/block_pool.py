"""Blocks of one tier (device or host): who holds references, what content they hold, which may be reused.

A block is in exactly one of two places: referenced (refcount > 0) or in the free list. A block whose content is known
(named) stays findable while it waits in the free list; it loses its name when it is handed out again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.free_list import FreeList
from octavo_shared.plan import NO_NAMES, PageNames
from octavo_shared.records import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Content:
    """What a full block holds. The same content has the same ``number`` wherever it lies.

    ``digest`` is its chain hash, ``parent`` the number of the content it continues (or of the root of its chain),
    ``depth`` its place in the chain (1 = first) and ``tokens`` its token ids, int32[block_size], as bytes.
    """

    digest: bytes
    number: int
    parent: int
    depth: int
    tokens: bytes


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Columns are arrays over the blocks, so that a million cost little.

    ``generation`` uint32 counts how often a block was handed out: a (block, generation) pair names one life of it, so that
    what was said of an earlier life can be told apart (rule R1). ``hits`` counts how often its present content was found,
    ``used_at`` is the step in which that or its handing out last happened.

    ``evicting`` is told of a named block just before it loses its content.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evicting: Callable[[int], None] | None = None
        self.now = 0
        self._handed_out = 0
        # np.zeros and np.empty touch no memory: columns become resident where blocks really are used.
        self.generation: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        self.hits: Int32Array = np.zeros(num_blocks, np.int32)
        self.used_at: Int64Array = np.zeros(num_blocks, np.int64)
        self.depth: Int32Array = np.zeros(num_blocks, np.int32)
        self._refcount = array("i", bytes(4 * num_blocks))
        self.refcount: Int32Array = np.frombuffer(self._refcount, np.int32)
        self._free = FreeList(num_blocks)
        # Beside its own token ids each block keeps whom its content continues. Both are compared, so that a collision of
        # hashes cannot leak, however far up the chain it lies.
        self._digest: list[bytes | None] = [None] * num_blocks
        self._named = bytearray(num_blocks)
        self.named: npt.NDArray[np.bool_] = np.frombuffer(self._named, np.bool_)
        self.number: Int64Array = np.zeros(num_blocks, np.int64)
        self.parent: Int64Array = np.zeros(num_blocks, np.int64)
        self.tokens: Int32Array = np.empty((num_blocks, block_size), np.int32)
        # Blocks that have got or lost a name since the last time somebody asked, and what is to be said of them if ready.
        self._renamed: set[int] = set()
        self._names: PageNames | None = NO_NAMES
        self._by_digest: dict[bytes, int] = {}
        self.find = self._by_digest.get

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self._free.size

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self._free.size

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found."""
        return len(self._by_digest)

    def free_blocks(self) -> list[int]:
        """Free blocks in the order they will be taken."""
        return list(self._free)

    def next_free(self, count: int) -> list[int]:
        """The first ``count`` free blocks in the order they will be taken."""
        return self._free.first(count)

    def take_handed_out(self) -> int:
        """How many blocks were handed out since the last call."""
        count, self._handed_out = self._handed_out, 0
        return count

    def is_named(self, block: int) -> bool:
        """Its content can be found."""
        return self._digest[block] is not None

    def content(self, block: int) -> Content:
        """What a named block holds."""
        digest = self._digest[block]
        assert digest is not None, "the block has no known content"
        number, parent, depth = int(self.number[block]), int(self.parent[block]), int(self.depth[block])
        return Content(digest, number, parent, depth, self.tokens[block].tobytes())

    def allocate(self, count: int) -> Int32Array:
        """Hand out ``count`` blocks (there must be as many), with one reference each: int32[count]."""
        blocks = np.array(self._free.pop_many(count), np.int32)
        self._handed_out += count
        self.refcount[blocks] = 1
        named = self.named[blocks]
        if np.count_nonzero(named):
            for block in blocks[named].tolist():
                if self.evicting is not None:
                    self.evicting(block)
                self._forget(block)
        self.generation[blocks] += 1
        self.used_at[blocks] = self.now
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, the tail first: the head of a chain is worth keeping longest."""
        refcount, free = self._refcount, self._free
        for block in reversed(blocks):
            left = refcount[block] - 1
            assert left >= 0, "released more often than held"
            refcount[block] = left
            if left == 0:
                if self._digest[block] is None:
                    free.push_front(block)
                else:
                    free.push_back(block)

    def acquire(self, blocks: Int32Array) -> None:
        """Take one more reference to each block, int32[n], all different."""
        self._free.remove_many(blocks[self.refcount[blocks] == 0])
        self.refcount[blocks] += 1

    def touch(self, blocks: Int32Array) -> None:
        """Content of these blocks was found."""
        self.hits[blocks] += 1
        self.used_at[blocks] = self.now

    def num_free_among(self, blocks: Int32Array) -> int:
        """How many of them wait in the free list (taking them makes ``num_free`` smaller)."""
        return int((self.refcount[blocks] == 0).sum()) if len(blocks) else 0

    def holds(self, block: int, content: Content) -> bool:
        """Does the block that has this digest hold this content, or is it a collision of hashes?"""
        same = self.parent[block] == content.parent and self.tokens[block].tobytes() == content.tokens
        return bool(same)

    def name(self, block: int, generation: int, content: Content) -> bool:
        """A full block's content is there: make it findable.

        False: it is not, because the block has been handed out again since ``generation``, has a name already, or another
        block answers to this digest.
        """
        if content.digest in self._by_digest or self._digest[block] is not None:
            return False
        if self.generation[block] != generation:
            return False
        self._by_digest[content.digest] = block
        self._digest[block] = content.digest
        self._named[block] = True
        self._renamed.add(block)
        self._names = None
        self.number[block] = content.number
        self.parent[block] = content.parent
        self.depth[block] = content.depth
        self.hits[block] = 0
        self.tokens[block] = np.frombuffer(content.tokens, np.int32)
        if self._refcount[block] == 0:
            # Let go before it was known to be worth keeping: it had been put first in line.
            self._free.remove(block)
            self._free.push_back(block)
        return True

    def prepare_names(self) -> PageNames:
        """What has changed since ``take_names`` was called in what blocks are known to hold."""
        if self._names is None:
            blocks = np.fromiter(self._renamed, np.int32, len(self._renamed))
            named = self.named[blocks]
            numbers = np.where(named, self.number[blocks], 0)
            self._names = PageNames(blocks, numbers, self.parent[blocks], self.tokens[blocks[named]])
        return self._names

    def take_names(self) -> PageNames:
        """The same, for the last time. Quick when nothing has changed since it was prepared."""
        names, self._names = self.prepare_names(), NO_NAMES
        self._renamed.clear()
        return names

    def forget_all(self) -> int:
        """Nothing is findable any more, nor what plans in flight will have computed; returns how many blocks that were."""
        forgotten = len(self._by_digest)
        for block in list(self._by_digest.values()):
            self._forget(block)
        # What is being computed belongs to the old days too: names given for the lives so far come too late.
        self.generation += 1
        return forgotten

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digest[block] = None
            self._named[block] = False
            self._renamed.add(block)
            self._names = None

    def check_integrity(self, references: Int64Array) -> None:
        """Compare with the references that are really held, int64[num_blocks].

        Raises:
            IntegrityError: a refcount is wrong, a block is in two places or in none, or the cache names a wrong block.
        """
        if not np.array_equal(self.refcount, references):
            wrong = np.flatnonzero(self.refcount != references)[:8].tolist()
            raise IntegrityError(f"refcounts differ from references held at blocks {wrong}")
        free = list(self._free)
        if len(free) != len(set(free)) or len(free) != self._free.size:
            raise IntegrityError("the free list is broken")
        if set(free) != set(np.flatnonzero(self.refcount == 0).tolist()):
            raise IntegrityError("a block is in two places or in none")
        if any(self._digest[block] != digest for digest, block in self._by_digest.items()):
            raise IntegrityError("the cache names a block with other content")
        if self.named.tolist() != [digest is not None for digest in self._digest]:
            raise IntegrityError("the column of named blocks is wrong")
        if len(self._by_digest) != int(self.named.sum()):
            raise IntegrityError("a named block cannot be found")

"""The order in which unused blocks are taken: an intrusive doubly linked list over two arrays.

Every operation is O(1), removal from the middle included, which is what a hit on a cached but unused block needs. The idea
is vLLM's free block queue; links live in flat arrays here, so a million blocks cost 8 MB and no objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

import numpy as np

from octavo_shared.records import Int32Array

_OUT = -1


class FreeList:
    """Block ids 0 … n-1, at first all of them in order. The front is taken first."""

    __slots__ = ("_end", "_links", "_next", "_previous", "size")

    def __init__(self, num_blocks: int) -> None:
        # Position n is a sentinel that closes the ring: no special cases at either end.
        self._end = num_blocks
        self._next: array[int] = array("i", [*range(1, num_blocks + 1), 0])
        # The same memory as ``_next``.
        self._links: Int32Array = np.frombuffer(self._next, np.int32)
        self._previous: array[int] = array("i", [num_blocks, *range(num_blocks)])
        self.size = num_blocks

    def __len__(self) -> int:
        return self.size

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _OUT

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def pop_front(self) -> int:
        """Take the block that may go first. The list must not be empty."""
        block = self._next[self._end]
        assert block != self._end, "no free block"
        self.remove(block)
        return block

    def pop_many(self, count: int) -> list[int]:
        """Take the ``count`` blocks that may go first; there must be as many."""
        assert count <= self.size, "not enough free blocks"
        following = self._next
        taken = []
        block = following[self._end]
        for _ in range(count):
            taken.append(block)
            following[block], block = _OUT, following[block]
        following[self._end] = block
        self._previous[block] = self._end
        self.size -= count
        return taken

    def first(self, count: int) -> list[int]:
        """The ``count`` blocks that may go first, or all of them; they stay."""
        return list(islice(self, count))

    def remove(self, block: int) -> None:
        """Take a certain block out."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = _OUT
        self.size -= 1

    def remove_many(self, blocks: Int32Array) -> None:
        """Take certain blocks out, int32[n], all different.

        Blocks of one chain that were put in together, the tail first, lie side by side: each such run is one cut.
        """
        if not len(blocks):
            return
        following = self._links
        cuts = (following[blocks[1:]] != blocks[:-1]).nonzero()[0].tolist()
        for first, last in zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(blocks) - 1], strict=True):
            after, before = self._next[blocks[first]], self._previous[blocks[last]]
            self._next[before] = after
            self._previous[after] = before
        following[blocks] = _OUT
        self.size -= len(blocks)

    def push_front(self, block: int) -> None:
        """Its content is worthless: take it before all others."""
        self._insert(self._end, block)

    def push_back(self, block: int) -> None:
        """Its content may be wanted again: take it last."""
        self._insert(self._previous[self._end], block)

    def _insert(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[block], self._previous[block] = after, before
        self._next[before] = self._previous[after] = block
        self.size += 1

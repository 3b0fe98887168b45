"""Choices of one request share what they have in common: one prefill, then forks, then copy-on-write.

The first choice of a request (the leader) computes the prompt; the others follow. When the leader's last logits are
sampled, each follower that finds a slot is sampled from the same row and shares every block, the partly filled last one
too (rule R5). Whoever writes into a block that others hold copies it first; the last owner writes in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.admission import will_fit
from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.events import Admitted, Chunk
from octavo_scheduler.core.in_flight import Fork
from octavo_scheduler.core.sequence import Sequence, State
from octavo_scheduler.core.slots import SlotTable
from octavo_shared.plan import PageMoves
from octavo_shared.records import Int32Array

if TYPE_CHECKING:
    from octavo_scheduler.core.draft import Draft, Samples
    from octavo_scheduler.core.scheduler import Scheduler


class Families:
    """Who follows whom, by the leader's uid."""

    def __init__(self) -> None:
        self._followers: dict[int, list[Sequence]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._followers)

    def followers(self) -> Iterator[Sequence]:
        """Everyone who follows."""
        for followers in self._followers.values():
            yield from followers

    def form(self, leader: Sequence, followers: list[Sequence]) -> None:
        """``followers`` wait for the prompt that ``leader`` computes."""
        if followers:
            self._followers[leader.uid] = followers
            for follower in followers:
                follower.state = State.FOLLOWING
                self._leader_of[follower.uid] = leader.uid

    def leads(self, uid: int) -> bool:
        """Somebody follows this sequence."""
        return uid in self._followers

    def release(self, uid: int) -> list[Sequence]:
        """The followers of a leader whose prompt is about to be computed; they follow no longer."""
        followers = self._followers.pop(uid, [])
        for follower in followers:
            del self._leader_of[follower.uid]
        return followers

    def leave(self, sequence: Sequence) -> Sequence | None:
        """A sequence ends. If it led, its first follower leads from here on, and is returned: it has to wait its turn."""
        leader = self._leader_of.pop(sequence.uid, None)
        if leader is not None:
            self._followers[leader].remove(sequence)
            if not self._followers[leader]:
                del self._followers[leader]
            return None
        followers = self.release(sequence.uid)
        if not followers:
            return None
        heir = followers[0]
        heir.state = State.WAITING
        self.form(heir, followers[1:])
        return heir


def fork_followers(core: Scheduler, draft: Draft, samples: Samples) -> tuple[list[Fork], list[Sequence]]:
    """Followers of leaders whose prompt a plan completes: those that find room are forked, the others are late."""
    forks: list[Fork] = []
    late: list[Sequence] = []
    if not len(core.families):
        return forks, late
    # From the end, since each fork moves the samples behind it.
    for place, uid in reversed(list(enumerate(samples.uids.tolist()))):
        if not core.families.leads(uid):
            continue
        leader = core.sequence(uid)
        followers = core.families.release(uid)
        room = _room_for(core, followers)
        children = followers[:room]
        late += followers[room:]
        forks += [Fork(leader, child) for child in children]
        rows = [_fork(core, draft, samples.of_row[place], leader, child) for child in children]
        samples.insert(place + 1, rows, core.table)
    return forks, late


def _room_for(core: Scheduler, followers: list[Sequence]) -> int:
    """How many of a leader's followers find a slot, and memory for what they are going to say as far as that is known."""
    child = followers[0]
    prompt_blocks = len(child.tokens) // core.config.block_size
    most = min(len(followers), core.table.num_free)
    return bisect_left(range(1, most + 1), True, key=lambda count: not will_fit(core, child, count, prompt_blocks))


def _fork(core: Scheduler, draft: Draft, place: int, leader: Sequence, child: Sequence) -> int:
    """The child takes a slot on the blocks of its leader, which computes in the plan's row ``place``; returns its own."""
    table = core.table
    blocks = table.blocks(leader).copy()
    num_tokens = len(child.tokens)
    core.pool.acquire(blocks)
    slot = core.seat(child, blocks, num_tokens)
    if num_tokens % core.config.block_size:
        table.shares_tail[[table.row(leader), table.row(child)]] = 1
    # As of before the forward pass it has what its leader has.
    draft.admitted.append(child.placed(slot, blocks, int(draft.starts[place])))
    core.note(Admitted(child, core.step, num_tokens, num_tokens))
    core.note(Chunk(child, core.step, num_tokens, 0, last=True))
    return table.row(child)


class CopyOnWrite:
    """Finds who is about to write into a block that others hold, and gives it one of its own."""

    def __init__(self, table: SlotTable, pool: BlockPool, block_size: int) -> None:
        self._table = table
        self._pool = pool
        self._block_size = block_size
        self._swaps: list[tuple[int, int, int, int]] = []

    def copies_needed(self, rows: npt.NDArray[np.intp]) -> int:
        """Blocks that have to be copied before these rows (of the slot table) compute what comes next."""
        return sum(copies for _, copies in self._writers(rows))

    def _writers(self, rows: npt.NDArray[np.intp]) -> list[tuple[list[int], int]]:
        """Rows by the shared block they write into, and how many of them must copy it."""
        table, size = self._table, self._block_size
        by_block: dict[int, list[int]] = {}
        for row in rows[table.shares_tail[rows] != 0].tolist():
            position = int(table.planned[row])
            if position % size:
                block = int(table.block_table[table.slot[row], position // size])
                by_block.setdefault(block, []).append(row)
        # If every holder writes, the last one finds itself alone.
        refcount = self._pool.refcount
        return [(writers, min(len(writers), int(refcount[block]) - 1)) for block, writers in by_block.items()]

    def diverge(self, rows: npt.NDArray[np.intp]) -> None:
        """Make copies for these rows where needed; there must be as many free blocks as ``copies_needed`` said."""
        table, size = self._table, self._block_size
        for writers, copies in self._writers(rows):
            fresh = self._pool.allocate(copies).tolist()
            for row, block in zip(writers, fresh, strict=False):
                slot, index = int(table.slot[row]), int(table.planned[row]) // size
                old = int(table.block_table[slot, index])
                self._swaps.append((slot, index, old, block))
                table.block_table[slot, index] = block
                self._pool.release([old])
        table.shares_tail[rows] = 0

    def take(self) -> tuple[Int32Array, Int32Array, Int32Array, PageMoves] | None:
        """What the plan that is being made must say: (slots, indices, new blocks) of swaps, and the copies."""
        if not self._swaps:
            return None
        slots, indices, old, new = (np.array(column, np.int32) for column in zip(*self._swaps, strict=True))
        self._swaps = []
        return slots, indices, new, PageMoves(old, new, self._pool.generation[new])

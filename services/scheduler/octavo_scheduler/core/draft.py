"""A plan while it is being made: rows of the slot table that compute, and what they sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.host_tier import Moves
from octavo_scheduler.core.in_flight import BlockFills, find_fills
from octavo_scheduler.core.slots import Rows, SlotTable
from octavo_shared.plan import NO_INTS, NO_MOVES, CacheOffer, NewSequence, PageMoves, StepPlan
from octavo_shared.records import Int32Array

RowIndex = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Grant:
    """``rows`` of the slot table compute ``counts`` tokens each, ``num_tokens`` in all, which brings them to ``ends``.

    ``near`` intp[k] are the places among them of those that come to the end of the blocks they have. ``growing`` rows
    intp[g] need ``need`` int32[g] more blocks, ``growth`` in all; ``forked`` rows intp[f] write into blocks that others may
    hold and so need ``copies`` blocks in all.
    """

    rows: Rows
    counts: Int32Array
    ends: Int32Array
    num_tokens: int
    near: RowIndex
    growing: RowIndex
    need: Int32Array
    growth: int
    forked: RowIndex
    copies: int

    @property
    def num_blocks(self) -> int:
        """Blocks that have to be free."""
        return self.growth + self.copies


class Draft:
    """Rows that compute: ``rows`` of the slot table (r of them), ``counts`` tokens each, from ``starts`` to ``ends``, int32[r].

    ``slots`` and ``uids`` [r] are who has the rows. These two, and the columns of ``Samples``, may be shared between plans:
    they are never written to.
    """

    def __init__(self, table: SlotTable, grant: Grant) -> None:
        self._table = table
        self._take_rows(grant.rows)
        self.counts = grant.counts
        self.ends = grant.ends
        self.starts: Int32Array = grant.ends - grant.counts
        # Places of the rows that may fill a block.
        self._near = grant.near
        self.num_tokens = grant.num_tokens
        self.admitted: list[NewSequence] = []
        self.grow_slots = NO_INTS
        self.grow_blocks = NO_INTS

    def _take_rows(self, rows: Rows) -> None:
        table = self._table
        self.rows = rows
        if isinstance(rows, slice) and rows.stop == len(table):
            self.slots, self.uids = table.roster.slots, table.roster.uids
        else:
            self.slots, self.uids = table.slot[rows].copy(), table.uid[rows].copy()

    @property
    def num_rows(self) -> int:
        """Rows that compute."""
        return len(self.slots)

    def grow(self, slots: Int32Array, blocks: Int32Array) -> None:
        """Block tables get longer: a slot for each block."""
        self.grow_slots, self.grow_blocks = slots, blocks

    def admit(self, admitted: list[NewSequence], grants: list[int]) -> None:
        """Sequences that have just taken the last rows of the table compute as well."""
        if not admitted:
            return
        rows, before, now = self.num_rows, len(self._table) - len(admitted), len(self._table)
        if isinstance(self.rows, slice) and self.rows.stop == before:
            self._take_rows(slice(0, now))
        else:
            own = np.arange(self.num_rows) if isinstance(self.rows, slice) else self.rows
            self._take_rows(np.concatenate([own, np.arange(before, now)]))
        self.admitted += admitted
        self.counts = np.append(self.counts, np.array(grants, np.int32))
        self.starts = self._table.planned[self.rows].copy()
        self.ends = self.starts + self.counts
        self._near = np.append(self._near, np.arange(rows, self.num_rows))
        self.num_tokens += sum(grants)

    def advance(self, generation: npt.NDArray[np.uint32], block_size: int, step: int) -> BlockFills | None:
        """The lengths move on; returns the blocks that become full."""
        table = self._table
        table.planned[self.rows] = self.ends
        table.last_step[self.rows] = step
        return find_fills(self._near, self.starts, self.ends, self.slots, table.block_table, generation, block_size)

    def build(
        self,
        numbers: tuple[int, int, int],
        released: list[int],
        samples: Samples,
        swaps: tuple[Int32Array, Int32Array, Int32Array, PageMoves] | None,
        moves: Moves | None,
        names: CacheOffer,
    ) -> StepPlan:
        """The plan. ``numbers`` are its term, epoch and step."""
        term, epoch, step = numbers
        swap_slots, swap_indices, swap_blocks, copies = swaps or (NO_INTS, NO_INTS, NO_INTS, NO_MOVES)
        return StepPlan(
            term=term,
            epoch=epoch,
            step=step,
            release=np.array(released, np.int32) if released else NO_INTS,
            admit=tuple(self.admitted),
            grow_slots=self.grow_slots,
            grow_blocks=self.grow_blocks,
            swap_slots=swap_slots,
            swap_indices=swap_indices,
            swap_blocks=swap_blocks,
            copy_out=moves.out() if moves is not None else NO_MOVES,
            copies=copies,
            restores=moves.back() if moves is not None else NO_MOVES,
            row_slots=self.slots,
            row_starts=self.starts,
            row_tokens=self.counts,
            row_samples=samples.per_row,
            sample_slots=samples.slots,
            names=names,
        )


class Samples:
    """What a plan samples, row by row: [samples] each.

    ``of_row`` is the plan's row, ``slots`` and ``uids`` the sequence the sample is for (another than the row's if it is a
    fork), ``rows`` that sequence's row in the slot table. ``per_row`` int32[rows of the plan] counts them.
    """

    def __init__(
        self,
        per_row: Int32Array,
        of_row: npt.NDArray[np.intp],
        slots: Int32Array,
        uids: npt.NDArray[np.int64],
        rows: Rows,
    ) -> None:
        self.per_row = per_row
        self.of_row = of_row
        self.slots = slots
        self.uids = uids
        self.rows = rows

    @classmethod
    def of(cls, table: SlotTable, draft: Draft) -> Samples:
        """Every row that reaches the end of its tokens is sampled once."""
        reached = draft.ends == table.expected[draft.rows]
        if draft.slots is table.roster.slots and np.count_nonzero(reached) == draft.num_rows:
            roster = table.roster
            return cls(roster.ones, roster.rows, draft.slots, draft.uids, draft.rows)
        of_row = reached.nonzero()[0]
        rows = of_row if isinstance(draft.rows, slice) else draft.rows[of_row]
        return cls(reached.astype(np.int32), of_row, draft.slots[of_row], draft.uids[of_row], rows)

    def insert(self, place: int, rows: list[int], table: SlotTable) -> None:
        """Samples for further ``rows`` of the table, drawn like the one before ``place``."""
        row = self.of_row[place - 1]
        own = np.arange(len(self.slots)) if isinstance(self.rows, slice) else self.rows
        at = [place] * len(rows)
        self.rows = np.insert(own, at, rows)
        self.of_row = np.insert(self.of_row, at, row)
        self.slots = np.insert(self.slots, at, table.slot[rows])
        self.uids = np.insert(self.uids, at, table.uid[rows])
        self.per_row = self.per_row.copy()
        self.per_row[row] += len(rows)

    def beams(self, table: SlotTable) -> npt.NDArray[np.bool_] | None:
        """Samples that bring candidates, bool[samples]; None when there are none."""
        mask: npt.NDArray[np.bool_] = table.is_beam[self.rows] != 0
        return mask if mask.any() else None

    def advance(self, table: SlotTable, step: int, beams: npt.NDArray[np.bool_] | None) -> None:
        """Every sampled sequence has one token more to come, but for beams, whose next token is decided elsewhere."""
        table.expected[self.rows] += 1 if beams is None else ~beams
        table.last_step[self.rows] = step

"""Which running sequences compute in a step, how many tokens each, and the blocks they need for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.draft import Draft
from octavo_scheduler.core.forks import CopyOnWrite
from octavo_scheduler.core.slots import Rows, SlotTable
from octavo_shared.plan import NO_INTS
from octavo_shared.records import Int32Array

RowIndex = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Grant:
    """``rows`` of the slot table compute ``counts`` tokens each, ``num_tokens`` in all.

    ``growing`` rows need ``need`` int32[g] more blocks, ``growth`` in all; ``forked`` rows write into blocks that others may
    hold and so need ``copies`` blocks in all.
    """

    rows: Rows
    counts: Int32Array
    num_tokens: int
    growing: RowIndex
    need: Int32Array
    growth: int
    forked: RowIndex
    copies: int

    @property
    def num_blocks(self) -> int:
        """Blocks that have to be free."""
        return self.growth + self.copies


class Granter:
    """Shares the budget of a step among running sequences: those one token behind first, then in order of admission."""

    def __init__(self, config: CoreConfig, table: SlotTable, pool: BlockPool, copy_on_write: CopyOnWrite) -> None:
        self._config = config
        self._table = table
        self._pool = pool
        self._copy_on_write = copy_on_write

    def propose(self) -> Grant:
        """What running sequences should compute; nothing is changed."""
        rows, counts, num_tokens = self._share()
        growing, need = self._growth(rows, counts)
        forked = _pick(rows, self._table.shares_tail[rows].nonzero()[0])
        copies = self._copy_on_write.copies_needed(forked) if len(forked) else 0
        return Grant(rows, counts, num_tokens, growing, need, int(need.sum()), forked, copies)

    def carry_out(self, grant: Grant) -> Draft:
        """Give the rows their blocks, of which there must be as many free: a plan begins."""
        draft = Draft(self._table, grant.rows, grant.counts, grant.num_tokens)
        if grant.growth:
            blocks = self._pool.allocate(grant.growth)
            draft.grow(self._table.grow(grant.growing, grant.need, blocks), blocks)
        if len(grant.forked):
            self._copy_on_write.diverge(grant.forked)
        return draft

    def _share(self) -> tuple[Rows, Int32Array, int]:
        table, n = self._table, len(self._table)
        expected = table.expected[:n]
        behind = expected - table.planned[:n]
        # Who has all the tokens it may have waits for its end.
        complete = expected >= table.max_total[:n]
        if np.count_nonzero(complete):
            behind[complete] = 0
        if self._config.long_prefill_token_threshold:
            np.minimum(behind, self._config.long_prefill_token_threshold, out=behind)
        num_tokens = int(behind.sum())
        if num_tokens > self._config.max_num_batched_tokens:
            num_tokens = self._config.max_num_batched_tokens
            behind = _within(behind, num_tokens)
        if np.count_nonzero(behind) == n:
            return slice(0, n), behind, num_tokens
        rows = behind.nonzero()[0]
        return rows, behind[rows], num_tokens

    def _growth(self, rows: Rows, counts: Int32Array) -> tuple[RowIndex, Int32Array]:
        missing: Int32Array = self._table.planned[rows] + counts - self._table.capacity[rows]
        places = (missing > 0).nonzero()[0]
        if not len(places):
            return places, NO_INTS
        need: Int32Array = -(-missing[places] // np.int32(self._config.block_size))
        return _pick(rows, places), need


def _pick(rows: Rows, places: RowIndex) -> RowIndex:
    """The rows at these places; where all rows are meant, a place is a row."""
    if isinstance(rows, slice):
        return places
    picked: RowIndex = rows[places]
    return picked


def _within(behind: Int32Array, budget: int) -> Int32Array:
    """Grants int32[n] for rows that are ``behind`` int32[n] tokens behind: those one behind first, then in order."""
    order = np.argsort(behind > 1, kind="stable")
    before = np.cumsum(behind[order]) - behind[order]
    grants = np.empty_like(behind)
    grants[order] = np.clip(budget - before, 0, behind[order])
    return grants

"""Which running sequences compute in a step, how many tokens each, and the blocks they need for it."""

from __future__ import annotations

import numpy as np

from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.draft import Draft, Grant, RowIndex
from octavo_scheduler.core.forks import CopyOnWrite
from octavo_scheduler.core.slots import Rows, SlotTable
from octavo_shared.records import Int32Array


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
        ends: Int32Array = self._table.planned[rows] + counts
        near, growing, need = self._growth(rows, ends)
        forked = _pick(rows, self._table.shares_tail[rows].nonzero()[0])
        copies = self._copy_on_write.copies_needed(forked) if len(forked) else 0
        return Grant(rows, counts, ends, num_tokens, near, growing, need, int(np.add.reduce(need)), forked, copies)

    def carry_out(self, grant: Grant) -> Draft:
        """Give the rows their blocks, of which there must be as many free: a plan begins."""
        draft = Draft(self._table, grant)
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
        num_tokens = int(np.add.reduce(behind))
        if num_tokens > self._config.max_num_batched_tokens:
            num_tokens = self._config.max_num_batched_tokens
            behind = _within(behind, num_tokens)
        if np.count_nonzero(behind) == n:
            return slice(0, n), behind, num_tokens
        rows = behind.nonzero()[0]
        return rows, behind[rows], num_tokens

    def _growth(self, rows: Rows, ends: Int32Array) -> tuple[RowIndex, RowIndex, Int32Array]:
        size = self._config.block_size
        missing: Int32Array = ends - self._table.capacity[rows]
        near = (missing >= 0).nonzero()[0]
        # None where the tokens just fit: such rows are near, for they fill a block.
        need: Int32Array = (missing[near] + np.int32(size - 1)) // np.int32(size)
        growing = need.nonzero()[0]
        return near, _pick(rows, near[growing]), need[growing]


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

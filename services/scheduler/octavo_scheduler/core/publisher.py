"""Blocks that steps have filled become findable: in batches, after the next plan has been sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from octavo_scheduler.core.in_flight import BlockFills, SentPlan
from octavo_scheduler.core.prefix_cache import PrefixCache
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_scheduler.core.slots import SlotTable
from octavo_shared.records import Int32Array

_NO_ROWS: frozenset[int] = frozenset()


class _Batch(NamedTuple):
    """What one acknowledged plan has filled, but for pages of rows that are ``unsound``, which nobody should read."""

    plan: SentPlan
    fills: BlockFills
    unsound: frozenset[int]


class Publisher:
    """Owns the fills that have been acknowledged and not been hashed yet."""

    def __init__(self, cache: PrefixCache, table: SlotTable, block_size: int) -> None:
        self._cache = cache
        self._table = table
        self._bytes = block_size * 4
        self._batches: list[_Batch] = []

    def add(self, plan: SentPlan, sample_counts: Int32Array | None) -> None:
        """The fills of ``plan`` have been computed; ``sample_counts`` int32[samples] came of it, None if 1 everywhere."""
        if plan.fills is None or not self._cache.enabled:
            return
        # A row that could not be sampled (its logits were not numbers) leaves pages nobody should read.
        unsound = _NO_ROWS if sample_counts is None else frozenset(plan.sampled[sample_counts == 0].tolist())
        self._batches.append(_Batch(plan, plan.fills, unsound))

    def forget(self) -> None:
        """Nothing computed until now is to be found."""
        self._batches.clear()

    def publish(self, alive: Mapping[int, Sequence]) -> None:
        """Hash and name all that waits; ``alive`` are the sequences that have not ended, by uid."""
        if self._batches:
            batches, self._batches = self._batches, []
            for batch in batches:
                self._publish(batch, alive)

    def _publish(self, batch: _Batch, alive: Mapping[int, Sequence]) -> None:
        plan, fills, unsound = batch
        slots = plan.slots[fills.row]
        contents = self._table.contents(slots, fills.index)
        # The slot may be another's by now; then the sequence itself knows its tokens.
        uids = plan.uids[fills.row]
        here = (self._table.uid_of_slot[slots] == uids).tolist()
        size, cache = self._bytes, self._cache
        columns = zip(
            map(alive.get, uids.tolist()),
            here,
            range(0, len(contents), size),
            fills.row.tolist(),
            fills.index.tolist(),
            fills.block.tolist(),
            fills.generation.tolist(),
            strict=True,
        )
        for sequence, is_here, start, row, index, block, generation in columns:
            if sequence is None or sequence.num_findable != index or row in unsound:
                continue
            content = contents[start : start + size] if is_here else self._own(sequence, index)
            cache.publish(sequence, index, block, generation, content)

    def _own(self, sequence: Sequence, index: int) -> bytes:
        row = sequence.tokens if sequence.slot == NO_SLOT else self._table.tokens[sequence.slot]
        first = index * self._bytes // 4
        content: bytes = np.ascontiguousarray(row[first : first + self._bytes // 4]).tobytes()
        return content

"""Blocks that steps have filled become findable: in batches, after the next plan has been sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from octavo_scheduler.core.in_flight import SentPlan
from octavo_scheduler.core.prefix_cache import PrefixCache
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_scheduler.core.slots import SlotTable
from octavo_shared.records import Int32Array


class _Batch(NamedTuple):
    """What one acknowledged plan has filled; None among the sequences where a page may not be read by others."""

    plan: SentPlan
    sequences: list[Sequence | None]


class Publisher:
    """Owns the fills that have been acknowledged and not been hashed yet."""

    def __init__(self, cache: PrefixCache, table: SlotTable, block_size: int) -> None:
        self._cache = cache
        self._table = table
        self._bytes = block_size * 4
        self._batches: list[_Batch] = []

    def add(self, plan: SentPlan, sample_counts: Int32Array, alive: Mapping[int, Sequence]) -> None:
        """The fills of ``plan`` have been computed; ``sample_counts`` int32[samples] came of it. ``alive`` is by uid."""
        fills = plan.fills
        if fills is None or not self._cache.enabled:
            return
        sequences = [alive.get(uid) for uid in plan.uids[fills.row].tolist()]
        if not sample_counts.all():
            # A row that could not be sampled (its logits were not numbers) leaves pages nobody should read.
            unsound = set(plan.sampled[sample_counts == 0].tolist())
            rows = fills.row.tolist()
            sequences = [None if row in unsound else one for row, one in zip(rows, sequences, strict=True)]
        self._batches.append(_Batch(plan, sequences))

    def forget(self) -> None:
        """Nothing computed until now is to be found."""
        self._batches.clear()

    def publish(self) -> None:
        """Hash and name all that waits."""
        if self._batches:
            batches, self._batches = self._batches, []
            for batch in batches:
                self._publish(batch)

    def _publish(self, batch: _Batch) -> None:
        plan, fills = batch.plan, batch.plan.fills
        assert fills is not None
        slots = plan.slots[fills.row]
        contents = self._table.contents(slots, fills.index)
        # The slot may be another's by now; then the sequence itself knows its tokens.
        here = (self._table.uid_of_slot[slots] == plan.uids[fills.row]).tolist()
        size, cache = self._bytes, self._cache
        columns = zip(
            batch.sequences,
            here,
            range(0, len(contents), size),
            fills.index.tolist(),
            fills.block.tolist(),
            fills.generation.tolist(),
            strict=True,
        )
        for sequence, is_here, start, index, block, generation in columns:
            if sequence is None or sequence.num_findable != index:
                continue
            content = contents[start : start + size] if is_here else self._own(sequence, index)
            cache.publish(sequence, index, block, generation, content)

    def _own(self, sequence: Sequence, index: int) -> bytes:
        row = sequence.tokens if sequence.slot == NO_SLOT else self._table.tokens[sequence.slot]
        first = index * self._bytes // 4
        content: bytes = np.ascontiguousarray(row[first : first + self._bytes // 4]).tobytes()
        return content

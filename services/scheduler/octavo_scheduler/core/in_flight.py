"""Plans that were sent and not yet acknowledged: what each one will have done once its result is back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_shared.records import Int32Array


@dataclass(frozen=True, slots=True)
class BlockFills:
    """Blocks that a plan fills to the last token, as of the plan: parallel arrays [f].

    ``row`` of the plan, ``index`` in the sequence's block table, the ``block`` and its ``generation``.
    """

    row: Int32Array
    index: Int32Array
    block: Int32Array
    generation: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SentPlan:
    """Rows of a plan, [r] each, with the identity of the sequence that had the slot when it was made."""

    step: int
    slots: Int32Array
    uids: npt.NDArray[np.int64]
    # Rows that are sampled, and their slots: [samples] each.
    sampled: npt.NDArray[np.intp]
    sample_slots: Int32Array
    fills: BlockFills | None


def find_fills(
    starts: Int32Array,
    ends: Int32Array,
    slots: Int32Array,
    block_table: Int32Array,
    generation: npt.NDArray[np.uint32],
    block_size: int,
) -> BlockFills | None:
    """Which blocks become full when rows compute [starts, ends), [r] each; None when there are none."""
    first = starts // block_size
    filled = ends // block_size - first
    total = int(filled.sum())
    if not total:
        return None
    row = np.repeat(np.arange(len(starts), dtype=np.int32), filled)
    offset = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(filled) - filled, filled)
    index = (first[row] + offset).astype(np.int32)
    block = block_table[slots[row], index]
    return BlockFills(row, index, block, generation[block])

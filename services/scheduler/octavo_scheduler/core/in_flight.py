"""Plans that were sent and not yet acknowledged: what each one will have done once its result is back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.host_tier import Moves
from octavo_scheduler.core.sequence import Sequence
from octavo_scheduler.core.slots import Rows
from octavo_shared.records import Int32Array


@dataclass(frozen=True, slots=True)
class BlockFills:
    """Blocks that a plan fills to the last token, as of the plan: parallel arrays [f].

    ``row`` of the plan, ``index`` in the sequence's block table, the ``block`` and its ``generation``.
    """

    row: npt.NDArray[np.intp]
    index: Int32Array
    block: Int32Array
    generation: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that starts as a copy of another, from this plan's sample on."""

    parent: Sequence
    child: Sequence


@dataclass(frozen=True, slots=True)
class SentPlan:
    """A plan's rows and samples, with the identity of the sequences that had the slots when it was made.

    ``version`` is that of the slot table; as long as it stays, ``sample_rows`` are the samples' rows in it.
    """

    step: int
    version: int
    slots: Int32Array  # [rows]
    uids: npt.NDArray[np.int64]  # [rows]
    # Rows of the plan that are sampled, once per sample; the samples' slots, sequences and rows in the table: [samples].
    sampled: npt.NDArray[np.intp]
    sample_slots: Int32Array
    sample_uids: npt.NDArray[np.int64]
    sample_rows: Rows
    num_tokens: int
    prompt_tokens: int
    fills: BlockFills | None
    # Samples that are beams' (their results are candidates), or None.
    beams: npt.NDArray[np.bool_] | None = None
    forks: tuple[Fork, ...] = ()
    # Choices that found no slot when their leader's prompt was computed; they will find it in the prefix cache.
    late: tuple[Sequence, ...] = ()
    moves: Moves | None = None


def find_fills(
    near: npt.NDArray[np.intp],
    starts: Int32Array,
    ends: Int32Array,
    slots: Int32Array,
    block_table: Int32Array,
    generation: npt.NDArray[np.uint32],
    block_size: int,
) -> BlockFills | None:
    """Which blocks become full when rows compute [starts, ends), [r] each; None when there are none.

    Only the rows ``near`` [n] the end of a block are looked at.
    """
    first = starts[near] // block_size
    filled = ends[near] // block_size - first
    full = filled.nonzero()[0]
    if not len(full):
        return None
    row, index, counts = near[full], first[full], filled[full]
    total = int(np.add.reduce(counts))
    if total > len(row):
        row = np.repeat(row, counts)
        offset = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        index = (np.repeat(index, counts) + offset).astype(np.int32)
    block = block_table[slots[row], index]
    return BlockFills(row, index, block, generation[block])

"""What the memory holds right now, as columns: for people, never for decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo_shared.records import Int32Array

if TYPE_CHECKING:
    from octavo_scheduler.core.scheduler import Scheduler
    from octavo_scheduler.core.sequence import Sequence

Tier = Literal["device", "host"]
# By number: nobody refers to it and its content is unknown; nobody refers to it but it can be found; somebody does.
STATES = ("free", "cached", "active")


@dataclass(frozen=True, slots=True)
class KvTotals:
    """Blocks of each tier by state, and what is wasted, in tokens.

    ``shared_blocks`` have several references; ``saved_blocks`` are the references beyond the first: blocks that would be
    needed as well if nothing were shared. ``internal_waste_tokens`` is the room in blocks that are held and not filled,
    ``reserved_tokens`` that of blocks held for later. Blocks are of one size, so none is ever too small to be used:
    ``external_waste_tokens`` is 0.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    shared_blocks: int
    saved_blocks: int
    host_blocks: int
    host_cached_blocks: int
    host_moving_blocks: int
    internal_waste_tokens: int
    reserved_tokens: int
    external_waste_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvView:
    """Blocks ``start`` … ``start + n - 1`` of a tier; columns [n].

    ``state`` indexes ``STATES``. ``filled`` counts tokens that are (or, with the plans sent, will be) in it. ``depth`` is its
    place in its chain (1 = first, 0 = content unknown), ``age_steps`` how long ago it was last handed out or found.
    ``owners`` are the requests (with the choice) whose block tables name it.
    """

    tier: Tier
    start: int
    state: list[int]
    references: list[int]
    filled: list[int]
    depth: list[int]
    age_steps: list[int]
    hits: list[int]
    owners: list[list[str]]
    totals: KvTotals


def view_kv(core: Scheduler, start: int, count: int, tier: Tier = "device") -> KvView:
    """A window on one tier's blocks; the cost grows with the blocks that are in use, not with the pool."""
    pool = core.pool if tier == "device" else core.host.pool
    start = min(max(start, 0), pool.num_blocks)
    stop = min(start + max(count, 0), pool.num_blocks)
    window = slice(start, stop)
    named = pool.named[window]
    references = pool.refcount[window]
    state = np.where(references > 0, 2, np.where(named, 1, 0))
    filled = np.where(named, pool.block_size, 0).astype(np.int32)
    owners: list[list[str]] = [[] for _ in range(stop - start)]
    if tier == "device":
        _mark_owners(core, start, stop, filled, owners)
    return KvView(
        tier=tier,
        start=start,
        state=state.tolist(),
        references=references.tolist(),
        filled=filled.tolist(),
        depth=np.where(named, pool.depth[window], 0).tolist(),
        age_steps=np.maximum(core.step - pool.used_at[window], 0).tolist(),
        hits=np.where(named, pool.hits[window], 0).tolist(),
        owners=owners,
        totals=kv_totals(core),
    )


def _mark_owners(core: Scheduler, start: int, stop: int, filled: Int32Array, owners: list[list[str]]) -> None:
    table, size = core.table, core.config.block_size
    if not len(table):
        return
    counts = table.capacity[: len(table)] // size
    blocks = np.concatenate([table.blocks(sequence) for sequence in table.running])
    places = np.flatnonzero((blocks >= start) & (blocks < stop))
    row = np.searchsorted(np.cumsum(counts), places, side="right")
    index = places - (np.cumsum(counts) - counts)[row]
    at = blocks[places] - start
    np.maximum.at(filled, at, np.clip(table.planned[row] - index * size, 0, size).astype(np.int32))
    names = {number: _name(table.running[number]) for number in set(row.tolist())}
    for block, number in zip(at.tolist(), row.tolist(), strict=True):
        owners[block].append(names[number])


def _name(sequence: Sequence) -> str:
    return f"{sequence.request_id}/{sequence.choice}"


def kv_totals(core: Scheduler) -> KvTotals:
    """The sums over the whole pool."""
    pool, host, size = core.pool, core.host.pool, core.config.block_size
    active = pool.num_used
    cached_free = int((pool.named & (pool.refcount == 0)).sum())
    n = len(core.table)
    references = int(pool.refcount.sum())
    restored = sum(plan.moves.num_restored for plan in core.sent if plan.moves is not None)
    return KvTotals(
        num_blocks=pool.num_blocks,
        block_size=size,
        free_blocks=pool.num_free - cached_free,
        cached_blocks=cached_free,
        active_blocks=active,
        shared_blocks=int((pool.refcount > 1).sum()),
        saved_blocks=references - active,
        host_blocks=host.num_blocks,
        host_cached_blocks=host.num_cached,
        host_moving_blocks=host.num_used,
        internal_waste_tokens=int((core.table.capacity[:n] - core.table.planned[:n]).sum()),
        reserved_tokens=restored * size,
    )

"""What must hold between the parts of a core whenever it is at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_scheduler.core.beam_groups import is_idle
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.sequence import Sequence, State

if TYPE_CHECKING:
    from octavo_scheduler.core.scheduler import Scheduler


def check_core(core: Scheduler) -> None:
    """Verify every invariant that ties the parts together.

    Raises:
        IntegrityError: the first breach found.
    """
    core.table.check_integrity()
    table, n = core.table, len(core.table)
    if (table.capacity[:n] - table.planned[:n] >= core.config.block_size).any():
        # Growth and fills are looked for at the end of the last block alone.
        raise IntegrityError("a sequence has a block before it needs it")
    _check_references(core)
    by_state: dict[State, set[int]] = {state: set() for state in State}
    for sequence in core.sequences:
        by_state[sequence.state].add(sequence.uid)
    running = {sequence.uid for sequence in core.table.running}
    if running != by_state[State.RUNNING] or {one.uid for one in core.waiting} != by_state[State.WAITING]:
        raise IntegrityError("slots, the waiting queue and the states of sequences disagree")
    if core.restoring.keys() != by_state[State.RESTORING]:
        raise IntegrityError("sequences whose pages are restored and the states disagree")
    late = {one.uid for plan in core.sent for one in plan.late}
    following = {one.uid for one in core.families.followers()}
    if not following <= by_state[State.FOLLOWING] <= late | following:
        raise IntegrityError("somebody follows nobody")
    _check_beams(core, by_state[State.IDLE])
    if not core.sequences and not core.sent and core.pool.num_used:
        raise IntegrityError("blocks are referenced although nothing runs")


def _check_references(core: Scheduler) -> None:
    pool, host = core.pool, core.host.pool
    on_device, on_host = core.host.holds([plan.moves for plan in core.sent if plan.moves is not None])
    held = np.bincount(np.array(on_device, np.int64), minlength=pool.num_blocks)
    pool.check_integrity(core.table.references(pool.num_blocks) + held)
    host.check_integrity(np.bincount(np.array(on_host, np.int64), minlength=host.num_blocks))


def _check_beams(core: Scheduler, idle: set[int]) -> None:
    sequences: dict[int, Sequence] = {one.uid: one for one in core.sequences}
    members = {one.uid: one for group in core.beams for one in group.members}
    beams = {uid: one for uid, one in sequences.items() if one.beams is not None}
    if members != beams:
        raise IntegrityError("beam searches and their sequences disagree")
    if any(not is_idle(sequences[uid]) for uid in idle):
        raise IntegrityError("a beam that has not been computed waits for nothing")

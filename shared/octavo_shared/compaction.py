"""Replacing the beginning of a log by a snapshot (rule L5): done by the gateway that owns it, or for an orphan by the scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from octavo_shared.entries import encode_snapshot
from octavo_shared.fold import LogFold, SnapshotEvent
from octavo_shared.ids import RequestId
from octavo_shared.streams import Streams


async def compact(streams: Streams, log: str, fold: LogFold, last_id: str, finished: Container[int]) -> str:
    """Put a snapshot of ``fold`` in place of the log up to ``last_id``, without the requests whose serials are ``finished``.

    Their ends are kept with them instead, and the fold forgets them. ``fold`` must hold everything that was ever in the log and
    may still be asked for. Returns where to read on.

    Raises:
        redis.exceptions.RedisError: Redis cannot be reached; whether the log was replaced is not known, both is fine.
    """
    states: list[SnapshotEvent] = []
    ended: dict[int, list[SnapshotEvent]] = defaultdict(list)
    for state in fold.snapshots():
        (ended[state.serial] if state.serial in finished else states).append(state)
    ends = {RequestId(log, serial): encode_snapshot(own) for serial, own in ended.items()}
    after = await streams.trim_log(log, last_id, encode_snapshot(states) if states else b"", ends)
    for serial in ended:
        fold.forget(serial)
    return after

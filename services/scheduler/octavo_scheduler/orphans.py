"""Requests and logs whose gateway is gone: what nobody reconnects to is ended, what is over is put away (rules L5, L7)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from redis.exceptions import RedisError

from octavo_scheduler.live import LiveRequest
from octavo_scheduler.service import SchedulerService
from octavo_shared.compaction import compact
from octavo_shared.fold import LogFold
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord
from octavo_shared.streams import Streams

# How often to look for logs of which nobody is known: an executor that is late can bring one back.
SCAN_S = 10.0
# Orphaned logs that are longer than this (entries) get a snapshot.
LONG_LOG = 2000

logger = logging.getLogger(__name__)


class Absences:
    """Since when gateways have had no lease (seconds of whatever clock), as far as anybody has looked.

    One without a lease for ``settle_s`` is gone: after an outage of Redis, or at our own start, those that live need that long
    to say so. From then on its requests have the time to be reconnected to that their records grant.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._since: dict[str, float] = {}

    def look(self, names: set[str], alive: set[str], now_s: float) -> None:
        """Of the gateways ``names``, all that matter, those have a lease."""
        self._since = {name: self._since.get(name, now_s) for name in names - alive}

    def gone(self, now_s: float) -> set[str]:
        """Gateways that are gone."""
        return {name for name, since in self._since.items() if now_s - since > self._settle_s}

    def have_abandoned(self, live: LiveRequest, gateways: Iterable[str], now_s: float) -> bool:
        """Whether the gateways have all been gone for longer than a request's clients may stay away."""
        gone_s = self._settle_s + live.record.disconnect_grace_ms / 1000
        return all(now_s - self._since.get(name, now_s) > gone_s for name in gateways)

    def forget(self, name: str) -> None:
        """Nothing is left of it."""
        self._since.pop(name, None)


class OrphanWatch:
    """Looks every ``period_s`` seconds for gateways without a lease; ``settle_s`` as in ``Absences``."""

    def __init__(
        self, service: SchedulerService, streams: Streams, *, period_s: float = 1.0, settle_s: float = 5.0
    ) -> None:
        self._service = service
        self._streams = streams
        self._period_s = period_s
        self._absences = Absences(settle_s)
        self._logs: set[str] = set()
        self._scan_at = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.look()
            except (RedisError, OSError) as error:
                logger.warning("orphaned logs cannot be looked for (%s)", error)

    async def look(self) -> None:
        """Act on every request and every log whose gateway has been gone for too long."""
        if time.monotonic() >= self._scan_at:
            self._logs = await self._streams.log_names()
            self._scan_at = time.monotonic() + SCAN_S
        owed = {live.record.id.log for live in self._service.live}
        names = owed.union(self._logs, *(live.gateways for live in self._service.live))
        alive = await self._streams.living_gateways(sorted(names))
        now = time.monotonic()
        self._absences.look(names, alive, now)
        gone = self._absences.gone(now)
        await self._end_abandoned([live for live in self._service.live if live.gateways & gone])
        for log in gone & (self._logs | owed):
            # Of a live one only what has grown long; it may have become somebody's last request only just now.
            await self._put_away(log, whole=log not in {live.record.id.log for live in self._service.live})

    async def _end_abandoned(self, lives: list[LiveRequest]) -> None:
        """Of requests that have lost a gateway those that nobody follows any more: who has left is not waited for."""
        known = await self._streams.followers([live.record.id for live in lives])
        now = time.monotonic()
        for live, followers in zip(lives, known, strict=True):
            live.learn(followers)
            if not self._absences.have_abandoned(live, followers.gateways, now):
                continue
            logger.info("nobody has reconnected to request %s; ending it", live.record.id)
            self._service.abort(AbortRecord(live.record.id, owner_generation=live.generation, reason="orphaned"))

    async def _put_away(self, log: str, *, whole: bool) -> None:
        """Save the ends of what is over and trim the log; with ``whole`` all is over, and the log goes."""
        length = await self._streams.log_length(log)
        if length == 0 and not whole:
            return
        if length > (0 if whole else LONG_LOG):
            fold, after = LogFold(), "0"
            while (page := await self._streams.read_log(log, after)).last_id != after:
                fold.apply_all(page.events)
                after = page.last_id
            serials = sorted({serial for serial, _ in fold.choices})
            unfinished = await self._streams.unfinished([RequestId(log, serial) for serial in serials])
            over = {serial for serial, owed in zip(serials, unfinished, strict=True) if not owed}
            if whole and len(over) < len(serials):
                # Not in our hands (yet).
                return
            await compact(self._streams, log, fold, after, over)
        if whole:
            logger.info("deleting the log of gateway %s, which is gone", log)
            await self._streams.delete_log(log)
            self._logs.discard(log)
            self._absences.forget(log)

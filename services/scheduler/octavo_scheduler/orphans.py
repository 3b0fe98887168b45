"""Logs whose gateway is gone: their requests are ended, then the log is deleted (the scheduler's part of rules L5, L7)."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from octavo_scheduler.service import SchedulerService
from octavo_shared.records import AbortRecord
from octavo_shared.streams import Streams

logger = logging.getLogger(__name__)


class OrphanWatch:
    """Looks every ``period_s`` seconds; a gateway without a lease for ``grace_s`` seconds counts as gone."""

    def __init__(
        self, service: SchedulerService, streams: Streams, *, period_s: float = 5.0, grace_s: float = 30.0
    ) -> None:
        self._service = service
        self._streams = streams
        self._period_s = period_s
        self._grace_s = grace_s
        # When each log's gateway was last known to live (monotonic seconds); a log first seen gets the whole grace.
        self._alive_at: dict[str, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.look()
            except (RedisError, OSError) as error:
                logger.warning("orphaned logs cannot be looked for (%s)", error)

    async def look(self) -> None:
        """Act on every log whose gateway has been gone for too long."""
        owed = {live.record.id.log for live in self._service.live}
        logs = owed | await self._streams.log_names()
        alive = await self._streams.living_gateways(sorted(logs))
        now = time.monotonic()
        self._alive_at = {log: now if log in alive else self._alive_at.get(log, now) for log in logs}
        for log, alive_at in self._alive_at.items():
            if now - alive_at <= self._grace_s:
                continue
            if log not in owed:
                logger.info("deleting the log of gateway %s, which is gone", log)
                await self._streams.delete_log(log)
                continue
            for live in self._service.live:
                if live.record.id.log == log:
                    generation = live.record.owner_generation
                    self._service.abort(AbortRecord(live.record.id, owner_generation=generation, reason="orphaned"))

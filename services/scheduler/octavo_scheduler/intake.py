"""Two readers on the log: requests through the consumer group, aborts from their own stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from octavo_scheduler.service import RETRY_S, SchedulerService
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord
from octavo_shared.streams import Streams

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
BATCH = 256
# An abort may overtake the request it names by as long as the other reader may be behind.
EARLY_ABORT_S = 60.0


class Intake:
    """Reads until cancelled. ``consumer`` names this scheduler within the group."""

    def __init__(self, service: SchedulerService, streams: Streams, consumer: str) -> None:
        self._service = service
        self._streams = streams
        self._consumer = consumer
        self._early: dict[RequestId, tuple[float, AbortRecord]] = {}
        self._after: bytes | str = "0"

    async def requests(self) -> None:
        """Hand every new request to the service."""
        await self._forever(self._read_requests)

    async def aborts(self) -> None:
        """Hand every abort to the service."""
        await self._forever(self._read_aborts)

    async def _forever(self, read: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await read()
            except (RedisError, OSError) as error:
                logger.warning("the log is out of reach (%s); trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _read_requests(self) -> None:
        for entry_id, payload in await self._streams.read_requests(self._consumer, count=BATCH, block_ms=BLOCK_MS):
            self._service.accept(entry_id, payload)
        if self._early:
            self._apply_early()

    async def _read_aborts(self) -> None:
        entries = await self._streams.read_aborts(self._after, block_ms=BLOCK_MS)
        for entry_id, record in entries:
            self._after = entry_id
            if record is None or self._service.abort(record):
                continue
            if (await self._streams.unfinished([record.request_id]))[0]:
                self._early[record.request_id] = (time.monotonic(), record)
        await self._streams.delete_aborts([entry_id for entry_id, _ in entries])
        if self._early:
            self._apply_early()

    def _apply_early(self) -> None:
        """Aborts that came before their request: apply those whose request is here now, drop those too old."""
        now = time.monotonic()
        for request_id, (since, record) in list(self._early.items()):
            if self._service.abort(record) or now - since > EARLY_ABORT_S:
                del self._early[request_id]

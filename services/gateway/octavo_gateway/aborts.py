"""Aborts: appended in order and until they are, some only after the time that their client has to come back (rule L7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from redis.exceptions import RedisError

from octavo_gateway.backoff import Backoff
from octavo_shared.records import AbortRecord
from octavo_shared.streams import Streams

logger = logging.getLogger(__name__)


class Aborts:
    """The owner of what this gateway has still to say against requests."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[AbortRecord] = asyncio.Queue()
        self._timers: set[asyncio.TimerHandle] = set()

    def append(self, record: AbortRecord) -> None:
        """Append an abort, in the background."""
        self._queue.put_nowait(record)

    def append_later(self, records: Sequence[AbortRecord], grace_s: float) -> None:
        """Append aborts after ``grace_s``. A client that has reconnected by then, to whichever gateway, makes them void."""

        def ring() -> None:
            self._timers.discard(timer)
            for record in records:
                self.append(record)

        timer = asyncio.get_running_loop().call_later(grace_s, ring)
        self._timers.add(timer)

    async def run(self) -> None:
        """Append what comes, each until it is appended."""
        while True:
            record = await self._queue.get()
            backoff = Backoff()
            while True:
                try:
                    await self._streams.append_abort(record)
                    break
                except (RedisError, OSError) as error:
                    if not backoff.failures:
                        logger.warning("an abort cannot be appended, trying again: %r", error)
                    await backoff.sleep()
            self._queue.task_done()

    async def finish(self) -> None:
        """Wait until what is due is appended. What is not is the scheduler's affair, once our lease is gone."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self._queue.join()

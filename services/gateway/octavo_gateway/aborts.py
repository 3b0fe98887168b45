"""Aborts: appended in order and until they are, some only after the time that their client has to come back (rule L7).

What was appended last a Redis that is restarted may have lost: it is kept for a while, to be appended once more (rule L9).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from redis.exceptions import RedisError

from octavo_gateway.backoff import Backoff
from octavo_shared.records import AbortRecord
from octavo_shared.streams import Streams

# For how long (seconds) what was appended is kept: a Redis that loses its memory loses at most the last two.
KEEP_S = 5.0

logger = logging.getLogger(__name__)


class Aborts:
    """The owner of what this gateway has still to say against requests."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[AbortRecord] = asyncio.Queue()
        self._timers: dict[asyncio.TimerHandle, Sequence[AbortRecord]] = {}
        # What was appended lately, and when (on the monotonic clock).
        self._kept: deque[tuple[float, AbortRecord]] = deque()

    def append(self, record: AbortRecord) -> None:
        """Append an abort, in the background."""
        self._queue.put_nowait(record)

    def append_later(self, records: Sequence[AbortRecord], grace_s: float) -> None:
        """Append aborts after ``grace_s``. A client that has reconnected by then, to whichever gateway, makes them void."""

        def ring() -> None:
            del self._timers[timer]
            for record in records:
                self.append(record)

        timer = asyncio.get_running_loop().call_later(grace_s, ring)
        self._timers[timer] = records

    @property
    def waiting(self) -> list[Sequence[AbortRecord]]:
        """What is to be appended later, together with what else comes then."""
        return list(self._timers.values())

    def forget_old(self) -> None:
        """Redis is still the one it was: it will not lose any more what it was told long ago."""
        while self._kept and time.monotonic() - self._kept[0][0] > KEEP_S:
            self._kept.popleft()

    def say_again(self) -> None:
        """Redis may have lost what was appended last. (An abort of what has ended counts for nothing.)"""
        while self._kept:
            self.append(self._kept.popleft()[1])

    async def run(self) -> None:
        """Append what comes, each until it is appended."""
        while True:
            record = await self._queue.get()
            backoff = Backoff()
            while True:
                try:
                    await self._streams.append_abort(record)
                    self._kept.append((time.monotonic(), record))
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

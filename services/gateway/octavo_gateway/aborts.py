"""Aborts: said in order and until they are, some only after the time that their client has to come back (rule L7).

What was appended last a Redis that is restarted may have lost: it is kept for a while, to be appended once more (rule L9).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from octavo_gateway.backoff import Backoff
from octavo_shared.records import ANY_GENERATION, AbortRecord
from octavo_shared.streams import Streams

# For how long (seconds) what was said is kept: a Redis that loses its memory loses at most the last two.
KEEP_S = 5.0

logger = logging.getLogger(__name__)


class Aborts:
    """The owner of what this gateway has still to say against requests."""

    def __init__(self, streams: Streams, gateway: str) -> None:
        """``gateway`` is this one's incarnation."""
        self._streams = streams
        self._gateway = gateway
        self._queue: asyncio.Queue[tuple[AbortRecord, Callable[[], None] | None]] = asyncio.Queue()
        self._timers: dict[asyncio.TimerHandle, Sequence[AbortRecord]] = {}
        # What was said lately, and when (on the monotonic clock).
        self._kept: deque[tuple[float, AbortRecord]] = deque()

    def append(self, record: AbortRecord) -> None:
        """Say in the background that a choice is not wanted, whoever follows it."""
        assert record.owner_generation == ANY_GENERATION, "who may follow it is asked first"
        self._queue.put_nowait((record, None))

    def leave(self, records: Sequence[AbortRecord], go_on: Callable[[], None] | None = None) -> None:
        """Say in the background that our clients up to the records' generations follow their requests no more.

        What is then followed by nobody is aborted; ``go_on`` is called for each that is followed elsewhere.
        """
        for record in records:
            self._queue.put_nowait((record, go_on))

    def leave_later(self, records: Sequence[AbortRecord], grace_s: float) -> None:
        """The same after ``grace_s`` (0 = now). A client that has come back here by then makes it void."""
        if not grace_s:
            self.leave(records)
            return

        def ring() -> None:
            del self._timers[timer]
            self.leave(records)

        timer = asyncio.get_running_loop().call_later(grace_s, ring)
        self._timers[timer] = records

    @property
    def waiting(self) -> list[Sequence[AbortRecord]]:
        """What is to be said later, together with what else comes then."""
        return list(self._timers.values())

    def forget_old(self) -> None:
        """Redis is still the one it was: it will not lose any more what it was told long ago."""
        while self._kept and time.monotonic() - self._kept[0][0] > KEEP_S:
            self._kept.popleft()

    def say_again(self) -> None:
        """Redis may have lost what was said last. (An abort of what has ended counts for nothing.)"""
        while self._kept:
            self._queue.put_nowait((self._kept.popleft()[1], None))

    async def run(self) -> None:
        """Say what comes, each until it is said."""
        while True:
            record, go_on = await self._queue.get()
            backoff = Backoff()
            while True:
                try:
                    is_said = await self._say(record)
                    break
                except (RedisError, OSError) as error:
                    if not backoff.failures:
                        logger.warning("an abort cannot be appended, trying again: %r", error)
                    await backoff.sleep()
            self._kept.append((time.monotonic(), record))
            if go_on is not None and not is_said:
                go_on()
            self._queue.task_done()

    async def _say(self, record: AbortRecord) -> bool:
        if record.owner_generation != ANY_GENERATION:
            return await self._streams.leave(record, self._gateway)
        await self._streams.append_abort(record)
        return True

    async def finish(self) -> None:
        """Wait until what is due is said. What is not is the scheduler's affair, once our lease is gone."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self._queue.join()

"""What the scheduler says can be served, kept fresh in the background (rule L14)."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from octavo_gateway.errors import unavailable
from octavo_shared.records import ModelLimits
from octavo_shared.streams import Streams

REFRESH_S = 0.5
FRESH_S = 5.0

logger = logging.getLogger(__name__)


class LimitsWatch:
    """The owner of the published limits."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._limits: ModelLimits | None = None
        # Why Redis did not answer the last time; "" when it did.
        self._failure = "The gateway has not spoken to Redis yet."
        # When they were read last, on the monotonic clock, and who is reading them now.
        self._read_s = 0.0
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Read the limits again and again until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self, at_most_s: float = 0.0) -> None:
        """Read the limits, unless that is no longer than ``at_most_s`` ago; all who ask meanwhile wait for the same answer."""
        if time.monotonic() - self._read_s <= at_most_s:
            return
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(FRESH_S):
                self._limits = await self._streams.read_limits()
            self._failure = ""
        except (RedisError, OSError, TimeoutError, ValueError, TypeError) as error:
            if not self._failure:
                logger.warning("cannot read the limits: %r", error)
            self._failure = "Redis cannot be reached."
        finally:
            self._read_s, self._reading = time.monotonic(), None

    @property
    def latest(self) -> ModelLimits | None:
        """The newest limits, fresh or not."""
        return self._limits

    def why_no_scheduler(self) -> str:
        """Empty when a scheduler is at work, else why that is not known."""
        if self._failure:
            return self._failure
        if self._limits is None:
            return "No scheduler has reported yet."
        age_s = time.time() - self._limits.written_s
        return f"The scheduler has been silent for {age_s:.0f} s." if age_s >= FRESH_S else ""

    def why_not_ready(self) -> str:
        """Empty when requests can be served now, else the reason why not."""
        if reason := self.why_no_scheduler():
            return reason
        assert self._limits is not None
        return "" if self._limits.ready else self._limits.reason or "No executor is ready."

    def require(self) -> ModelLimits:
        """The limits to admit under.

        Raises:
            ApiError: 503 when nothing can be served now.
        """
        if reason := self.why_not_ready():
            raise unavailable(reason)
        assert self._limits is not None
        return self._limits

"""Two readers on the log: requests through the consumer group, aborts from their own stream.

An abort stays there until the end it brings about is in the log, or it is known to bring about none: who reads it may die.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from octavo_scheduler.background import RETRY_S
from octavo_scheduler.service import SchedulerService
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord
from octavo_shared.streams import NoGroupError, Streams

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
# While the end that an abort brings about is on its way into the log.
BLOCK_SHORTLY_MS = 20
BATCH = 256
# While requests keep coming, how often to look for some that never arrived.
LOOK_S = 5.0
# An abort may overtake the request it names by as long as the other reader may be behind.
EARLY_ABORT_S = 60.0


@dataclass(slots=True)
class _Abort:
    """An abort that has been read: its entry, and when that was (on the monotonic clock)."""

    entry_id: bytes
    record: AbortRecord
    read_s: float
    # Its request has not come yet.
    is_early: bool = False


class Intake:
    """Reads until cancelled. ``consumer`` names this scheduler within the group."""

    def __init__(self, service: SchedulerService, streams: Streams, consumer: str) -> None:
        self._service = service
        self._streams = streams
        self._consumer = consumer
        self._after: bytes | str = "0"
        # Aborts that are not to be deleted yet.
        self._unsettled: list[_Abort] = []
        self._looked_at = time.monotonic()

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
            except NoGroupError:
                # Somebody has deleted the model stream. What was in it is gone; what comes is to be served.
                logger.error("the model stream has lost its consumer group; making it anew")
                await self._make_group()
            except (RedisError, OSError) as error:
                logger.warning("the log is out of reach (%s); trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _make_group(self) -> None:
        try:
            await self._streams.create_group()
        except (RedisError, OSError) as error:
            logger.warning("the log is out of reach (%s); trying again", error)
            await asyncio.sleep(RETRY_S)

    async def _read_requests(self) -> None:
        entries = await self._streams.read_requests(self._consumer, count=BATCH, block_ms=BLOCK_MS)
        for entry_id, payload in entries:
            self._service.pending.accept(entry_id, payload)
        if not entries or time.monotonic() - self._looked_at > LOOK_S:
            await self._find_lost()
        self._apply_early()

    async def _find_lost(self) -> None:
        """Take over requests that were read in an answer that never came here.

        When a connection breaks after Redis has carried a read out, what it returned is pending and no further read brings it
        up. And a scheduler that has been replaced without noticing may have read, or even begun, what came later.
        """
        self._looked_at = time.monotonic()
        # As of before asking: what is acknowledged meanwhile may still be in the answer.
        known = self._service.pending.in_hand()
        if await self._streams.num_pending() <= len(known):
            return
        pending = await self._streams.claim_pending(self._consumer)
        lost = [(entry_id, payload) for entry_id, payload in pending if entry_id not in known]
        if lost:
            logger.info("%d entries of the model stream got lost on their way here; found", len(lost))
            await self._service.pending.take_over(lost)

    async def _read_aborts(self) -> None:
        block_ms = BLOCK_MS if all(abort.is_early for abort in self._unsettled) else BLOCK_SHORTLY_MS
        entries = await self._streams.read_aborts(self._after, block_ms=block_ms)
        now = time.monotonic()
        aborts = [_Abort(entry_id, record, now) for entry_id, record in entries if record is not None]
        # New owners first: whoever has reconnected since makes an abort void that nobody has acted on yet.
        for abort in sorted(aborts, key=lambda abort: not abort.record.new_owner):
            known = self._service.abort(abort.record)
            abort.is_early = not known and await self._is_coming(abort.record.request_id)
        await self._streams.delete_aborts([entry_id for entry_id, record in entries if record is None])
        if entries:
            # Only now: when Redis fails in between, these are read again.
            self._after = entries[-1][0]
            self._unsettled += aborts
        self._apply_early()
        settled = {abort.entry_id for abort in self._unsettled if self._is_settled(abort)}
        await self._streams.delete_aborts(list(settled))
        self._unsettled = [abort for abort in self._unsettled if abort.entry_id not in settled]

    async def _is_coming(self, request_id: RequestId) -> bool:
        return (await self._streams.unfinished([request_id]))[0]

    def _is_settled(self, abort: _Abort) -> bool:
        live = self._service.live.get(abort.record.request_id)
        return not abort.is_early and (live is None or not live.is_ending)

    def _apply_early(self) -> None:
        """Aborts that came before their request: apply those whose request is here now, give up those too old."""
        now = time.monotonic()
        for abort in self._unsettled:
            if abort.is_early:
                known = self._service.abort(abort.record)
                abort.is_early = not known and now - abort.read_s <= EARLY_ABORT_S

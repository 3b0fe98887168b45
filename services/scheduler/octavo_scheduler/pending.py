"""Entries of the model stream, from their reading to their acknowledgement (rule L6).

What is no request goes at once. A request that somebody else may have begun is fenced and read before it starts; its entry
stays pending until all its ends are logged.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from octavo_scheduler.background import RETRY_S, insist
from octavo_scheduler.live import LiveRequest, Standing
from octavo_scheduler.reading import read_request, remains_of
from octavo_shared.entries import MalformedEntryError, encode_fences
from octavo_shared.fold import FenceEvent
from octavo_shared.ids import Attempt
from octavo_shared.records import EndReason, Problem, RequestRecord

if TYPE_CHECKING:
    from octavo_scheduler.service import SchedulerService

logger = logging.getLogger(__name__)


class PendingEntries:
    """What has been read from the model stream and is still to be acknowledged."""

    def __init__(self, service: SchedulerService, holder: str) -> None:
        """``holder`` is who holds the lease; requests are acknowledged only while that is so."""
        self._service = service
        self._holder = holder
        # Requests up to this entry of the model stream may have been begun before, even if nothing says so any more: Redis
        # forgets who has read what more easily than what was logged.
        self.old_until = b"0-0"
        self._in_hand: set[bytes] = set()
        # Requests just read that somebody else may have begun.
        self._perhaps_begun: list[LiveRequest] = []

    def in_hand(self) -> frozenset[bytes]:
        """Entries that have been read and are still to be acknowledged, as far as is known here."""
        return frozenset(self._in_hand)

    def accept(self, entry_id: bytes, payload: bytes) -> None:
        """A request was read from the model stream; it stays pending there until all its ends are logged."""
        live = self._take_on(entry_id, payload)
        if live is None:
            return
        if live.record.readmitted or _entry_time(entry_id) <= _entry_time(self.old_until):
            self._perhaps_begun.append(live)
            if len(self._perhaps_begun) == 1:
                self._service.background.spawn(self._take_up_what_came())
            return
        live.attempt_n = 1
        self._service.placement.place(live, Standing())

    async def take_over(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Requests that an earlier term left pending: fence, read, resume. Called once, before anything is accepted."""
        taken = [self._take_on(entry_id, payload) for entry_id, payload in entries]
        lives = [live for live in taken if live is not None]
        if lives:
            logger.info("taking over %d requests", len(lives))
            await self._take_up(lives)

    async def finish(self, entry_id: bytes, record: RequestRecord | None) -> None:
        """Acknowledge an entry and what is known of its request (None: it is none), until that has succeeded."""
        streams = self._service.streams

        async def finish() -> None:
            while not await streams.finish_request(entry_id, record, self._holder):
                # Either the lease is taken again soon, or this scheduler is no more.
                await asyncio.sleep(RETRY_S)

        await insist(finish)
        self._in_hand.discard(entry_id)

    def _take_on(self, entry_id: bytes, payload: bytes) -> LiveRequest | None:
        """From now on a request is owed an end; None: it is none, or known already, and its entry goes."""
        self._in_hand.add(entry_id)
        try:
            record = read_request(payload)
        except MalformedEntryError as error:
            self._turn_away(entry_id, payload, error)
            return None
        if self._service.live.get(record.id) is not None:
            logger.warning("request %s is in the model stream twice; dropped once", record.id)
            self._service.background.spawn(self.finish(entry_id, None))
            return None
        live = LiveRequest(record, entry_id, open=set(range(record.n)))
        self._service.owe(live)
        return live

    def _turn_away(self, entry_id: bytes, payload: bytes, why: MalformedEntryError) -> None:
        """An entry that is no request goes. If it can at least name itself somebody may be waiting: they hear of its end."""
        logger.warning("entry %s of the model stream is not a request (%s)", entry_id.decode(), why)
        remains = remains_of(payload)
        if remains is None or self._service.live.get(remains.id) is not None:
            self._service.background.spawn(self.finish(entry_id, None))
        else:
            self._service.background.spawn(self._end_unread(entry_id, remains))

    async def _end_unread(self, entry_id: bytes, remains: RequestRecord) -> None:
        # One failed choice fails the answer, however many it was to have.
        problem = Problem("The request cannot be understood by the scheduler.")
        fence = FenceEvent(remains.id.serial, 0, Attempt(self._service.term, 1), EndReason.ERROR, problem)
        await insist(partial(self._service.streams.append_log, remains.id.log, encode_fences([fence])))
        await self.finish(entry_id, remains)

    async def _take_up_what_came(self) -> None:
        # All that were read together, in their order.
        lives, self._perhaps_begun = self._perhaps_begun, []
        await self._take_up(lives)

    async def _take_up(self, lives: list[LiveRequest]) -> None:
        """Requests that somebody else may have begun."""
        await insist(partial(self._learn_followers, lives))
        await self._service.resume(lives)

    async def _learn_followers(self, lives: list[LiveRequest]) -> None:
        known = await self._service.streams.followers([live.record.id for live in lives])
        for live, followers in zip(lives, known, strict=True):
            live.learn(followers)


def _entry_time(entry_id: bytes) -> tuple[int, int]:
    """A stream's entry id as something that can be compared."""
    time_ms, _, sequence = entry_id.partition(b"-")
    return int(time_ms), int(sequence or 0)

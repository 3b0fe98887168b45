"""The gateway's own log: its serials, its lease, and what is kept of it (rules L4, L5, L9)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redis.exceptions import RedisError

from octavo_gateway.aborts import Aborts
from octavo_gateway.log_follower import LogFollower
from octavo_gateway.watcher import Watcher
from octavo_shared.compaction import compact
from octavo_shared.fold import LogEvent
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord
from octavo_shared.streams import LogPage, Streams

# Under load the log is trimmed after this many pages, when nothing has come for a while, at once.
TRIM_PAGES = 1000

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rest:
    """Requests of one answer that go on though whoever asked for them has left, and the tokens of those that are over."""

    serials: set[int]
    tell: Callable[[int], None]
    tokens: int = 0

    def ended(self, serial: int, tokens: int) -> None:
        self.serials.discard(serial)
        self.tokens += tokens
        if not self.serials:
            self.tell(self.tokens)


class LogReader(LogFollower):
    """The owner of one gateway incarnation's log. Requests stay in it until they are acknowledged and nobody waits for them."""

    def __init__(self, streams: Streams, aborts: Aborts, incarnation: str, lease_s: float) -> None:
        self.incarnation = incarnation
        super().__init__(streams, aborts, incarnation, incarnation)
        self._lease_s = lease_s
        self._next_serial = 1
        # Choices of every request that is watched or not known to be acknowledged, and what was appended for it.
        self._choices: dict[int, int] = {}
        self._records: dict[int, RequestRecord] = {}
        # Those nobody watches.
        self._parted: set[int] = set()
        # Of those what is to be told when they are over.
        self._rests: dict[int, _Rest] = {}
        self._pages_since_trim = 0
        # Tokens that came since, and tokens that the snapshot had.
        self._new_tokens = self._kept_tokens = 0

    # --- requests ---

    def watch(self, prompts: int, n: int) -> Watcher:
        """Number ``prompts`` new requests of ``n`` choices each and listen for them."""
        serials = range(self._next_serial, self._next_serial + prompts)
        self._next_serial += prompts
        watcher = Watcher(tuple(RequestId(self.incarnation, serial) for serial in serials), n)
        self._choices.update(dict.fromkeys(serials, n))
        self.follow(watcher)
        return watcher

    def admitted(self, watcher: Watcher, records: tuple[RequestRecord, ...]) -> None:
        """The watcher's requests are in the model stream."""
        watcher.records = records
        self._records.update({record.id.serial: record for record in records})

    def follow(self, watcher: Watcher) -> None:
        """Tell a watcher of requests that have not been forgotten what is known of them, and what changes."""
        for request_id in watcher.ids:
            self._parted.discard(request_id.serial)
            self._choices.setdefault(request_id.serial, watcher.n)
        super().follow(watcher)

    def when_over(self, ids: Iterable[RequestId], tell: Callable[[int], None]) -> None:
        """Let ``tell`` know how many output tokens requests have come to, once all of them have ended."""
        rest = _Rest({one.serial for one in ids}, tell)
        for serial in sorted(rest.serials):
            self._rests[serial] = rest
            self._look_whether_over(serial)

    def _look_whether_over(self, serial: int) -> None:
        if serial in self._rests and self.has_ended(serial, self._choices[serial]):
            self._over(serial)

    def _over(self, serial: int) -> None:
        if (rest := self._rests.pop(serial, None)) is not None:
            made = sum(len(self._fold.get(serial, index).tokens) for index in range(self._choices[serial]))
            rest.ended(serial, made)

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself."""
        watched = set(self._watchers)
        assert not watched & self._parted, "a request is both waited for and parted from"
        assert set(self._choices) == watched | self._parted, "a request's choices are unknown or left over"
        assert set(self._records) <= set(self._choices), "a record is left over"
        assert set(self._rests) <= set(self._choices), "somebody waits for the end of what is forgotten"
        for serial, index in self._fold.choices:
            assert serial in self._choices, f"request {serial} is forgotten but folded"
            assert 0 <= index < self._choices[serial], f"request {serial} has no choice {index}"
        assert all(0 < serial < self._next_serial for serial in self._choices), "a serial was never given"

    def _abandoned(self, serial: int) -> None:
        self._parted.add(serial)

    def _is_waited_for(self, serial: int) -> bool:
        record = self._records.get(serial)
        return record is not None and record.disconnect_grace_ms > 0

    # --- background work ---

    async def run_lease(self) -> None:
        """Keep the gateway's lease, so that the scheduler knows that somebody reads this log."""
        key = self._streams.keys.gateway(self.incarnation)
        while True:
            try:
                if not await self._streams.renew_lease(key, self.incarnation, self._lease_s):
                    await self._streams.take_lease(key, self.incarnation, self._lease_s)
            except (RedisError, OSError) as error:
                logger.warning("the lease cannot be renewed: %r", error)
                await asyncio.sleep(min(0.5, self._lease_s / 3))
                continue
            await asyncio.sleep(self._lease_s / 3)

    def _owed(self) -> list[RequestRecord]:
        return list(self._records.values())

    def _take(self, page: LogPage) -> None:
        if page.last_id != self._after:
            self._pages_since_trim += 1
            self._new_tokens += len(page.events)
        super()._take(page)

    def _apply(self, event: LogEvent) -> None:
        # Not of a request that has been acknowledged and forgotten.
        if event.serial in self._choices:
            super()._apply(event)
            self._look_whether_over(event.serial)

    # --- trimming ---

    async def _tidy(self, *, quiet: bool) -> None:
        self._aborts.forget_old()
        # A snapshot of much is made only after as much has come: what is written is at most a few times what is logged.
        busy = self._pages_since_trim >= TRIM_PAGES and self._new_tokens >= self._kept_tokens
        if busy or (quiet and (self._pages_since_trim or self._parted)):
            await self.trim()

    async def trim(self) -> None:
        """Put a snapshot of what may still be needed in place of the log so far."""
        parted = [RequestId(self.incarnation, serial) for serial in self._parted]
        unfinished = await self._streams.unfinished(parted)
        # Somebody may have come for one meanwhile.
        finished = {one.serial for one, owed in zip(parted, unfinished, strict=True) if not owed} & self._parted
        if not finished and not self._pages_since_trim:
            return
        for serial in finished:
            self._over(serial)
        self._after = await compact(self._streams, self.incarnation, self._fold, self._after, finished)
        self._pages_since_trim = self._new_tokens = 0
        self._kept_tokens = sum(len(choice.tokens) for choice in self._fold.choices.values())
        for serial in finished:
            # Who has come just now finds the end with the request.
            if serial in self._parted:
                self._parted.discard(serial)
                del self._choices[serial]
            self._records.pop(serial, None)

    # --- the end ---

    async def leave(self, grace_s: float) -> bool:
        """Take the log away once all of it is acknowledged; False if that did not happen in time.

        A log that has to stay is the scheduler's to clean up, which it does once the lease is gone.
        """
        for watcher in self.watchers:
            self.unfollow(watcher)
        deadline = time.monotonic() + grace_s
        try:
            async with asyncio.timeout(grace_s):
                await self._aborts.finish()
            while True:
                while (page := await self._streams.read_log(self.incarnation, self._after)).last_id != self._after:
                    self._take(page)
                await self.trim()
                # Whoever may come back is not ended by us.
                ending = {serial for serial in self._parted if not self._is_waited_for(serial)}
                if not ending or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            if not self._parted:
                await self._streams.delete_log(self.incarnation)
            await self._streams.release_lease(self._streams.keys.gateway(self.incarnation), self.incarnation)
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("could not take leave of Redis: %r", error)
            return False
        return not self._parted

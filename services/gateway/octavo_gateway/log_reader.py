"""The gateway's own log: read once for all requests, folded, and trimmed (rules L1, L4, L5)."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from octavo_gateway.watcher import Watcher
from octavo_shared.compaction import compact
from octavo_shared.fold import FenceEvent, LogFold
from octavo_shared.ids import Attempt, RequestId, mint_incarnation
from octavo_shared.records import AbortRecord, EndReason, Problem
from octavo_shared.streams import LogPage, Streams

BLOCK_MS = 1000
RETRY_S = 0.2
# Under load the log is trimmed after this many pages; when nothing has come for BLOCK_MS, at once.
TRIM_PAGES = 1000

logger = logging.getLogger(__name__)


class LogReader:
    """The owner of one gateway incarnation's log, its serials, its fold and its lease."""

    def __init__(self, streams: Streams, lease_s: float) -> None:
        self.incarnation = mint_incarnation()
        self._streams = streams
        self._lease_s = lease_s
        self._fold = LogFold()
        self._after = "0-0"
        self._next_serial = 1
        # Requests somebody waits for; requests nobody waits for but that may not be acknowledged yet.
        self._watchers: dict[int, Watcher] = {}
        self._parted: set[int] = set()
        self._choices: dict[int, int] = {}
        self._pages_since_trim = 0
        self._aborts: asyncio.Queue[AbortRecord] = asyncio.Queue()
        self.malformed_entries = 0

    # --- requests ---

    def watch(self, prompts: int, n: int) -> Watcher:
        """Number ``prompts`` new requests of ``n`` choices each and listen for them."""
        serials = range(self._next_serial, self._next_serial + prompts)
        self._next_serial += prompts
        watcher = Watcher(tuple(RequestId(self.incarnation, serial) for serial in serials))
        for serial in serials:
            self._watchers[serial] = watcher
            self._choices[serial] = n
        return watcher

    def part(self, watcher: Watcher, *, abort: str = "") -> None:
        """Nobody waits for these requests any more; with ``abort`` whatever has not ended is to end, for that reason."""
        for request_id in watcher.ids:
            if self._watchers.pop(request_id.serial, None) is None:
                continue
            self._parted.add(request_id.serial)
            if abort and not self._ended(request_id.serial):
                self.abort(AbortRecord(request_id, reason=abort))

    def abort(self, record: AbortRecord) -> None:
        """Append an abort, in the background and in order."""
        self._aborts.put_nowait(record)

    def abort_everything(self, reason: str) -> None:
        """End every request that somebody still waits for."""
        for serial in self._watchers:
            if not self._ended(serial):
                self.abort(AbortRecord(RequestId(self.incarnation, serial), reason=reason))

    @property
    def live(self) -> int:
        """Requests somebody waits for."""
        return len(self._watchers)

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself."""
        watched = set(self._watchers)
        assert not watched & self._parted, "a request is both waited for and parted from"
        assert set(self._choices) == watched | self._parted, "a request's choices are unknown or left over"
        for serial, index in self._fold.choices:
            assert serial in self._choices, f"request {serial} is forgotten but folded"
            assert 0 <= index < self._choices[serial], f"request {serial} has no choice {index}"
        assert all(0 < serial < self._next_serial for serial in self._choices), "a serial was never given"

    def _ended(self, serial: int) -> bool:
        return all(
            self._fold.get(serial, index).end is not EndReason.NONE for index in range(self._choices.get(serial, 0))
        )

    # --- background work ---

    async def run(self) -> None:
        """Read, fold, wake and trim until cancelled."""
        failing = False
        while True:
            try:
                page = await self._streams.read_log(self.incarnation, self._after, block_ms=BLOCK_MS)
                self._take(page)
                await self._trim_if_due(quiet=not page.events)
                failing = False
            except (RedisError, OSError) as error:
                if not failing:
                    logger.warning("the log cannot be read, trying again: %r", error)
                failing = True
                await asyncio.sleep(RETRY_S)

    async def run_aborts(self) -> None:
        """Append aborts as they come, each until it is appended."""
        while True:
            record = await self._aborts.get()
            failing = False
            while True:
                try:
                    await self._streams.append_abort(record)
                    break
                except (RedisError, OSError) as error:
                    if not failing:
                        logger.warning("an abort cannot be appended, trying again: %r", error)
                    failing = True
                    await asyncio.sleep(RETRY_S)
            self._aborts.task_done()

    async def run_lease(self) -> None:
        """Keep the gateway's lease, so that the scheduler knows that somebody reads this log."""
        key = self._streams.keys.gateway(self.incarnation)
        while True:
            try:
                if not await self._streams.renew_lease(key, self.incarnation, self._lease_s):
                    await self._streams.take_lease(key, self.incarnation, self._lease_s)
            except (RedisError, OSError) as error:
                logger.warning("the lease cannot be renewed: %r", error)
            await asyncio.sleep(self._lease_s / 3)

    def _take(self, page: LogPage) -> None:
        fold, watchers = self._fold, self._watchers
        for event in page.events:
            serial = event.serial
            watcher = watchers.get(serial)
            if watcher is None and serial not in self._parted:
                # Of a request that has been acknowledged and forgotten.
                continue
            changed = fold.apply(event)
            if changed and watcher is not None:
                for index, choice in changed:
                    watcher.changed(serial, index, choice)
        if page.malformed:
            self.malformed_entries += page.malformed
            logger.error("%d entries of the log could not be read", page.malformed)
        if page.last_id != self._after:
            self._pages_since_trim += 1
        self._after = page.last_id

    # --- trimming ---

    async def _trim_if_due(self, *, quiet: bool) -> None:
        if self._watchers and quiet:
            await self._fail_lost()
        if self._pages_since_trim >= TRIM_PAGES or (quiet and (self._pages_since_trim or self._parted)):
            await self.trim()

    async def _fail_lost(self) -> None:
        """Fail requests that are acknowledged though the log has no end for them.

        That happens when this process was thought dead and its log deleted, or when Redis lost its memory.
        """
        waiting = [
            RequestId(self.incarnation, serial)
            for serial, watcher in self._watchers.items()
            if watcher.admitted and not self._ended(serial)
        ]
        known = await self._streams.unfinished(waiting)
        gone = [request_id.serial for request_id, unfinished in zip(waiting, known, strict=True) if not unfinished]
        if not gone:
            return
        # Their ends may have been logged since the last page was read.
        self._take(await self._streams.read_log(self.incarnation, self._after))
        for serial in gone:
            for index in range(self._choices.get(serial, 0)):
                choice, watcher = self._fold.get(serial, index), self._watchers.get(serial)
                if choice.end is EndReason.NONE and watcher is not None:
                    logger.error("request %s has no end in the log and never will", RequestId(self.incarnation, serial))
                    last = Attempt(choice.attempt.term + 1, 0)
                    lost = FenceEvent(serial, index, last, EndReason.ERROR, Problem("The request was lost."))
                    for ended, failed in self._fold.apply(lost):
                        watcher.changed(serial, ended, failed)

    async def trim(self) -> None:
        """Put a snapshot of what may still be needed in place of the log so far."""
        parted = [RequestId(self.incarnation, serial) for serial in self._parted]
        unfinished = await self._streams.unfinished(parted)
        finished = {one.serial for one, owed in zip(parted, unfinished, strict=True) if not owed}
        if not finished and not self._pages_since_trim:
            return
        self._after = await compact(self._streams, self.incarnation, self._fold, self._after, finished)
        self._pages_since_trim = 0
        self._parted -= finished
        for serial in finished:
            del self._choices[serial]

    # --- the end ---

    async def leave(self, grace_s: float) -> bool:
        """End what lives and take the log away once all of it is acknowledged; False if that did not happen in time.

        A log that has to stay is the scheduler's to clean up, which it does once the lease is gone.
        """
        for watcher in set(self._watchers.values()):
            self.part(watcher, abort="shutdown")
        deadline = time.monotonic() + grace_s
        try:
            async with asyncio.timeout(grace_s):
                await self._aborts.join()
            while self._parted and time.monotonic() < deadline:
                await self.trim()
                if self._parted:
                    await asyncio.sleep(0.05)
            if not self._parted:
                await self._streams.delete_log(self.incarnation)
            await self._streams.release_lease(self._streams.keys.gateway(self.incarnation), self.incarnation)
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("could not take leave of Redis: %r", error)
            return False
        return not self._parted

"""Reading one log for everybody on this gateway who waits for something in it (rules L1, L4, L9)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from redis.exceptions import RedisError

from octavo_gateway.aborts import Aborts
from octavo_gateway.backoff import Backoff
from octavo_gateway.watcher import Watcher
from octavo_shared.entries import encode_snapshot
from octavo_shared.fold import Changed, ChoiceFold, FenceEvent, LogEvent, LogFold, SnapshotEvent
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.records import EndReason, Problem, RequestRecord
from octavo_shared.streams import LogPage, Streams

BLOCK_MS = 1000
# Ends that are no longer in the log are looked for when nothing has come for BLOCK_MS, and at least this often.
SETTLE_S = 5.0
# So many requests are looked for at a time, the others the next time: idle streams cost the same however many they are.
SETTLE_MOST = 512

logger = logging.getLogger(__name__)


class LogFollower:
    """Reads a log, folds it, and wakes the watchers of what has changed."""

    def __init__(self, streams: Streams, aborts: Aborts, log: str, gateway: str) -> None:
        """``gateway`` is the incarnation of the one that reads, whose clients the watchers speak for."""
        self.log = log
        self._aborts = aborts
        self._gateway = gateway
        self.malformed_entries = 0
        self._streams = streams
        self._fold = LogFold()
        self._after = "0-0"
        self._watchers: dict[int, set[Watcher]] = {}
        # What has been delivered, from when Redis has lost its memory until the log has caught up with it.
        self._delivered: dict[tuple[int, int], SnapshotEvent] = {}
        self._run_id = ""
        self._settled_at = time.monotonic()
        # Up to which serial ends have been looked for in this round.
        self._settled_serial = 0

    @property
    def live(self) -> int:
        """Requests somebody waits for."""
        return len(self._watchers)

    @property
    def watchers(self) -> set[Watcher]:
        """Everybody who waits for something."""
        return {watcher for watchers in self._watchers.values() for watcher in watchers}

    def follow(self, watcher: Watcher) -> None:
        """Tell a watcher what is known of its requests, and from now on what changes."""
        for request_id in watcher.ids:
            self._watchers.setdefault(request_id.serial, set()).add(watcher)
            for index in range(watcher.n):
                if (choice := self._fold.choices.get((request_id.serial, index))) is not None:
                    watcher.changed(request_id.serial, index, choice)

    def unfollow(self, watcher: Watcher) -> None:
        """It is not to be told any more."""
        for request_id in watcher.ids:
            watchers = self._watchers.get(request_id.serial, set())
            watchers.discard(watcher)
            if not watchers and self._watchers.pop(request_id.serial, None) is not None:
                self._abandoned(request_id.serial)

    def heir_of(self, watcher: Watcher) -> Watcher | None:
        """Somebody else who follows the same answer and is still there."""
        watchers = self._watchers.get(watcher.ids[0].serial, ())
        return next((one for one in watchers if one is not watcher and not one.is_over), None)

    def has_ended(self, serial: int, n: int) -> bool:
        """Whether every choice of a request has its end, as far as the log has been read."""
        return all(self._fold.get(serial, index).end for index in range(n))

    # --- background work ---

    async def run(self) -> None:
        """Read, fold and wake until cancelled."""
        backoff = Backoff()
        while True:
            try:
                if backoff.failures or not self._run_id:
                    await self._greet()
                page = await self._streams.read_log(self.log, self._after, block_ms=BLOCK_MS)
                self._take(page)
                quiet = not page.events
                if quiet or time.monotonic() - self._settled_at > SETTLE_S:
                    self._settled_at = time.monotonic()
                    await self._settle()
                await self._tidy(quiet=quiet)
                backoff.reset()
            except (RedisError, OSError) as error:
                if not backoff.failures:
                    logger.warning("log %s cannot be read, trying again: %r", self.log, error)
                await backoff.sleep()

    async def _greet(self) -> None:
        """Find out whether this is still the same Redis; another one may have forgotten what it was told last."""
        run_id = await self._streams.run_id()
        if self._run_id and run_id != self._run_id:
            logger.warning("Redis has been started anew; reading log %s from its beginning", self.log)
            await self._recover()
        self._run_id = run_id

    async def _recover(self) -> None:
        """Say again what is owed, what was delivered (the scheduler sees the one only after the other) and who follows it."""
        for state in self._fold.snapshots():
            key = (state.serial, state.choice)
            known = self._delivered.get(key)
            self._delivered[key] = state if known is None else _furthest(known, state)
        owed = self._owed()
        wanted = {record.id.serial for record in owed}.union(self._watchers)
        self._delivered = {key: state for key, state in self._delivered.items() if key[0] in wanted}
        for record in owed:
            keys = [(record.id.serial, index) for index in range(record.n)]
            states = [self._delivered[key] for key in keys if key in self._delivered]
            snapshot = encode_snapshot(states) if states else b""
            await self._streams.readmit(replace(record, readmitted=True), snapshot)
        await self._follow_again()
        # Only then: who has left meanwhile may just have been said to be there.
        self._aborts.say_again()
        self._fold = LogFold()
        self._after = "0-0"

    async def _follow_again(self) -> None:
        """Redis may have forgotten that our clients follow, or may still come back, and believe others who say that nobody does."""
        following: list[tuple[Sequence[RequestId], int]] = [(one.ids, one.generation) for one in self.watchers]
        for records in self._aborts.waiting:
            following.append(([record.request_id for record in records], records[0].owner_generation))
        for ids, generation in following:
            # Of the first one everybody knows without being told. The clock is ahead of what was given before.
            if generation:
                await self._streams.follow(ids, self._gateway, at_least=int(time.time()) + 1, own=generation)

    def _owed(self) -> list[RequestRecord]:
        """Requests that are to be appended again should Redis have lost them."""
        records = {record.id: record for watcher in self.watchers for record in watcher.records}
        ended = {key for key, state in self._delivered.items() if state.end}
        return [one for one in records.values() if not all((one.id.serial, index) in ended for index in range(one.n))]

    async def _tidy(self, *, quiet: bool) -> None:
        """Whatever else there is to do between pages."""

    def _abandoned(self, serial: int) -> None:
        """Nobody watches a request any more."""

    # --- events ---

    def _take(self, page: LogPage) -> None:
        for event in page.events:
            self._apply(event)
        if page.malformed:
            self.malformed_entries += page.malformed
            logger.error("%d entries of log %s could not be read", page.malformed, self.log)
        self._after = page.last_id

    def _apply(self, event: LogEvent) -> None:
        changed = self._fold.apply(event)
        if changed and self._delivered:
            self._compare(event.serial, changed)
        if changed and (watchers := self._watchers.get(event.serial)):
            for index, choice in changed:
                for watcher in watchers:
                    watcher.changed(event.serial, index, choice)

    def _compare(self, serial: int, changed: Changed) -> None:
        """A position that has been delivered and comes back with another token ends its choice (rule L9)."""
        for index, choice in changed:
            known = self._delivered.get((serial, index))
            if known is None:
                continue
            common = min(len(known.tokens), len(choice.tokens))
            if list(known.tokens[:common]) != choice.tokens[:common]:
                logger.error("choice %d of request %x comes back with other tokens than were sent", index, serial)
                self._fail(serial, index, choice, "The output was lost and could not be restored.")
                del self._delivered[serial, index]
            elif choice.end or (common == len(known.tokens) and not known.end):
                del self._delivered[serial, index]

    def _fail(self, serial: int, index: int, choice: ChoiceFold, message: str) -> None:
        """End a choice for those who watch it here, whatever the log says."""
        choice.end, choice.problem = EndReason.ERROR, Problem(message)
        choice.attempt = Attempt(choice.attempt.term + 1, 0)
        for watcher in self._watchers.get(serial, ()):
            watcher.changed(serial, index, choice)

    # --- ends that are not in the log ---

    async def _settle(self) -> None:
        """Bring requests to an end that are acknowledged though the log, as far as it was read, has no end for them.

        Either the log's owner has put their ends away, or they are lost: their log was deleted, or Redis lost its memory.
        """
        serials = sorted(serial for serial in self._watchers if serial > self._settled_serial)[:SETTLE_MOST]
        self._settled_serial = serials[-1] if len(serials) == SETTLE_MOST else 0
        waiting = [
            RequestId(self.log, serial)
            for serial in serials
            if any(one.records and not self.has_ended(serial, one.n) for one in self._watchers[serial])
        ]
        known = await self._streams.unfinished(waiting)
        over = [one for one, unfinished in zip(waiting, known, strict=True) if not unfinished]
        if not over:
            return
        # Their ends may have been logged since the last page was read.
        while (page := await self._streams.read_log(self.log, self._after)).last_id != self._after:
            self._take(page)
        for request_id, standing in zip(over, await self._streams.look_up(over), strict=True):
            for event in standing.end if standing is not None else ():
                self._apply(event)
            self._lose(request_id)

    def _lose(self, request_id: RequestId) -> None:
        serial = request_id.serial
        for index in range(max((watcher.n for watcher in self._watchers.get(serial, ())), default=0)):
            if not self._fold.get(serial, index).end:
                logger.error("request %s has no end in the log and never will", request_id)
                last = Attempt(self._fold.get(serial, index).attempt.term + 1, 0)
                self._apply(FenceEvent(serial, index, last, EndReason.ERROR, Problem("The request was lost.")))


def _furthest(known: SnapshotEvent, now: SnapshotEvent) -> SnapshotEvent:
    """What has been delivered of a choice, of two states of it: Redis may forget again before the log has caught up."""
    if now.end or (len(now.tokens) >= len(known.tokens) and not known.end):
        further = now
    else:
        further = known
    searches = [state.beams for state in (known, now) if state.beams is not None]
    beams = max(searches, key=lambda search: (search.attempt, search.position), default=None)
    return replace(further, attempt=max(known.attempt, now.attempt), beams=beams)

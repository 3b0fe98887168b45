"""Logs of other gateways that clients have come here to follow: each is read once for all of them."""

from __future__ import annotations

import asyncio
import logging

from octavo_gateway.aborts import Aborts
from octavo_gateway.log_follower import LogFollower
from octavo_gateway.watcher import Watcher
from octavo_shared.fold import LogFold
from octavo_shared.streams import Streams

# Choices that nobody here watches are forgotten when there are more than this, and more than twice as many as there were.
MANY_CHOICES = 4096

logger = logging.getLogger(__name__)


class ForeignLog(LogFollower):
    """Another gateway's log. All of it is folded, since whoever comes next may want any of it."""

    def __init__(self, streams: Streams, aborts: Aborts, log: str, gateway: str) -> None:
        super().__init__(streams, aborts, log, gateway)
        self._most = MANY_CHOICES

    async def _tidy(self, *, quiet: bool) -> None:
        if len(self._fold.choices) > self._most:
            # Its owner has put most of it away by now: what is still in the log is what can still be asked for.
            self._fold, self._after = LogFold(), "0-0"
            while (page := await self._streams.read_log(self.log, self._after)).last_id != self._after:
                self._take(page)
            self._most = max(MANY_CHOICES, 2 * len(self._fold.choices))


class ForeignLogs:
    """The owner of the foreign logs that are being read, for as long as somebody follows them."""

    def __init__(self, streams: Streams, aborts: Aborts, gateway: str) -> None:
        """``gateway`` is this one's incarnation."""
        self._streams = streams
        self._aborts = aborts
        self._gateway = gateway
        self._logs: dict[str, tuple[ForeignLog, asyncio.Task[None]]] = {}

    @property
    def live(self) -> int:
        """Requests somebody waits for."""
        return sum(log.live for log, _ in self._logs.values())

    @property
    def watchers(self) -> set[Watcher]:
        """Everybody who waits for something."""
        return {watcher for log, _ in self._logs.values() for watcher in log.watchers}

    def follow(self, watcher: Watcher) -> None:
        """Tell a watcher what is in the log of its requests."""
        name = watcher.ids[0].log
        if name not in self._logs:
            log = ForeignLog(self._streams, self._aborts, name, self._gateway)
            self._logs[name] = (log, asyncio.create_task(log.run(), name=f"log {name}"))
        self._logs[name][0].follow(watcher)

    def unfollow(self, watcher: Watcher) -> None:
        """It is not to be told any more; a log that nobody follows is not read any more."""
        name = watcher.ids[0].log
        if (entry := self._logs.get(name)) is None:
            return
        log, task = entry
        log.unfollow(watcher)
        if not log.live:
            del self._logs[name]
            task.cancel()

    def heir_of(self, watcher: Watcher) -> Watcher | None:
        """Somebody else here who follows the same answer and is still there."""
        entry = self._logs.get(watcher.ids[0].log)
        return entry[0].heir_of(watcher) if entry is not None else None

    async def stop(self) -> None:
        """Read nothing any more."""
        tasks = [task for _, task in self._logs.values()]
        self._logs.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

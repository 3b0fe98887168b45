"""One client's view of the log: which of its choices have changed since it last looked."""

from __future__ import annotations

import asyncio

from octavo_shared.fold import ChoiceFold
from octavo_shared.ids import RequestId


class Watcher:
    """Collects changed choices of some requests and wakes the one task that waits for them."""

    __slots__ = ("_dirty", "_waiter", "admitted", "disconnected", "ids")

    def __init__(self, ids: tuple[RequestId, ...]) -> None:
        self.ids = ids
        # The requests have been appended to the model stream.
        self.admitted = False
        # The client has gone; nothing will be sent any more.
        self.disconnected = False
        self._dirty: dict[tuple[int, int], ChoiceFold] = {}
        self._waiter: asyncio.Future[None] | None = None

    def changed(self, serial: int, index: int, choice: ChoiceFold) -> None:
        """The reader says: this choice has moved on."""
        self._dirty[serial, index] = choice
        self._wake()

    def disconnect(self) -> None:
        """The client has gone."""
        self.disconnected = True
        self._wake()

    async def wait(self) -> dict[tuple[int, int], ChoiceFold]:
        """What has changed, keyed by (serial, choice); waits for something. Empty only after a disconnect."""
        while not self._dirty and not self.disconnected:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        dirty, self._dirty = self._dirty, {}
        return dirty

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""One client's view of the log: which of its choices have changed since it last looked."""

from __future__ import annotations

import asyncio

from octavo_shared.fold import ChoiceFold
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord


class Watcher:
    """Collects changed choices of the requests of one answer and wakes the one task that waits for them."""

    __slots__ = ("_dirty", "_waiter", "counts", "disconnected", "generation", "handed_over", "ids", "n", "records")

    def __init__(self, ids: tuple[RequestId, ...], n: int, generation: int = 0) -> None:
        self.ids = ids
        # Choices of each of them.
        self.n = n
        # Of its client's coming: that nobody follows any more is not said for clients who came later (rule L7).
        self.generation = generation
        # What it is told counts in the metrics: of several who follow the same from its beginning one does.
        self.counts = False
        # Set once the requests have been appended to the model stream.
        self.records: tuple[RequestRecord, ...] = ()
        # The client has gone; nothing will be sent any more.
        self.disconnected = False
        # The client is to go on elsewhere: the answer stops here, the requests do not.
        self.handed_over = False
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

    def hand_over(self) -> None:
        """The client is to go on elsewhere."""
        self.handed_over = True
        self._wake()

    @property
    def is_over(self) -> bool:
        """Nothing more is to be sent."""
        return self.disconnected or self.handed_over

    async def wait(self) -> dict[tuple[int, int], ChoiceFold]:
        """What has changed, keyed by (serial, choice); waits for something. Empty only when it is over."""
        while not self._dirty and not self.is_over:
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

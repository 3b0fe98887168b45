"""Deadlines of live requests: a heap, and one timer of the event loop for the earliest."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from octavo_shared.ids import RequestId

# The wall clock may be set while the timer runs: never sleep longer than this (seconds) without looking at it.
LONGEST_SLEEP_S = 60.0


class Deadlines:
    """Calls ``expire`` with each request whose deadline has passed, unless it has been forgotten before.

    Deadlines are Unix microseconds; ``clock`` gives Unix seconds. Nothing runs between deadlines: adding and forgetting are
    O(log n), and a request without a deadline costs nothing.
    """

    def __init__(self, expire: Callable[[RequestId], None], clock: Callable[[], float] = time.time) -> None:
        self._expire = expire
        self._clock = clock
        self._deadlines: dict[RequestId, int] = {}
        # Entries of requests that were forgotten stay until they come up or are the majority.
        self._heap: list[tuple[int, RequestId]] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request_id: RequestId, deadline_us: int) -> None:
        """Watch a request; one whose deadline has passed already expires as soon as the loop runs. 0 means no deadline."""
        if deadline_us <= 0:
            return
        self._deadlines[request_id] = deadline_us
        heapq.heappush(self._heap, (deadline_us, request_id))
        if self._heap[0][1] == request_id:
            self._arm()

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        if self._deadlines.pop(request_id, None) is None:
            return
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._deadlines):
            self._heap = [entry for entry in self._heap if self._deadlines.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)

    def due(self) -> list[RequestId]:
        """Take out the requests whose deadlines have passed, the earliest first."""
        now_us = int(self._clock() * 1e6)
        due = []
        while self._heap and self._heap[0][0] <= now_us:
            deadline_us, request_id = heapq.heappop(self._heap)
            if self._deadlines.get(request_id) == deadline_us:
                del self._deadlines[request_id]
                due.append(request_id)
        return due

    def close(self) -> None:
        """Nothing expires any more."""
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deadlines:
            sleep_s = min(max(self._heap[0][0] / 1e6 - self._clock(), 0.0), LONGEST_SLEEP_S)
            self._timer = asyncio.get_running_loop().call_later(sleep_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        try:
            for request_id in self.due():
                self._expire(request_id)
        finally:
            self._arm()

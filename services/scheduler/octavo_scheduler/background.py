"""What is done beside: tasks of one term, and operations on the log that are repeated until they succeed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

RETRY_S = 0.2


async def insist(operation: Callable[[], Awaitable[None]]) -> None:
    """Repeat an idempotent operation on the log until it succeeds."""
    while True:
        try:
            await operation()
            return
        except (RedisError, OSError) as error:
            logger.warning("the log is out of reach (%s); trying again", error)
            await asyncio.sleep(RETRY_S)


class Background:
    """Owns the tasks that are under way in a term. What goes wrong in one is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Do something beside. Nothing is begun any more once the term is over."""
        if self.is_closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Stop whatever is under way."""
        self.is_closed = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.1)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())

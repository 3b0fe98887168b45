"""Looks after executors: one that falls silent, or has work and gets nowhere, is let go, and its requests go on elsewhere."""

from __future__ import annotations

import asyncio
import time

from octavo_scheduler.engine import STUCK, Patience
from octavo_scheduler.service import SchedulerService

LOOK_S = 0.5


class Watchdog:
    """A lease on every executor, renewed by whatever it says (rule L2: what it still logs afterwards counts for nothing)."""

    def __init__(self, service: SchedulerService, executor_lease_s: float, step_timeout_s: float | None) -> None:
        """``step_timeout_s``: how long a step may last; None: that depends on what is in it."""
        self._service = service
        self._lease_s = executor_lease_s
        self._patience = STUCK if step_timeout_s is None else Patience(step_timeout_s, 0.0, step_timeout_s)
        self._looked_at_s = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """Act on every executor that is silent or stalled, as of ``now_s`` (seconds of the monotonic clock)."""
        slept_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        for engine in list(self._service.engines):
            if slept_s > 4 * LOOK_S:
                # It was this process that stood still: what executors said meanwhile has not been read yet.
                engine.last_heard_s += slept_s
                continue
            silent_s = now_s - engine.last_heard_s
            if silent_s > self._lease_s:
                self._service.metrics.count_let_go("silent")
                engine.hang_up(f"has been silent for {silent_s:.0f} s")
            elif reason := engine.stalled(now_s, self._patience):
                self._service.metrics.count_let_go("stalled")
                if engine.step_s:
                    engine.hang_up(f"gets nowhere: {reason}", stuck=True)
                else:
                    engine.restart(f"it gets nowhere: {reason}")

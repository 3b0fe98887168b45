"""Keeps a set of processes running: ordered start, restarts with back-off, ordered stop, no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.child import Child, ChildSpec, NotReadyError, describe_end


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a restart: doubling from the first, forgotten after a long enough life."""

    first_s: float = 0.5
    longest_s: float = 30.0
    forgotten_after_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """The wait before the restart that follows `failures` earlier ones."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures, 30))


class Supervisor:
    """Runs children until a signal asks it to stop.

    A child that never became ready fails the start as a whole, since restarting it would only hide a
    wrong setting; one that was ready before is restarted for as long as it takes.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        show_line: Callable[[str, str], None],
        on_ready: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        for index, spec in enumerate(specs):
            missing = [need for need in spec.needs if need not in names[:index]]
            if missing:
                raise ValueError(f"{spec.name} needs {missing[0]}, which does not come before it")
        self._show_line = show_line
        self._on_ready = on_ready
        self._backoff = backoff or Backoff()
        self._children = [Child(spec, show_line) for spec in specs]
        self._ready = {name: asyncio.Event() for name in names}
        self._stop_asked = asyncio.Event()
        self._signals_seen = 0

    async def run(self) -> int:
        """Start everything, wait for SIGINT, SIGTERM or SIGHUP, stop everything. The exit status: 1 if the
        start failed, else 0. Must run in the main thread."""
        loop = asyncio.get_running_loop()
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in caught:
            loop.add_signal_handler(number, self._on_signal)
        tending = [asyncio.create_task(self._tend(child)) for child in self._children]
        announcing = asyncio.create_task(self._announce())
        asked = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait([*tending, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tending, announcing, asked):
                task.cancel()
            results = await asyncio.gather(*tending, announcing, asked, return_exceptions=True)
            await self._stop_all()
            for number in caught:
                loop.remove_signal_handler(number)
        return self._exit_status(results)

    def pids(self) -> dict[str, int]:
        """Process ids of the children that have been started, by name."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    def _exit_status(self, results: Sequence[object]) -> int:
        failures = [r for r in results if isinstance(r, Exception) and not isinstance(r, asyncio.CancelledError)]
        for failure in failures:
            if not isinstance(failure, NotReadyError):
                raise failure
        return 1 if failures else 0

    async def _announce(self) -> None:
        for event in self._ready.values():
            await event.wait()
        self._on_ready()

    async def _tend(self, child: Child) -> None:
        name = child.spec.name
        for need in child.spec.needs:
            await self._ready[need].wait()
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started_s = loop.time()
            try:
                await child.start()
                await child.until_ready()
            except NotReadyError as error:
                child.show_tail()
                if not self._ready[name].is_set():
                    self._show_line(name, f"{error}; giving up")
                    raise
                reason = str(error)
            else:
                if failures:
                    self._show_line(name, "is ready again")
                self._ready[name].set()
                reason = describe_end(await child.wait())
                child.show_tail()
            if loop.time() - started_s > self._backoff.forgotten_after_s:
                failures = 0
            delay_s = self._backoff.delay_s(failures)
            failures += 1
            self._show_line(name, f"{reason}; restarting it in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    def _on_signal(self) -> None:
        self._signals_seen += 1
        self._stop_asked.set()
        if self._signals_seen > 1:  # a second Ctrl-C: whoever waits has lost patience
            for child in self._children:
                child.kill()

    async def _stop_all(self) -> None:
        """Last started, first stopped: nobody loses the service it depends on while it winds down."""
        for child in reversed(self._children):
            with contextlib.suppress(NotReadyError):
                await child.stop()

"""One process of the stack: started, killed, stopped and continued at will, and started again when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.procs import die_with_parent

RESTART_S = 0.3


class Process:
    """Keeps a command running, as a supervisor would; its output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.starts = 0
        # Exit statuses that no fault of ours brought about.
        self.surprises: list[str] = []
        self._expected_end = False
        # Done once before the next start.
        self._before_start: Callable[[], None] | None = None

    def start(self) -> None:
        """Start it, and again whenever it ends."""
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            self._expected_end = False
            self.starts += 1
            if self._before_start is not None:
                self._before_start()
                self._before_start = None
            self._process = self._spawn()
            while self._process.poll() is None:
                await asyncio.sleep(0.02)
            if not self._expected_end:
                self.surprises.append(f"{self.name} ended by itself with status {self._process.returncode}")
            await asyncio.sleep(RESTART_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            output.write(f"--- start {self.starts}\n".encode())
            output.flush()
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self, then: Callable[[], None] | None = None) -> None:
        """SIGKILL; the keeper does ``then`` and starts it again."""
        self._before_start = then
        self._send(signal.SIGKILL, ends=True)

    def terminate(self) -> None:
        """SIGTERM, as in a rolling restart."""
        self._send(signal.SIGTERM, ends=True)

    def pause(self) -> None:
        """SIGSTOP."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def _send(self, number: int, *, ends: bool = False) -> None:
        if self.running and self._process is not None:
            self._expected_end |= ends
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM and no restart; its exit status, that of SIGKILL if it did not end in time."""
        if self._keeper is not None:
            self._keeper.cancel()
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while process.poll() is None and loop.time() < deadline_s:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        return process.wait()

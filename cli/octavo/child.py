"""One supervised process: its start, its output, its readiness and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.procs import die_with_parent

_PROBE_INTERVAL_S = 0.05
_TAIL_LINES = 20
# After a process has ended, something it started may still hold its output open.
_OUTPUT_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run, and how to tell that it works."""

    name: str
    command: Sequence[str]
    ready: Callable[[], bool] | None = None  # called in a thread, must return soon; None: ready once started
    needs: Sequence[str] = ()  # children that must be ready before this one starts
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of ours
    ready_timeout_s: float = 120.0
    stop_timeout_s: float = 10.0
    on_line: Callable[[str], bool] | None = None  # sees every output line; True keeps it from being shown
    quiet: bool = False  # lines are shown only if the child ends unasked: its last ones


class NotReadyError(Exception):
    """The child ended, or did not become ready in time."""


class Child:
    """Owns the process of one spec, through all its restarts."""

    def __init__(self, spec: ChildSpec, show_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._show_line = show_line
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._transport: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process in a session of its own, so that a Ctrl-C reaches only the supervisor.

        Raises NotReadyError if it cannot be executed.
        """
        self.tail.clear()
        process = self._spawn()
        loop = asyncio.get_running_loop()
        self._process = process
        self._ended = loop.create_future()
        threading.Thread(target=_await_end, args=(process, loop, self._ended), daemon=True).start()
        output = asyncio.StreamReader()
        assert process.stdout is not None
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), process.stdout)
        self._reader = asyncio.create_task(self._forward(output))

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Not asyncio's own subprocesses: waiting for one of those also waits for everything that inherited
        # its output, so a crash would go unseen while a process it started lives on. In this thread, not
        # a worker: the kernel ties the child's life to the thread that forked it.
        try:
            return subprocess.Popen(
                list(self.spec.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
                preexec_fn=die_with_parent(),
                bufsize=0,
            )
        except OSError as error:
            raise NotReadyError(f"cannot be started: {error}") from error

    async def until_ready(self) -> None:
        """Return when the probe says yes. Raises NotReadyError."""
        if self.spec.ready is None:
            return
        assert self._ended is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.spec.ready_timeout_s
        while not await asyncio.to_thread(self.spec.ready):
            if self._ended.done():
                raise NotReadyError(describe_end(await self.wait()))
            if loop.time() > deadline:
                await self.stop()
                raise NotReadyError(f"was not ready within {self.spec.ready_timeout_s:g} s")
            await asyncio.sleep(_PROBE_INTERVAL_S)
        if self._ended.done():  # the probe was answered by something else
            raise NotReadyError(describe_end(await self.wait()))

    async def wait(self) -> int:
        """The exit status (negative: a signal's number), once the process and what it started are gone."""
        assert self._ended is not None
        code = await asyncio.shield(self._ended)
        self._kill_group()
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OUTPUT_GRACE_S):
                    await self._reader
            self._reader = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        return code

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the spec's deadline. Nothing happens if it is not running."""
        if self._process is None or self._ended is None:
            return
        if not self._ended.done():
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.spec.stop_timeout_s):
                    await asyncio.shield(self._ended)
            except TimeoutError:
                self._show_line(self.spec.name, f"did not stop within {self.spec.stop_timeout_s:g} s; killing it")
                self.kill()
        await self.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL for the process and everything in its session."""
        if self._process is not None:
            self._process.kill()
            self._kill_group()

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _forward(self, output: asyncio.StreamReader) -> None:
        # Not readline(): a line longer than the reader's limit would end it with an error.
        unfinished = b""
        while data := await output.read(1 << 16):
            *lines, unfinished = (unfinished + data).split(b"\n")
            for line in lines:
                self._take_line(line)
        if unfinished:
            self._take_line(unfinished)

    def _take_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        taken = self.spec.on_line is not None and self.spec.on_line(line)
        if not taken and not self.spec.quiet:
            self._show_line(self.spec.name, line)

    def show_tail(self) -> None:
        """Show the last lines of a quiet child."""
        if self.spec.quiet:
            for line in self.tail:
                self._show_line(self.spec.name, line)


def _await_end(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
    code = process.wait()

    def tell() -> None:
        if not ended.done():
            ended.set_result(code)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(tell)


def describe_end(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"

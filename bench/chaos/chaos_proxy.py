"""A TCP proxy between two services, for all that can happen to a line: cuts, silence, delay, half-open connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Target = Callable[[], Sequence[int]]


@dataclass(slots=True, eq=False)
class _Line:
    """One connection: the client's side and the server's."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Proxy:
    """Listens on a port of its own and connects each client to the first target port that accepts.

    ``target`` is asked for every new connection, in order of preference: so a proxy also plays the name or the load
    balancer behind which a standby takes over.
    """

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self._target = target
        self._lines: set[_Line] = set()
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._flowing_back = asyncio.Event()
        self._flowing_back.set()
        self._refusing = False
        self.delay_s = 0.0
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop every line."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def __len__(self) -> int:
        return len(self._lines)

    # --- what can happen ---

    def cut(self, *, reset: bool = True) -> None:
        """Every connection ends: by a reset, or by an orderly end."""
        for line in list(self._lines):
            self._drop(line, reset=reset)

    def freeze(self, *, there: bool = True, back: bool = True) -> None:
        """Nothing passes any more, in either direction or one; connections stay open."""
        if there:
            self._flowing.clear()
        if back:
            self._flowing_back.clear()

    def thaw(self) -> None:
        """What was held back passes, and what follows."""
        self._flowing.set()
        self._flowing_back.set()

    def abandon(self) -> None:
        """Connections of now turn half-open: both sides believe them alive, and nothing passes ever again."""
        for line in list(self._lines):
            for task in line.tasks:
                task.cancel()

    def refuse(self, refusing: bool) -> None:
        """While refusing, nobody gets a new connection."""
        self._refusing = refusing

    # --- the plumbing ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = None if self._refusing else await self._connect()
        if far is None:
            _reset(writer)
            return
        far_reader, far_writer = far
        line = _Line(writer, far_writer)
        self._lines.add(line)
        there = asyncio.create_task(self._pump(reader, far_writer, self._flowing))
        back = asyncio.create_task(self._pump(far_reader, writer, self._flowing_back))
        line.tasks = [there, back]
        await asyncio.wait(line.tasks, return_when=asyncio.FIRST_COMPLETED)
        if not any(task.cancelled() for task in line.tasks):
            self._drop(line, reset=any(task.exception() is not None for task in line.tasks if task.done()))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for port in self._target():
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        return None

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            await flowing.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        await flowing.wait()

    def _drop(self, line: _Line, *, reset: bool) -> None:
        self._lines.discard(line)
        for task in line.tasks:
            task.cancel()
        for writer in (line.near, line.far):
            if reset:
                _reset(writer)
            else:
                writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

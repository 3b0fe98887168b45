"""A small HTTP/1.1 client over bare sockets: it sees every byte that comes, and when a connection breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# Gateways hold the head of an answer back until there is something to say.
HEAD_TIMEOUT_S = 15.0


class BrokenError(ConnectionError):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One server-sent event: its ``id`` line ("" without one) and its data."""

    id: str
    data: str


class Exchange:
    """One request and its answer, as an async context; the connection is closed afterwards.

    Raises:
        BrokenError: the connection cannot be made, or ends early.
    """

    def __init__(
        self, port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        self._port = port
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._request = "\r\n".join([*lines, "", ""]).encode() + payload
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Exchange:
        try:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._writer.write(self._request)
            head_bytes = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            head = head_bytes.decode("latin-1").split("\r\n")
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.__aexit__(None, None, None)
            raise BrokenError(str(error)) from error
        self.status = int(head[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))
                return
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise BrokenError(str(error)) from error

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self._pieces()])

    async def events(self) -> AsyncIterator[SseEvent]:
        """Server-sent events as they come."""
        buffer = b""
        async for piece in self._pieces():
            *whole, buffer = (buffer + piece).split(b"\n\n")
            for text in whole:
                fields = dict(line.split(": ", 1) for line in text.decode().split("\n") if ": " in line)
                if "data" in fields:
                    yield SseEvent(fields.get("id", ""), fields["data"])

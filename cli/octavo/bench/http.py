"""A thin HTTP/1.1 client for streamed completions.

A general HTTP library spends more processor time on one server-sent event than a small model's server
spends on making it; on a machine shared with the server that would be measuring the client. This one
keeps to what a measurement needs: POST with a known body, chunked or plain answers, keep-alive.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from octavo.errors import CommandError

# Called for every `data:` line with its payload and the time at which its bytes arrived.
EventCallback = Callable[[bytes, float], None]


class HttpError(Exception):
    """The exchange failed: no connection, a broken answer, or a status other than 200."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens, and the head that every request to it shares."""

    host: str
    port: int
    tls: bool
    prefix: str  # path in front of every endpoint, without a closing slash
    headers: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(url: str, headers: dict[str, str]) -> Target:
        """From `http[s]://host[:port][/prefix]`. Raises CommandError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise CommandError(f"--base-url: {url!r} is not an http:// or https:// URL")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return Target(parts.hostname, port, tls, parts.path.rstrip("/"), tuple(headers.items()))

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole request, ready to be written."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """One keep-alive connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bytes] | None = None
        self._on_event: EventCallback | None = None
        self._reset()

    def _reset(self) -> None:
        self._head: bytes | None = b""  # bytes of an unfinished head; None once it is read
        self._status = 0
        self._chunked = False
        self._left = 0  # bytes still to come of this chunk or body; -1: until the connection closes
        self._framing = b""  # an unfinished chunk-size line
        self._line = b""  # an unfinished event line
        self._plain: list[bytes] | None = None  # the body, when it is not an event stream
        self._close = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, on_event: EventCallback | None = None) -> bytes:
        """Send `request`; returns the body of an answer that is not an event stream. Raises HttpError."""
        if self._transport is None or not self.usable:
            raise HttpError("the connection is closed")
        self._reset()
        self._on_event = on_event
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not an isinstance check: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is None or self._done.done():
            return
        if self._head is None and self._left == -1 and exc is None:
            self._finish()
        else:
            self._fail(f"the server closed the connection ({exc or 'no error given'})")

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self._done is None or self._done.done():
            return
        try:
            if self._head is not None:
                data = self._read_head(data)
            if self._head is None:
                self._read_body(data, now)
        except (ValueError, IndexError) as error:
            self._fail(f"the server's answer is not HTTP ({error})")
            self.close()

    def _read_head(self, data: bytes) -> bytes:
        assert self._head is not None
        # A keep-alive peer may still owe the line end of the previous answer.
        data = (self._head + data).lstrip(b"\r\n")
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._head = data
            return b""
        lines = data[:end].decode("latin-1").split("\r\n")
        self._status = int(lines[0].split(" ", 2)[1])
        headers = {
            name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(":") for x in lines[1:])
        }
        rest = data[end + 4 :]
        if self._status == 100:  # "continue": the real head follows
            self._head = b""
            return self._read_head(rest)
        self._head = None
        self._chunked = "chunked" in headers.get("transfer-encoding", "")
        self._left = 0 if self._chunked else int(headers.get("content-length", -1))
        self._close = headers.get("connection") == "close"
        if self._status != 200 or not headers.get("content-type", "").startswith("text/event-stream"):
            self._plain = []
        return rest

    def _read_body(self, data: bytes, now: float) -> None:
        if not self._chunked:
            if self._left > 0:
                self._left -= len(data)
            self._deliver(data, now)
            if self._left == 0:
                self._finish()
            return
        while data:
            if self._left > 2:  # inside a chunk: its bytes, then two of line end
                content = data[: self._left - 2]
                self._deliver(content, now)
                self._left -= len(content)
                data = data[len(content) :]
            elif self._left > 0:
                skipped = min(self._left, len(data))
                self._left -= skipped
                data = data[skipped:]
            else:
                end = data.find(b"\n")
                if end < 0:
                    self._framing += data
                    return
                size = int((self._framing + data[:end]).split(b";")[0], 16)
                self._framing = b""
                data = data[end + 1 :]
                if size == 0:
                    self._finish()
                    return
                self._left = size + 2

    def _deliver(self, content: bytes, now: float) -> None:
        if self._plain is not None:
            self._plain.append(content)
            return
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and self._on_event is not None:
                self._on_event(line[5:].strip(), now)

    def _finish(self) -> None:
        assert self._done is not None
        body = b"".join(self._plain or ())
        if self._close:
            self.close()
        if self._status == 200:
            self._done.set_result(body)
        else:
            self._fail(f"HTTP {self._status}: {body[:500].decode(errors='replace')}")

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(message))


class ConnectionPool:
    """Connections to one server, reused last-in first-out; the caller limits how many are in use."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def exchange(self, request: bytes, on_event: EventCallback | None = None) -> bytes:
        """One exchange over an idle connection or a new one. Raises HttpError."""
        connection = await self._take()
        try:
            return await connection.exchange(request, on_event)
        finally:
            if connection.usable:
                self._idle.append(connection)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(Connection, self.target.host, self.target.port, ssl=self._tls)
        except OSError as error:
            raise HttpError(f"cannot connect to {self.target.host}:{self.target.port} ({error})") from error
        return made

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

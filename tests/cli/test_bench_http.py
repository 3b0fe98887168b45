"""The benchmark's HTTP client against real sockets, with answers cut at every possible place."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.http import Connection, ConnectionPool, HttpError, Target
from octavo.errors import CommandError

_EVENTS = [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"\xc3\xa9\\n"}]}', b"[DONE]"]
_STREAM = b"".join(b"data: " + event + b"\n\n" for event in _EVENTS)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def _chunked(parts: list[bytes]) -> bytes:
    body = b"".join(b"%X;x=1\r\n%s\r\n" % (len(part), part) for part in parts if part)
    return _HEAD + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@asynccontextmanager
async def _server(answer: Callable[[asyncio.StreamWriter], asyncio.Future[None] | None]) -> AsyncIterator[Target]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length:
                    await reader.readexactly(int(length[0].split(b":")[1]))
                pending = answer(writer)
                if pending is not None:
                    await pending
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("127.0.0.1", port, tls=False, prefix="")


def _feed(pieces: list[bytes]) -> list[bytes]:
    """What a connection reports when an answer arrives in exactly these pieces."""

    async def main() -> list[bytes]:
        events: list[bytes] = []

        class Transport(asyncio.Transport):
            def write(self, data: object) -> None:
                for piece in pieces:
                    loop.call_soon(connection.data_received, piece)

            def is_closing(self) -> bool:
                return False

        loop = asyncio.get_running_loop()
        connection = Connection()
        connection.connection_made(Transport())
        await asyncio.wait_for(connection.exchange(b"x", lambda event, now: events.append(event)), 5)
        return events

    return asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_events_survive_every_cut(data: st.DataObject) -> None:
    cuts = st.lists(st.integers(0, len(_STREAM)), max_size=6).map(sorted)
    borders = [0, *data.draw(cuts), len(_STREAM)]
    wire = _chunked([_STREAM[a:b] for a, b in itertools.pairwise(borders)])
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8))), len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(places) if a < b]
    assert _feed(pieces) == _EVENTS


def test_events_survive_byte_by_byte() -> None:
    wire = _chunked([_STREAM])
    assert _feed([wire[i : i + 1] for i in range(len(wire))]) == _EVENTS


def test_carriage_returns_and_comments_are_allowed() -> None:
    stream = b": ping\r\n\r\ndata:1\r\n\r\nevent: x\r\nid: 3\r\ndata: 2\r\n\r\n"
    assert _feed([_chunked([stream])]) == [b"1", b"2"]


def test_length_and_close_delimited_streams() -> None:
    assert _feed([_HEAD + b"Content-Length: %d\r\n\r\n" % len(_STREAM), _STREAM[:9], _STREAM[9:]]) == _EVENTS

    async def main() -> list[bytes]:
        def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(_HEAD + b"connection: close\r\n\r\n" + _STREAM)
            writer.close()

        events: list[bytes] = []
        async with _server(answer) as target:
            pool = ConnectionPool(target)
            await pool.exchange(target.request("POST", "/", b"{}"), lambda event, now: events.append(event))
            pool.close()
        return events

    assert asyncio.run(main()) == _EVENTS


def test_connections_are_reused() -> None:
    async def main() -> tuple[int, list[bytes]]:
        writers = set()

        def answer(writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            writer.write(_chunked([_STREAM]))

        events: list[bytes] = []
        async with _server(answer) as target:
            pool = ConnectionPool(target)
            for _ in range(5):
                await pool.exchange(target.request("POST", "/x", b"{}"), lambda event, now: events.append(event))
            pool.close()
        return len(writers), events

    assert asyncio.run(main()) == (1, _EVENTS * 5)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b'HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n{"no": 1}', r'HTTP 404: {"no": 1}'),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:", "closed the connection"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
)
def test_failures_are_told_apart(wire: bytes, message: str) -> None:
    async def main() -> None:
        def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(wire)
            writer.close()

        async with _server(answer) as target:
            pool = ConnectionPool(target)
            try:
                await pool.exchange(target.request("POST", "/", b"{}"), lambda event, now: None)
            finally:
                pool.close()

    with pytest.raises(HttpError, match=message):
        asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        pool = ConnectionPool(Target("127.0.0.1", 9, tls=False, prefix=""))
        await pool.exchange(b"x")

    with pytest.raises(HttpError, match="cannot connect"):
        asyncio.run(main())


def test_targets() -> None:
    target = Target.parse("https://models.example/api/", {"X-A": "b"})
    assert (target.host, target.port, target.tls, target.prefix) == ("models.example", 443, True, "/api")
    assert target.request("POST", "/v1/completions", b"{}").startswith(
        b"POST /api/v1/completions HTTP/1.1\r\nHost: models.example:443\r\n"
    )
    with pytest.raises(CommandError, match="--base-url"):
        Target.parse("models.example:80", {})

"""Tokens on their way into the log: what a restarted Redis may have lost is said again."""

from __future__ import annotations

import asyncio
import queue
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from log_server import LogServer

from octavo_executor.outbox import Outbox, StepAppend
from octavo_shared.fold import LogFold
from octavo_shared.ids import RequestId
from octavo_shared.keys import Keys
from octavo_shared.plan import OutputRow
from octavo_shared.streams import Streams

WAIT_S = 30.0


class Server(LogServer):
    """One that writes down what it is told before it answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--appendonly", "yes", "--appendfsync", "always")
        self.start()

    def kill(self, *, loses: bool) -> None:
        self.stop(kill=True)
        if loses:
            shutil.rmtree(self.folder / "appendonlydir")

    def tokens(self) -> list[int]:
        async def read() -> list[int]:
            streams = Streams.connect(self.url, "m")
            try:
                page = await streams.read_log("g", "0", count=10_000)
                return LogFold().apply_all(page.events).get(1, 0).tokens
            finally:
                await streams.close()

        return asyncio.run(read())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill(loses=False)


def step(number: int) -> StepAppend:
    return StepAppend(1, 1, number, (OutputRow(RequestId("g", 1), 0, 1, number - 1, (100 + number,)),))


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_restarted_redis_is_told_again(server: Server, loses: bool, busy: bool) -> None:
    """Whether it has lost what it was told last or not, and whether or not something comes after."""
    logged: queue.SimpleQueue[int] = queue.SimpleQueue()
    outbox = Outbox(server.url, "m", "e", 64, logged=lambda epoch, step: logged.put(step), broken=lambda: None)

    def until(number: int) -> None:
        while logged.get(timeout=WAIT_S) < number:
            pass

    for number in range(1, 9):
        outbox.put(step(number))
    until(8)
    server.kill(loses=loses)
    if busy:
        outbox.put(step(9))
    server.start()
    count = 9 if busy else 8
    if busy:
        until(9)
    deadline = time.monotonic() + WAIT_S
    while server.tokens() != [100 + number for number in range(1, count + 1)]:
        assert time.monotonic() < deadline, server.tokens()
        time.sleep(0.05)
    assert outbox.close(WAIT_S)


def test_what_is_in_the_way_is_logged_without_what_was_to_be_said(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set(Keys("m").log("g"), "x")
        outbox = Outbox(server.url, "m", "e", 64, logged=lambda epoch, step: None, broken=lambda: None)
        outbox.put(step(1))
        deadline = time.monotonic() + WAIT_S
        while "1 steps wait" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.delete(Keys("m").log("g"))
    assert outbox.close(WAIT_S)
    assert server.tokens() == [101]
    assert "XADD" not in caplog.text


def test_a_full_outbox_waits_and_loses_nothing(server: Server) -> None:
    logged: queue.SimpleQueue[int] = queue.SimpleQueue()
    outbox = Outbox(server.url, "m", "e", 4, logged=lambda epoch, step: logged.put(step), broken=lambda: None)
    outbox.put(step(1))
    assert logged.get(timeout=WAIT_S) == 1
    server.kill(loses=False)
    for number in range(2, 6):
        outbox.put(step(number))
    server.start()
    for number in range(6, 30):
        outbox.put(step(number))
    assert outbox.close(WAIT_S)
    assert server.tokens() == [100 + number for number in range(1, 30)]

"""Questions to the scheduler and its answers, over a real Valkey."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from log_server import log_server

from octavo_shared.control import Ask, AskRefusedError, ControlChannel, NoAnswerError
from octavo_shared.entries import MalformedEntryError
from octavo_shared.streams import Streams

Scenario = Callable[[Streams, ControlChannel], Awaitable[None]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with log_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def run(url: str) -> Callable[[Scenario], None]:
    def runner(scenario: Scenario) -> None:
        async def main() -> None:
            streams = Streams.connect(url, "org/model")
            await streams.client.flushall()
            try:
                await asyncio.wait_for(scenario(streams, ControlChannel(streams)), 30)
                assert await streams.client.keys("*") == [], "something is left behind"
            finally:
                await streams.close()

        asyncio.run(main())

    return runner


Run = Callable[[Scenario], None]


def test_questions_are_answered_each_its_own(run: Run) -> None:
    async def scenario(_: Streams, control: ControlChannel) -> None:
        async def serve() -> None:
            for _ in range(20):
                ask = await control.read(block_s=5)
                assert ask is not None
                assert ask.kind == "double"
                await control.answer(ask, {"double": 2 * ask.payload["number"]})

        server = asyncio.create_task(serve())
        answers = await asyncio.gather(*(control.ask("double", {"number": number}, 10) for number in range(20)))
        assert answers == [{"double": 2 * number} for number in range(20)]
        await server

    run(scenario)


def test_a_refusal_says_why(run: Run) -> None:
    async def scenario(_: Streams, control: ControlChannel) -> None:
        async def serve() -> None:
            ask = await control.read(block_s=5)
            assert ask is not None
            await control.answer(ask, refusal=AskRefusedError("there is no such thing", 503))

        server = asyncio.create_task(serve())
        with pytest.raises(AskRefusedError, match="there is no such thing") as refused:
            await control.ask("nonsense", {}, 10)
        assert refused.value.status == 503
        await server

    run(scenario)


def test_without_an_answer_the_question_is_withdrawn(run: Run) -> None:
    async def scenario(streams: Streams, control: ControlChannel) -> None:
        before = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"within 0\.2 s"):
            await control.ask("kv", {}, 0.2)
        assert time.monotonic() - before >= 0.2
        assert await streams.client.llen(streams.keys.control) == 0
        assert await control.read(block_s=0.01) is None

    run(scenario)


def test_nothing_stays_when_either_side_dies(run: Run) -> None:
    async def scenario(streams: Streams, control: ControlChannel) -> None:
        asking = asyncio.create_task(control.ask("kv", {}, 5))
        async with asyncio.timeout(5):
            while not await streams.client.llen(streams.keys.control):
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        # Nobody withdraws it, but it runs out, and so does an answer nobody fetches.
        assert 0 < await streams.client.ttl(streams.keys.control) <= 15
        ask = await control.read(block_s=1)
        assert ask is not None
        await control.answer(ask, 1)
        assert 0 < await streams.client.ttl(streams.keys.answer(ask.id)) <= 10
        await streams.client.delete(streams.keys.answer(ask.id))

    run(scenario)


def test_what_nobody_waits_for_is_passed_over(run: Run) -> None:
    async def scenario(streams: Streams, control: ControlChannel) -> None:
        late = {"id": "1", "kind": "kv", "until_s": time.time() - 1, "payload": {}}
        await streams.client.rpush(streams.keys.control, json.dumps(late))
        assert await control.read(block_s=1) is None

    run(scenario)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "{}",
        '{"id": "1", "kind": "kv", "until_s": "x"}',
        '{"id": 1, "kind": "kv", "until_s": 9e9}',
        '{"id": "1", "kind": "kv", "until_s": 9e9, "payload": 5}',
        "\xff",
    ],
)
def test_garbage_is_named(run: Run, text: str) -> None:
    async def scenario(streams: Streams, control: ControlChannel) -> None:
        await streams.client.rpush(streams.keys.control, text.encode("latin-1"))
        with pytest.raises(MalformedEntryError):
            await control.read(block_s=1)

    run(scenario)


def test_an_ask_has_defaults() -> None:
    assert Ask("1", "kv", 2.0).payload == {}


def test_waiting_outlasts_the_clients_patience_with_a_silent_connection(url: str) -> None:
    """Else a quiet channel looks like a dead connection, and what is asked at the wrong moment is lost with it."""

    async def main() -> None:
        streams = Streams.connect(f"{url}?socket_timeout=2.2", "org/model")
        try:
            assert await ControlChannel(streams).read(block_s=2.6) is None
        finally:
            await streams.close()

    asyncio.run(main())

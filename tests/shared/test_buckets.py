"""Token buckets, on a real server: what they give, what they refuse, and what many takers share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from log_server import log_server

from octavo_shared.buckets import Buckets, Level
from octavo_shared.streams import Streams


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with log_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


def run(valkey: str, scene: Callable[[Streams, Buckets], Awaitable[None]]) -> None:
    async def main() -> None:
        streams = Streams.connect(valkey, "buckets")
        await streams.client.flushall()
        try:
            await scene(streams, Buckets(streams.client, streams.keys))
        finally:
            await streams.close()

    asyncio.run(main())


def test_all_or_nothing(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        first = await buckets.take("k", (60, 1000), 1, 400)
        assert (first.given, first.requests.remaining, first.tokens.remaining) == (True, 59, 600)
        refused = await buckets.take("k", (60, 1000), 1, 700)
        assert not refused.given
        assert 600 <= refused.tokens.left < 690
        assert refused.requests.left >= 59, "what is refused costs nothing"
        # (700 - 600) tokens at 1000 a minute, less what has come in the meantime.
        assert 1 < refused.tokens.wait_s(700) <= 6
        assert refused.requests.wait_s(1) == 0
        assert (await buckets.take("k", (60, 1000), 1, 600)).given
        assert (await buckets.take("other", (60, 1000), 1, 1000)).given, "keys do not share"

    run(valkey, scene)


def test_time_fills_a_bucket_up_to_its_limit(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        key = streams.keys.bucket("k")
        await buckets.take("k", (0, 600), 1, 600)

        async def pass_time(seconds: float) -> float:
            await streams.client.hset(key, "at", str(float(await streams.client.hget(key, "at")) - seconds))
            return (await buckets.take("k", (0, 600), 0, 0)).tokens.left

        assert 100 <= await pass_time(10) < 150, "10 s at 600 a minute"
        assert await pass_time(3600) == 600
        # A clock that was set back takes nothing away.
        await buckets.take("k", (0, 600), 0, 100)
        assert 500 <= await pass_time(-3600) < 550

    run(valkey, scene)


def test_settling_may_leave_a_debt_and_give_back(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        await buckets.take("k", (10, 100), 1, 50)
        debt = await buckets.take("k", (10, 100), 0, 250, ask=False)
        assert debt.given
        assert -201 < debt.tokens.left < -190
        assert debt.tokens.remaining == 0
        assert not (await buckets.take("k", (10, 100), 1, 1)).given
        back = await buckets.take("k", (10, 100), -1, -1000, ask=False)
        assert (back.requests.left, back.tokens.left) == (10, 100), "never more than full"

    run(valkey, scene)


def test_more_than_a_full_bucket_needs_a_full_one(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        big = await buckets.take("k", (0, 100), 1, 1000)
        assert big.given
        assert big.tokens.left == -900
        again = await buckets.take("k", (0, 100), 1, 1000)
        assert not again.given
        assert 590 < again.tokens.wait_s(1000) <= 600, "until it is full"

    run(valkey, scene)


def test_many_takers_get_together_what_there_is(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        taken = await asyncio.gather(*(buckets.take("k", (50, 0), 1, 10) for _ in range(200)))
        given = sum(one.given for one in taken)
        passed_s = 60 * (given - 50) / 50
        assert 50 <= given <= 55, passed_s

    run(valkey, scene)


def test_a_bucket_that_is_full_again_is_forgotten(valkey: str) -> None:
    async def scene(streams: Streams, buckets: Buckets) -> None:
        await buckets.take("k", (60, 6000), 1, 600)
        left_ms = await streams.client.pttl(streams.keys.bucket("k"))
        # 600 tokens at 6000 a minute are back in 6 s, and a second.
        assert 5000 < left_ms <= 7001

    run(valkey, scene)


def test_no_limit() -> None:
    assert Level(0, 0.0).wait_s(5) == 0

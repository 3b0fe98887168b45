"""The log in a real server: Valkey from the wheel, and the redis-server on PATH where there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
import uvloop
from log_server import LogServer, debians_redis, log_server
from redis.exceptions import ResponseError

from octavo_shared.connections import OtherLifeError, connect_blocking
from octavo_shared.entries import decode_request, encode_fences, encode_snapshot, encode_tokens
from octavo_shared.fold import FenceEvent, LogFold
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.records import ANY_GENERATION, AbortRecord, EndReason, ModelLimits, RequestRecord, SamplingParams
from octavo_shared.streams import FIELD, GROUP, Followers, Streams

Scenario = Callable[[Streams], Awaitable[None]]


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = debians_redis() if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        # The bundled Valkey is always tested; Debian's Redis where it is installed, as CI does.
        pytest.skip("no redis-server on PATH")
    with log_server(tmp_path_factory.mktemp("log"), binary=binary) as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    with redis.Redis.from_url(server) as client:
        client.flushall()
    return server


@pytest.fixture
def run(url: str) -> Callable[[Scenario], None]:
    """Runs a coroutine over a fresh connection."""

    def runner(scenario: Scenario) -> None:
        async def main() -> None:
            async for streams in _connected(url):
                await asyncio.wait_for(scenario(streams), 30)

        asyncio.run(main())

    return runner


async def _connected(url: str) -> AsyncIterator[Streams]:
    streams = Streams.connect(url, "org/model")
    try:
        yield streams
    finally:
        await streams.close()


Run = Callable[[Scenario], None]
# Of a request of the log "g" that only its first client follows.
NOBODY_CAME = Followers(0, {"g": 0})


def record(serial: int, log: str = "g", **more: object) -> RequestRecord:
    return RequestRecord(RequestId(log, serial), serial, np.arange(1, 4, dtype=np.int32), SamplingParams(), **more)  # type: ignore[arg-type]


def entry(serial: int, position: int, *tokens: int, end: int = 0) -> bytes:
    row = OutputRow(RequestId("g", serial), 0, 1, position, tokens, end=end)
    return encode_tokens([row], term=1, executor="e", epoch=1, step=1)


# --- admission and the model stream -----------------------------------------------------------------------------------


def test_admission_is_set_if_absent_on_the_id(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        assert await s.admit(record(1)) == RequestId("g", 1)
        assert await s.admit(record(1)) == RequestId("g", 1)
        assert await s.admit(record(2), record(1), record(3)) == RequestId("g", 2)
        assert await s.client.xlen(s.keys.requests) == 3

    run(scenario)


def test_admission_is_set_if_absent_on_the_idempotency_key(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        first = record(1, idempotency_key="k")
        assert await s.idempotent("", "k") is None
        assert await s.admit(first) == first.id
        assert await s.idempotent("", "k") == first.id
        assert await s.admit(record(2, idempotency_key="k"), record(3)) == first.id
        assert await s.admit(record(3, "other-gateway", idempotency_key="k")) == first.id
        assert await s.admit(first) == first.id
        assert await s.client.xlen(s.keys.requests) == 1
        # The loser has not taken its own ids either: they may come again without the key.
        assert await s.admit(record(2), record(3)) == RequestId("g", 2)
        # Others' keys are others'.
        assert await s.admit(record(4, idempotency_key="k", tenant="t")) == RequestId("g", 4)
        assert await s.client.xlen(s.keys.requests) == 4
        # As long as the answer is to come there is no end to it.
        assert await s.client.ttl(s.keys.idempotency("", "k")) == -1

    run(scenario)


def test_no_tenant_can_spell_anothers_idempotency_key(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        for serial, (tenant, key) in enumerate([("a:b", "c"), ("a", "b:c"), ("", "a:b:c")], 1):
            assert await s.admit(record(serial, tenant=tenant, idempotency_key=key)) == RequestId("g", serial)

    run(scenario)


@pytest.mark.parametrize("kind", ["string", "list", "hash"])
def test_what_is_no_log_goes(run: Run, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(s: Streams) -> None:
        async def spoil() -> None:
            key = s.keys.log("g")
            await s.client.delete(key)
            words = {"string": ("SET", key, "x"), "list": ("RPUSH", key, "x"), "hash": ("HSET", key, "a", "b")}
            await s.client.execute_command(*words[kind])

        await s.append_log("g", encode_fences([FenceEvent(1, 0, Attempt(1, 1))]))
        assert await s.log_length("g") == 1
        await spoil()
        await s.append_log("g", encode_fences([FenceEvent(1, 0, Attempt(1, 2))]))
        assert len((await s.read_log("g", "0")).events) == 1
        await spoil()
        assert (await s.read_log("g", "0")).events == []
        await spoil()
        assert await s.log_length("g") == 0

    run(scenario)
    assert caplog.text.count("was no stream") == 3


def test_errors_do_not_show_what_was_said(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        await s.client.set("text", "x")
        async with s.client.pipeline(transaction=False) as pipe:
            pipe.xadd("text", {FIELD: "what a client has said"})
            with pytest.raises(ResponseError, match="WRONGTYPE") as error:
                await pipe.execute()
        assert "client" not in str(error.value)

    run(scenario)
    with connect_blocking(url, 5) as client, client.pipeline(transaction=False) as pipe:
        pipe.xadd("text", {FIELD: "what a client has said"})
        with pytest.raises(ResponseError, match="WRONGTYPE") as error:
            pipe.execute()
        assert "client" not in str(error.value)


def test_a_rush_waits_for_connections(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        await asyncio.gather(*(s.admit(record(serial)) for serial in range(1, 501)))
        assert len(await s.read_requests("c", count=1000, block_ms=1)) == 500
        # Cancelled ones give their connections back.
        for _ in range(3):
            tasks = [asyncio.create_task(s.append_log("g", entry(1, 0, 5))) for _ in range(300)]
            await asyncio.sleep(0.002)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(s.unfinished([RequestId("g", serial)]) for serial in range(1, 501)))

    run(scenario)


def test_admission_by_many_at_once_lets_one_through(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        others = [Streams.connect(url, "org/model") for _ in range(8)]
        holders = await asyncio.gather(
            *(other.admit(record(serial, idempotency_key="k")) for serial, other in enumerate(others, 1))
        )
        assert len(set(holders)) == 1
        assert await s.client.xlen(s.keys.requests) == 1
        for other in others:
            await other.close()

    run(scenario)


def test_a_request_is_pending_until_it_is_finished(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        await s.create_group()
        await s.create_group()
        await s.admit(record(2))
        entries = await s.read_requests("one", count=10, block_ms=10)
        assert [decode_request(data).id.serial for _, data in entries] == [1, 2]
        assert await s.read_requests("one", count=10, block_ms=10) == []
        ids = [RequestId("g", serial) for serial in (1, 2, 3)]
        assert await s.unfinished(ids) == [True, True, False]
        await s.finish_request(entries[0][0], record(1))
        assert await s.unfinished(ids) == [False, True, False]
        assert await s.unfinished([]) == []
        # A scheduler that dies loses nothing: the next one claims what is pending, as it was.
        assert await s.claim_pending("two") == [entries[1]]
        assert await s.claim_pending("three") == [entries[1]]
        await s.finish_request(entries[1][0], None)
        assert await s.claim_pending("four") == []
        assert await s.client.xlen(s.keys.requests) == 0
        pending = await s.client.xpending(s.keys.requests, GROUP)
        assert pending["pending"] == 0
        # Nothing is kept of a request whose record does not want it.
        assert not await s.client.exists(s.keys.request(ids[0]))

    run(scenario)


def test_an_answer_is_kept_for_as_long_as_its_record_says_and_then_goes_by_itself(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        kept = record(1, resume_ttl_ms=60_000, idempotency_key="k", tenant="t")
        await s.admit(kept, record(2))
        (alive, other, nobody) = await s.look_up([kept.id, RequestId("g", 2), RequestId("g", 3)])
        assert alive is not None
        assert other is not None
        assert nobody is None
        assert (alive.record.id, alive.followers, alive.end, alive.is_owed) == (kept.id, NOBODY_CAME, (), True)
        entries = await s.read_requests("one", count=10, block_ms=10)
        for _ in range(2):
            await s.finish_request(entries[0][0], kept)
            await s.finish_request(entries[1][0], record(2))
        keys = [s.keys.request(kept.id), s.keys.idempotency("t", "k")]
        assert all([0 < await s.client.pttl(key) <= 60_000 for key in keys])
        end = encode_fences([FenceEvent(1, 0, Attempt(1, 2), EndReason.ABORT)])
        await s.append_log("g", entry(1, 0, 5))
        page = await s.read_log("g", "0")
        await s.trim_log("g", page.last_id, b"", {kept.id: end, RequestId("g", 2): end})
        (ended, gone) = await s.look_up([kept.id, RequestId("g", 2)])
        assert ended is not None
        assert gone is None
        assert (ended.record.tenant, ended.is_owed) == ("t", False)
        assert ended.end == (FenceEvent(1, 0, Attempt(1, 2), EndReason.ABORT),)
        # All that is left runs out by itself.
        names = {key for key in await s.client.keys("*") if await s.client.ttl(key) == -1}
        assert names == {s.keys.requests.encode(), s.keys.log("g").encode()}
        # The key is free as soon as the answer is gone.
        await s.client.delete(*keys)
        assert await s.idempotent("t", "k") is None

    run(scenario)


def test_life_times_begin_when_the_last_request_of_an_answer_has_ended(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        three = [
            record(5 + i, place=i, places=3, idempotency_key="k", resume_ttl_ms=60_000, owner_generation=i)
            for i in range(3)
        ]
        await s.admit(*three)
        entries = await s.read_requests("one", count=10, block_ms=10)
        keys = [*map(s.keys.request, three[1].siblings), s.keys.idempotency("", "k")]
        for index in (1, 0):
            await s.finish_request(entries[index][0], three[index])
            assert [await s.client.ttl(key) for key in keys] == [-1] * 4
        assert await s.unfinished([one.id for one in three]) == [False, False, True]
        await s.finish_request(entries[2][0], three[2])
        assert all([0 < await s.client.pttl(key) <= 60_000 for key in keys])
        standings = await s.look_up([one.id for one in three])
        assert [standing and standing.record.owner_generation for standing in standings] == [0, 1, 2]

    run(scenario)


def test_an_idempotency_key_of_another_answer_is_left_alone(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1, idempotency_key="k"))
        await s.finish_request(b"1-1", record(1, "other", idempotency_key="k", resume_ttl_ms=1000))
        assert await s.client.ttl(s.keys.idempotency("", "k")) == -1

    run(scenario)


def test_a_request_is_aborted_once_nobody_follows_it_at_any_gateway(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        ids = [RequestId("g", 1), RequestId("g", 2)]
        await s.admit(record(1), record(2))
        assert await s.followers(ids) == [NOBODY_CAME] * 2
        assert await s.follow(ids, "h", at_least=7) == 7
        # Whoever comes is told from all that came before.
        assert await s.follow(ids, "i", at_least=2) == 8
        assert await s.follow(ids, "h") == 9
        assert await s.followers(ids) == [Followers(9, {"g": 0, "h": 9, "i": 8})] * 2
        told = [abort for _, abort in await s.read_aborts("0", block_ms=10)]
        assert told == [
            AbortRecord(one, -1, n, "followed", who) for n, who in ((7, "h"), (8, "i"), (9, "h")) for one in ids
        ]
        first = AbortRecord(ids[0], reason="disconnect")
        assert not await s.leave(replace(first, owner_generation=9), "h")
        assert not await s.leave(replace(first, owner_generation=9), "i")
        assert await s.followers(ids) == [Followers(9, {"g": 0}), Followers(9, {"g": 0, "h": 9, "i": 8})]
        # The last one's abort names the last generation: nobody came after that.
        assert await s.leave(first, "g")
        assert [abort for _, abort in await s.read_aborts("0", block_ms=10)][6:] == [replace(first, owner_generation=9)]
        assert await s.followers(ids) == [Followers(9, {}), Followers(9, {"g": 0, "h": 9, "i": 8})]
        assert await s.follow(ids[:1], "i") == 10
        assert not await s.leave(first, "g")

    run(scenario)


def test_a_gateway_does_not_leave_for_clients_who_have_come_since(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        one = RequestId("g", 1)
        assert await s.follow([one], "g") == 1
        assert not await s.leave(AbortRecord(one), "g")
        assert await s.followers([one]) == [Followers(1, {"g": 1})]
        assert await s.leave(AbortRecord(one, owner_generation=1), "g")
        # Said again it is no less true.
        assert await s.leave(AbortRecord(one), "g")

    run(scenario)


def test_who_follows_is_said_again_to_a_redis_that_has_forgotten_it(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        one = RequestId("g", 1)
        assert await s.leave(AbortRecord(one, owner_generation=6), "g")
        # Whatever was said without knowing of them is older.
        assert await s.follow([one], "h", own=5) == 7
        assert await s.followers([one]) == [Followers(7, {"h": 5})]
        assert await s.follow([one], "h", own=3) == 8
        assert await s.followers([one]) == [Followers(8, {"h": 5})]
        assert await s.leave(AbortRecord(one, owner_generation=5), "h")
        told = [abort for _, abort in await s.read_aborts("0", block_ms=10)]
        assert [(abort.owner_generation, abort.new_owner) for abort in told if abort] == [
            (6, ""),
            (7, "h"),
            (8, "h"),
            (8, ""),
        ]

    run(scenario)


def test_nothing_is_written_of_who_follows_what_has_ended(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        ids = [RequestId("g", 1), RequestId("g", 2), RequestId("g", 3)]
        await s.admit(record(1), record(2))
        await s.follow(ids, "i")
        ((first, _), (second, _)) = await s.read_requests("one", count=10, block_ms=10)
        await s.finish_request(first, record(1, resume_ttl_ms=1000))
        await s.finish_request(second, record(2))
        kept = [Followers(1, {"g": 0, "i": 1}), NOBODY_CAME, NOBODY_CAME]
        assert await s.followers(ids) == kept
        assert await s.follow(ids, "h") == 2
        assert [await s.leave(AbortRecord(one), "g") for one in ids] == [False, True, True]
        assert await s.followers(ids) == kept
        assert await s.followers([]) == []
        assert await s.follow([], "h", at_least=3) == 3

    run(scenario)


def test_a_damaged_request_is_as_good_as_none(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        for serial, field in enumerate(("record", "followers", "end")):
            await s.admit(record(serial))
            await s.client.hset(s.keys.request(RequestId("g", serial)), field, b"\xff")
            if field == "record":
                await s.client.hdel(s.keys.request(RequestId("g", serial)), "entry")
        first, second, third = await s.look_up([RequestId("g", serial) for serial in range(3)])
        assert (first, third) == (None, None)
        assert second is not None
        assert second.followers == NOBODY_CAME
        assert await s.leave(AbortRecord(RequestId("g", 1)), "g")

    run(scenario)


@pytest.mark.parametrize(
    "field", [b"\xff", b" ", b"x", b"1 g", b"1 g=", b"4294967295 g=0", b"9" * 400, b"-1 g=0", b"1e400 h=7"]
)
def test_followers_that_nobody_has_written_are_as_good_as_none(run: Run, field: bytes) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        key = s.keys.request(one := RequestId("g", 1))
        await s.client.hset(key, "followers", field)
        assert await s.followers([one]) == [NOBODY_CAME]
        generation = await s.follow([one], "h", at_least=5)
        assert 5 <= generation < ANY_GENERATION
        (now,) = await s.followers([one])
        assert (now.generation, now.gateways["h"]) == (generation, generation)
        await s.client.hset(key, "followers", field)
        assert await s.leave(AbortRecord(one, -1, 0, "disconnect"), "g") in (True, False)

    run(scenario)


def test_what_is_no_request_says_nothing_of_others(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        await s.client.set(s.keys.request(RequestId("g", 2)), "x")
        ids = [RequestId("g", 2), RequestId("g", 1)]
        assert await s.followers(ids) == [NOBODY_CAME] * 2
        assert await s.unfinished(ids) == [False, True]

    run(scenario)


def test_another_server_has_another_run_id(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        assert len(await s.run_id()) == 40
        assert await s.run_id() == await s.run_id()

    run(scenario)


def test_a_reader_that_is_cancelled_at_any_moment_ends(run: Callable[[Scenario], None]) -> None:
    async def scenario(s: Streams) -> None:
        async def read() -> None:
            while True:
                await s.read_log("g", "0-0", block_ms=100)

        for moment in range(300):
            reader = asyncio.create_task(read())
            for _ in range(moment // 5):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader], timeout=5)
            assert reader.cancelled(), "it goes on reading, and keeps a connection to itself"

    run(scenario)


@pytest.mark.parametrize("protocol", ["2", "3"])
def test_who_stays_in_one_life_of_redis_says_nothing_in_another(tmp_path: Path, protocol: str) -> None:
    server = LogServer(tmp_path).start()

    async def main() -> None:
        async for s in _connected(f"{server.url}?protocol={protocol}"):
            s.stay_in(await s.run_id())
            # On a connection of its own, beside one that waits.
            waiting = asyncio.create_task(s.read_log("g", "0", block_ms=60_000))
            await asyncio.sleep(0.05)
            await s.append_log("g", entry(1, 0, 5))
            assert len((await waiting).events) == 1
            server.stop(kill=True)
            with pytest.raises(redis.exceptions.ConnectionError) as away:
                await s.append_log("g", entry(1, 1, 6))
            assert not isinstance(away.value, OtherLifeError)
            server.start()
            for _ in range(2):
                with pytest.raises(OtherLifeError):
                    await s.append_log("g", entry(1, 1, 6))
            with pytest.raises(OtherLifeError):
                await s.run_id()
            s.stay_in("")
            assert (await s.read_log("g", "0")).events == []
            s.stay_in(await s.run_id())
            await s.append_log("g", entry(1, 1, 6))

    try:
        asyncio.run(main())
    finally:
        server.stop(kill=True)


def test_only_the_lease_holder_finishes_requests(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        await s.create_group()
        ((entry_id, _),) = await s.read_requests("old", count=10, block_ms=10)
        await s.take_lease(s.keys.lease, "new", 60)
        assert not await s.finish_request(entry_id, record(1), "old")
        assert await s.unfinished([RequestId("g", 1)]) == [True]
        assert await s.finish_request(entry_id, record(1), "new")
        assert await s.unfinished([RequestId("g", 1)]) == [False]
        assert await s.claim_pending("new") == []

    run(scenario)


def test_a_lost_request_is_appended_again_and_only_a_lost_one(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.admit(record(1))
        again, lost = record(1, readmitted=True), record(2, readmitted=True)
        assert not await s.readmit(again, entry(1, 0, 5))
        assert await s.readmit(lost, entry(2, 0, 6, 7))
        assert not await s.readmit(lost)
        await s.create_group()
        read = [decode_request(data) for _, data in await s.read_requests("one", count=10, block_ms=10)]
        assert [(one.id.serial, one.readmitted) for one in read] == [(1, False), (2, True)]
        assert await s.unfinished([lost.id]) == [True]
        fold = LogFold().apply_all((await s.read_log("g", "0")).events)
        assert (fold.get(1, 0).tokens, fold.get(2, 0).tokens) == ([5], [6, 7])
        assert await s.run_id() == await s.run_id()

    run(scenario)


def test_more_pending_requests_than_one_claim_returns(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        for serial in range(1, 601):
            await s.admit(record(serial))
        entries = await s.read_requests("one", count=1000, block_ms=10)
        assert len(entries) == 600
        # Deleted behind the group's back: it is claimed by nobody and stops nobody.
        await s.client.xdel(s.keys.requests, entries[300][0])
        claimed = await s.claim_pending("two")
        assert claimed == entries[:300] + entries[301:]

    run(scenario)


def test_foreign_entries_are_seen_as_empty(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.create_group()
        await s.client.xadd(s.keys.requests, {"other": "x"})
        ((entry_id, data),) = await s.read_requests("one", count=1, block_ms=10)
        assert data == b""
        assert await s.claim_pending("two") == [(entry_id, b"")]

    run(scenario)


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_aborts_are_read_in_order_and_deleted(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        first = AbortRecord(RequestId("g", 1), -1, 2, "disconnect")
        await s.append_abort(first)
        await s.client.xadd(s.keys.aborts, {FIELD: b"\xff"})
        await s.append_abort(replace(first, choice=1))
        aborts = await s.read_aborts("0", block_ms=10)
        assert [abort for _, abort in aborts] == [first, None, replace(first, choice=1)]
        assert await s.read_aborts(aborts[-1][0], block_ms=10) == []
        await s.delete_aborts([])
        await s.delete_aborts([entry_id for entry_id, _ in aborts])
        assert await s.read_aborts("0", block_ms=10) == []

    run(scenario)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_on_from_where_one_was(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        empty = await s.read_log("g", "0")
        assert (empty.events, empty.last_id, empty.malformed) == ([], "0", 0)
        await s.append_log("g", entry(1, 0, 5, 6))
        page = await s.read_log("g", "0")
        await s.append_log("g", b"\xff\xff")
        await s.append_log("g", encode_fences([FenceEvent(1, 0, Attempt(1, 2))]))
        await s.append_log("other", entry(1, 2, 9))
        rest = await s.read_log("g", page.last_id, block_ms=10)
        assert rest.malformed == 1
        assert [type(event) for event in rest.events] == [FenceEvent]
        whole = await s.read_log("g", "0")
        assert whole.events == page.events + rest.events
        assert LogFold().apply_all(whole.events).get(1, 0).tokens == [5, 6]
        few = await s.read_log("g", "0", count=1)
        assert few.last_id == page.last_id

    run(scenario)


def test_a_reader_that_waits_is_woken(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        other = Streams.connect(url, "org/model")
        waiting = asyncio.create_task(other.read_log("g", "0", block_ms=20_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await s.append_log("g", entry(1, 0, 5))
        assert len((await waiting).events) == 1
        await other.close()

    run(scenario)


def test_a_log_is_trimmed_behind_a_snapshot(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        for position in range(4):
            await s.append_log("g", entry(1, position, position))
        page = await s.read_log("g", "0")
        fold = LogFold().apply_all(page.events)
        snapshot = encode_snapshot([fold.get(1, 0).snapshot(1, 0)])
        assert await s.trim_log("g", page.last_id, snapshot)
        assert await s.client.xlen(s.keys.log("g")) == 1
        await s.append_log("g", entry(1, 4, 4, end=EndReason.STOP))
        late = LogFold().apply_all((await s.read_log("g", "0")).events).get(1, 0)
        assert (late.tokens, late.end) == ([0, 1, 2, 3, 4], EndReason.STOP)
        # Who had read up to the snapshot sees it, and it changes nothing for him.
        on = await s.read_log("g", page.last_id)
        assert fold.apply_all(on.events).get(1, 0).tokens == [0, 1, 2, 3, 4]

    run(scenario)


@pytest.mark.parametrize("nothing_left", [False, True])
def test_trimming_keeps_what_came_meanwhile(run: Run, nothing_left: bool) -> None:
    async def scenario(s: Streams) -> None:
        for position in range(3):
            await s.append_log("g", entry(1, position, 5 + position))
        page = await s.read_log("g", "0")
        fold = LogFold().apply_all(page.events)
        for position in range(3, 6):
            await s.append_log("g", entry(1, position, 5 + position))
        ahead = await s.read_log("g", page.last_id, count=2)
        snapshot = b"" if nothing_left else encode_snapshot(fold.snapshots())
        at = await s.trim_log("g", page.last_id, snapshot)
        assert await s.client.xlen(s.keys.log("g")) == (3 if nothing_left else 4)
        if not nothing_left:
            late = LogFold().apply_all((await s.read_log("g", "0")).events)
            assert late.get(1, 0).tokens == [5, 6, 7, 8, 9, 10]
        # Who made the snapshot reads on behind it, others from wherever they are.
        for start, before in ((at, []), (page.last_id, []), (ahead.last_id, ahead.events)):
            reader = LogFold().apply_all([*page.events, *before])
            assert reader.apply_all((await s.read_log("g", start)).events).get(1, 0).tokens == [5, 6, 7, 8, 9, 10]
        # Reading on works after everything is gone.
        page = await s.read_log("g", "0")
        assert await s.trim_log("g", page.last_id, b"") == page.last_id
        assert await s.client.xlen(s.keys.log("g")) == 0
        await s.append_log("g", entry(1, 6, 7))
        assert len((await s.read_log("g", page.last_id)).events) == 1
        # Of a log that is not there nothing comes to be.
        assert await s.trim_log("nobody", "5-1", b"") == "5-1"
        assert not await s.client.exists(s.keys.log("nobody"))

    run(scenario)


def test_a_log_is_forgotten(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        await s.append_log("g", entry(1, 0, 5))
        await s.append_log("h*", entry(1, 0, 5))
        assert await s.log_names() == {"g", "h*"}
        await s.delete_log("g")
        assert await s.log_names() == {"h*"}
        assert (await s.read_log("g", "0")).events == []

    run(scenario)


def test_models_do_not_see_each_other(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        # A glob pattern made of the name would match the other one.
        pattern = Streams.connect(url, "org/*")
        await s.append_log("g", entry(1, 0, 5))
        await s.admit(record(1))
        assert await pattern.log_names() == set()
        await pattern.create_group()
        assert await pattern.read_requests("one", count=1, block_ms=10) == []
        assert await pattern.unfinished([RequestId("g", 1)]) == [False]
        await pattern.close()

    run(scenario)


# --- leases, terms, what is published ---------------------------------------------------------------------------------


def test_what_never_runs_out_is_no_lease(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        key = s.keys.lease
        for junk in (s.client.set(key, "somebody"), s.client.hset(key, "a", "b"), s.client.xadd(key, {"a": "b"})):
            await junk
            assert not await s.renew_lease(key, "one", 30)
            await s.release_lease(key, "one")
            assert await s.take_lease(key, "one", 30)
            assert not await s.take_lease(key, "two", 30)
            await s.release_lease(key, "one")

    run(scenario)


def test_a_lease_has_one_holder(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        key = s.keys.lease
        assert await s.take_lease(key, "one", 30)
        assert not await s.take_lease(key, "two", 30)
        assert not await s.renew_lease(key, "two", 60)
        assert await s.client.pttl(key) <= 30_000
        assert await s.renew_lease(key, "one", 60)
        assert await s.client.pttl(key) > 30_000
        await s.release_lease(key, "two")
        assert not await s.take_lease(key, "two", 30)
        await s.release_lease(key, "one")
        assert await s.take_lease(key, "two", 30)
        assert not await s.renew_lease(key, "one", 30)

    run(scenario)


def test_a_lease_runs_out(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        assert await s.take_lease(s.keys.gateway("g"), "g", 0.05)
        await s.take_lease(s.keys.gateway("h"), "h", 60)
        while await s.client.exists(s.keys.gateway("g")):
            await asyncio.sleep(0.01)
        assert not await s.renew_lease(s.keys.gateway("g"), "g", 1)
        assert await s.living_gateways(["g", "h", "nobody"]) == {"h"}
        assert await s.living_gateways([]) == set()

    run(scenario)


def test_terms_only_rise(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        first = await s.next_term()
        terms = [await s.next_term(), await s.next_term(first + 9), await s.next_term(3)]
        assert terms == [first + 1, first + 10, first + 11]
        assert await s.next_term(first + 11) == first + 12

    run(scenario)


def test_a_restarted_redis_gives_no_term_twice(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        first = await s.next_term()
        await asyncio.sleep(0.005)
        # As after a restart that has forgotten the last terms: they were given in another life.
        await s.client.set(s.keys.life, "another")
        second = await s.next_term()
        assert second > first + 1
        assert await s.next_term() == second + 1
        # It is restarted once more, and has forgotten the first time as well.
        await s.client.mset({s.keys.term: first, s.keys.life: "another"})
        await asyncio.sleep(0.005)
        third = await s.next_term()
        assert third > second + 1
        # Now it has forgotten everything, even that it has ever given one.
        await s.client.delete(s.keys.term, s.keys.life)
        await asyncio.sleep(0.005)
        assert await s.next_term() > third

    run(scenario)


def test_terms_taken_at_once_differ(run: Run, url: str) -> None:
    async def scenario(s: Streams) -> None:
        others = [Streams.connect(url, "org/model") for _ in range(8)]
        terms = await asyncio.gather(*(other.next_term(at_least) for other in others for at_least in (5, 50, 1 << 50)))
        assert len(set(terms)) == len(terms)
        assert max(terms) > 1 << 50
        for other in others:
            await other.close()

    run(scenario)


def test_limits_and_metrics_are_published(run: Run) -> None:
    async def scenario(s: Streams) -> None:
        assert await s.read_limits() is None
        limits = ModelLimits(
            "m",
            128,
            1024,
            99,
            True,
            executors=1,
            term=3,
            queued_tokens=7,
            tokens_per_s=0.5,
            expected_outputs=(1.0, 1.5),
        )
        before = time.time()
        await s.publish_limits(limits)
        published = await s.read_limits()
        assert published is not None
        assert published.written_s >= before
        assert replace(published, written_s=0.0) == limits
        # From a scheduler of another version: what is not known is ignored, what is missing has its default.
        await s.client.set(
            s.keys.limits,
            '{"model": "m", "max_model_len": 1, "pool_tokens": 2, "vocab_size": 3, "ready": false, "mood": "good"}',
        )
        assert await s.read_limits() == ModelLimits("m", 1, 2, 3, False)
        assert await s.read_metrics() == {}
        await s.publish_metrics("scheduler", b"a 1\n")
        await s.publish_metrics("executor-0", b"b 2\n")
        assert await s.read_metrics() == {b"scheduler": b"a 1\n", b"executor-0": b"b 2\n"}

    run(scenario)


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_reply_protocols_are_understood(url: str, protocol: int) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(url, protocol=protocol)
        s = Streams(client, "m")
        await s.create_group()
        await s.admit(record(1))
        ((entry_id, data),) = await s.read_requests("one", count=5, block_ms=10)
        assert decode_request(data).id == RequestId("g", 1)
        assert await s.claim_pending("two") == [(entry_id, data)]
        await s.append_log("g", entry(1, 0, 5))
        assert len((await s.read_log("g", "0")).events) == 1
        await s.append_abort(AbortRecord(RequestId("g", 1)))
        assert len(await s.read_aborts("0", block_ms=10)) == 1
        assert await s.read_requests("one", count=5, block_ms=10) == []
        await s.close()

    asyncio.run(main())


def test_a_connection_that_is_closed_while_it_is_used_is_a_connection_error(url: str) -> None:
    """uvloop calls it a RuntimeError, which would end whatever loop speaks to Redis for good."""

    async def main() -> None:
        s = Streams.connect(url, "m")
        connection = await s.client.connection_pool.get_connection()
        try:
            connection._writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(redis.exceptions.ConnectionError):
                await connection.send_command("PING")
        finally:
            await s.client.connection_pool.release(connection)
        assert await s.client.ping()
        await s.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())

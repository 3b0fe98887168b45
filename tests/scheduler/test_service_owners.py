"""Who follows a request: gateways that go, clients that reconnect elsewhere, and what becomes of the logs that are left."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service_stage import LOG, Stage, play

from octavo_scheduler import orphans
from octavo_scheduler.orphans import OrphanWatch
from octavo_shared.entries import encode_abort
from octavo_shared.fold import LogFold
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord, EndReason

OTHER = "another"
FIRST = RequestId(LOG, 1)


async def leave(stage: Stage, gateway: str = LOG) -> None:
    await stage.streams.client.delete(stage.streams.keys.gateway(gateway))


async def look(stage: Stage) -> None:
    """Long enough for whoever is gone to be known to be."""
    watch = OrphanWatch(stage.service, stage.streams, settle_s=0.01)
    for _ in range(2):
        await watch.look()
        await asyncio.sleep(0.05)
    await watch.look()


async def has_end(stage: Stage, serial: int, end: EndReason) -> None:
    async def ended() -> bool:
        return (await stage.fold(serial))[1] is end

    await stage.until(ended)


def test_requests_of_a_gateway_that_is_gone_end_and_its_log_goes(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            await look(stage)
            assert (await stage.fold(1))[1] is EndReason.NONE, "its gateway lives"
            await leave(stage)
            await look(stage)
            await stage.until(stage.all_acknowledged)
            await look(stage)
            assert await stage.streams.log_names() == set()

    play(scene, valkey, tmp_path)


def test_a_request_waits_for_its_client_as_long_as_it_may(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100, disconnect_grace_ms=60_000)
            await stage.admit(2, max_tokens=100, disconnect_grace_ms=10)
            await executor.work(2)
            await leave(stage)
            await look(stage)
            await has_end(stage, 2, EndReason.ABORT)
            await executor.work(2)
            assert (await stage.fold(1))[1] is EndReason.NONE

    play(scene, valkey, tmp_path)


def test_who_reconnects_elsewhere_is_waited_for_there(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.streams.take_lease(stage.streams.keys.gateway(OTHER), OTHER, 60)
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            assert await stage.streams.follow([FIRST], OTHER) == 1
            await leave(stage)
            await look(stage)
            await executor.work(2)
            assert (await stage.fold(1))[1] is EndReason.NONE, "its client's gateway lives"
            await leave(stage, OTHER)
            await look(stage)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_a_gateway_that_dies_takes_its_clients_away_and_nobody_elses(valkey: str, tmp_path: Path) -> None:
    """Not even those whom an earlier gateway serves: the request goes on until they have left as well."""

    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.streams.take_lease(stage.streams.keys.gateway(OTHER), OTHER, 60)
            for serial in (1, 2):
                await stage.admit(serial, max_tokens=100)
                await stage.streams.follow([RequestId(LOG, serial)], OTHER)
            await executor.work(2)
            # Of the second one the first client has gone; of the first one both are there.
            assert not await stage.streams.leave(AbortRecord(RequestId(LOG, 2)), LOG)
            await leave(stage, OTHER)
            await look(stage)
            await has_end(stage, 2, EndReason.ABORT)
            await executor.work(2)
            assert (await stage.fold(1))[1] is EndReason.NONE
            # The other one is still on the list: that nobody follows is the scheduler's to find.
            assert not await stage.streams.leave(AbortRecord(FIRST), LOG)
            await look(stage)
            await has_end(stage, 1, EndReason.ABORT)

    play(scene, valkey, tmp_path)


def test_a_coming_that_has_not_been_heard_of_counts_all_the_same(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.streams.take_lease(stage.streams.keys.gateway(OTHER), OTHER, 60)
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            # Only what the request says of itself: the message is lost.
            await stage.streams.client.hset(stage.streams.keys.request(FIRST), "followers", f"1 {LOG}=0 {OTHER}=1")
            await leave(stage)
            await look(stage)
            await executor.work(2)
            assert (await stage.fold(1))[1] is EndReason.NONE
            await stage.streams.append_abort(AbortRecord(FIRST, owner_generation=1))
            await has_end(stage, 1, EndReason.ABORT)

    play(scene, valkey, tmp_path)


def test_an_abort_from_before_a_reconnection_is_ignored(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            keys = stage.streams.keys
            # Both arrive at once, the abort first: as after an outage of the scheduler.
            async with stage.streams.client.pipeline(transaction=True) as pipe:
                pipe.xadd(keys.aborts, {b"e": encode_abort(AbortRecord(FIRST))})
                pipe.xadd(keys.aborts, {b"e": encode_abort(AbortRecord(FIRST, -1, 1, "followed", new_owner=LOG))})
                await pipe.execute()
            await stage.admit(2, max_tokens=1)
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 2)))
            await has_end(stage, 2, EndReason.ABORT)
            await executor.work(2)
            assert (await stage.fold(1))[1] is EndReason.NONE
            await stage.streams.append_abort(AbortRecord(FIRST, owner_generation=1))
            await has_end(stage, 1, EndReason.ABORT)

    play(scene, valkey, tmp_path)


def test_a_long_log_of_a_gateway_that_is_gone_is_trimmed_and_what_is_over_is_kept(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100, disconnect_grace_ms=60_000, prompt_tokens=4)
            await stage.admit(2, max_tokens=2, resume_ttl_ms=60_000, prompt_tokens=4)
            await executor.work(20)
            before = await stage.fold(1)

            async def over() -> bool:
                return await stage.streams.unfinished([RequestId(LOG, 2)]) == [False]

            await stage.until(over)
            length = await stage.streams.client.xlen(stage.streams.keys.log(LOG))
            assert length > 10
            await leave(stage)
            orphans.LONG_LOG = 10
            await look(stage)
            assert await stage.streams.client.xlen(stage.streams.keys.log(LOG)) == 1
            assert await stage.fold(1) == before
            assert await stage.fold(2) == ([], EndReason.NONE)
            (standing,) = await stage.streams.look_up([RequestId(LOG, 2)])
            assert standing is not None
            kept = LogFold().apply_all(standing.end).get(2, 0)
            assert (kept.tokens, kept.end) == ([100, 101], EndReason.LENGTH)
            await stage.streams.append_abort(AbortRecord(FIRST))
            await has_end(stage, 1, EndReason.ABORT)

    threshold = orphans.LONG_LOG
    try:
        play(scene, valkey, tmp_path)
    finally:
        orphans.LONG_LOG = threshold

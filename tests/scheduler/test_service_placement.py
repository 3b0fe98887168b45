"""Executors of different sizes: a request goes where it has room, and gateways are told what the largest can do."""

from __future__ import annotations

from pathlib import Path

from service_stage import Executor, Stage, play

from octavo_shared.ids import RequestId
from octavo_shared.records import EndReason
from octavo_shared.wire import Heartbeat

SMALL = {"name": "small", "incarnation": "small-1", "num_device_blocks": 4, "max_model_len": 64, "max_num_seqs": 2}


def served(executor: Executor) -> set[RequestId]:
    return {new.request_id for new in executor.admitted}


async def both_attached(stage: Stage) -> None:
    async def are_there() -> bool:
        return len(stage.service.engines) == 2

    await stage.until(are_there)


def test_a_request_goes_where_it_has_room(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with stage.executor(**SMALL) as small, stage.executor() as large:
            await both_attached(stage)
            small.keep_working()
            # The large one is not the first choice for anybody who fits: it has company.
            busy = await stage.admit(1, prompt_tokens=8, max_tokens=100)
            await large.work(2)
            assert served(large) == {busy}
            fits = await stage.admit(3, prompt_tokens=8, max_tokens=20)
            # Its prompt would fit the small one, its output would be cut short there.
            long = await stage.admit(4, prompt_tokens=30, max_tokens=60)
            beams = await stage.admit(5, prompt_tokens=8, max_tokens=4, beam_width=3)
            await stage.finish(large)
            assert served(small) == {fits}
            assert served(large) == {busy, long, beams}
            assert len((await stage.fold(4))[0]) == 60
            assert (await stage.fold(5))[1] is EndReason.LENGTH

    play(scene, valkey, tmp_path)


def test_what_is_published_is_what_the_largest_can_do(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with stage.executor(**SMALL), stage.executor() as large:
            await both_attached(stage)
            limits = stage.service.limits()
            assert (limits.max_model_len, limits.pool_tokens, limits.max_num_seqs) == (128, 256, 8)
            # What has no room anywhere is refused.
            await stage.admit(1, prompt_tokens=130, max_tokens=4)
            await stage.finish(large)
            assert (await stage.fold(1))[1] is EndReason.ERROR

    play(scene, valkey, tmp_path)


def test_what_has_room_only_on_one_that_leaves_waits_for_another(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with stage.executor(**SMALL) as small, stage.executor() as leaving:
            await both_attached(stage)
            small.keep_working()
            await stage.admit(1, prompt_tokens=8, max_tokens=100)
            await leaving.work(2)
            leaving.say(Heartbeat(leaving.epoch, 0, draining=True))
            long = await stage.admit(2, prompt_tokens=30, max_tokens=60)
            await stage.admit(3, prompt_tokens=8, max_tokens=4)

            async def the_small_one_has_served() -> bool:
                return (await stage.fold(3))[1] is EndReason.LENGTH

            await stage.until(the_small_one_has_served)
            assert await stage.fold(2) == ([], EndReason.NONE)
            async with stage.executor(name="e1", incarnation="e1-1") as next_one:
                leaving.keep_working()
                await stage.finish(next_one)
                assert long in served(next_one)
                assert len((await stage.fold(2))[0]) == 60
                assert len((await stage.fold(1))[0]) == 100

    play(scene, valkey, tmp_path)

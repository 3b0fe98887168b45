"""Redis is restarted and has forgotten what it was told last: who knows it says it again, and schedulers wait for that."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from log_server import LogServer
from service_stage import LOG, MODEL, Stage, open_stage

from octavo_shared.fold import FenceEvent
from octavo_shared.records import EndReason
from octavo_shared.streams import FIELD, Streams


async def _true(value: object) -> bool:
    return bool(value)


async def is_fenced(stage: Stage) -> bool:
    events = (await stage.streams.read_log(LOG, "0", count=1000)).events
    return any(isinstance(event, FenceEvent) for event in events)


@pytest.mark.parametrize("who", ["the same process", "the same, in the middle of something", "another one"])
def test_a_scheduler_waits_until_all_has_been_said_again(tmp_path: Path, who: str) -> None:
    """Else it would go on before tokens that clients have been sent already, and draw them a second time."""
    redis = LogServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()

    async def scene(streams: Streams) -> None:
        stage = open_stage(redis.url, tmp_path, streams)
        await stage.listening()
        async with stage.executor() as executor:
            await stage.admit(1)
            await executor.work(1)
            on_disk = redis.append_only_file.stat().st_size
            await executor.work(2)
            appended = [fields[FIELD] for _, fields in await streams.client.xrange(streams.keys.log(LOG))]
            assert len(appended) == 3
            redis.stop(kill=True)
            if "middle" in who:
                # It wants to resume what ran there.
                executor._call.cancel()
                await stage.until(lambda: _true(not stage.service.engines))
            if who == "another one":
                stage.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await stage.task
                stage = open_stage(redis.url, tmp_path, streams)
            assert redis.forget(on_disk).count(b":log:") == 2
            redis.start()
            await streams.client.connection_pool.disconnect()
            assert await stage.fold(1) == ([100], EndReason.NONE)

            async def knows() -> bool:
                return stage.process._run_id == await streams.run_id()

            await stage.until(knows)
            # Executors find out only now.
            await asyncio.sleep(0.5)
            assert not await is_fenced(stage), "it has not waited"
            for entry in appended:
                await streams.append_log(LOG, entry)
        async with stage.executor(incarnation="e0-2") as executor:
            await executor.work(1)
            assert executor.admitted[0].tokens.tolist()[10:] == [100, 101, 102], "nothing is drawn again"
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)
        assert await is_fenced(stage)
        await stage.close()

    async def main() -> None:
        streams = Streams.connect(redis.url, MODEL)
        try:
            await scene(streams)
        finally:
            await streams.close()

    try:
        asyncio.run(main())
    finally:
        redis.stop(kill=True)

"""Deadlines: the heap by itself, and requests that end by it wherever they stand."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from service_stage import LOG, Stage, open_stage, play

from octavo_scheduler.deadlines import Deadlines
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord, EndReason


def us(seconds: float) -> int:
    """Unix microseconds so many seconds from now."""
    return int((time.time() + seconds) * 1e6)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 20), st.integers(0, 50)),
        st.tuples(st.just("forget"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("tick"), st.integers(0, 20), st.just(0)),
    ),
    max_size=300,
)


@given(ACTIONS)
def test_what_is_due_is_what_a_list_would_say(actions: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        now = [0.0]
        deadlines = Deadlines(lambda _: None, clock=lambda: now[0])
        model: dict[RequestId, int] = {}
        for name, number, value in actions:
            request_id = RequestId("log", number)
            if name == "add" and request_id not in model:
                deadlines.add(request_id, value * 1_000_000)
                if value:
                    model[request_id] = value
            elif name == "forget":
                deadlines.forget(request_id)
                model.pop(request_id, None)
            elif name == "tick":
                now[0] += number
                due = deadlines.due()
                assert sorted(due) == sorted(one for one, at in model.items() if at <= now[0])
                assert [model[one] for one in due] == sorted(model[one] for one in due)
                model = {one: at for one, at in model.items() if at > now[0]}
            assert len(deadlines) == len(model)

    asyncio.run(main())


def test_the_loop_wakes_for_the_earliest_and_for_nothing_else() -> None:
    async def main() -> None:
        expired: list[int] = []
        deadlines = Deadlines(lambda request_id: expired.append(request_id.serial))
        deadlines.add(RequestId("log", 1), us(30))
        deadlines.add(RequestId("log", 2), us(0.05))
        deadlines.add(RequestId("log", 3), us(0.05))
        deadlines.forget(RequestId("log", 3))
        # A clock that was ahead when the deadline was set, or a request that waited long in the stream.
        deadlines.add(RequestId("log", 4), us(-5))
        async with asyncio.timeout(10):
            while 2 not in expired:
                await asyncio.sleep(0.01)
        assert expired == [4, 2]
        assert len(deadlines) == 1

    asyncio.run(main())


def test_a_clock_that_is_set_back_only_postpones() -> None:
    async def main() -> None:
        now, expired = [100.0], []
        deadlines = Deadlines(lambda request_id: expired.append(request_id), clock=lambda: now[0])
        deadlines.add(RequestId("log", 1), 100_050_000)
        now[0] = 100.0
        await asyncio.sleep(0.1)
        # The timer rang, but by the clock it is not time yet; it looks again.
        assert expired == []
        now[0] = 100.06
        async with asyncio.timeout(10):
            while not expired:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_thousand_forgotten_deadlines_leave_nothing_behind() -> None:
    async def main() -> None:
        deadlines = Deadlines(lambda _: None)
        for serial in range(1000):
            deadlines.add(RequestId("log", serial), us(1000 + serial))
        for serial in range(1000):
            deadlines.forget(RequestId("log", serial))
        assert len(deadlines) == 0
        assert len(deadlines._heap) <= 64

    asyncio.run(main())


def test_a_request_that_decodes_ends_where_it_stands(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100, n=2, prompt_tokens=40, deadline_us=us(2.0))
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            first, second = await stage.fold(1, 0), await stage.fold(1, 1)
            assert (first[1], second[1]) == (EndReason.TIMEOUT, EndReason.TIMEOUT)
            assert first[0] == list(range(100, 100 + len(first[0])))
            assert 0 < len(first[0]) < 100
            assert stage.service.engines[0].core.pool.num_used == 0
            # Others are served as before, and one whose deadline is far away ends by itself.
            await stage.admit(2, deadline_us=us(1000))
            await stage.finish(executor)
        assert await stage.fold(2) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_beam_search_gives_back_what_it_has(valkey: str, tmp_path: Path) -> None:
    """Live hypotheses end as they are, the best first, whether or not a step is on its way into the log."""

    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=50, n=2, beam_width=3, deadline_us=us(2.0))
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            (first, end), (second, other_end) = await stage.fold(1, 0), await stage.fold(1, 1)
            assert (end, other_end) == (EndReason.TIMEOUT, EndReason.TIMEOUT)
            # The likeliest candidate at every position; the second best has one of the second likeliest.
            assert first == [200, 210, 220, 230]
            assert sorted(token % 10 for token in second) == [0, 0, 0, 1]
            assert stage.service.engines[0].core.pool.num_used == 0
            await stage.admit(2)
            await stage.finish(executor)
        assert await stage.fold(2) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_request_that_waits_behind_others_ends_too(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor(max_num_seqs=1) as executor:
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            await stage.admit(2, deadline_us=us(0.2))

            async def timed_out() -> bool:
                return (await stage.fold(2))[1] is EndReason.TIMEOUT

            await stage.until(timed_out)
            assert await stage.fold(2) == ([], EndReason.TIMEOUT)
            assert (await stage.fold(1))[1] is EndReason.NONE
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 1)))
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize("seconds", [-10.0, 0.2])
def test_a_request_without_any_executor_ends_in_the_lobby(valkey: str, tmp_path: Path, seconds: float) -> None:
    async def scene(stage: Stage) -> None:
        await stage.admit(1, deadline_us=us(seconds))
        await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([], EndReason.TIMEOUT)
        assert stage.service.exposition().count(b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0') == 1

    play(scene, valkey, tmp_path)


def test_a_deadline_survives_a_takeover(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100, deadline_us=us(2.0))
            await executor.work(3)
            await stage.close()
        # Nobody is there to run it: it ends by its deadline alone, with the tokens it had.
        fresh = open_stage(valkey, tmp_path, stage.streams)
        try:
            await fresh.until(fresh.all_acknowledged)
            tokens, end = await fresh.fold(1)
            assert end is EndReason.TIMEOUT
            assert tokens[:3] == [100, 101, 102]
        finally:
            await fresh.close()

    play(scene, valkey, tmp_path)

"""The scheduler as a process: requests, executors and terms that come and go, and what is in the log afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from service_stage import LOG, MODEL, Stage, open_stage, play

from octavo_scheduler.core.sequence import Sequence
from octavo_scheduler.engine import IDLE_S, SILENCE_S, SLOW, STUCK, choose_engine
from octavo_scheduler.watchdog import Watchdog
from octavo_shared.entries import encode_request, encode_snapshot, encode_tokens
from octavo_shared.fold import ChoiceFold, LogFold, TokenEvent
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import MeasuredStep, OutputRow, StepPlan
from octavo_shared.records import AbortRecord, EndReason, RequestRecord, SamplingParams
from octavo_shared.streams import GROUP, Streams
from octavo_shared.wire import Farewell, Heartbeat, Refusal, Resync, Welcome


def test_a_request_is_planned_logged_and_acknowledged(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_request_stays_pending_until_its_end_is_logged(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=1)
            welcome, plan = await executor.hear(), await executor.hear()
            assert isinstance(welcome, Welcome)
            assert isinstance(plan, StepPlan)
            result, rows = executor.carry_out(plan)
            executor.say(result)
            await asyncio.sleep(0.3)
            assert not await stage.all_acknowledged(), "computed is not logged"
            await executor.log(plan, rows)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_requests_wait_for_the_first_executor(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.admit(1)
        while (limits := await stage.streams.read_limits()) is None:
            await asyncio.sleep(0.02)
        assert not limits.ready
        async with stage.executor() as executor:
            await executor.work(4)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_aborts_end_choices_wherever_they_are(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        # In the lobby; and an abort that overtakes its request.
        await stage.admit(1)
        await stage.streams.append_abort(AbortRecord(RequestId(LOG, 1)))
        await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([], EndReason.ABORT)
        async with stage.executor() as executor:
            # While decoding; only one of two choices, by its number.
            await stage.admit(2, max_tokens=50, n=2, prompt_tokens=40)
            await executor.work(3)
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 2), choice=1))

            async def aborted() -> bool:
                return (await stage.fold(2, 1))[1] is EndReason.ABORT

            await stage.until(aborted)
            assert (await stage.fold(2, 0))[1] is EndReason.NONE
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 2)))
            await stage.until(stage.all_acknowledged)
            assert (await stage.fold(2, 0))[1] is EndReason.ABORT
            await stage.until(stage.no_aborts)

    play(scene, valkey, tmp_path)


def test_an_abort_of_an_older_owner_is_ignored(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        request_id = RequestId(LOG, 7)
        prompt = np.arange(5, dtype=np.int32)
        sampling = SamplingParams(max_tokens=2)
        await stage.streams.admit(RequestRecord(request_id, 0, prompt, sampling, owner_generation=2))
        await stage.streams.append_abort(AbortRecord(request_id, owner_generation=1))
        await asyncio.sleep(0.3)
        async with stage.executor() as executor:
            await executor.work(2)
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(7) == ([100, 101], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_what_never_fits_is_refused_with_400(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor():
            await stage.admit(1, prompt_tokens=128)
            await stage.until(stage.all_acknowledged)
        events = (await stage.streams.read_log(LOG, "0")).events
        problem = LogFold().apply_all(events).get(1, 0).problem
        assert problem is not None
        assert problem.status == 400

    play(scene, valkey, tmp_path)


def test_a_lost_executor_costs_no_token(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.admit(1, max_tokens=6)
        async with stage.executor() as first:
            await first.work(3)
        async with stage.executor(incarnation="e0-2") as second:
            await second.work(3)
            await stage.until(stage.all_acknowledged)
        resumed = second.admitted[0]
        assert resumed.tokens.tolist() == [*range(10), 100, 101, 102]
        assert (resumed.output_start, resumed.attempt) == (10, 2)
        assert await stage.fold(1) == ([100, 101, 102, 103, 104, 105], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize("how", ["failed", "resync"])
def test_a_failed_step_begins_a_new_epoch(valkey: str, tmp_path: Path, how: str) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=3)
            step = await executor.work(1)
            plan = await executor.hear()
            assert isinstance(plan, StepPlan)
            if how == "failed":
                executor.fail(plan)
            else:
                executor.say(Resync(plan.epoch, step, "out of step"))
                executor.epoch = -1
            await executor.work(2)
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([100, 101, 102], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_request_that_keeps_failing_ends_with_an_error(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=3)
            failures = 0
            while failures < 3:
                plan = await executor.hear()
                if isinstance(plan, StepPlan):
                    executor.fail(plan)
                    failures += 1
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([], EndReason.ERROR)

    play(scene, valkey, tmp_path)


def test_a_new_scheduler_takes_over_what_is_pending(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.admit(1, max_tokens=5)
        await stage.admit(2, max_tokens=1)
        async with stage.executor() as executor:
            await executor.work(2)
        await stage.close()
        fresh = open_stage(valkey, tmp_path, stage.streams)
        async with fresh.executor(incarnation="e0-2") as executor:
            # The second request may have been read by either of them.
            await fresh.finish(executor)
        await fresh.close()
        (resumed,) = [new for new in executor.admitted if new.request_id.serial == 1]
        assert resumed.tokens.tolist()[10:] == [100, 101]
        assert await stage.fold(1) == ([100, 101, 102, 103, 104], EndReason.LENGTH)
        assert await stage.fold(2) == ([100], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_second_scheduler_waits_for_the_lease(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            first = await executor.hear()
            assert isinstance(first, Welcome)
            (other_path := tmp_path / "other").mkdir()
            standby = open_stage(valkey, other_path, stage.streams)
            await asyncio.sleep(1.5)
            assert not (other_path / "scheduler.sock").exists(), "it listens without the lease"
        await stage.close()
        async with standby.executor() as executor:
            welcome = await executor.hear()
            assert isinstance(welcome, Welcome)
            assert welcome.term == first.term + 1
        await standby.close()

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({"model": "other"}, "serves"),
        ({"protocol": 99}, "protocol"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_device_blocks": (1 << 31) - 1}, "num_device_blocks"),
        ({"run_ahead": 1000}, "run_ahead"),
    ],
)
def test_executors_that_do_not_fit_are_refused(valkey: str, tmp_path: Path, info: dict[str, object], word: str) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor(**info) as executor:
            refusal = await executor.hear()
            assert isinstance(refusal, Refusal)
            assert word in refusal.reason

    play(scene, valkey, tmp_path)


def test_a_term_that_an_executor_has_seen_before_is_left_for_a_greater_one(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.admit(1)
        await stage.until(lambda: _true(stage.process.service is not None))
        first = stage.service.term
        # One that the clock of another Redis has given is among them.
        for seen in (first, first + 1, first + 1_000_000):
            welcome = None
            async with asyncio.timeout(10):
                while welcome is None:
                    # Whoever is not welcomed dials again.
                    async with stage.executor(highest_term=seen, incarnation=f"e-{seen}") as executor:
                        with contextlib.suppress(AssertionError, grpc.RpcError):
                            welcome = await executor.hear()
            assert isinstance(welcome, Welcome)
            assert welcome.term == seen + 1
        async with stage.executor(highest_term=seen + 1, incarnation=f"e-{seen}") as known:
            assert isinstance(await known.hear(), Welcome), "it has seen this term here"
            await known.work(4)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_requests_stolen_by_a_scheduler_that_was_replaced_are_found(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await executor.hear()
            await stage.streams.client.xgroup_createconsumer(stage.streams.keys.requests, GROUP, "zombie")
            request_id = RequestId(LOG, 1)
            record = RequestRecord(request_id, 0, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=4))
            async with stage.streams.client.pipeline(transaction=True) as pipe:
                pipe.hset(stage.streams.keys.request(request_id), "entry", "1-1")
                pipe.xadd(stage.streams.keys.requests, {b"e": encode_request(record)})
                pipe.xreadgroup(GROUP, "zombie", {stage.streams.keys.requests: ">"})
                await pipe.execute()
            # It has even begun it, under its own term.
            row = OutputRow(request_id, 0, 1, 0, (100,))
            await stage.streams.append_log(LOG, encode_tokens([row], term=0, executor="z", epoch=1, step=1))
            await executor.work(3)
            await stage.until(stage.all_acknowledged)
        assert executor.admitted[0].tokens.tolist()[10:] == [100]
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_readmitted_request_goes_on_where_its_log_ends(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await executor.hear()
            record = RequestRecord(
                RequestId(LOG, 1), 0, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=4), readmitted=True
            )
            state = ChoiceFold()
            state.apply(TokenEvent(1, 0, Attempt(1, 1), 0, (100, 101)))
            assert await stage.streams.readmit(record, encode_snapshot([state.snapshot(1, 0)]))
            await executor.work(2)
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_a_fence_that_comes_too_late_ends_the_term(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await executor.hear()
            # Somebody else's attempt is in the log, of a term that has been forgotten.
            record = RequestRecord(
                RequestId(LOG, 1), 0, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=4), readmitted=True
            )
            forgotten = stage.service.term + 7
            state = ChoiceFold()
            state.apply(TokenEvent(1, 0, Attempt(forgotten, 1), 0, (100, 101)))
            assert await stage.streams.readmit(record, encode_snapshot([state.snapshot(1, 0)]))
            await stage.until(lambda: _true(stage.service.term == forgotten + 1))
        async with stage.executor(incarnation="e0-2") as executor:
            await executor.work(2)
            await stage.until(stage.all_acknowledged)
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_an_executor_that_leaves_is_relieved_first(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as leaving:
            await stage.admit(1, max_tokens=6)
            await leaving.work(2)
            plan = await leaving.hear()
            assert isinstance(plan, StepPlan)
            leaving.say(Heartbeat(leaving.epoch, 2, draining=True))
            result, rows = leaving.carry_out(plan)
            leaving.say(result)
            while isinstance(message := await leaving.hear(), StepPlan):
                # Sent before it had asked.
                last, late = leaving.carry_out(message)
                leaving.say(last)
                await leaving.log(plan, rows)
                plan, rows = message, late
                await leaving.log(plan, rows)
                rows = []
            assert isinstance(message, Farewell)
            assert not stage.service.engines
        async with stage.executor(incarnation="e0-2") as executor:
            await executor.hear()
            executor.keep_working()
            await stage.until(stage.all_acknowledged)
        assert len(executor.admitted[0].tokens) > 12, "what was under way was waited for"
        assert await stage.fold(1) == ([100, 101, 102, 103, 104, 105], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


def test_silent_and_stalled_executors_are_let_go(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            assert isinstance(await executor.hear(), Welcome)
            await stage.admit(1)
            assert isinstance(await executor.hear(), StepPlan)
            watchdog, now = Watchdog(stage.service, 30.0, 60.0), time.monotonic()
            watchdog.look(now)
            (engine,) = stage.service.engines
            assert engine.core.epoch == 1
            # It lives and has a plan, but is in no step.
            watchdog._looked_at_s = now + IDLE_S
            watchdog.look(now + IDLE_S + 1)
            (engine,) = stage.service.engines
            assert engine.core.epoch == 2, "a new epoch with the same executor"
            # This process stood still: that is nobody's silence.
            watchdog.look(now + 1000)
            assert stage.service.engines
            watchdog.look(now + 1000.1)
            assert stage.service.engines
            engine.last_heard_s = now + 900
            watchdog.look(now + 1000.2)
            assert not stage.service.engines
            text = stage.service.exposition().decode()
            assert 'octavo:executors_let_go_total{engine="0",model_name="tiny",reason="silent"} 1.0' in text
            assert 'octavo:executors_let_go_total{engine="0",model_name="tiny",reason="stalled"} 1.0' in text

    play(scene, valkey, tmp_path)


def test_a_replaced_scheduler_stands_by_and_comes_back(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: _true(stage.process.service is not None))
        keys = stage.streams.keys
        # Somebody else took the lease while this one stood still, and a term with it.
        await stage.streams.client.set(keys.lease, "other", px=60_000)
        term = await stage.streams.next_term()
        await stage.admit(1)
        await asyncio.sleep(1.5)
        assert not (tmp_path / "scheduler.sock").exists(), "it still listens"
        await stage.streams.client.delete(keys.lease)
        async with stage.executor() as executor:
            welcome = await executor.hear()
            assert isinstance(welcome, Welcome)
            assert welcome.term == term + 1
            await executor.work(4)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_an_executor_that_introduces_itself_twice_is_refused(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as twice:
            assert isinstance(await twice.hear(), Welcome)
            await stage.admit(1)
            twice.say(twice.info)
            while not isinstance(message := await twice.hear(), Refusal):
                pass
            assert "before" in message.reason
            # Nothing is left of it that requests could be sent to; what it had goes to the next.
            await stage.until(lambda: _true(not stage.service.engines))
        async with stage.executor(incarnation="e0-2") as executor:
            assert isinstance(await executor.hear(), Welcome)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)

    play(scene, valkey, tmp_path)


async def _true(value: bool) -> bool:
    return value


def test_a_request_whose_reading_was_never_answered_is_found(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await executor.hear()
            # Appended and read for the scheduler in one transaction: to it that is an answer lost with its connection.
            record = RequestRecord(RequestId(LOG, 1), 0, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=4))
            keys = stage.streams.keys
            async with stage.streams.client.pipeline(transaction=True) as pipe:
                pipe.xadd(keys.requests, {b"e": encode_request(record)}, id="1-1")
                pipe.hset(keys.request(record.id), "entry", "1-1")
                pipe.xreadgroup(GROUP, stage.process.incarnation, {keys.requests: ">"})
                await pipe.execute()
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)
            assert [new.request_id for new in executor.admitted] == [record.id]

    play(scene, valkey, tmp_path)


def test_a_deleted_model_stream_is_made_anew(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await executor.hear()
            await stage.streams.client.delete(stage.streams.keys.requests)
            await stage.admit(1)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_a_request_that_is_in_the_stream_twice_runs_once(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: _true(stage.process.service is not None))
        record = RequestRecord(RequestId(LOG, 1), 0, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=4))
        await stage.streams.admit(record)
        await stage.streams.client.xadd(stage.streams.keys.requests, {b"e": encode_request(record)})
        async with stage.executor() as executor:
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            assert len(executor.admitted) == 1

    play(scene, valkey, tmp_path)


def test_an_end_on_its_way_into_the_log_survives_the_loss_of_the_executor(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        service = stage.service
        append, held = service.streams.append_log, asyncio.Event()

        async def slow_end(log: str, entry: bytes) -> None:
            # The end is the first thing that the scheduler has to say, and it takes a slow connection.
            if not held.is_set():
                held.set()
                await asyncio.sleep(0.3)
            await append(log, entry)

        async with stage.executor() as executor:
            request_id = await stage.admit(1, n=2)
            await executor.work(1)
            service.streams.append_log = slow_end  # type: ignore[method-assign]
            await stage.streams.append_abort(AbortRecord(request_id, choice=0))
            await held.wait()
        async with stage.executor(incarnation="e0-2") as executor:
            await executor.work(3)
            await stage.until(stage.all_acknowledged)
        assert (await stage.fold(1, 0))[1] is EndReason.ABORT
        assert await stage.fold(1, 1) == ([100, 101, 102, 103], EndReason.LENGTH)

    async def begun(stage: Stage) -> None:
        await stage.until(lambda: _true(stage.process.service is not None))
        await scene(stage)

    play(begun, valkey, tmp_path)


def test_an_abort_survives_whoever_has_read_it(valkey: str, tmp_path: Path) -> None:
    async def begun(stage: Stage) -> None:
        await stage.listening()
        held = asyncio.Event()

        async def stuck(log: str, entry: bytes) -> None:
            held.set()
            await asyncio.Event().wait()

        async with stage.executor() as executor:
            request_id = await stage.admit(1, max_tokens=50)
            await executor.work(1)
            stage.service.streams.append_log = stuck  # type: ignore[method-assign]
            await stage.streams.append_abort(AbortRecord(request_id))
            await held.wait()
            await asyncio.sleep(0.2)
            assert await stage.streams.client.xlen(stage.streams.keys.aborts) == 1
            stage.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stage.task
        await stage.streams.client.delete(stage.streams.keys.lease)
        fresh = open_stage(valkey, tmp_path, stage.streams)
        try:
            # Nobody is there to run it.
            await fresh.until(fresh.all_acknowledged)
            tokens, end = await fresh.fold(1)
            assert (tokens[:1], end) == ([100], EndReason.ABORT)
            await fresh.until(fresh.no_aborts)
        finally:
            await fresh.close()

    async def main() -> None:
        streams = Streams.connect(valkey, MODEL)
        await streams.client.flushall()
        await begun(open_stage(valkey, tmp_path, streams))
        await streams.close()

    asyncio.run(main())


def test_garbage_in_the_streams_is_dropped(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        keys = stage.streams.keys
        with contextlib.suppress(Exception):
            await stage.streams.create_group()
        for fields in ({b"e": b"\xff\x00garbage"}, {b"e": b""}, {b"other": b"x"}):
            await stage.streams.client.xadd(keys.requests, fields)
            await stage.streams.client.xadd(keys.aborts, fields)
        async with stage.executor() as executor:
            await stage.admit(1)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)
            await stage.until(stage.no_aborts)

    play(scene, valkey, tmp_path)


def test_metrics_and_limits_are_published(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)

            async def published() -> bool:
                text = (await stage.streams.read_metrics()).get(b"scheduler", b"").decode()
                return (
                    f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0' in text
                    and f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.0' in text
                    and f'vllm:request_queue_time_seconds_count{{engine="0",model_name="{MODEL}"}} 1.0' in text
                    and f'vllm:prefix_cache_queries_total{{engine="0",model_name="{MODEL}"}} 10.0' in text
                )

            await stage.until(published)
            limits = await stage.streams.read_limits()
            assert limits is not None
            assert (limits.ready, limits.max_model_len, limits.pool_tokens) == (True, 128, 256)

    play(scene, valkey, tmp_path)


def test_a_broken_core_is_noticed_when_idle_and_replaced(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1)
            await executor.work(2)
            stage.service.engines[0].core.pool.acquire(np.array([15], np.int32))
            await executor.work(2)

            async def replaced() -> bool:
                return stage.service.engines[0].core.epoch == 2

            await stage.until(replaced)
            assert b'octavo:integrity_breaches_total{engine="0",model_name="tiny"} 1.0' in stage.service.exposition()
            await stage.admit(2)
            await executor.work(4)
            await stage.until(stage.all_acknowledged)

    play(scene, valkey, tmp_path)


def test_settings_that_do_not_suit_an_executor_refuse_it(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            refusal = await executor.hear()
            assert isinstance(refusal, Refusal)
            assert "chunked prefill" in refusal.reason

    play(scene, valkey, tmp_path, enable_chunked_prefill=False)


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("nan"), float("inf")])
def test_an_executor_that_measured_nonsense_is_refused(valkey: str, tmp_path: Path, seconds: float) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor(measured=(MeasuredStep(0, 1, 0.1), MeasuredStep(16, 1, seconds))) as executor:
            refusal = await executor.hear()
            assert isinstance(refusal, Refusal)
            assert "measured" in refusal.reason
        async with stage.executor(measured=(MeasuredStep(0, 1, 0.1),) * 65) as executor:
            assert isinstance(await executor.hear(), Refusal)

    play(scene, valkey, tmp_path)


def test_a_first_step_that_hangs_is_told_from_a_long_one_by_what_was_measured(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        fast = (
            MeasuredStep(0, 1, 0.01),
            MeasuredStep(0, 8, 0.02),
            MeasuredStep(16, 1, 0.03),
            MeasuredStep(64, 1, 0.09),
        )
        slow = tuple(MeasuredStep(step.prompt_tokens, step.sequences, 100 * step.seconds) for step in fast)
        for serial, (name, measured) in enumerate((("fast", fast), ("slow", slow)), 1):
            async with stage.executor(name=name, incarnation=f"{name}-1", measured=measured) as executor:
                assert isinstance(await executor.hear(), Welcome)
                (engine,) = stage.service.engines
                limits = stage.service.limits()
                factor = 100 if name == "slow" else 1
                assert limits.prompt_token_s == pytest.approx(factor * 0.00125, rel=0.1)
                assert limits.lone_step_s == pytest.approx(factor * 0.01, rel=0.1)
                await stage.admit(serial, prompt_tokens=50)
                assert isinstance(await executor.hear(), StepPlan)
                now = time.monotonic()
                engine.last_heard_s = now + 100
                engine.step_s = 1.0
                assert engine.is_making_progress(now + SLOW.least_s - 1)
                if name == "fast":
                    assert not engine.is_making_progress(now + SLOW.least_s + 1)
                    assert "were expected" in engine.stalled(now + STUCK.least_s + 1, STUCK)
                else:
                    assert engine.is_making_progress(now + 60), "50 tokens take some 7 s here"
                    assert not engine.is_making_progress(now + 200)

    play(scene, valkey, tmp_path)


def test_ready_means_progress(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            assert isinstance(await executor.hear(), Welcome)
            engine = stage.service.engines[0]
            now = time.monotonic()
            assert engine.is_making_progress(now)
            assert not engine.is_making_progress(now + SILENCE_S + 1), "it has fallen silent"
            await stage.admit(1)
            assert isinstance(await executor.hear(), StepPlan)
            engine.last_heard_s = now + 2 * STUCK.unknown_s
            assert not engine.is_making_progress(now + IDLE_S + 1), "it has a plan and is in no step"
            engine.step_s = 1.0
            assert engine.is_making_progress(now + IDLE_S + 1), "a long step is honest"
            assert not engine.is_making_progress(now + SLOW.unknown_s + 1), "it beats but its step never ends"
            # Once it is known what steps take, a hanging one is noticed at once, and a long one is not taken for one.
            for _ in range(100):
                engine.times.observe(10, 1, 0.01)
            assert engine.is_making_progress(now + SLOW.least_s - 1)
            assert not engine.is_making_progress(now + SLOW.least_s + 1)
            assert "were expected" in engine.stalled(now + STUCK.least_s + 1, STUCK)
            for _ in range(2000):
                engine.times.observe(10, 1, 10.0)
            assert engine.is_making_progress(now + SLOW.least_s + 1)
            assert engine.times.expected_s(10, 1) == pytest.approx(10, rel=0.1)
            assert not engine.is_making_progress(now + SLOW.times * 11)

    play(scene, valkey, tmp_path)


def test_a_poisonous_request_harms_no_other(valkey: str, tmp_path: Path) -> None:
    """Request 3 of six breaks every step it is in: it alone ends with an error, with or without company."""
    poison = 3

    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            for serial in range(1, 7):
                await stage.admit(serial, max_tokens=3)
            slots: dict[int, int] = {}
            ends = 0
            while ends < 5:
                plan = await executor.hear()
                if not isinstance(plan, StepPlan):
                    slots.clear()
                    continue
                slots.update({new.slot: new.request_id.serial for new in plan.admit})
                if poison in [slots[slot] for slot in plan.row_slots.tolist()]:
                    executor.fail(plan)
                    continue
                result, rows = executor.carry_out(plan)
                executor.say(result)
                await executor.log(plan, rows)
                ends += int((result.ends > 0).sum())
            await stage.until(stage.all_acknowledged)
        for serial in range(1, 7):
            expected = ([], EndReason.ERROR) if serial == poison else ([100, 101, 102], EndReason.LENGTH)
            assert await stage.fold(serial) == expected, serial

    play(scene, valkey, tmp_path)


def test_requests_go_where_their_prefix_is_cached_unless_it_is_crowded_there(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as first, stage.executor(name="e1", incarnation="e1-1") as second:
            assert isinstance(await first.hear(), Welcome)
            assert isinstance(await second.hear(), Welcome)
            first.keep_working()
            second.keep_working()
            await stage.admit(1, prompt_tokens=100, max_tokens=4)
            await stage.until(stage.all_acknowledged)
            (warm,) = [executor for executor in (first, second) if executor.admitted]
            await stage.admit(2, prompt_tokens=100, max_tokens=4)
            await stage.until(stage.all_acknowledged)
            assert len(warm.admitted) == 2
            now = time.monotonic()
            record = RequestRecord(RequestId(LOG, 9), 0, np.arange(100, dtype=np.int32), SamplingParams(max_tokens=1))
            engines = {engine.info.name: engine for engine in stage.service.engines}
            best = engines.pop(warm.info.name)
            (other,) = engines.values()
            assert choose_engine([other, best], now, record) is best
            best.core.add([Sequence(record, 0, 1, 128), Sequence(record, 1, 1, 128)])
            assert choose_engine([best, other], now, record) is other

    play(scene, valkey, tmp_path)


def test_requests_go_to_executors_that_make_progress(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as silent, stage.executor(name="e1", incarnation="e1-1") as lively:
            assert isinstance(await silent.hear(), Welcome)
            assert isinstance(await lively.hear(), Welcome)
            engines = stage.service.engines
            names = {engine.info.name: engine for engine in engines}
            now = time.monotonic()
            names["e1"].last_heard_s = now + 2 * SILENCE_S
            assert choose_engine(engines, now + 2 * SILENCE_S) is names["e1"]
            names["e0"].draining = True
            assert choose_engine(engines, now) is names["e1"]
            names["e1"].draining = True
            assert choose_engine(engines, now) is None

    play(scene, valkey, tmp_path)

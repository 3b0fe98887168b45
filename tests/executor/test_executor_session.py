"""The executor's loop over real gRPC and a real log: what it says to the scheduler, and when."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from late_device import LateDevice
from log_server import log_server
from plan_maker import PlanMaker, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.logged import LoggedMark
from octavo_executor.outbox import Outbox
from octavo_executor.page_names import PageNameTable
from octavo_executor.runner import Runner
from octavo_executor.session import Session
from octavo_executor.step_loop import StepLoop
from octavo_executor.step_work import Launched
from octavo_scheduler.serve import SchedulerProcess
from octavo_shared.ids import RequestId
from octavo_shared.plan import ExecutorInfo, StepOutput, StepPlan, StepResult
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.proto import executor_pb2_grpc
from octavo_shared.records import RequestRecord, SamplingParams
from octavo_shared.settings import SchedulerSettings, load_settings
from octavo_shared.streams import GROUP, Streams
from octavo_shared.wire import FromScheduler, Heartbeat, Logged, Welcome, from_executor, to_executor

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WAIT_S = 30


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with log_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return make_runner(folder)


class SchedulerEnd(executor_pb2_grpc.SchedulerServicer):
    """The scheduler's end of the line: says what it is told to, keeps what it hears (heartbeats aside)."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._say: queue.SimpleQueue[FromScheduler | None] = queue.SimpleQueue()

    def say(self, *messages: FromScheduler | None) -> None:
        for message in messages:
            self._say.put(message)

    def Attach(self, request_iterator: Any, context: Any) -> Iterator[pb.SchedulerMessage]:
        threading.Thread(target=self._listen, args=(request_iterator,), daemon=True).start()
        while (message := self._say.get()) is not None:
            yield to_executor(message)

    def _listen(self, messages: Any) -> None:
        try:
            for raw in messages:
                message = from_executor(raw)
                if not isinstance(message, Heartbeat):
                    self.heard.put(message)
        except grpc.RpcError:
            pass

    def next(self) -> Any:
        return self.heard.get(timeout=WAIT_S)


class Gated:
    """The real runner; ``before`` is called with a plan before it is carried out, ``after`` with what came of it."""

    def __init__(self, runner: Runner, before: Callable[[StepPlan], None], after: Callable[[StepOutput], None]) -> None:
        self._runner, self._before, self._after = runner, before, after

    @property
    def depth(self) -> int:
        return self._runner.depth

    def launch(self, plan: StepPlan) -> Launched:
        self._before(plan)
        return self._runner.launch(plan)

    def collect(self, step: Launched) -> StepOutput:
        output = self._runner.collect(step)
        self._after(output)
        return output

    def reset(self) -> None:
        self._runner.reset()


class Line:
    """An executor attached to a scheduler's end; the steps that are in the log can be waited for."""

    def __init__(self, runner: Runner, valkey: str, address: str) -> None:
        info = ExecutorInfo("e", "e-1", "m", "f", 80, 16, 200, 6, 128, 131)
        self.session = Session([address], info)
        # What was said of the log outside results.
        self.said: list[Logged] = []
        self.mark = LoggedMark(self._say)
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.after: Callable[[StepOutput], None] = lambda output: None
        self._logged: set[int] = set()
        self._changed = threading.Condition()
        self._outbox = Outbox(valkey, "m", "e-1", 8, logged=self._note, broken=self.session.close)
        gated = Gated(runner, lambda plan: self.before(plan), lambda output: self.after(output))
        self._thread = threading.Thread(
            target=StepLoop(gated, self.session, self._outbox, self.mark, PageNameTable(80, 0, 16)).run, daemon=True
        )
        self._thread.start()

    def _say(self, message: Logged) -> None:
        self.said.append(message)
        self.session.send(message)

    def _note(self, epoch: int, step: int) -> None:
        self.mark.note(epoch, step)
        with self._changed:
            self._logged.update(range(step + 1))
            self._changed.notify_all()

    def wait_until_logged(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self._logged, WAIT_S)

    def wait_for_news(self) -> None:
        done = threading.Event()
        for _ in range(WAIT_S * 100):
            if self.session.has_news:
                return
            done.wait(0.01)
        raise AssertionError("no plan came")

    def close(self) -> None:
        self.session.close()
        self._thread.join(WAIT_S)
        assert self._outbox.close(WAIT_S)
        self.session.join()


@contextmanager
def attached(runner: Runner, valkey: str, folder: Path) -> Iterator[tuple[SchedulerEnd, Line]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    end = SchedulerEnd()
    executor_pb2_grpc.add_SchedulerServicer_to_server(end, server)
    address = f"unix:{folder}/line.sock"
    server.add_insecure_port(address)
    server.start()
    line = Line(runner, valkey, address)
    try:
        assert isinstance(end.next(), ExecutorInfo)
        yield end, line
    finally:
        end.say(None)
        line.close()
        server.stop(None)


def make_plans(runner: Runner, count: int) -> list[StepPlan]:
    """A prompt and ``count`` - 1 more tokens, one plan each."""
    maker = PlanMaker(runner)
    sequence = maker.admit(random_tokens(5, 1), GREEDY)
    return [maker.plan([(sequence, 5 if i == 0 else 1)]) for i in range(count)]


def test_what_is_logged_comes_with_the_next_result(loaded: Runner, valkey: str, tmp_path: Path) -> None:
    with attached(loaded, valkey, tmp_path) as (end, line):

        def before(plan: StepPlan) -> None:
            # The plan behind it is there before a step begins, and the step before it is logged.
            if plan.step < 3:
                line.wait_for_news()
            if plan.step > 1:
                line.wait_until_logged(plan.step - 1)

        line.before = before
        end.say(Welcome(1, 1), *make_plans(loaded, 3))
        results = [end.next() for _ in range(3)]
        assert all(isinstance(result, StepResult) and not result.failed for result in results)
        assert [(result.step, result.logged_step) for result in results] == [(1, 0), (2, 1), (3, 2)]
        # Nothing follows the last one: its own news comes by itself.
        assert end.next() == Logged(1, 3)
        assert end.heard.empty()


def test_what_is_logged_comes_by_itself_when_nothing_runs(loaded: Runner, valkey: str, tmp_path: Path) -> None:
    with attached(loaded, valkey, tmp_path) as (end, _):
        end.say(Welcome(1, 1))
        for i, plan in enumerate(make_plans(loaded, 2)):
            end.say(plan)
            result = end.next()
            assert (result.step, result.logged_step) == (i + 1, i)
            assert end.next() == Logged(1, i + 1)


def test_what_is_logged_is_told_though_the_next_step_fails(loaded: Runner, valkey: str, tmp_path: Path) -> None:
    """News that came while a step ran, whose result never said so."""
    with attached(loaded, valkey, tmp_path) as (end, line):

        def before(plan: StepPlan) -> None:
            if plan.step == 1:
                line.wait_for_news()
            else:
                line.wait_until_logged(1)
                raise MemoryError("no more of it")

        line.before = before
        end.say(Welcome(1, 1), *make_plans(loaded, 2))
        assert end.next().step == 1
        failure = end.next()
        assert (failure.step, failure.failed, failure.logged_step) == (2, True, 0)
        assert end.next() == Logged(1, 1)


def test_a_new_epoch_hears_nothing_of_the_old_one(loaded: Runner, valkey: str, tmp_path: Path) -> None:
    with attached(loaded, valkey, tmp_path) as (end, line):
        line.before = lambda plan: line.wait_for_news() if plan.epoch == 1 else None
        plans = make_plans(loaded, 1)
        # The second welcome lies there before the step of the first epoch begins.
        end.say(Welcome(1, 1), *plans, Welcome(1, 2))
        assert end.next().step == 1
        line.wait_until_logged(1)
        later = make_plans(loaded, 1)[0]
        end.say(StepPlan(**{name: getattr(later, name) for name in later.__dataclass_fields__} | {"epoch": 2}))
        heard = [end.next()]
        if heard[0] == Logged(1, 1):  # the old epoch was still the current one when its step was logged
            heard = [end.next()]
        assert (heard[0].epoch, heard[0].logged_step) == (2, 0)
        assert end.next() == Logged(2, 1)


async def unacknowledged(streams: Streams) -> int:
    pending = await streams.client.xpending(streams.keys.requests, GROUP)
    return int(pending["pending"])


def test_a_request_is_acknowledged_by_what_a_result_says(loaded: Runner, valkey: str, tmp_path: Path) -> None:
    """A real scheduler. One request ends, another one goes on: a result is all that tells of the first one's end."""
    release, ended_at = threading.Event(), []

    def before(line: Line, plan: StepPlan) -> None:
        if ended_at and plan.step == ended_at[0] + 2:
            assert release.wait(WAIT_S)
        elif not release.is_set():
            line.wait_for_news()
            if plan.step > 1:
                line.wait_until_logged(plan.step - 1)

    def after(output: StepOutput) -> None:
        if any(row.end for row in output.rows) and not ended_at:
            ended_at.append(output.result.step)

    async def scene() -> None:
        address = f"unix:{tmp_path}/scheduler.sock"
        settings = load_settings(SchedulerSettings, model="m", redis_url=valkey, scheduler_address=address)
        streams = Streams.connect(valkey, "m")
        await streams.client.flushall()
        stop = asyncio.Event()
        scheduler = asyncio.create_task(SchedulerProcess(settings).run(stop))
        line = Line(loaded, valkey, address)
        line.before, line.after = (lambda plan: before(line, plan)), after
        try:
            for serial, count in ((1, 60), (2, 3)):
                record = RequestRecord(
                    RequestId("log", serial),
                    time.time_ns() // 1000,
                    np.array(random_tokens(9, serial), np.int32),
                    SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
                )
                await streams.admit(record)
            async with asyncio.timeout(WAIT_S):
                while not ended_at or await unacknowledged(streams) != 1:
                    await asyncio.sleep(0.01)
            assert not [message for message in line.said if message.step >= ended_at[0]]
            release.set()
            async with asyncio.timeout(WAIT_S):
                while await unacknowledged(streams):
                    await asyncio.sleep(0.01)
        finally:
            release.set()
            await asyncio.to_thread(line.close)
            stop.set()
            await asyncio.wait_for(scheduler, WAIT_S)
            await streams.close()

    asyncio.run(scene())


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return make_runner(folder, device=LateDevice(1))


def test_a_plan_is_launched_before_the_step_before_it_is_collected(
    loaded: Runner, late: Runner, valkey: str, tmp_path: Path
) -> None:
    """Where the device has room for two steps; what comes of them is the same, in the same order."""
    plans = make_plans(loaded, 5)
    loaded.reset()
    expected = [loaded.execute(plan).result.tokens.tolist() for plan in plans]
    order: list[tuple[str, int]] = []
    with attached(late, valkey, tmp_path) as (end, line):

        def before(plan: StepPlan) -> None:
            order.append(("launch", plan.step))
            if plan.step < 5:
                line.wait_for_news()

        line.before, line.after = before, lambda output: order.append(("collect", output.result.step))
        end.say(Welcome(1, 1), *plans)
        results = [heard for heard in (end.next() for _ in range(6)) if isinstance(heard, StepResult)]
        assert [result.step for result in results] == [1, 2, 3, 4, 5]
        assert [result.tokens.tolist() for result in results] == expected
        assert all(result.timings.forward_s > 0 and result.timings.sample_s > 0 for result in results)
    first = [("launch", 1), ("launch", 2), ("collect", 1), ("launch", 3), ("collect", 2), ("launch", 4), ("collect", 3)]
    assert order == [*first, ("launch", 5), ("collect", 4), ("collect", 5)]


def test_steps_under_way_are_collected_before_a_failure_is_told(late: Runner, valkey: str, tmp_path: Path) -> None:
    plans = make_plans(late, 3)
    with attached(late, valkey, tmp_path) as (end, line):

        def before(plan: StepPlan) -> None:
            if plan.step < 3:
                line.wait_for_news()
            else:
                raise MemoryError("no more of it")

        line.before = before
        end.say(Welcome(1, 1), *plans)
        heard = [message for message in (end.next() for _ in range(4)) if isinstance(message, StepResult)]
        assert [(result.step, result.failed) for result in heard] == [(1, False), (2, False), (3, True)]
        # A new epoch begins with nothing under way.
        line.before = lambda plan: None
        end.say(Welcome(1, 2), replace(make_plans(late, 1)[0], epoch=2))
        results = []
        while not results or results[-1].epoch < 2:
            results += [message for message in (end.next(),) if isinstance(message, StepResult)]
        assert [(result.step, result.failed) for result in results] == [(1, False)]

"""A stage for the scheduler as a process: real Valkey, real gRPC, and an executor that speaks the real protocol.

The executor in here computes nothing: it answers plans with made-up tokens, which is all the scheduler can see of one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from octavo_scheduler.serve import SchedulerProcess
from octavo_scheduler.service import SchedulerService
from octavo_shared.entries import encode_tokens
from octavo_shared.fold import LogFold
from octavo_shared.ids import RequestId
from octavo_shared.plan import ExecutorInfo, NewSequence, OutputRow, StepPlan, StepResult
from octavo_shared.proto import executor_pb2_grpc
from octavo_shared.records import EndReason, RequestRecord, SamplingParams
from octavo_shared.settings import SchedulerSettings, load_settings
from octavo_shared.streams import GROUP, Streams
from octavo_shared.wire import FromExecutor, Heartbeat, Logged, Refusal, Welcome, from_scheduler, to_scheduler

MODEL = "tiny"
LOG = "gateway0"


class Executor:
    """One attached executor: tokens it makes up are 100, 101, … by output position. With ``beats`` it is never silent for long."""

    def __init__(self, address: str, streams: Streams, beats: bool = False, **info: object) -> None:
        defaults: dict[str, object] = {
            "name": "e0",
            "incarnation": "e0-1",
            "model": MODEL,
            "fingerprint": "f",
            "num_device_blocks": 16,
            "block_size": 16,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "vocab_size": 1000,
        }
        self.info = ExecutorInfo(**(defaults | info))  # type: ignore[arg-type]
        self.streams = streams
        self.slots: dict[int, NewSequence] = {}
        self.lengths: dict[int, int] = {}
        self.admitted: list[NewSequence] = []
        self.epoch = 0
        self._channel = grpc.aio.insecure_channel(address)
        self._out: asyncio.Queue[FromExecutor | None] = asyncio.Queue()
        self._worker: asyncio.Task[int] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._beats = beats

    async def __aenter__(self) -> Executor:
        self._call = executor_pb2_grpc.SchedulerStub(self._channel).Attach(self._messages(), wait_for_ready=True)
        self.say(self.info)
        if self._beats:
            self._heart = asyncio.create_task(self._beat())
        return self

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.say(Heartbeat(self.epoch, 0))

    async def __aexit__(self, *_: object) -> None:
        for task in (self._worker, self._heart):
            if task is not None:
                task.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _messages(self) -> AsyncIterator[object]:
        while (message := await self._out.get()) is not None:
            yield to_scheduler(message)

    def say(self, message: FromExecutor) -> None:
        self._out.put_nowait(message)

    async def hear(self) -> Welcome | StepPlan | Refusal:
        """The next message that counts: after a failed step, plans of the old epoch do not."""
        while True:
            raw = await asyncio.wait_for(self._call.read(), 10)
            assert raw is not grpc.aio.EOF, "the scheduler hung up"
            message = from_scheduler(raw)
            if isinstance(message, Welcome):
                self.epoch = message.epoch
                self.slots.clear()
            if not isinstance(message, StepPlan) or message.epoch == self.epoch:
                return message

    def fail(self, plan: StepPlan) -> None:
        none = np.empty(0, np.int32)
        self.say(StepResult(plan.term, plan.epoch, plan.step, none, none, none.astype(np.uint8), True, "boom"))
        self.epoch = -1

    def carry_out(self, plan: StepPlan) -> tuple[StepResult, list[OutputRow]]:
        for slot in plan.release.tolist():
            del self.slots[slot]
        for new in plan.admit:
            self.slots[new.slot], self.lengths[new.slot] = new, len(new.tokens)
            self.admitted.append(new)
        rows, ends, counts, tokens, scores = [], [], [], [], []
        for slot in plan.sample_slots.tolist():
            new = self.slots[slot]
            if width := new.sampling.beam_width:
                # Candidates tell the output position and their rank.
                ends.append(0)
                counts.append(2 * width)
                tokens += [200 + 10 * (len(new.tokens) - new.output_start) + rank for rank in range(2 * width)]
                scores += [-0.1 * (rank + 1) for rank in range(2 * width)]
                continue
            position = self.lengths[slot] - new.output_start
            self.lengths[slot] += 1
            end = EndReason.LENGTH if self.lengths[slot] >= new.max_total_tokens else EndReason.NONE
            ends.append(int(end))
            counts.append(1)
            tokens.append(100 + position)
            rows.append(OutputRow(new.request_id, new.choice, new.attempt, position, (100 + position,), end=int(end)))
        result = StepResult(
            plan.term,
            plan.epoch,
            plan.step,
            np.array(counts, np.int32),
            np.array(tokens, np.int32),
            np.array(ends, np.uint8),
            scores=np.array(scores, np.float32),
        )
        return result, rows

    async def log(self, plan: StepPlan, rows: list[OutputRow]) -> None:
        for log in {row.request_id.log for row in rows}:
            own = [row for row in rows if row.request_id.log == log]
            entry = encode_tokens(own, term=plan.term, executor="e0-1", epoch=plan.epoch, step=plan.step)
            await self.streams.append_log(log, entry)
        self.say(Logged(plan.epoch, plan.step))

    def keep_working(self) -> None:
        """Carry out plans in the background until the end."""
        if self._worker is None:
            self._worker = asyncio.create_task(self.work(1 << 30))

    async def work(self, steps: int) -> int:
        """Carry out plans until ``steps`` are done; returns the step of the last one."""
        done = 0
        step = 0
        while done < steps:
            message = await self.hear()
            if isinstance(message, StepPlan):
                result, rows = self.carry_out(message)
                self.say(result)
                await self.log(message, rows)
                done, step = done + 1, message.step
        return step


class Stage:
    """A running scheduler process and a hand on its log."""

    def __init__(self, streams: Streams, address: str, settings: SchedulerSettings) -> None:
        self.streams = streams
        self.address = address
        self.settings = settings
        self.process = SchedulerProcess(settings)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.process.run(self.stop))

    def executor(self, *, beats: bool = False, **info: object) -> Executor:
        return Executor(self.address, self.streams, beats, **info)

    async def admit(
        self, serial: int, prompt_tokens: int = 10, max_tokens: int = 4, n: int = 1, beam_width: int = 0, **fields: Any
    ) -> RequestId:
        request_id = RequestId(LOG, serial)
        await self.streams.take_lease(self.streams.keys.gateway(LOG), LOG, 600)
        prompt = np.arange(prompt_tokens, dtype=np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, beam_width=beam_width)
        await self.streams.admit(RequestRecord(request_id, time.time_ns() // 1000, prompt, sampling, n=n, **fields))
        return request_id

    async def fold(self, serial: int, choice: int = 0) -> tuple[list[int], EndReason]:
        state = LogFold().apply_all((await self.streams.read_log(LOG, "0", count=10_000)).events).get(serial, choice)
        return state.tokens, state.end

    async def until(self, question: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(10):
            while not await question():
                await asyncio.sleep(0.01)

    async def all_acknowledged(self) -> bool:
        """Nothing is pending, no entry is left, no request key either."""
        await self.streams.create_group()
        pending = await self.streams.client.xpending(self.streams.keys.requests, GROUP)
        length = await self.streams.client.xlen(self.streams.keys.requests)
        keys = await self.streams.client.keys(self.streams.keys.request(RequestId(LOG, 0))[:-1] + "*")
        return pending["pending"] == 0 and length == 0 and not keys

    async def no_aborts(self) -> bool:
        """Nothing that was said against a request is still to be seen to."""
        return await self.streams.client.xlen(self.streams.keys.aborts) == 0

    async def finish(self, executor: Executor) -> None:
        """From now on the executor carries out whatever comes; wait until nothing is owed any more."""
        executor.keep_working()
        await self.until(self.all_acknowledged)

    async def listening(self) -> None:
        """Wait until the scheduler holds the lease and listens."""

        async def is_there() -> bool:
            return await asyncio.to_thread(os.path.exists, self.address.removeprefix("unix:"))

        await self.until(is_there)

    @property
    def service(self) -> SchedulerService:
        assert self.process.service is not None
        return self.process.service

    async def close(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 10)


Scene = Callable[[Stage], Awaitable[None]]


def play(scene: Scene, valkey: str, tmp_path: Path, **flags: object) -> None:
    async def main() -> None:
        streams = Streams.connect(valkey, MODEL)
        await streams.client.flushall()
        stage = open_stage(valkey, tmp_path, streams, **flags)
        try:
            await scene(stage)
        finally:
            await stage.close()
            await streams.close()

    asyncio.run(main())


def open_stage(valkey: str, tmp_path: Path, streams: Streams, **flags: object) -> Stage:
    address = f"unix:{tmp_path}/scheduler.sock"
    settings = load_settings(
        SchedulerSettings, model=MODEL, redis_url=valkey, scheduler_address=address, scheduler_lease_s=1.0, **flags
    )
    return Stage(streams, address, settings)

"""429: how much work is queued, how much more may come, and when to come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_stage import Reply, Stage, default_reply, eventually
from test_gateway_log import samples

from octavo_gateway import limits as limits_module
from octavo_gateway.pressure import MOST_RETRY_S, UNKNOWN_RETRY_S, work_of
from octavo_shared.records import ModelLimits, RequestRecord, SamplingParams

MakeStage = Callable[..., AbstractContextManager[Stage]]
# Every choice is expected to use all of its max_tokens.
ALL = tuple(float(1 << place) for place in range(12))


def tell(stage: Stage, **figures: Any) -> None:
    """Let the scheduler say so, and wait until the gateway knows."""
    stage.engine.limits = replace(stage.engine.limits, expected_outputs=ALL, **figures)
    limits = stage.server.gateway.limits

    def known() -> bool:
        return limits.latest is not None and all(getattr(limits.latest, name) == figures[name] for name in figures)

    eventually(known, "the gateway knows")


def test_work_is_prompts_and_expected_outputs() -> None:
    limits = ModelLimits("m", 1, 1, 1, True, expected_outputs=(1.0, 2.0, 3.0))
    plain, beams = SamplingParams(max_tokens=2), SamplingParams(max_tokens=4, beam_width=5)
    assert work_of([[1] * 10], [plain], 1, limits) == 12
    assert work_of([[1] * 10, [1] * 7], [plain, plain], 3, limits) == 17 + 2 * 3 * 2
    assert work_of([[1] * 10], [beams], 2, limits) == 10 + 5 * 3


@pytest.mark.parametrize(
    ("queued", "bound", "rate", "retry_s"),
    [
        # 20 tokens of work, so many beyond the bound.
        (1000, 1010, 1.0, 10),
        (1000, 1000, 8.0, 3),
        (1000, 500, 1e9, 1),
        (1000, 1010, 0.0, UNKNOWN_RETRY_S),
        (10**9, 1000, 1.0, MOST_RETRY_S),
        # The request alone is beyond it: once nothing is queued it may come all the same.
        (5, 10, 1.0, 5),
    ],
)
def test_too_much_work_is_429(make_stage: MakeStage, queued: int, bound: int, rate: float, retry_s: int) -> None:
    with make_stage() as stage:
        tell(stage, queued_tokens=queued, max_queued_tokens=bound, tokens_per_s=rate)
        for path, body in (
            ("/v1/completions", {"prompt": [5] * 12, "max_tokens": 8}),
            ("/v1/completions", {"prompt": [5] * 12, "max_tokens": 8, "stream": True}),
        ):
            answer = stage.post(path, **body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == str(retry_s)
            assert answer.json() == {
                "error": {
                    "message": f"The server is overloaded: {queued} tokens of work are queued, this request needs about "
                    f"20, and the limit is {bound}. Please retry in {retry_s} s.",
                    "type": "RateLimitError",
                    "param": None,
                    "code": "rate_limit_exceeded",
                }
            }
        assert stage.engine.records == []
        assert samples(stage)["octavo:requests_refused_total"] == 2
        # What is wrong in itself is said even so.
        assert stage.post("/v1/completions", prompt="x", n=0).status_code == 400


@pytest.mark.parametrize(("queued", "bound"), [(0, 1), (10**9, 0), (980, 1000)])
def test_what_may_come_comes(make_stage: MakeStage, queued: int, bound: int) -> None:
    with make_stage() as stage:
        tell(stage, queued_tokens=queued, max_queued_tokens=bound)
        assert stage.post("/v1/completions", prompt=[5] * 12, max_tokens=8).status_code == 200


def test_prompts_of_a_request_come_all_or_none(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        tell(stage, queued_tokens=100, max_queued_tokens=150)
        assert stage.post("/v1/completions", prompt=[[5] * 10] * 3, max_tokens=8).status_code == 429
        assert stage.post("/v1/completions", prompt=[[5] * 10] * 2, max_tokens=8).status_code == 200
        assert len(stage.engine.records) == 2


def test_what_was_admitted_since_counts_until_it_ends(make_stage: MakeStage) -> None:
    gate = threading.Event()

    def reply(record: RequestRecord, choice: int) -> Reply:
        return Reply([70] * 8, gate=gate) if len(record.prompt) == 40 else default_reply(record, choice)

    with make_stage() as stage:
        tell(stage, queued_tokens=0, max_queued_tokens=60)
        # From now on the scheduler says nothing new.
        stage.engine.publishing = False
        stage.engine.reply = reply
        big: list[int] = []
        first = threading.Thread(
            target=lambda: big.append(stage.post("/v1/completions", prompt=[5] * 40, max_tokens=8).status_code)
        )
        first.start()
        eventually(lambda: len(stage.engine.records) == 1, "the first one is admitted")
        assert stage.post("/v1/completions", prompt=[5] * 8, max_tokens=8).status_code == 429
        assert stage.post("/v1/completions", prompt=[5] * 4, max_tokens=8).status_code == 200
        assert stage.post("/v1/completions", prompt=[5] * 4, max_tokens=8).status_code == 200, "the other has ended"
        gate.set()
        first.join(10)
        assert big == [200]
        assert stage.post("/v1/completions", prompt=[5] * 80, max_tokens=8).status_code == 200, "nothing is queued"
        assert stage.server.gateway.pressure._own_tokens == 0


def test_nobody_is_refused_on_hearsay(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_stage() as stage:
        gateway = stage.server.gateway
        # The gateway looks once more by itself at most, then not for a long time. If it was just looking, it does not look
        # again: there is nothing to wait for but the time.
        monkeypatch.setattr(limits_module, "REFRESH_S", 1000.0)
        time.sleep(1.0)
        loaded = replace(stage.engine.limits, queued_tokens=10**6, max_queued_tokens=100, written_s=time.time())
        gateway.limits._limits = loaded
        assert stage.post("/v1/completions", prompt=[5] * 12, max_tokens=8).status_code == 200
        assert gateway.limits.latest is not None
        assert gateway.limits.latest.queued_tokens == 0, "it has asked again"


def test_a_rush_is_admitted_up_to_the_bound(make_stage: MakeStage) -> None:
    """Many at once, while the scheduler says nothing: what is let in never exceeds the bound."""
    gate = threading.Event()
    with make_stage() as stage:
        tell(stage, queued_tokens=1, max_queued_tokens=201)
        stage.engine.publishing = False
        stage.engine.reply = lambda record, choice: Reply([70] * 8, gate=gate)
        codes: list[int] = []

        def ask() -> None:
            codes.append(stage.post("/v1/completions", prompt=[5] * 12, max_tokens=8).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(codes) == 30, "thirty are refused")
        assert codes == [429] * 30
        gate.set()
        for thread in threads:
            thread.join(10)
        assert sorted(codes) == [200] * 10 + [429] * 30


# A second of others' prompts is ahead.
BUSY = {
    "prompt_token_s": 0.001,
    "step_s": 0.01,
    "lone_step_s": 0.01,
    "max_queue_wait_s": 30.0,
    "max_ttft_ratio": 2.0,
    "prompts_ahead": {"other": 1000},
}


@contextmanager
def at_the_door(stage: Stage, **body: Any) -> Iterator[Future[int]]:
    """While executors are busy a request has come; in the end its status."""
    tell(stage, **BUSY)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(lambda: stage.post("/v1/completions", prompt=[5] * 12, max_tokens=8, **body).status_code)
        eventually(lambda: len(stage.server.gateway.pressure._door) == 1, "it is held at the door")
        assert stage.engine.records == []
        yield status
        status.result(30)


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_held_at_the_door_comes_in_when_there_is_room(make_stage: MakeStage, stream: bool) -> None:
    with make_stage() as stage, at_the_door(stage, stream=stream) as status:
        tell(stage, prompts_ahead={})
        assert status.result(30) == 200


def test_who_is_held_at_the_door_when_the_gateway_is_drained_is_answered(make_stage: MakeStage) -> None:
    with make_stage() as stage, at_the_door(stage) as status:
        assert stage.loop is not None
        stage.loop.call_soon_threadsafe(stage.server.stop)
        assert status.result(30) == 200


def test_who_is_held_at_the_door_when_no_executor_is_left_is_told_so(make_stage: MakeStage) -> None:
    with make_stage() as stage, at_the_door(stage) as status:
        tell(stage, ready=False)
        assert status.result(30) == 503
        assert stage.engine.records == []


def test_who_hangs_up_at_the_door_leaves_nothing(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        tell(stage, **BUSY)
        pressure = stage.server.gateway.pressure
        gate = threading.Event()
        stage.engine.reply = lambda record, choice: Reply([70] * 8, gate=gate)
        body = {"prompt": [5] * 12, "max_tokens": 8}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stage.url}/v1/completions", json=body, headers=dict(stage.client.headers), timeout=0.5)
        assert len(pressure._door) == 1
        tell(stage, prompts_ahead={})
        eventually(lambda: len(stage.engine.records) == 1 and not stage.engine.live, "it is let in, and given up")
        eventually(lambda: (pressure._own_tokens, pressure._outlook._own_ahead) == (0, 0), "and forgotten")


def test_the_next_word_of_the_scheduler_replaces_ones_own() -> None:
    """What was admitted before the limits were written is in them already."""
    from prometheus_client import CollectorRegistry, Counter

    from octavo_gateway.pressure import Pressure

    class Watch:
        def __init__(self) -> None:
            self.limits = ModelLimits("m", 1, 1, 1, True, written_s=time.time(), queued_tokens=1, max_queued_tokens=100)

        def require(self) -> ModelLimits:
            return self.limits

        async def refresh(self, at_most_s: float = 0.0) -> None:
            return

    watch = Watch()
    counter = Counter("refused", "", registry=CollectorRegistry())
    pressure = Pressure(watch, counter, "g1")  # type: ignore[arg-type]
    prompts, samplings = [np.zeros(50, np.int32)], [SamplingParams(max_tokens=4)]

    async def main() -> None:
        ticket = await pressure.take_on(prompts, samplings, 1)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="overloaded"):
            await pressure.take_on(prompts, samplings, 1)  # type: ignore[arg-type]
        watch.limits = replace(watch.limits, written_s=time.time() + 1)
        second = await pressure.take_on(prompts, samplings, 1)  # type: ignore[arg-type]
        pressure.give_back(ticket)
        pressure.give_back(second)
        pressure.give_back(second)
        assert pressure._own_tokens == 0

    asyncio.run(main())

"""Lasting overload: bursts are let in, and once they are too much only those whose first token comes soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from octavo_gateway import pressure as pressure_module
from octavo_gateway.errors import ApiError
from octavo_gateway.pressure import BURST_S, CALM_S, LASTING, MOST_SPREAD_S, Pressure
from octavo_shared.records import ModelLimits, SamplingParams

# A prompt of 100 tokens takes 0.1 + 0.01 s by itself, so its first token may take 0.22 s under overload.
LIMITS = ModelLimits(
    *("m", 8192, 1 << 20, 1000, True),
    executors=1,
    prompt_token_s=0.001,
    step_s=0.01,
    lone_step_s=0.01,
    max_queue_wait_s=10.0,
    max_ttft_ratio=2.0,
)


class Watch:
    """Limits that tests set."""

    def __init__(self) -> None:
        self.limits = replace(LIMITS, written_s=time.time())

    def require(self) -> ModelLimits:
        return self.limits

    async def refresh(self, at_most_s: float = 0.0) -> None:
        return


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pressure_module, "time", clock)
    return clock


class Door:
    """A gateway's pressure, and what has come."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.pressure = Pressure(self.watch, Counter("refused", "", registry=CollectorRegistry()), "own")  # type: ignore[arg-type]

    def tell(self, **limits: Any) -> None:
        self.watch.limits = replace(self.watch.limits, **limits)

    async def ask(self, tokens: int = 100) -> int:
        """A ticket; 0 = refused."""
        try:
            return await self.pressure.take_on([[1] * tokens], [SamplingParams(max_tokens=4)], 1, 4 * tokens)
        except ApiError as error:
            self.retry_s = int(error.headers["Retry-After"])
            return 0

    async def fill(self) -> list[int]:
        """A burst that ends in overload."""
        tickets = [await self.ask() for _ in range(101)]
        assert all(tickets), "ten seconds of work come at once, and all are let in"
        assert not await self.ask()
        return tickets


def play(scene: Callable[[Door], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Door())

    asyncio.run(main())


def test_a_burst_is_let_in_until_it_would_wait_too_long(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        tickets = await door.fill()
        for ticket in tickets:
            door.pressure.began(ticket, 100)
            door.pressure.give_back(ticket)
        assert (door.pressure._own_ahead, door.pressure._own_tokens, door.pressure._taken) == (0, 0, {})

    play(scene)


@pytest.mark.parametrize("gap_s", [0.0101, 0.05, 0.09])
def test_a_line_that_grows_on_after_the_burst_is_overload(clock: Clock, gap_s: float) -> None:
    async def scene(door: Door) -> None:
        # Each takes 0.1 s, and one comes every ``gap_s``: a burst of a second, and more.
        came, begun, tickets = 0, 0, []
        while ticket := await door.ask():
            tickets.append(ticket)
            came += 1
            clock.now_s += gap_s
            if begun < int((clock.now_s - 1000.0) / 0.1):
                door.pressure.began(tickets[begun], 100)
                begun += 1
        passed_s = clock.now_s - 1000.0
        wait_s = (came - begun) * 0.1
        assert passed_s >= BURST_S
        assert wait_s == pytest.approx(max(LASTING * 10.0, 0.1 * BURST_S / gap_s - BURST_S), abs=0.35)
        *line, last = tickets[begun:]
        for ticket in line:
            assert not await door.ask(), "now only who comes soon"
            door.pressure.began(ticket, 100)
        door.pressure.began(last, 100)
        assert await door.ask()

    play(scene)


def test_clients_of_a_burst_that_come_again_are_let_in_again(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        waiting = [await door.ask() for _ in range(80)]
        assert all(waiting), "eight seconds of work at once"
        for _ in range(500):
            clock.now_s += 0.1
            door.pressure.began(waiting.pop(0), 100)
            again = await door.ask()
            assert again, "the line does not grow"
            waiting.append(again)
        assert await door.ask()
        assert not await door.ask(), "now it has"

    play(scene)


def test_a_line_is_forgotten_once_it_is_worked_off(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        for _ in range(3):
            waiting = [await door.ask() for _ in range(90)]
            assert all(waiting), "every burst may be as large"
            for ticket in waiting:
                clock.now_s += 0.1
                door.pressure.began(ticket, 100)

    play(scene)


def test_under_overload_a_request_comes_in_only_if_its_first_token_comes_soon(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        for ticket in await door.fill():
            assert not await door.ask(), "the queue has to be worked off first"
            door.pressure.began(ticket, 100)
        first = await door.ask()
        assert first
        assert not await door.ask(), "0.1 s for the one before it, 0.1 for its own, three steps"
        assert await door.ask(150), "of a longer prompt less is expected"
        door.pressure.began(first, 100)
        # Steps are long because of those that run: two plans before it, and its own.
        door.tell(step_s=0.05)
        door.pressure._own_ahead = 0
        assert not await door.ask()
        door.tell(step_s=0.03)
        assert await door.ask()

    play(scene)


def test_short_prompts_come_in_one_at_a_time_while_steps_are_not_much_longer_for_it(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        for ticket in await door.fill():
            door.pressure.began(ticket, 100)
        door.tell(step_s=0.02)
        ticket = await door.ask(1)
        assert ticket
        assert not await door.ask(1)
        door.pressure.began(ticket, 1)
        door.tell(step_s=0.021)
        assert not await door.ask(1)

    play(scene)


def test_others_requests_and_lacking_slots_make_one_wait_too(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        door.tell(prompts_ahead={"own": 10**6, "other": 9_900})
        assert await door.ask()
        door.tell(executors=1, prompts_ahead={"other": 10_000})
        assert not await door.ask()
        door = Door()
        door.tell(executors=4, prompts_ahead={"other": 39_000})
        assert await door.ask(), "four work at it"
        door.tell(prompts_ahead={}, slot_wait_s=10.5)
        assert not await door.ask()

    play(scene)


def test_overload_is_over_when_most_are_let_in_again(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        for ticket in await door.fill():
            door.pressure.began(ticket, 100)
        # Ten come for each that is let in.
        for _ in range(40):
            clock.now_s += 0.5
            ticket = await door.ask()
            assert ticket
            for _ in range(9):
                assert not await door.ask()
            assert door.retry_s <= MOST_SPREAD_S
            door.pressure.began(ticket, 100)
        assert door.retry_s == pytest.approx(10, abs=1), "who comes back is told to come as seldom as one is let in"
        # Now as many come as can be served, and overload goes on for a while.
        for _ in range(100):
            clock.now_s += 0.5
            ticket = await door.ask()
            door.pressure.began(ticket, 100)
        assert [bool(await door.ask()) for _ in range(20)] == [True] * 20
        assert clock.now_s > 1000 + CALM_S

    play(scene)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_queue_wait_s": 0.0},
        # Nothing is known yet.
        {"step_s": 0.0, "prompt_token_s": 0.0},
    ],
)
def test_no_bound_on_time(clock: Clock, limits: dict[str, float]) -> None:
    async def scene(door: Door) -> None:
        door.tell(**limits)
        assert all([await door.ask() for _ in range(300)])

    play(scene)


def test_without_a_ratio_the_queue_stays_as_long_as_it_may(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        door.tell(max_ttft_ratio=0.0)
        tickets = await door.fill()
        door.pressure.began(tickets[0], 100)
        assert await door.ask()
        assert not await door.ask()

    play(scene)


def test_what_will_be_refused_is_refused_before_it_is_tokenised(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        await door.pressure.look_ahead(4000, 0)
        tickets = await door.fill()
        for chars, ids in ((400, 0), (0, 100)):
            with pytest.raises(ApiError, match="overloaded"):
                await door.pressure.look_ahead(chars, ids)
        for ticket in tickets:
            door.pressure.began(ticket, 100)
        await door.pressure.look_ahead(400, 0)
        assert await door.ask()
        with pytest.raises(ApiError, match="overloaded"):
            await door.pressure.look_ahead(400, 0)
        await door.pressure.look_ahead(600, 0)

    play(scene)


def test_what_a_first_token_takes_beyond_steps_counts_for_both_sides(clock: Clock) -> None:
    async def scene(door: Door) -> None:
        for _ in range(20):
            ticket = await door.ask()
            clock.now_s += 0.15
            door.pressure.began(ticket, 100)
            door.pressure.give_back(ticket)
        assert door.pressure._overhead_s == pytest.approx(0.04)
        for ticket in await door.fill():
            door.pressure.began(ticket, 100)
        assert await door.ask(60)
        assert await door.ask(), "0.06 s for the one before, 0.1, three steps, 0.04 are within twice 0.15"
        assert not await door.ask()

    play(scene)

"""Lasting overload: bursts are let in, and once they are too much only those whose first token comes soon."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from octavo_gateway import outlook as outlook_module
from octavo_gateway import pressure as pressure_module
from octavo_gateway.errors import ApiError, unavailable
from octavo_gateway.line import MOST_WORK_S, OVERLOAD, SPAN_S, Line, Verdict
from octavo_gateway.pressure import CALM_S, DOOR_LOOK_S, LASTING, MOST_SPREAD_S, Pressure
from octavo_shared.records import ModelLimits, SamplingParams

TICK_S = 0.01

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
        if not self.limits.ready:
            raise unavailable("No executor is ready.")
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
    for module in (pressure_module, outlook_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


# What becomes of a request that is neither let in nor refused yet.
HELD = -1


class Gate:
    """A gateway's pressure, and those that came."""

    def __init__(self, log: str = "own", watch: Watch | None = None) -> None:
        self.watch = watch or Watch()
        self.pressure = Pressure(self.watch, Counter("refused", "", registry=CollectorRegistry()), log)  # type: ignore[arg-type]
        self.held: list[asyncio.Task[int]] = []
        self.retry_s: list[int] = []

    def tell(self, **limits: Any) -> None:
        self.watch.limits = replace(self.watch.limits, **limits)

    async def come(self, tokens: int = 100) -> int:
        """A ticket; 0 = refused."""
        try:
            return await self.pressure.take_on([[1] * tokens], [SamplingParams(max_tokens=4)], 1, 4 * tokens)
        except ApiError as error:
            self.retry_s.append(int(error.headers.get("Retry-After", 0)))
            return 0

    async def ask(self, tokens: int = 100) -> int:
        """A ticket; 0 = refused, HELD = held at the door."""
        task = asyncio.create_task(self.come(tokens))
        await settle()
        if task.done():
            return task.result()
        self.held.append(task)
        return HELD

    async def look(self) -> list[int]:
        """What became of those that were held and are not any more."""
        self.pressure._look()
        await settle()
        done = [task for task in self.held if task.done()]
        self.held = [task for task in self.held if not task.done()]
        return [task.result() for task in done]

    async def look_at_last(self) -> list[int]:
        """The same, of those that have not gone away."""
        self.pressure._look()
        await settle()
        return [task.result() for task in self.held if task.done() and not task.cancelled()]

    def began(self, ticket: int, tokens: int = 100) -> None:
        self.pressure.began(ticket, tokens, 0)

    async def fill(self, clock: Clock) -> list[int]:
        """A burst that ends in overload."""
        tickets = [await self.ask() for _ in range(100)]
        assert 0 not in tickets, "ten seconds of work come at once"
        clock.now_s += 2 * SPAN_S
        tickets = [ticket for ticket in tickets if ticket != HELD] + await self.look()
        assert len(tickets) == 100
        assert 0 not in tickets, "and all are let in"
        assert await self.ask() > 0
        assert not await self.ask()
        return [*tickets, max(tickets) + 1]


async def settle() -> None:
    """Let all tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def play(scene: Callable[[Gate], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Gate())

    asyncio.run(main())


@dataclass
class Visit:
    """What became of one that came: seconds until it was let in (None = refused) and to its first token, or to its refusal."""

    came_s: float
    tokens: int
    let_in_s: float | None = None
    took_s: float = 0.0


async def simulate(clock: Clock, arrivals: Sequence[tuple[float, int]], *gates: Gate) -> list[Visit]:
    """Requests come (seconds, tokens) to the gateways in turn; one executor serves prompts in order, TOKEN_S a token."""
    start_s = clock.now_s
    visits = [Visit(at_s, tokens) for at_s, tokens in arrivals]
    queue: list[tuple[Gate, int, Visit]] = []

    async def visit(gate: Gate, one: Visit) -> None:
        ticket = await gate.come(one.tokens)
        one.took_s = clock.now_s - start_s - one.came_s
        if ticket:
            one.let_in_s = one.took_s
            queue.append((gate, ticket, one))

    tasks: list[asyncio.Task[None]] = []
    done_s = told_s = 0.0
    served: tuple[Gate, int, Visit] | None = None
    while len(tasks) < len(visits) or queue or served or not all(task.done() for task in tasks):
        now_s = clock.now_s - start_s
        while len(tasks) < len(visits) and visits[len(tasks)].came_s <= now_s:
            tasks.append(asyncio.create_task(visit(gates[len(tasks) % len(gates)], visits[len(tasks)])))
            await settle()
        if served and now_s >= done_s:
            gate, ticket, one = served
            one.took_s = now_s - one.came_s
            gate.began(ticket, one.tokens)
            gate.pressure.give_back(ticket)
            await settle()
            served = None
        if queue and not served:
            served = queue.pop(0)
            done_s = max(done_s, now_s - TICK_S) + served[2].tokens * LIMITS.prompt_token_s
        if now_s >= told_s:
            told_s = now_s + 0.25
            ahead = {gate.pressure._outlook._log: gate.pressure._outlook._own_ahead for gate in gates}
            for gate in gates:
                gate.tell(prompts_ahead={log: tokens for log, tokens in ahead.items() if tokens})
        for gate in gates:
            gate.pressure._look()
        await settle()
        clock.now_s += TICK_S
    return visits


def at_random(seed: int, rate: float, seconds: float, tokens: int = 100) -> list[tuple[float, int]]:
    """Arrivals, ``rate`` a second."""
    rng = random.Random(seed)
    arrivals, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        arrivals.append((at_s, tokens))
        at_s += rng.expovariate(rate)
    return arrivals


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("gateways", [1, 2, 6])
def test_from_the_first_second_of_overload_who_is_let_in_has_its_first_token_soon(
    clock: Clock, seed: int, gateways: int
) -> None:
    async def main() -> None:
        watch = Watch()
        gates = [Gate(str(number), watch) for number in range(gateways)]
        # Ten a second can be served.
        visits = await simulate(clock, at_random(seed, 100.0, 20.0), *gates)
        first = [one.took_s for one in visits if one.let_in_s is not None]
        refused = [one.took_s for one in visits if one.let_in_s is None]
        # Gateways hear of each other four times a second, and each may let somebody in meanwhile.
        soon_s = 0.22 + 2 * TICK_S + 0.25 * (gateways - 1)
        assert max(first) <= soon_s
        assert max(refused) <= 2 * SPAN_S + DOOR_LOOK_S + TICK_S
        assert sorted(refused)[len(refused) // 2] == pytest.approx(0.0, abs=TICK_S), "once it is known, at once"
        assert len(first) >= 0.75 * 200

    asyncio.run(main())


@pytest.mark.parametrize("lasting_s", [0.0, 0.7, 1.4])
def test_a_burst_is_let_in_and_worked_off(clock: Clock, lasting_s: float) -> None:
    async def scene(gate: Gate) -> None:
        visits = await simulate(clock, [(lasting_s * number / 80, 100) for number in range(80)], gate)
        assert all(one.let_in_s is not None and one.let_in_s <= 2 * SPAN_S + DOOR_LOOK_S for one in visits)
        assert max(one.took_s for one in visits) <= 8.5, "the executor had something to do all the time"
        assert not gate.pressure._door
        # A line is forgotten once it is worked off: the next burst may be as large.
        visits = await simulate(clock, [(0.0, 100)] * 80, gate)
        assert all(one.let_in_s is not None for one in visits)

    play(scene)


@pytest.mark.parametrize("seed", [1, 2])
def test_as_many_as_can_be_served_are_let_in(clock: Clock, seed: int) -> None:
    async def scene(gate: Gate) -> None:
        visits = await simulate(clock, at_random(seed, 9.0, 120.0), gate)
        assert all(one.let_in_s is not None for one in visits)

    play(scene)


def test_long_prompts_among_short_ones_are_no_overload(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        # Two of three seconds each come beside five short ones a second.
        arrivals = sorted([*at_random(1, 5.0, 30.0, 10), (10.0, 3000), (11.6, 3000)])
        visits = await simulate(clock, arrivals, gate)
        assert all(one.let_in_s is not None for one in visits)

    play(scene)


def test_a_burst_is_let_in_until_it_would_wait_too_long(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        tickets = await gate.fill(clock)
        for ticket in tickets:
            gate.began(ticket)
            gate.pressure.give_back(ticket)
        pressure = gate.pressure
        assert (pressure._outlook._own_ahead, pressure._own_tokens, pressure._outlook._taken) == (0, 0, {})

    play(scene)


def test_what_does_not_fit_into_a_burst_is_refused_and_the_burst_is_let_in(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        came = [await gate.ask() for _ in range(110)]
        assert came.count(0) == 9
        assert came[-9:] == [0] * 9, "a hundred and one are ten seconds of work before the last one"
        assert gate.retry_s == [1] * 9
        clock.now_s += 2 * SPAN_S
        assert len(await gate.look()) == came.count(HELD)

    play(scene)


@pytest.mark.parametrize("gap_s", [0.06, 0.07, 0.09])
def test_a_line_that_grows_on_is_overload(clock: Clock, gap_s: float) -> None:
    async def scene(gate: Gate) -> None:
        # Ten a second can be served, and a few more come.
        visits = await simulate(clock, [(gap_s * number, 100) for number in range(1500)], gate)
        first_refused = next(one for one in visits if one.let_in_s is None)
        before = [one for one in visits if one.came_s < first_refused.came_s]
        assert before[-1].took_s == pytest.approx(LASTING * 10.0, abs=0.5)
        began_s = first_refused.came_s
        after = [one for one in visits if began_s + LASTING * 10.0 < one.came_s < began_s + CALM_S]
        assert max(one.took_s for one in after if one.let_in_s is not None) <= 0.22 + 2 * TICK_S

    play(scene)


def test_clients_of_a_burst_that_come_again_are_let_in_again(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        tickets = [await gate.ask() for _ in range(80)]
        clock.now_s += 2 * SPAN_S
        waiting = sorted([ticket for ticket in tickets if ticket != HELD] + await gate.look())
        assert len(waiting) == 80, "eight seconds of work at once"
        for _ in range(500):
            clock.now_s += 0.1
            gate.began(waiting.pop(0))
            again = await gate.ask()
            assert again > 0, "the line does not grow"
            waiting.append(again)
        assert await gate.ask() > 0
        assert not await gate.ask(), "now it has"

    play(scene)


def test_who_came_last_goes_in_first_when_it_looks_like_overload(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        first, *held = [await gate.ask() for _ in range(4)]
        assert held == [HELD] * 3
        assert not await gate.look()
        tasks = list(gate.held)
        gate.began(first)
        await settle()
        assert [task.done() for task in tasks] == [True, False, False], "three tenths of a second of work are not much"
        for _ in range(5):
            assert await gate.ask() == HELD
        tasks = list(gate.held)
        gate.began(tasks[0].result())
        await settle()
        assert [task.done() for task in tasks] == [True, *[False] * 6, True]
        # It does not look like it any more.
        clock.now_s += 0.9
        gate.began(tasks[-1].result())
        await settle()
        assert [task.done() for task in tasks] == [True, True, *[False] * 5, True]
        clock.now_s += 2 * SPAN_S
        assert len(await gate.look()) == 8

    play(scene)


def test_who_is_sent_away_from_the_door_is_told_to_come_back_in_turn(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for _ in range(2):
            for _ in range(45):
                assert await gate.ask()
            clock.now_s += SPAN_S
        assert await gate.look() == [0] * 89
        assert gate.retry_s == sorted(gate.retry_s, reverse=True), "the last one hears of it first"
        assert (gate.retry_s[-1], gate.retry_s[0]) == (1, 9)
        assert (gate.pressure._door.work, gate.pressure._door.prompt_tokens) == (0, 0)
        assert gate.pressure._refusals._value.get() == 89

    play(scene)


def test_who_goes_away_from_the_door_leaves_nothing(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        tickets = [await gate.ask() for _ in range(6)]
        gone, at_once, *others = gate.held
        gone.cancel()
        await settle()
        assert gone.cancelled()
        assert gate.pressure._door.prompt_tokens == 400
        # One is let in and goes away before it knows.
        clock.now_s += 2 * SPAN_S
        gate.pressure._look()
        at_once.cancel()
        await settle()
        assert at_once.cancelled()
        for ticket in [tickets[0], *(task.result() for task in others)]:
            gate.pressure.give_back(ticket)
        pressure = gate.pressure
        assert (pressure._outlook._own_ahead, pressure._own_tokens, len(pressure._door)) == (0, 0, 0)
        assert (pressure._door.work, pressure._door.prompt_tokens) == (0, 0)

    play(scene)


def test_many_who_go_away_at_once_while_the_door_is_opened_leave_nothing(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        gate.tell(max_queue_wait_s=1e5)
        first, *_ = [await gate.ask() for _ in range(1500)]
        for task in gate.held[:-1]:
            task.cancel()
        # Before the tasks hear of it.
        clock.now_s += 2 * SPAN_S
        *_, last = await gate.look_at_last()
        gate.pressure.give_back(first)
        gate.pressure.give_back(last)
        pressure = gate.pressure
        assert (pressure._outlook._own_ahead, pressure._own_tokens, len(pressure._door)) == (0, 0, 0)
        assert (pressure._door.work, pressure._door.prompt_tokens) == (0, 0)

    play(scene)


def test_who_is_held_only_after_a_second_look_is_in_a_line_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(gate: Gate) -> None:
        # Work is queued, none of which are prompts: a newcomer would not wait. Asked again, the scheduler says otherwise.
        gate.tell(queued_tokens=1000, max_queued_tokens=1000)

        async def refresh(at_most_s: float = 0.0) -> None:
            gate.tell(queued_tokens=0, prompts_ahead={"other": 5000})

        monkeypatch.setattr(gate.watch, "refresh", refresh)
        assert await gate.ask() == HELD
        clock.now_s += 2 * SPAN_S
        (ticket,) = await gate.look()
        assert ticket > 0, "it is known by now that it is alone"

    play(scene)


def test_who_is_held_is_not_forgotten_when_looking_fails(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        assert [await gate.ask() for _ in range(3)].count(HELD) == 2
        gate.tell(prompt_token_s="soon")
        async with asyncio.timeout(10):
            assert await asyncio.gather(*gate.held) == [0, 0]
        gate.tell(prompt_token_s=0.001)
        assert await gate.ask() == HELD
        assert gate.pressure._doorman is not None

    play(scene)


def test_who_is_held_is_let_in_at_its_deadline(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        assert [await gate.ask() for _ in range(3)].count(HELD) == 2
        ask = gate.pressure.take_on(
            [[1] * 100], [SamplingParams(max_tokens=4)], 1, 400, int(1e6 * time.time()) + 100_000
        )
        async with asyncio.timeout(10):
            ticket = await ask
        assert ticket > 0
        pressure = gate.pressure
        assert (len(pressure._door), pressure._door.prompt_tokens, len(pressure._outlook._taken)) == (2, 200, 2)

    play(scene)


def test_who_is_at_the_door_when_nothing_can_be_served_any_more_is_told_so(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for _ in range(5):
            await gate.ask()
        gate.tell(ready=False)
        assert await gate.look() == [0] * 4
        assert not gate.pressure._door

    play(scene)


def test_those_at_the_door_count_as_queued_work(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        gate.tell(max_queued_tokens=1050, queued_tokens=1)
        came = [await gate.ask() for _ in range(15)]
        assert (came.count(HELD), came.count(0)) == (9, 5)

    play(scene)


def test_prompts_that_a_cache_has_are_not_waited_for(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for _ in range(400):
            ticket = await gate.ask(1000)
            gate.pressure.began(ticket, 1000, 990)
            gate.pressure.give_back(ticket)
        assert gate.pressure._outlook.alone_s(LIMITS, 1000) == pytest.approx(0.02, rel=0.05)
        # Ten tokens each, and those ahead take less than three steps.
        assert min([await gate.ask(1000) for _ in range(3)]) > 0
        assert await gate.ask(1000) == HELD

    play(scene)


def test_gateways_whose_prompts_hardly_ever_wait_share_nothing(clock: Clock) -> None:
    """One of six has nearly all the load: with what comes to it there is as much as with one gateway."""
    outlook = outlook_module.Outlook("own")
    others = [f"other {number}" for number in range(5)]

    def hear(*waiting: str) -> float:
        return outlook.num_gateways(replace(LIMITS, prompts_ahead=dict.fromkeys(waiting, 10)))

    assert hear() == 1.0
    assert hear(*others) == 6.0, "it has just begun"
    for number in range(100):
        shared = hear("own", *(others[number // 20 :][:1] if number % 20 == 0 else []))
    assert 1.0 < shared < 1.6
    same = replace(LIMITS, prompts_ahead={"other 1": 10})
    assert outlook.num_gateways(same) == outlook.num_gateways(same), "the same word counts once"
    for _ in range(100):
        shared = hear("own", *others[:3])
    assert shared == pytest.approx(4.0, abs=0.5)
    for _ in range(300):
        shared = hear("own", *others[3:])
    assert shared == pytest.approx(3.0, abs=0.5), "those before are forgotten"


def test_no_cache_has_more_than_all_of_a_prompt(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for _ in range(10):
            ticket = await gate.ask(1000)
            gate.pressure.began(ticket, 1000, 1100)
            gate.pressure.give_back(ticket)
        assert gate.pressure._outlook.prompt_s(LIMITS, 1000) > 0

    play(scene)


def test_a_line_is_known_after_two_spans() -> None:
    line = Line()
    assert (bool(line), line.look(5.0)) == (False, Verdict.UNKNOWN)
    needed = round(OVERLOAD * SPAN_S / MOST_WORK_S)
    for at_s in (10.0, 10.0 + SPAN_S):
        for _ in range(needed):
            # However long it is, one request is not many.
            line.came(at_s, 100.0)
            assert line.look(at_s) is Verdict.UNKNOWN
    assert line.look(10.0 + 1.99 * SPAN_S) is Verdict.UNKNOWN
    assert line.look(10.0 + 2 * SPAN_S) is Verdict.OVERLOAD
    # The same, but one too few in the second span; then many come for two spans.
    line = Line()
    for span, count in enumerate((needed, needed - 1, needed, needed)):
        for _ in range(count):
            line.came(10.0 + span * SPAN_S, 100.0)
    assert line.look(10.0 + 3.99 * SPAN_S) is Verdict.BURST
    assert line.look(10.0 + 4 * SPAN_S) is Verdict.OVERLOAD
    # Many come in two spans, but not on end.
    line = Line()
    for at_s in (10.0, 1000.0, 1000.0 + 2 * SPAN_S):
        for _ in range(needed):
            line.came(at_s, 100.0)
    assert line.look(2000.0) is Verdict.BURST


def test_under_overload_a_request_comes_in_only_if_its_first_token_comes_soon(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for ticket in await gate.fill(clock):
            assert not await gate.ask(), "the queue has to be worked off first"
            gate.began(ticket)
        first = await gate.ask()
        assert first
        assert not await gate.ask(), "0.1 s for the one before it, 0.1 for its own, three steps"
        assert await gate.ask(150), "of a longer prompt less is expected"
        gate.began(first)
        # Steps are long because of those that run: two plans before it, and its own.
        gate.tell(step_s=0.05)
        gate.pressure._outlook._own_ahead = 0
        assert not await gate.ask()
        gate.tell(step_s=0.03)
        assert await gate.ask()

    play(scene)


def test_short_prompts_come_in_one_at_a_time_while_steps_are_not_much_longer_for_it(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for ticket in await gate.fill(clock):
            gate.began(ticket)
        gate.tell(step_s=0.02)
        ticket = await gate.ask(1)
        assert ticket
        assert not await gate.ask(1)
        gate.began(ticket, 1)
        gate.tell(step_s=0.021)
        assert not await gate.ask(1)

    play(scene)


def test_others_requests_and_lacking_slots_make_one_wait_too(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        gate.tell(prompts_ahead={"own": 10**6, "other": 9_900})
        assert await gate.ask()
        gate.tell(executors=1, prompts_ahead={"other": 10_000})
        assert not await gate.ask()
        gate = Gate()
        gate.tell(executors=4, prompts_ahead={"other": 39_000})
        assert await gate.ask(), "four work at it"
        gate.tell(prompts_ahead={}, slot_wait_s=10.5)
        assert not await gate.ask()
        gate = Gate()
        gate.tell(prompts_ahead={"other": 6_000}, slot_wait_s=6.0)
        assert await gate.ask(), "their prompts are computed as they get their slots"

    play(scene)


def test_overload_is_over_when_most_are_let_in_again(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for ticket in await gate.fill(clock):
            gate.began(ticket)
        # Ten come for each that is let in.
        for _ in range(40):
            clock.now_s += 0.5
            ticket = await gate.ask()
            assert ticket
            for _ in range(9):
                assert not await gate.ask()
            assert gate.retry_s[-1] <= MOST_SPREAD_S
            gate.began(ticket)
        assert gate.retry_s[-1] == pytest.approx(10, abs=1), "who comes back is told to come as seldom as one is let in"
        # Now as many come as can be served, and overload goes on for a while.
        for _ in range(100):
            clock.now_s += 0.5
            ticket = await gate.ask()
            gate.began(ticket)
        assert [bool(await gate.ask()) for _ in range(20)] == [True] * 20
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
    async def scene(gate: Gate) -> None:
        gate.tell(**limits)
        assert all([await gate.ask() for _ in range(300)])

    play(scene)


def test_without_a_ratio_the_queue_stays_as_long_as_it_may(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        gate.tell(max_ttft_ratio=0.0)
        tickets = await gate.fill(clock)
        gate.began(tickets[0])
        assert await gate.ask()
        assert not await gate.ask()

    play(scene)


def test_what_will_be_refused_is_refused_before_it_is_tokenised(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        await gate.pressure.look_ahead(4000, 0)
        tickets = await gate.fill(clock)
        for chars, ids in ((400, 0), (0, 100)):
            with pytest.raises(ApiError, match="overloaded"):
                await gate.pressure.look_ahead(chars, ids)
        for ticket in tickets:
            gate.began(ticket)
        await gate.pressure.look_ahead(400, 0)
        assert await gate.ask()
        with pytest.raises(ApiError, match="overloaded"):
            await gate.pressure.look_ahead(400, 0)
        await gate.pressure.look_ahead(600, 0)

    play(scene)


def test_what_a_first_token_takes_beyond_steps_counts_for_both_sides(clock: Clock) -> None:
    async def scene(gate: Gate) -> None:
        for _ in range(20):
            ticket = await gate.ask()
            clock.now_s += 0.15
            gate.began(ticket)
            gate.pressure.give_back(ticket)
        assert gate.pressure._outlook._overhead_s == pytest.approx(0.04)
        for ticket in await gate.fill(clock):
            gate.began(ticket)
        assert await gate.ask(60)
        assert await gate.ask(), "0.06 s for the one before, 0.1, three steps, 0.04 are within twice 0.15"
        assert not await gate.ask()

    play(scene)

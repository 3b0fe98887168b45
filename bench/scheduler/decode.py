"""Steady decode, and the admission of a prompt that is cached: CPU seconds on one core."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median, quantiles

import numpy as np
from core import BLOCK_SIZE, add, answer, make_core, prompt_of, record

from octavo_shared.plan import StepPlan

LONG_PROMPT = 8192
WARM_UP = 48
# Steps measured of one case before the next one has its turn.
TURN = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per step: of ``schedule`` and ``commit`` together, and of ``tidy``, which runs once the plan is sent."""

    step: float
    p90: float
    tidy: float


def steady_decode(running: int, waiting: int, steps: int) -> Iterator[tuple[float, float]]:
    """(schedule + commit, tidy) of each of ``steps`` steps in which all of ``running`` decode, one plan ahead."""
    length = 64 + steps + WARM_UP + 64
    core = make_core(running, length, running * (length // BLOCK_SIZE + 2))
    rng = np.random.default_rng(0)
    for serial in range(running):
        # Different lengths, so that block boundaries are crossed evenly.
        add(core, record(serial, prompt_of(rng, 32 + serial % BLOCK_SIZE), steps + WARM_UP + 16))
    waiting_prompt = prompt_of(rng, 32)
    for serial in range(running, running + waiting):
        add(core, record(serial, waiting_prompt, 16))
    sent: deque[StepPlan] = deque()
    for step in range(steps + WARM_UP):
        result = answer(sent.popleft()) if len(sent) > 1 else None
        begun = time.thread_time()
        if result is not None:
            core.commit(result)
        plan = core.schedule()
        planned = time.thread_time()
        core.tidy()
        done = time.thread_time()
        assert plan is not None
        sent.append(plan)
        core.drain_events()
        if step >= WARM_UP:
            yield planned - begun, done - planned
    assert (core.num_running, core.num_waiting) == (running, waiting)


def one_addition() -> float:
    """CPU seconds of what a step is made of: one numpy call on a short array. It tells how fast the machine is right now."""
    left = np.arange(256, dtype=np.int32)
    begun = time.thread_time()
    for _ in range(1000):
        np.add(left, left)
    return (time.thread_time() - begun) / 1000


def in_turns(cases: Sequence[tuple[int, int]], steps: int) -> tuple[dict[tuple[int, int], Cost], float]:
    """The cost for each (running, waiting), and microseconds of an addition: each in turn, so that a busy moment hits all."""
    streams = {case: steady_decode(*case, steps) for case in cases}
    seconds: dict[tuple[int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    additions = []
    for _ in range(0, steps, TURN):
        additions.append(1e6 * one_addition())
        for case, stream in streams.items():
            seconds[case] += islice(stream, TURN)
    costs = {}
    for case, measured in seconds.items():
        step, tidy = ([1e6 * value for value in column] for column in zip(*measured, strict=True))
        costs[case] = Cost(median(step), quantiles(step, n=10)[-1], mean(tidy))
    return costs, median(additions)


def full_hit_admission(repeats: int) -> float:
    """Median microseconds for taking in and admitting a prompt of which everything but the last block is cached."""
    core = make_core(4, LONG_PROMPT + 64, 4 * LONG_PROMPT // BLOCK_SIZE)
    prompt = prompt_of(np.random.default_rng(0), LONG_PROMPT)
    micros = []
    for serial in range(repeats + 1):
        request = record(serial, prompt, 4)
        begun = time.thread_time()
        add(core, request)
        plan = core.schedule()
        micros.append(1e6 * (time.thread_time() - begun))
        assert plan is not None
        assert plan.admit[0].num_computed == (LONG_PROMPT - BLOCK_SIZE if serial else 0)
        core.commit(answer(plan))
        core.tidy()
        core.abort(core.sequences[0])
    return median(micros[1:])

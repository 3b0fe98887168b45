"""What the scheduler's core costs: CPU microseconds per step, without executor, wire or log.

    python bench/scheduler_core.py [--steps 400] [--profile]

Steady decode (every running sequence gets one token per step, one plan ahead) at 256 and 1,024 running sequences, with
nobody and with 100,000 waiting, and the admission of an 8,192-token prompt whose prefix is cached. The ratios are the
claims: a step should cost about as much per row at any size, and those who wait should cost nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence as Choice
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan, StepResult
from octavo_shared.records import RequestRecord, SamplingParams

BLOCK_SIZE = 16
LONG_PROMPT = 8192
WARM_UP = 48
# Steps measured of one case before the next one has its turn.
TURN = 20


def make_scheduler(running: int, max_model_len: int, num_blocks: int) -> Scheduler:
    return Scheduler(
        CoreConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=max(8192, running),
            max_model_len=max_model_len,
        )
    )


def add(scheduler: Scheduler, serial: int, prompt: np.ndarray, max_tokens: int) -> None:
    record = RequestRecord(RequestId("bench", serial), 0, prompt, SamplingParams(max_tokens=max_tokens))
    scheduler.add([Choice(record, 0, 1, scheduler.config.max_model_len)])


def answer(plan: StepPlan) -> StepResult:
    """One token for every sample, none of which ends anything."""
    samples = len(plan.sample_slots)
    tokens = np.arange(samples, dtype=np.int32) + plan.step
    ends = np.zeros(samples, np.uint8)
    return StepResult(plan.term, plan.epoch, plan.step, np.ones(samples, np.int32), tokens, ends)


def steady_decode(running: int, waiting: int, steps: int) -> Iterator[float]:
    """CPU seconds of schedule + commit for each of ``steps`` steps in which all of ``running`` decode."""
    length = 64 + steps + WARM_UP + 64
    scheduler = make_scheduler(running, length, running * (length // BLOCK_SIZE + 2))
    rng = np.random.default_rng(0)
    for serial in range(running):
        # Different lengths, so that block boundaries are crossed evenly.
        add(scheduler, serial, rng.integers(0, 30000, 32 + serial % BLOCK_SIZE, dtype=np.int32), steps + WARM_UP + 16)
    waiting_prompt = rng.integers(0, 30000, 32, dtype=np.int32)
    for serial in range(running, running + waiting):
        add(scheduler, serial, waiting_prompt, 16)
    sent: deque[StepPlan] = deque()
    for step in range(steps + WARM_UP):
        result = answer(sent.popleft()) if len(sent) > 1 else None
        start = time.thread_time()
        if result is not None:
            scheduler.commit(result)
        plan = scheduler.schedule()
        seconds = time.thread_time() - start
        assert plan is not None
        sent.append(plan)
        scheduler.drain_events()
        if step >= WARM_UP:
            yield seconds
    assert scheduler.num_running == running
    assert scheduler.num_waiting == waiting


def in_turns(cases: Sequence[tuple[int, int]], steps: int) -> dict[tuple[int, int], list[float]]:
    """Microseconds per step of each (running, waiting), a few steps of each in turn, so that a busy moment hits all."""
    streams = {case: steady_decode(*case, steps) for case in cases}
    micros: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(0, steps, TURN):
        for case, stream in streams.items():
            micros[case] += [1e6 * value for value in islice(stream, TURN)]
    return micros


def full_hit_admission(repeats: int) -> list[float]:
    """CPU seconds of the ``schedule`` that admits a prompt of which everything but the last block is cached."""
    scheduler = make_scheduler(4, LONG_PROMPT + 64, 4 * LONG_PROMPT // BLOCK_SIZE)
    prompt = np.random.default_rng(0).integers(0, 30000, LONG_PROMPT, dtype=np.int32)
    seconds = []
    for serial in range(repeats + 1):
        add(scheduler, serial, prompt, 4)
        start = time.thread_time()
        plan = scheduler.schedule()
        seconds.append(time.thread_time() - start)
        assert plan is not None
        assert plan.admit[0].num_computed == (LONG_PROMPT - BLOCK_SIZE if serial else 0)
        scheduler.commit(answer(plan))
        scheduler.abort(scheduler.sequences[0])
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    parser.add_argument("--profile", action="store_true", help="show where a step at 1,024 running spends its time")
    arguments = parser.parse_args()
    if arguments.profile:
        profile = cProfile.Profile()
        decode = steady_decode(1024, 0, arguments.steps)
        next(decode)
        profile.runcall(lambda: sum(decode))
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    medians: dict[tuple[int, int], float] = {}
    print(f"{'running':>8} {'waiting':>8} {'median us':>10} {'p90 us':>8} {'us/row':>7}")
    cases = [(running, waiting) for running in (256, 1024) for waiting in (0, 100_000)]
    for (running, waiting), micros in in_turns(cases, arguments.steps).items():
        median = medians[running, waiting] = statistics.median(micros)
        p90 = statistics.quantiles(micros, n=10)[-1]
        print(f"{running:>8} {waiting:>8} {median:>10.0f} {p90:>8.0f} {median / running:>7.2f}")
    for running in (256, 1024):
        print(f"100,000 waiting costs x{medians[running, 100_000] / medians[running, 0]:.2f} at {running} running")
    print(f"1,024 running cost x{medians[1024, 0] / medians[256, 0]:.2f} of 256 running")
    admission = statistics.median(full_hit_admission(50))
    print(f"admission of {LONG_PROMPT:,} tokens with a full prefix hit: {1e6 * admission:.0f} us")


if __name__ == "__main__":
    main()

"""What sharing costs the core: forks with their copies on write, and the steps of beam searches."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from core import VOCABULARY, add, answer, make_core, prompt_of, record

from octavo_scheduler.core.beam_groups import BeamGroup
from octavo_scheduler.core.beams import BeamRules, BeamSearch
from octavo_scheduler.core.events import BeamStep
from octavo_scheduler.core.scheduler import Scheduler
from octavo_shared.ids import Attempt
from octavo_shared.plan import StepPlan, StepResult

PROMPT = 500  # ends within a block
CHOICES = 8
WIDTH = 4
SEARCHES = 16


def forks_per_second(requests: int) -> float:
    """Forks of an eight-choice request with a long prompt: sharing all blocks, then copying the last one to write on.

    Counted are the step that forks and the one that copies, less what two steps of a single choice cost.
    """
    seconds = {n: min(_fork(n, requests) for _ in range(3)) for n in (1, CHOICES)}
    return requests * (CHOICES - 1) / max(seconds[CHOICES] - seconds[1], 1e-9)


def _fork(n: int, requests: int) -> float:
    core = make_core(CHOICES, 1024, 1024)
    rng = np.random.default_rng(0)
    seconds = 0.0
    for serial in range(requests):
        choices = add(core, record(serial, prompt_of(rng, PROMPT), 8, n, temperature=1.0, seed=1))
        copies = 0
        for _ in range(2):
            begun = time.thread_time()
            plan = core.schedule()
            assert plan is not None
            result = answer(plan)
            core.commit(result)
            seconds += time.thread_time() - begun
            copies += len(plan.copies)
            core.tidy()
        # The last owner writes in place.
        assert copies == n - 1
        for choice in choices:
            core.abort(choice)
        core.drain_events()
        if (plan := core.schedule()) is not None:
            core.commit(answer(plan))
    return seconds


def beam_steps_per_second(steps: int) -> float:
    """Steps of single searches of width four, sixteen at once: plan, candidates, decision, forks and drops."""
    core = make_core(SEARCHES * WIDTH, 2048, 4096)
    rng = np.random.default_rng(0)
    for serial in range(SEARCHES):
        request = record(serial, prompt_of(rng, PROMPT), steps + 64, WIDTH, temperature=0.0, beam_width=WIDTH)
        search = BeamSearch(BeamRules.of(request, (), 2048), serial, Attempt(core.term, 1))
        core.beams.add(BeamGroup.of(request, 1, search, 2048))
    steps_of = _beam_steps(core, rng)
    for _ in range(4):
        next(steps_of)
    seconds = sum(next(steps_of) for _ in range(steps))
    assert core.num_running == SEARCHES * WIDTH
    return steps * SEARCHES / seconds


def _beam_steps(core: Scheduler, rng: np.random.Generator) -> Iterator[float]:
    """CPU seconds of one step of all searches after the other, tidying included: it is what lets forks find blocks."""
    while True:
        begun = time.thread_time()
        plan = core.schedule()
        seconds = time.thread_time() - begun
        assert plan is not None
        result = _candidates(plan, rng)
        begun = time.thread_time()
        core.commit(result)
        core.tidy()
        for event in core.drain_events():
            if isinstance(event, BeamStep):
                core.beams.logged(event.group)
        yield seconds + time.thread_time() - begun


def _candidates(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    samples = len(plan.sample_slots)
    counts = np.full(samples, 2 * WIDTH, np.int32)
    first = rng.integers(0, VOCABULARY, (samples, 1), dtype=np.int32)
    tokens = (first + np.arange(2 * WIDTH, dtype=np.int32)).ravel()
    # Apart by little, so that hypotheses overtake each other all the time.
    scores = -np.sort(rng.random((samples, 2 * WIDTH), np.float32), axis=1).ravel()
    ends = np.zeros(samples, np.uint8)
    return StepResult(plan.term, plan.epoch, plan.step, counts, tokens, ends, scores=scores)

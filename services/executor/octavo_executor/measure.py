"""How long steps take, found out before anyone asks for one: a scheduler can then tell a first step that hangs from a long one.

It also pays for what is done only once: threads are started, memory is touched, weights are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo_executor.runner import Runner
from octavo_executor.warm_up import ROOM_AFTER, begun, rows
from octavo_shared.plan import NO_INTS, MeasuredStep, StepPlan
from octavo_shared.records import Int32Array, SamplingParams

logger = logging.getLogger(__name__)

# Decodes are of so many sequences, and of one.
SEQUENCES = 8
# Prompts are of so many tokens, and of as many times that as take about LONG_PROMPT_S, within bounds.
PROMPT_TOKENS = 16
LONG_PROMPT_S = 0.2
LEAST_TIMES, MOST_TIMES = 2, 16
# The short prompt also comes after so many tokens: attention to what is there already takes its time, in long prompts most of it.
CONTEXT_TOKENS = 2048
# A step is run so often, and its shortest run counts: whatever comes between makes a step longer, never shorter. One that lasts
# so long is run once: little of it comes from between.
RUNS = 2
LONG_STEP_S = 0.05
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)


def measure_steps(runner: Runner, max_tokens: int) -> tuple[MeasuredStep, ...]:
    """Run decodes and prompts of at most ``max_tokens`` tokens a step; () if sequences have no room for it.

    Nothing may be under way; every sequence is forgotten, and what the first pages hold is lost.
    """
    state = runner.state
    room = min(state.max_model_len, state.num_blocks * state.block_size) - ROOM_AFTER
    if min(room, max_tokens) < PROMPT_TOKENS:
        return ()
    since_s = time.perf_counter()
    stage = _Stage(runner)
    # Not timed: what is done for the first time is done here.
    most = min(SEQUENCES, state.num_slots)
    stage.begin(most, 1)
    steps = [stage.decode(sequences) for sequences in dict.fromkeys((most, 1))]
    steps.append(stage.prompt(PROMPT_TOKENS))
    times = min(max(int(LONG_PROMPT_S / steps[-1].seconds), LEAST_TIMES), MOST_TIMES)
    steps.append(stage.prompt(min(times * PROMPT_TOKENS, max_tokens, room)))
    if pages := min(CONTEXT_TOKENS, room - PROMPT_TOKENS) // state.block_size:
        steps.append(stage.prompt(PROMPT_TOKENS, pages))
    runner.reset()
    said = ", ".join(f"{1000 * step.seconds:.1f} ms for {_what(step)}" for step in steps)
    logger.info("steps measured in %.2f s: %s", time.perf_counter() - since_s, said)
    return tuple(steps)


def _what(step: MeasuredStep) -> str:
    if not step.prompt_tokens:
        return f"{step.sequences} decoding"
    return f"a prompt of {step.prompt_tokens}" + (f" after {step.context_tokens}" if step.context_tokens else "")


def _shortest_s(run: Callable[[], float]) -> float:
    """Of some runs, each of which says how long it took (seconds)."""
    shortest_s = run()
    for _ in range(RUNS - 1):
        if shortest_s < LONG_STEP_S:
            shortest_s = min(shortest_s, run())
    return shortest_s


class _Stage:
    """Has a runner to itself: plans one step after the other, and times them."""

    def __init__(self, runner: Runner) -> None:
        runner.reset()
        self._runner, self._state = runner, runner.state
        self._step = 0
        self._slots = NO_INTS
        self._computed = 0

    def begin(self, sequences: int, tokens: int, context_blocks: int = 0) -> float:
        """So many sequences of ``tokens`` each take the place of those before; how long their step took (seconds)."""
        released, self._slots, self._computed = self._slots, np.arange(sequences, dtype=np.int32), tokens
        return self._run({"release": released, **begun(self._state, self._slots, tokens, GREEDY, context_blocks)})

    def decode(self, sequences: int) -> MeasuredStep:
        """A step that draws another token for each of the first ``sequences`` that have begun; no more of them can follow."""
        return MeasuredStep(0, sequences, _shortest_s(lambda: self._decode(self._slots[:sequences])))

    def prompt(self, tokens: int, context_blocks: int = 0) -> MeasuredStep:
        """A step that computes a prompt of so many tokens, after so many pages, and draws the first one after it."""
        seconds = _shortest_s(lambda: self.begin(1, tokens, context_blocks))
        return MeasuredStep(tokens, 1, seconds, context_blocks * self._state.block_size)

    def _decode(self, slots: Int32Array) -> float:
        at, self._computed = self._computed, self._computed + 1
        return self._run(rows(slots, at, 1))

    def _run(self, changes: dict[str, Any]) -> float:
        self._step += 1
        plan = StepPlan(0, 0, self._step, **changes)
        since_s = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - since_s

"""A scheduler's core, requests for it, and an executor that answers at once with made-up tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan, StepResult
from octavo_shared.records import Int32Array, RequestRecord, SamplingParams

BLOCK_SIZE = 16
VOCABULARY = 30_000


def make_core(running: int, max_model_len: int, num_blocks: int, budget: int = 8192) -> Scheduler:
    """A core with room for ``running`` sequences and a budget of ``budget`` tokens a step."""
    return Scheduler(
        CoreConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=max(budget, running),
            max_model_len=max_model_len,
        )
    )


def record(serial: int, prompt: Int32Array, max_tokens: int, n: int = 1, **sampling: Any) -> RequestRecord:
    """A request of the only client there is."""
    return RequestRecord(RequestId("bench", serial), 0, prompt, SamplingParams(max_tokens=max_tokens, **sampling), n=n)


def add(core: Scheduler, request: RequestRecord) -> list[Sequence]:
    """Let a request's choices wait."""
    choices = [Sequence(request, choice, 1, core.config.max_model_len) for choice in range(request.n)]
    core.add(choices)
    return choices


def prompt_of(rng: np.random.Generator, length: int) -> Int32Array:
    """A prompt nobody else has."""
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def answer(plan: StepPlan) -> StepResult:
    """One token for every sample, none of which ends anything."""
    samples = len(plan.sample_slots)
    tokens = np.arange(samples, dtype=np.int32) + plan.step
    ends = np.zeros(samples, np.uint8)
    return StepResult(plan.term, plan.epoch, plan.step, np.ones(samples, np.int32), tokens, ends)

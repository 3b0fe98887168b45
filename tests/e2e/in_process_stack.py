"""Core and runner in one process, with any settings of either: what tests look at the computation alone with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from careless import Careless

from octavo.in_process import InProcess
from octavo_executor.runner import Runner
from octavo_executor.serve import load_model
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.engine import core_config
from octavo_shared.fold import ChoiceFold
from octavo_shared.ids import RequestId
from octavo_shared.plan import ExecutorInfo, StepOutput, StepPlan
from octavo_shared.records import RequestRecord, SamplingParams
from octavo_shared.settings import ExecutorSettings, SchedulerSettings, load_settings

Choices = dict[tuple[int, int], ChoiceFold]


class Watched:
    """A runner that keeps count: blocks in use at each step, and pages copied and moved.

    With ``free_moves`` it reports that restoring pages takes no time to speak of, so that they always are.
    """

    def __init__(self, runner: Runner, core: Scheduler, *, free_moves: bool) -> None:
        self._runner = runner
        self._core = core
        self._free_moves = free_moves
        self.used: list[int] = []
        self.copied = self.saved = self.restored = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        self.used.append(self._core.pool.num_used)
        self.copied += len(plan.copies)
        self.saved += len(plan.copy_out)
        self.restored += len(plan.restores)
        output = self._runner.execute(plan)
        if self._free_moves and len(plan.restores):
            timings = replace(output.result.timings, restore_s=1e-12)
            return replace(output, result=replace(output.result, timings=timings))
        return output


@dataclass
class Model:
    """A model that is loaded once; every ``stack`` begins with an empty cache of ``blocks`` blocks."""

    runner: Runner
    info: ExecutorInfo
    folder: Path

    @classmethod
    def load(cls, folder: Path, **executor: Any) -> Model:
        """Load with these executor settings, on one thread if nothing else is said."""
        settings = load_settings(ExecutorSettings, model=str(folder), **{"num_threads": 1, **executor})
        loaded = load_model(settings, "test")
        return cls(loaded.runner, loaded.info, folder)

    def stack(self, *, free_moves: bool = False, rash: bool = False, **scheduler: Any) -> Stack:
        """Core and runner, with these scheduler settings; nothing is cached.

        ``rash``: the core expects outputs to be short, so that it takes in too much and preempts all the time.
        """
        self.runner.reset()
        settings = load_settings(SchedulerSettings, model=str(self.folder), **scheduler)
        core = Scheduler(core_config(self.info, settings))
        if rash:
            core.forecast = Careless()
        watch = Watched(self.runner, core, free_moves=free_moves)
        return Stack(InProcess(core, watch, check=True), watch)


@dataclass
class Stack:
    """A core that drives a runner, with its integrity checked after every step."""

    process: InProcess
    watch: Watched

    @property
    def core(self) -> Scheduler:
        return self.process.core

    def run(self, records: list[RequestRecord]) -> Choices:
        """Run requests to their ends; nothing is held afterwards."""
        choices = self.process.run(records)
        self.core.check_integrity()
        assert self.core.pool.num_used == self.core.host.pool.num_used == 0
        for record in records:
            assert all(choices[record.id.serial, i].end for i in range(record.n))
        return choices


def make_request(serial: int, prompt: np.ndarray, sampling: SamplingParams, **more: Any) -> RequestRecord:
    """A request of the one client there is."""
    return RequestRecord(RequestId("test", serial), 0, prompt.astype(np.int32), sampling, **more)

"""The sections, and how one of them runs in a process of its own."""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stage import Stage

HERE = Path(__file__).parent

Kind = Literal["checks", "times"]


@dataclass(frozen=True, slots=True)
class Section:
    """``module`` holds ``checks(stage)`` or ``run(stage, path)``; checks may be dealt out to ``shards`` processes.

    Checks may run beside each other, what is timed has the device to itself.
    """

    name: str
    module: str
    kind: Kind
    timeout_s: float
    shards: int = 1
    host: bool = False  # the host takes part: there is nothing to compile by itself


# In order of their worth: whatever the time is too short for is at the end.
SECTIONS = (
    Section("attention", "check_attention", "checks", 150.0, 8),
    Section("cache", "check_cache", "checks", 120.0, 2),
    Section("sampling", "check_sampling", "checks", 120.0),
    Section("layers", "check_layers", "checks", 120.0, 2),
    Section("weights", "check_weights", "checks", 120.0),
    Section("decode", "time_decode", "times", 90.0),
    Section("prefill", "time_prefill", "times", 90.0),
    Section("serving", "time_serving", "times", 150.0, host=True),
    Section("step", "time_step", "times", 60.0, host=True),
    Section("serving-large", "time_serving_large", "times", 120.0, host=True),
    Section("reference", "time_reference", "times", 60.0, host=True),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One process of a section."""

    section: Section
    shard: int

    @property
    def name(self) -> str:
        """Of its files."""
        return self.section.name if self.section.shards == 1 else f"{self.section.name}-{self.shard}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended: "passed", "failed" (a case did), "crashed", "too long" or "not run"."""

    job: str
    section: str
    status: str
    seconds: float


def carry_out(section: Section, shard: int, mode: str, architecture: str, folder: Path) -> int:
    """Run one job in this process. 0: all is well, 1: a case failed."""
    from stage import Stage, run_checks

    module = importlib.import_module(section.module)
    path = folder / f"{Job(section, shard).name}.csv"

    def work(stage: Stage) -> int:
        if section.kind == "times":
            return int(module.run(stage, path))
        return run_checks(stage, path, module.checks(stage)[shard :: section.shards])

    return compile_all(work, architecture) if mode == "compile" else work(Stage(mode))  # type: ignore[arg-type]


def compile_all(work: Callable[[Stage], int], architecture: str) -> int:
    """Every launch of ``work`` compiled; 1 if one fails, or wants more shared memory than there is."""
    from stage import Stage

    from octavo_kernels.triton.aot.compile import compiling
    from octavo_kernels.triton.aot.targets import TARGETS

    target = TARGETS[architecture]
    with compiling(target.compiler) as launches:
        failed = work(Stage("compile", target.gpu))
    kernels = Counter((launch.name, launch.warps, launch.stages, launch.shared_bytes) for launch in launches)
    for (name, warps, stages, shared_bytes), count in sorted(kernels.items()):
        too_much = shared_bytes > target.gpu.shared_bytes
        print(
            f"{name} x {count}: {warps} warps, {stages} stages, {shared_bytes} bytes{' TOO MUCH' if too_much else ''}"
        )
        failed |= too_much
    return int(failed)


class Process:
    """A job under way."""

    def __init__(self, job: Job, flags: Sequence[str], folder: Path, limit_s: float) -> None:
        self.job = job
        self.begun = time.monotonic()
        self._limit_s = limit_s
        self._log = (folder / f"{job.name}.log").open("w", encoding="utf-8")
        command = [sys.executable, str(HERE), str(folder), *flags]
        self._process = subprocess.Popen(
            [*command, "--job", f"{job.section.name}:{job.shard}:{job.section.shards}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def outcome(self) -> Outcome | None:
        """None while it runs; past its time it is killed with all it started."""
        status = self._process.poll()
        seconds = time.monotonic() - self.begun
        if status is None and seconds < self._limit_s:
            return None
        late = status is None
        if late:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
        ended = "too long" if late else {0: "passed", 1: "failed"}.get(status or 0, "crashed")
        return Outcome(self.job.name, self.job.section.name, ended, seconds)


class Schedule:
    """Runs jobs: checks side by side, then what is timed one after the other, all before ``deadline`` (monotonic)."""

    def __init__(
        self,
        flags: Sequence[str],
        folder: Path,
        deadline: float,
        workers: int,
        tell: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """``tell`` hears of everything that ended, each time something does."""
        self._flags, self._folder, self._deadline, self._workers = flags, folder, deadline, workers
        self._tell = tell
        self.outcomes: list[Outcome] = []

    def run(self, sections: Sequence[Section]) -> list[Outcome]:
        """All of them, in the order in which they ended."""
        for kind, workers in (("checks", self._workers), ("times", 1)):
            jobs = [Job(s, shard) for s in sections if s.kind == kind for shard in range(s.shards)]
            self._side_by_side(jobs, workers)
        return self.outcomes

    def _side_by_side(self, jobs: list[Job], workers: int) -> None:
        running: list[Process] = []
        try:
            while jobs or running:
                while jobs and len(running) < workers:
                    job = jobs.pop(0)
                    left = self._deadline - time.monotonic()
                    if left < 5.0:
                        self._note(Outcome(job.name, job.section.name, "not run", 0.0))
                        continue
                    limit_s = min(job.section.timeout_s, left)
                    running.append(Process(job, self._flags, self._folder, limit_s))
                for process in list(running):
                    if (outcome := process.outcome()) is not None:
                        running.remove(process)
                        self._note(outcome)
                time.sleep(0.05)
        finally:
            for process in running:
                process._limit_s = -math.inf
                process.outcome()

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{outcome.job:16} {outcome.status:10} {outcome.seconds:6.1f} s", flush=True)
        self._tell(self.outcomes)

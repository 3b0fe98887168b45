"""Traces that press on memory, and what preemption costs under them: tokens computed again for each useful one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.forecast import LengthForecast
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, RequestRecord, SamplingParams

SIZE = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of ``n`` choices comes after ``step`` steps; each of them ends by itself after ``output`` tokens."""

    step: int
    prompt: int
    output: int
    n: int = 1
    tenant: str = ""


@dataclass(slots=True)
class Toll:
    """Tokens computed for the first time, and again; steps; rows computed."""

    useful: int = 0
    again: int = 0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0

    @property
    def share(self) -> float:
        """Tokens computed again for each useful one."""
        return self.again / self.useful


@dataclass(slots=True)
class Pressure:
    """Runs a trace with one plan ahead. ``timings_of`` makes up what the executor reports about a plan."""

    config: CoreConfig
    timings_of: Callable[[StepPlan], StepTimings] = lambda plan: StepTimings()
    # Instead of what the scheduler would expect.
    forecast: LengthForecast | None = None
    toll: Toll = field(default_factory=Toll)

    def run(self, arrivals: list[Arrival]) -> Toll:
        """Until every sequence has ended."""
        scheduler = Scheduler(self.config)
        if self.forecast is not None:
            scheduler.forecast = self.forecast
        rng = random.Random(0)
        due = deque(sorted(arrivals, key=lambda one: one.step))
        outputs: dict[int, int] = {}
        frontier: dict[int, int] = {}
        sent: deque[StepPlan] = deque()
        while due or scheduler.sequences:
            if not scheduler.sequences and due:
                self.toll.steps = max(self.toll.steps, due[0].step)
            while due and due[0].step <= self.toll.steps:
                self._arrive(scheduler, due.popleft(), outputs, rng)
            plan = scheduler.schedule()
            if plan is not None:
                self._count(scheduler, plan, frontier)
                sent.append(plan)
            assert sent, "a standstill"
            if plan is None or len(sent) > self.config.run_ahead:
                self._acknowledge(scheduler, sent.popleft(), outputs)
            self.toll.preemptions = scheduler.stats.preemptions
            scheduler.drain_events()
        return self.toll

    def _arrive(self, scheduler: Scheduler, arrival: Arrival, outputs: dict[int, int], rng: random.Random) -> None:
        serial = len(outputs) + 1
        prompt = np.array([rng.randrange(1 << 30) for _ in range(arrival.prompt)], np.int32)
        sampling = SamplingParams(max_tokens=self.config.max_model_len)
        record = RequestRecord(RequestId("log", serial), 0, prompt, sampling, n=arrival.n, tenant=arrival.tenant)
        sequences = [Sequence(record, choice, 1, self.config.max_model_len) for choice in range(arrival.n)]
        scheduler.add(sequences)
        for one in sequences:
            outputs[one.uid] = arrival.output

    def _count(self, scheduler: Scheduler, plan: StepPlan, frontier: dict[int, int]) -> None:
        uids = scheduler.table.uid_of_slot[plan.row_slots].tolist()
        self.toll.steps += 1
        self.toll.rows += len(uids)
        for uid, start, count in zip(uids, plan.row_starts.tolist(), plan.row_tokens.tolist(), strict=True):
            seen = frontier.get(uid, 0)
            again = max(0, min(seen, start + count) - start)
            self.toll.again += again
            self.toll.useful += count - again
            frontier[uid] = max(seen, start + count)

    def _acknowledge(self, scheduler: Scheduler, plan: StepPlan, outputs: dict[int, int]) -> None:
        alive = scheduler._sequences
        uids = scheduler._sent[0].sample_uids.tolist()
        counts = np.zeros(len(uids), np.int32)
        ends = np.zeros(len(uids), np.uint8)
        for at, uid in enumerate(uids):
            one = alive.get(uid)
            if one is None:
                continue
            counts[at] = 1
            if scheduler.known_tokens(one) + 1 - one.output_start >= outputs[uid]:
                ends[at] = EndReason.STOP
        tokens = np.arange(int(counts.sum()), dtype=np.int32)
        result = StepResult(plan.term, plan.epoch, plan.step, counts, tokens, ends, timings=self.timings_of(plan))
        scheduler.commit(result)
        scheduler.tidy()


def pool_of(tokens: int, **changes: object) -> CoreConfig:
    """A device that holds so many tokens."""
    values: dict[str, object] = {
        "num_blocks": tokens // SIZE,
        "block_size": SIZE,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": tokens,
        "max_num_partial_prefills": 0,
    }
    return CoreConfig(**values | changes)  # type: ignore[arg-type]


def burst(count: int, prompt: int, output: int, n: int = 1) -> list[Arrival]:
    """All at once, all alike."""
    return [Arrival(0, prompt, output, n) for _ in range(count)]


def heavy_tail(count: int, every: int, longest: int, seed: int = 0, shape: float = 1.1) -> list[Arrival]:
    """Output lengths as Pareto's, one request after the other."""
    rng = random.Random(seed)
    return [
        Arrival(i * every, 16 + rng.randrange(32), min(longest, int(8 * rng.paretovariate(shape))))
        for i in range(count)
    ]


def shift(short: int, long: int, output: int) -> list[Arrival]:
    """Many short ones teach what to expect; then long ones come."""
    before = [Arrival(i, 16, 8) for i in range(short)]
    return before + [Arrival(short + 50, 16, output) for _ in range(long)]


def two_kinds(count: int, every: int, short: int, long: int, seed: int = 0) -> list[Arrival]:
    """One in ten is long."""
    rng = random.Random(seed)
    return [Arrival(i * every, 32, long if rng.random() < 0.1 else short) for i in range(count)]


# Name -> tokens in the pool, the trace.
TRACES: dict[str, tuple[int, list[Arrival]]] = {
    "a burst, sixteen times what fits": (800, burst(40, 16, 200)),
    "a burst, three times what fits": (1600, burst(9, 16, 500)),
    "a burst, twice what fits": (1600, burst(32, 16, 90)),
    "waves of bursts": (800, [Arrival(wave * 200, 16, 150) for wave in range(5) for _ in range(12)]),
    "a tiny pool": (320, burst(20, 16, 200)),
    "a tiny pool, heavy tails": (320, heavy_tail(100, 3, 280)),
    "heavy tails": (1024, heavy_tail(200, 2, 900)),
    "heavier tails": (1024, heavy_tail(100, 2, 900, seed=1, shape=0.7)),
    "short, then long": (800, shift(1010, 16, 300)),
    "short, then a few long": (1600, shift(300, 8, 600)),
    "one in ten is long": (1024, two_kinds(200, 2, 8, 500)),
    "choices": (800, burst(5, 40, 150, n=8)),
    "long prompts": (1600, burst(16, 400, 150)),
}
TIERS: dict[str, dict[str, object]] = {
    "nothing kept": {"enable_prefix_caching": False},
    "prefix cache": {},
    "a small host": {"num_host_blocks": 30},
    "a large host": {"num_host_blocks": 2000},
}

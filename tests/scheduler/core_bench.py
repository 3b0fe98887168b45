"""A scheduler whose every plan is acknowledged with made-up tokens: for tests that look at single steps."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.events import Admitted
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, RequestRecord, SamplingParams


def sequence(uid: int, tokens: list[int] | int = 4, **more: object) -> Sequence:
    """One choice of a request of its own; a number stands for that many tokens 0, 1, 2 …"""
    prompt = np.array(tokens if isinstance(tokens, list) else range(tokens), np.int32)
    record = RequestRecord(RequestId("log", uid), 0, prompt, SamplingParams(), **more)  # type: ignore[arg-type]
    made = Sequence(record, 0, 1, 1024)
    made.uid = made.arrival = uid
    return made


class Bench:
    """A scheduler, one plan at a time."""

    def __init__(self, **changes: object) -> None:
        values: dict[str, object] = {
            "num_blocks": 10,
            "block_size": 16,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 8192,
            "max_model_len": 1024,
        }
        self.scheduler = Scheduler(CoreConfig(**values | changes))  # type: ignore[arg-type]
        self.pool = self.scheduler.pool
        self.serial = 0
        self.next_token = 10_000

    def choices(self, prompt: list[int] | int, n: int, *, max_tokens: int = 1, **more: object) -> list[Sequence]:
        """A request with ``n`` choices; a number stands for that many tokens nobody else has."""
        self.serial += 1
        if isinstance(prompt, int):
            prompt = [self.serial * 100_000 + i for i in range(prompt)]
        record = RequestRecord(
            RequestId("log", self.serial),
            0,
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=max_tokens, seed=self.serial),
            n=n,
            **more,  # type: ignore[arg-type]
        )
        sequences = [Sequence(record, choice, 1, self.scheduler.config.max_model_len) for choice in range(n)]
        self.scheduler.add(sequences)
        return sequences

    def add(self, prompt: list[int] | int, *, max_tokens: int = 1, **more: object) -> Sequence:
        """A request with one choice."""
        (one,) = self.choices(prompt, 1, max_tokens=max_tokens, **more)
        return one

    def run(self, prompt: list[int] | int, *, max_tokens: int = 2, **more: object) -> tuple[Sequence, int]:
        """A request whose prompt is computed and acknowledged: the sequence (still running) and its hit."""
        one = self.add(prompt, max_tokens=max_tokens, **more)
        self.scheduler.drain_events()
        self.step()
        (admitted,) = [e for e in self.scheduler.drain_events() if isinstance(e, Admitted)]
        assert admitted.sequence is one
        return one, admitted.cached_tokens

    def run_first(self, prompt: int) -> Sequence:
        """A request that goes before all others has its prompt computed; it is still running."""
        one = self.add(prompt, max_tokens=2, priority=-1)
        plan = self.step()
        assert [new.request_id for new in plan.admit] == [one.request_id]
        return one

    def plan(self) -> StepPlan:
        """The scheduler plans; it must want to."""
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def step(self, ending: Collection[Sequence] = ()) -> StepPlan:
        """A plan and its acknowledgement; ``ending`` are stopped by it."""
        plan = self.plan()
        self.acknowledge(plan, ending=ending)
        return plan

    def acknowledge(
        self,
        plan: StepPlan,
        end: EndReason = EndReason.NONE,
        ending: Collection[Sequence] = (),
        timings: StepTimings | None = None,
    ) -> None:
        """Every sample of a plan gets a token that nobody else has; ``end`` is everybody's, ``ending`` are stopped."""
        scheduler, slots = self.scheduler, plan.sample_slots
        stopped = {one.slot for one in ending}
        sent = scheduler._sent[0]
        alive = {one.uid for one in scheduler.sequences}
        # Who has ended meanwhile draws nothing.
        counts = np.array([uid in alive for uid in sent.sample_uids.tolist()], np.int32)
        total = int(counts.sum())
        tokens = np.arange(self.next_token, self.next_token + total, dtype=np.int32)
        self.next_token += total
        ends = np.array([EndReason.STOP if slot in stopped else end for slot in slots.tolist()], np.uint8) * counts
        result = StepResult(
            plan.term, plan.epoch, plan.step, counts, tokens, ends.astype(np.uint8), timings=timings or StepTimings()
        )
        scheduler.commit(result)
        scheduler.tidy()
        scheduler.check_integrity()

    def answer(self, plan: StepPlan, counts: list[int], ends: list[EndReason]) -> None:
        """A result of exactly these counts and ends."""
        tokens = np.arange(sum(counts), dtype=np.int32)
        numbers = np.array(counts, np.int32)
        self.scheduler.commit(StepResult(plan.term, plan.epoch, plan.step, numbers, tokens, np.array(ends, np.uint8)))
        self.scheduler.tidy()
        self.scheduler.check_integrity()

    def blocks(self, one: Sequence) -> list[int]:
        """The block table of a running sequence."""
        found: list[int] = self.scheduler.table.blocks(one).tolist()
        return found

    def planned(self, one: Sequence) -> int:
        """Tokens of a running sequence that will be in its pages once every plan sent has run."""
        table = self.scheduler.table
        return int(table.planned[table.row(one)])

    def granted(self, plan: StepPlan, *sequences: Sequence) -> list[int]:
        """What a plan grants to each sequence."""
        grants = dict(zip(plan.row_slots.tolist(), plan.row_tokens.tolist(), strict=True))
        return [grants.get(one.slot, 0) for one in sequences]

    def admitted(self, plan: StepPlan) -> list[int]:
        """Serials of the requests a plan admits, counted from 0, in order."""
        return [new.request_id.serial - 1 for new in plan.admit]

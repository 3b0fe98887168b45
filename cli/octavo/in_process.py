"""The scheduler's core and an executor's runner in one process: no log, no wire.

What the split into services costs is measured against this, and tests use it to look at the computation alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from octavo_scheduler.core.beam_groups import BeamGroup
from octavo_scheduler.core.beams import BeamRules, BeamSearch
from octavo_scheduler.core.events import BeamStep, Event
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.fold import ChoiceFold, LogFold, TokenEvent
from octavo_shared.ids import Attempt
from octavo_shared.plan import OutputRow, StepOutput, StepPlan
from octavo_shared.records import EndReason, RequestRecord


class Runner(Protocol):
    """What carries plans out."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry one plan out."""
        ...


class InProcess:
    """Requests in, folds out. ``check`` verifies the core's integrity after every step."""

    def __init__(self, core: Scheduler, runner: Runner, *, check: bool = False) -> None:
        self.core = core
        self.fold = LogFold()
        self.events: list[Event] = []
        self._runner = runner
        self._check = check

    def run(self, records: Iterable[RequestRecord]) -> dict[tuple[int, int], ChoiceFold]:
        """Run requests to their ends; the state of each choice by (serial, choice)."""
        for record in records:
            self._add(record)
        sent: deque[StepPlan] = deque()
        while self.core.num_running or self.core.num_waiting:
            # As over the wire: a plan is made before the result of the one before it is back.
            while (plan := self.core.schedule()) is not None:
                sent.append(plan)
            output = self._runner.execute(sent.popleft())
            self.core.commit(output.result)
            self._take(self.core.drain_events())
            for row in output.rows:
                self.fold.apply(as_event(row, self.core.term))
            self.core.tidy()
            if self._check:
                self.core.check_integrity()
        while sent:
            self.core.commit(self._runner.execute(sent.popleft()).result)
        return self.fold.choices

    def _add(self, record: RequestRecord) -> None:
        config = self.core.config
        if record.sampling.beam_width:
            rules = BeamRules.of(record, config.eos_token_ids, config.max_model_len)
            search = BeamSearch(rules, record.id.serial, Attempt(self.core.term, 1))
            self.core.beams.add(BeamGroup.of(record, 1, search, config.max_model_len))
        else:
            self.core.add([Sequence(record, i, 1, config.max_model_len) for i in range(record.n)])

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, BeamStep):
                self.fold.apply(event.event)
                self.core.beams.logged(event.group)


def as_event(row: OutputRow, term: int) -> TokenEvent:
    """What a reader of the log would see of an output row."""
    return TokenEvent(
        serial=row.request_id.serial,
        choice=row.choice,
        attempt=Attempt(term, row.attempt),
        position=row.position,
        tokens=row.tokens,
        end=EndReason(row.end),
        stop_token=row.stop_token,
        logprobs=row.logprobs,
        prompt_logprobs=row.prompt_logprobs,
        problem=row.problem,
        cached_tokens=row.cached_tokens,
    )

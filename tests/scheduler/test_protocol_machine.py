"""The log's protocol as a state machine: hypothesis chooses what happens next, and looks for an order that breaks the promise.

Beside the exhaustive small models (``tests/shared/test_protocol_model*.py``) this one is wider: any number of schedulers and
executors that do not know that they have been replaced, appends that are repeated or whose answer is lost, a log that is
trimmed while others read it, aborts, and clients that go on with another gateway. The scheduler's own code of resuming runs
in it, one Redis operation at a time.

With the rules the promise holds. Without any one of them a breach is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from protocol_world import CHOICES, ID, Executor, Fate, Scheduler, World

from octavo_scheduler.recovery import Resumption
from octavo_shared.fold import ChoiceFold, FenceEvent, LogFold, SnapshotEvent, TokenEvent
from octavo_shared.ids import NO_ATTEMPT

MOST_SCHEDULERS, MOST_EXECUTORS, MOST_ENTRIES = 4, 5, 24
NUMBER = st.integers(0, 1 << 16)


def machine_of(kind: type[World]) -> type[RuleBasedStateMachine]:
    """The state machine that plays one kind of world."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = kind()

        # --- what there is to choose from ---

        def _resuming(self) -> list[Scheduler]:
            return [scheduler for scheduler in self.world.schedulers if scheduler.work is not None]

        def _running(self) -> list[Scheduler]:
            return [scheduler for scheduler in self.world.schedulers if scheduler.executor is not None]

        def _talking(self) -> list[Scheduler]:
            return [scheduler for scheduler in self.world.schedulers if scheduler.words]

        def _done(self) -> list[Scheduler]:
            return [scheduler for scheduler in self.world.schedulers if scheduler.wants_to_acknowledge]

        def _computing(self) -> list[Executor]:
            return [one for one in self.world.executors if len(one.computed) < len(one.stories)]

        def _full(self) -> list[Executor]:
            return [one for one in self.world.executors if one.outbox]

        def _has_room(self) -> bool:
            return len(self.world.redis.entries) < MOST_ENTRIES

        # --- what can happen ---

        @precondition(lambda self: len(self.world.schedulers) < MOST_SCHEDULERS)
        @rule()
        def another_takes_the_lease(self) -> None:
            self.world.take_lease()

        @precondition(lambda self: self._resuming() and self._has_room())
        @rule(which=NUMBER, fate=st.sampled_from([Fate.DONE, Fate.DONE, Fate.DONE, Fate.LOST, Fate.UNHEARD]))
        def resuming_goes_on(self, which: int, fate: Fate) -> None:
            schedulers = self._resuming()
            self.world.advance(schedulers[which % len(schedulers)], fate)

        @precondition(lambda self: self._running() and len(self.world.executors) < MOST_EXECUTORS)
        @rule(which=NUMBER)
        def a_line_to_an_executor_breaks(self, which: int) -> None:
            schedulers = self._running()
            self.world.resume(schedulers[which % len(schedulers)])

        @precondition(lambda self: self.world.schedulers and not self.world.acknowledged)
        @rule(which=NUMBER, choice=st.integers(0, CHOICES - 1))
        def someone_wants_a_choice_to_end(self, which: int, choice: int) -> None:
            self.world.abort(self.world.schedulers[which % len(self.world.schedulers)], choice)

        @precondition(lambda self: self._talking() and self._has_room())
        @rule(which=NUMBER, again=st.booleans())
        def an_end_is_logged(self, which: int, again: bool) -> None:
            schedulers = self._talking()
            self.world.say(schedulers[which % len(schedulers)], again)

        @precondition(lambda self: self._done())
        @rule(which=NUMBER)
        def a_request_is_acknowledged(self, which: int) -> None:
            schedulers = self._done()
            self.world.acknowledge(schedulers[which % len(schedulers)])

        @precondition(lambda self: self._computing())
        @rule(which=NUMBER)
        def a_step_is_done(self, which: int) -> None:
            executors = self._computing()
            self.world.step(executors[which % len(executors)])

        @precondition(lambda self: self._full() and self._has_room())
        @rule(which=NUMBER, again=st.booleans())
        def a_step_is_logged(self, which: int, again: bool) -> None:
            executors = self._full()
            self.world.flush(executors[which % len(executors)], again)

        @precondition(lambda self: self.world.read_to < self.world.redis.newest)
        @rule()
        def the_gateway_reads(self) -> None:
            self.world.read()

        @precondition(lambda self: self.world.redis.entries and self.world.read_to == self.world.redis.newest)
        @rule()
        def the_gateway_trims(self) -> None:
            self.world.trim()

        @precondition(lambda self: self.world.read_to > 0)
        @rule()
        def the_client_goes_on_elsewhere(self) -> None:
            self.world.lose_gateway()

        @invariant()
        def the_promise_holds(self) -> None:
            self.world.check()

        def teardown(self) -> None:
            try:
                self.world.come_to_rest()
            finally:
                self.world.close()

    return Machine


# --- the same without a rule ------------------------------------------------------------------------------------------


class AnyFence(ChoiceFold):
    def _apply_fence(self, event: FenceEvent) -> bool:
        if self.end:
            return False
        self.attempt = event.attempt
        self.end = event.end or self.end
        return True


class AnyAttempt(ChoiceFold):
    def _apply_tokens(self, event: TokenEvent) -> bool:
        attempt, self.attempt = self.attempt, event.attempt
        changed = super()._apply_tokens(event)
        self.attempt = max(attempt, event.attempt)
        return changed


class AnyPosition(ChoiceFold):
    def _apply_tokens(self, event: TokenEvent) -> bool:
        if self.end or (event.attempt != self.attempt and self.attempt != NO_ATTEMPT):
            return False
        self.attempt = event.attempt
        self.tokens.extend(event.tokens)
        self.end = event.end
        return True


class LaterEnds(ChoiceFold):
    def apply(self, event: object) -> bool:
        before, self.end = self.end, type(self.end).NONE
        changed = super().apply(event)  # type: ignore[arg-type]
        self.end = self.end or before
        return changed


def folding(choice: type[ChoiceFold]) -> type[LogFold]:
    """A fold of logs that folds choices so."""

    class Folding(LogFold):
        def apply(self, event: object) -> object:
            if not isinstance(event, (TokenEvent, FenceEvent, SnapshotEvent)):
                return super().apply(event)  # type: ignore[arg-type]
            self.choices.setdefault((event.serial, event.choice), choice())
            return super().apply(event)

    return Folding


class ForgetfulSnapshots(LogFold):
    def snapshots(self) -> Iterator[SnapshotEvent]:
        for event in super().snapshots():
            yield SnapshotEvent(ID.serial, event.choice, NO_ATTEMPT, event.tokens, event.end)


class ReadsBeforeItFences(World):
    async def fence_and_read(self, scheduler: Scheduler) -> list[Resumption]:
        outputs = {choice: list(state.tokens) for choice, state in enumerate(self.whole()) if not state.end}
        ended = tuple(choice for choice, state in enumerate(self.whole()) if state.end)
        resumed = await super().fence_and_read(scheduler)
        return [Resumption(one.live, outputs, ended) for one in resumed]


class NeverFences(World):
    async def fence_and_read(self, scheduler: Scheduler) -> list[Resumption]:
        scheduler.live.attempt_n += 1
        outputs = {choice: list(state.tokens) for choice, state in enumerate(self.whole()) if not state.end}
        ended = tuple(choice for choice, state in enumerate(self.whole()) if state.end)
        return [Resumption(scheduler.live, outputs, ended)]


def without(name: str, **change: object) -> type[World]:
    return type(name, (World,), change)


BROKEN = [
    without("L1: any fence counts", fold_kind=folding(AnyFence)),
    without("L1: any attempt may speak", fold_kind=folding(AnyAttempt)),
    without("L1: any position counts", fold_kind=folding(AnyPosition)),
    without("L1: something follows the first end", fold_kind=folding(LaterEnds)),
    type("L1: a new attempt starts from before its fence", (ReadsBeforeItFences,), {}),
    type("L1: nobody fences", (NeverFences,), {}),
    without("L2: the term stays the same", new_terms=False),
    without("L3: an end that is computed is final", ends_when_computed=True),
    without("L5: snapshots do not say who may speak", fold_kind=ForgetfulSnapshots),
    without("L6: whoever thinks so acknowledges", acknowledges_unasked=True),
]


def test_the_promise_holds_in_whatever_order_things_happen() -> None:
    run_state_machine_as_test(
        machine_of(World),
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_without_a_rule_a_breach_is_found(kind: type[World]) -> None:
    """If this fails, the machine above no longer tests what it says."""
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine_of(kind),
            settings=settings(
                max_examples=2000,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

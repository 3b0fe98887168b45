"""The log's protocol as a state machine: hypothesis chooses what happens next, and looks for an order that breaks the promise.

Beside the exhaustive small models (``tests/shared/test_protocol_model*.py``) this one is wider: any number of schedulers and
executors that do not know that they have been replaced, appends that are repeated or whose answer is lost, a log that is
trimmed while others read it, aborts, and clients that go on with another gateway. The scheduler's own code of resuming runs
in it, one Redis operation at a time.

With the rules the promise holds. Without any one of them a breach is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from protocol_restarts import RestartWorld
from protocol_world import ID, Scheduler, World

from octavo_scheduler.recovery import Resumption
from octavo_shared.fold import ChoiceFold, FenceEvent, LogFold, SnapshotEvent, TokenEvent
from octavo_shared.ids import NO_ATTEMPT


class Machine(RuleBasedStateMachine):
    """Plays a world: whatever is possible may be next."""

    kind: type[World] = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.kind()

    @rule(number=st.integers(0, 1 << 16))
    def next(self, number: int) -> None:
        options = self.world.options()
        name, happen = options[number % len(options)]
        note(name)
        happen()
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.come_to_rest()
        finally:
            self.world.close()


class RestartMachine(Machine):
    """With a Redis that forgets."""

    kind = RestartWorld


def play_at_random(kind: type[World], games: int, moves: int = 40) -> int:
    """As the machine does it, without what it takes to shrink a finding; returns the number of the game that broke.

    Raises:
        LookupError: none did.
    """
    for game in range(games):
        rng, world = random.Random(game), kind()
        try:
            for _ in range(rng.randrange(moves)):
                rng.choice(world.options())[1]()
                world.check()
            world.come_to_rest()
        except AssertionError:
            return game
        finally:
            world.close()
    raise LookupError(f"no breach in {games} games")


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


def without(name: str, world: type[World] = World, **change: object) -> type[World]:
    return type(name, (world,), change)


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
    without("L2: a term that Redis has forgotten is given again", RestartWorld, terms_are_new=False),
    without("L9: gateways do not say again what they know", RestartWorld, says_again=False),
    without("L9: other tokens than were delivered go unnoticed", RestartWorld, compares=False),
    without("L9: what Redis calls new counts as new", RestartWorld, distrusts_redis=False),
    without("L9: ends of another life of Redis count", RestartWorld, acknowledges_in_one_life=False),
]


@pytest.mark.parametrize("machine", [Machine, RestartMachine])
def test_the_promise_holds_in_whatever_order_things_happen(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))


@pytest.mark.parametrize("kind", [World, RestartWorld])
def test_the_promise_holds_in_many_games(kind: type[World]) -> None:
    with pytest.raises(LookupError):
        play_at_random(kind, 1500)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_without_a_rule_a_breach_is_found(kind: type[World]) -> None:
    """If this fails, the machine above no longer tests what it says."""
    play_at_random(kind, 20_000)

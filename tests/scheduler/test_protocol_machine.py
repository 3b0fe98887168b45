"""The log's protocol as a state machine: hypothesis chooses what happens next, and looks for an order that breaks the promise.

Beside the exhaustive small models (``tests/shared/test_protocol_model*.py``) this one is wider: any number of schedulers and
executors that do not know that they have been replaced, appends that are repeated or whose answer is lost, a log that is
trimmed while others read it, aborts, and clients that go on with another gateway. The scheduler's own code of resuming runs
in it, one Redis operation at a time.

With the rules the promise holds. Without any one of them a breach is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from protocol_clients import ClientWorld, Connection
from protocol_followers import GRACE, FollowerWorld
from protocol_restarts import RestartWorld
from protocol_world import CHOICES, ID, Fate, Scheduler, World

from octavo_gateway.choice_view import ChoiceView
from octavo_gateway.event_ids import EventIds, Position, Told
from octavo_scheduler.live import LiveRequest
from octavo_scheduler.orphans import Absences
from octavo_scheduler.recovery import Resumption
from octavo_shared.fold import ChoiceFold, FenceEvent, LogFold, SnapshotEvent, TokenEvent
from octavo_shared.ids import NO_ATTEMPT
from octavo_shared.records import AbortRecord


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


class FollowerMachine(Machine):
    """With clients that come and go, and gateways that die."""

    kind = FollowerWorld


class ClientMachine(Machine):
    """With a client that reads events and asks for the rest by their ids."""

    kind = ClientWorld


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


def heed_anybody(live: LiveRequest, word: AbortRecord) -> set[int]:
    live.generation = 0
    return live.heed(word)


class ImpatientAbsences(Absences):
    def have_abandoned(self, live: LiveRequest, gateways: Iterable[str], now_s: float) -> bool:
        return set(gateways) <= self.gone(now_s)


class EndlessPatience(Absences):
    def have_abandoned(self, live: LiveRequest, gateways: Iterable[str], now_s: float) -> bool:
        return False


class OneIsEnough(Absences):
    def have_abandoned(self, live: LiveRequest, gateways: Iterable[str], now_s: float) -> bool:
        return any(super(OneIsEnough, self).have_abandoned(live, [name], now_s) for name in gateways)


class NamesWhatIsRead(Connection):
    def name(self, choice: int, folds: list[ChoiceFold]) -> None:
        for other, fold in enumerate(folds):
            if fold.tokens:
                self.ids.told(other, len(fold.tokens), ended=bool(fold.end))


class NamesWhatItHasTold(Connection):
    def __init__(self, position: Position | None) -> None:
        super().__init__(position)
        self.ids = EventIds(ID, CHOICES)


class CountsEvents(Connection):
    def __init__(self, position: Position | None) -> None:
        super().__init__(position)
        self.events = [told.tokens if told else 0 for told in self.told]

    def name(self, choice: int, folds: list[ChoiceFold]) -> None:
        self.events[choice] += 1
        self.ids.told(choice, self.events[choice], ended=self.views[choice].finish_reason is not None)


class NamesNoEnds(Connection):
    def name(self, choice: int, folds: list[ChoiceFold]) -> None:
        self.ids.told(choice, self.views[choice].tokens, ended=False)


class BeginsAgain(Connection):
    def catch_up(self, view: ChoiceView, fold: ChoiceFold, told: Told) -> bool:
        return True


class GoesOnFromTheNewest(Connection):
    def catch_up(self, view: ChoiceView, fold: ChoiceFold, told: Told) -> bool:
        view.advance(fold, len(fold.tokens))
        return True


class ForgetsWhatWasHeldBack(Connection):
    def catch_up(self, view: ChoiceView, fold: ChoiceFold, told: Told) -> bool:
        view.tokens = told.tokens
        return len(fold.tokens) >= told.tokens and not told.ended


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
    without("L7: an abort counts whoever has come since", FollowerWorld, heeds=heed_anybody),
    without("L7: who comes last decides for all", FollowerWorld, counts_gateways=False),
    without("L7: a gateway leaves for those who have come since", FollowerWorld, knows_who_came_since=False),
    without("L7: who reconnects is no other than before", FollowerWorld, bumps_generation=False),
    without("L7: there is no grace after a gateway's lease", FollowerWorld, absences_kind=ImpatientAbsences),
    without("L7: a gateway without a lease is waited for", FollowerWorld, absences_kind=EndlessPatience),
    without("L7: a gateway that dies takes all clients away", FollowerWorld, absences_kind=OneIsEnough),
    without("L7: nobody asks who follows it now", FollowerWorld, asks_who_follows=False),
    without("L8: an event's id names what has been read", ClientWorld, connection_kind=NamesWhatIsRead),
    without("L8: an event's id names what this gateway has told", ClientWorld, connection_kind=NamesWhatItHasTold),
    without("L8: an event's id counts events", ClientWorld, connection_kind=CountsEvents),
    without("L8: an event's id does not tell ends", ClientWorld, connection_kind=NamesNoEnds),
    without("L8: who comes back is told all once more", ClientWorld, connection_kind=BeginsAgain),
    without("L8: who comes back goes on from the newest", ClientWorld, connection_kind=GoesOnFromTheNewest),
    without("L8: what was held back is forgotten", ClientWorld, connection_kind=ForgetsWhatWasHeldBack),
    without("L9: gateways do not say again who follows", FollowerWorld, follows_again=False),
    without("L9: gateways do not say again what they have given up", FollowerWorld, leaves_again=False),
    without("L7: an abort is deleted before its end is logged", FollowerWorld, aborts_outlive_readers=False),
    without("L9: a generation that Redis has forgotten is given again", FollowerWorld, generations_are_new=False),
]


@pytest.mark.parametrize("machine", [Machine, RestartMachine, FollowerMachine, ClientMachine])
def test_the_promise_holds_in_whatever_order_things_happen(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=50, deadline=None))


@pytest.mark.parametrize(
    ("kind", "games"), [(World, 1500), (RestartWorld, 1500), (FollowerWorld, 800), (ClientWorld, 400)]
)
def test_the_promise_holds_in_many_games(kind: type[World], games: int) -> None:
    with pytest.raises(LookupError):
        play_at_random(kind, games)


def test_a_fence_that_redis_has_forgotten_is_no_place_to_start_from() -> None:
    """Who has seen it may say so again, with tokens that the new attempt would not have started from."""
    world = World()
    world.delivered = True
    world.take_lease()
    scheduler = world.schedulers[0]
    for _ in range(2):
        world.advance(scheduler, Fate.DONE)
    assert isinstance(world.redis.entries[0][1][0], FenceEvent)
    world.redis.entries.clear()
    for _ in range(3):
        world.advance(scheduler, Fate.DONE)
        assert scheduler.executor is None
    while scheduler.work is not None:
        world.advance(scheduler, Fate.DONE)
    assert scheduler.executor is not None
    assert scheduler.executor.attempt == world.whole()[0].attempt > (1, 1)
    world.close()


@pytest.mark.parametrize("anew", [True, False])
def test_what_was_said_when_redis_had_forgotten_somebody_does_not_count(anew: bool) -> None:
    """Too much has to come together for a game to find it: whoever is said again to be there, is there anew."""
    world = without("L9", FollowerWorld, follows_anew=anew)()
    world.come("second")
    world.come("gateway")
    first, _, later = world.lines
    world.notice(first)
    world.notice(later)
    for _ in range(GRACE):
        world.pass_time()
    world.restart()
    world.give_up(later)
    if anew:
        world.come_to_rest()
    else:
        with pytest.raises(AssertionError, match="a client was given up"):
            world.come_to_rest()
    world.close()


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_without_a_rule_a_breach_is_found(kind: type[World]) -> None:
    """If this fails, the machine above no longer tests what it says."""
    play_at_random(kind, 20_000)

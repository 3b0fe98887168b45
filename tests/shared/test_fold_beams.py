"""Beam steps in the fold: choices that grow by what is certain, one fence for all, ends that stay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo_shared.entries import decode_entry, encode_beams, encode_fences, encode_snapshot, encode_tokens
from octavo_shared.fold import ChoiceFold, FenceEvent, LogEvent, LogFold, TokenEvent
from octavo_shared.fold_beams import NO_TOKEN, BeamEnd, BeamEvent, BeamFold
from octavo_shared.ids import NO_ATTEMPT, Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason, Problem, TokenLogprobs

FIRST, SECOND = Attempt(1, 1), Attempt(2, 1)
STOP, LENGTH = EndReason.STOP, EndReason.LENGTH


def step(
    position: int, live: list[tuple[int, int]], *, n: int = 2, attempt: Attempt = FIRST, **more: object
) -> BeamEvent:
    """Live hypotheses as (parent, token); each scores -1 per token of its own number."""
    parents, tokens = tuple(parent for parent, _ in live), tuple(token for _, token in live)
    scores = tuple(-float(position + index) for index in range(len(live)))
    return BeamEvent(1, attempt, position, n, parents, tokens, scores, **more)  # type: ignore[arg-type]


def fence(choice: int, attempt: Attempt, end: EndReason = EndReason.NONE, problem: Problem | None = None) -> FenceEvent:
    return FenceEvent(1, choice, attempt, end, problem)


def folded(*events: LogEvent) -> LogFold:
    return LogFold().apply_all(events)


def outputs(log: LogFold, n: int = 2) -> list[list[int]]:
    return [log.get(1, choice).tokens for choice in range(n)]


def ends(log: LogFold, n: int = 2) -> list[EndReason]:
    return [log.get(1, choice).end for choice in range(n)]


def state_of(choice: ChoiceFold) -> dict[str, Any]:
    values = {name: getattr(choice, name) for name in ChoiceFold.__slots__}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


NOTHING_SAID = state_of(ChoiceFold())


def state(log: LogFold) -> object:
    """All that a fold knows; choices of which nothing has been said are as good as absent."""
    choices = {key: state_of(choice) for key, choice in log.choices.items()}
    return {key: known for key, known in choices.items() if known != NOTHING_SAID}, dict(log.beams)


# --- one rule at a time -----------------------------------------------------------------------------------------------


def test_choices_grow_by_what_all_hypotheses_agree_on() -> None:
    log = folded(step(0, [(0, 5), (0, 6)]))
    assert outputs(log) == [[], []]
    changed = log.apply(step(1, [(1, 7), (1, 8)]))
    assert [index for index, _ in changed] == [0, 1]
    assert outputs(log) == [[6], [6]]
    # It may take more than one token at once.
    log.apply(step(2, [(1, 9), (1, 4)]))
    assert outputs(log) == [[6, 8], [6, 8]]
    assert log.apply(step(3, [(0, 1), (1, 1)])) == ()
    assert outputs(log) == [[6, 8], [6, 8]]
    assert [one.tokens for one in log.beams[1].live] == [(6, 8, 9, 1), (6, 8, 4, 1)]


def test_a_hypothesis_that_has_ended_holds_back_what_it_does_not_share_while_it_is_among_the_best() -> None:
    start = step(0, [(0, 5), (0, 6)], finished=(BeamEnd(0, 2, -0.5, STOP),), ranking=(0,))
    log = folded(start, step(1, [(0, 7), (0, 8)]))
    assert outputs(log) == [[], []]
    # Two better ones: it is not among the two best any more, and never will be.
    better = (BeamEnd(0, 2, -0.1, STOP), BeamEnd(1, 2, -0.2, STOP))
    log.apply(step(2, [(0, 9), (1, 9)], finished=better, ranking=(1, 2, 0)))
    assert outputs(log) == [[5], [5]]
    assert [one.tokens for one in log.beams[1].kept] == [(5, 7, 2), (5, 8, 2), (2,)]


def test_those_kept_before_stay_in_their_order_and_go_from_the_end() -> None:
    two = (BeamEnd(0, 2, -0.1, STOP), BeamEnd(0, 3, -0.2, STOP))
    third = (BeamEnd(0, 2, -0.3, STOP),)
    for ranking, counts in {(0, 2, 1): True, (2, 0): True, (2,): True, (1, 0, 2): False, (1, 2): False}.items():
        log = folded(step(0, [(0, 5)], finished=two, ranking=(0, 1)))
        log.apply(step(1, [(0, 7)], finished=third, ranking=ranking))
        assert (log.beams[1].position == 2) == counts


def test_the_last_step_gives_each_choice_its_hypothesis() -> None:
    log = folded(step(0, [(0, 5), (0, 6)], cached_tokens=16), step(1, [(0, 7), (0, 8)]))
    finished = (BeamEnd(0, 9, -3.0, LENGTH), BeamEnd(1, 2, -1.0, STOP), BeamEnd(1, 3, -2.0, LENGTH))
    changed = log.apply(step(2, [], finished=finished, ranking=(1, 2), end=LENGTH))
    assert [index for index, _ in changed] == [0, 1]
    assert outputs(log) == [[5, 8, 2], [5, 8, 3]]
    assert ends(log) == [STOP, LENGTH]
    assert [log.get(1, i).stop_token for i in (0, 1)] == [2, -1]
    assert [log.get(1, i).cached_tokens for i in (0, 1)] == [16, 16]
    assert log.beams == {}
    before = state(log)
    for late in (step(2, [(0, 1)]), step(0, [(0, 1)]), step(3, [(0, 1)]), fence(0, SECOND), fence(1, SECOND, STOP)):
        assert log.apply(late) == ()
    assert state(log) == before


def test_a_search_may_end_as_it_stands_and_with_fewer_hypotheses_than_choices() -> None:
    log = folded(step(0, [(0, 5), (0, 6)], n=3), step(1, [(0, 7), (0, 8)], n=3))
    asis = tuple(BeamEnd(parent, NO_TOKEN, -1.0, EndReason.TIMEOUT) for parent in (0, 1))
    log.apply(step(2, [], n=3, finished=asis, ranking=(1, 0), end=EndReason.TIMEOUT))
    assert outputs(log, 3) == [[5, 8], [5, 7], [5]]
    assert ends(log, 3) == [EndReason.TIMEOUT] * 3


@pytest.mark.parametrize(
    "void",
    [
        step(0, [(0, 5), (0, 6)]),
        step(1, [(0, 7), (0, 8)]),
        step(3, [(0, 7), (0, 8)]),
        step(2, [(0, 7), (0, 8)], attempt=SECOND),
        step(2, [(0, 7), (0, 8)], attempt=Attempt(1, 2)),
        step(2, [(0, 7), (0, 8)], attempt=Attempt(0, 9)),
        step(2, [(0, 7), (0, 8)], n=3),
        step(2, [(2, 7)]),
        step(2, [(-1, 7)]),
        step(2, [(0, -1)]),
        step(2, [(0, 7), (0, 7)]),
        step(2, []),
        step(2, [(0, 7)], end=STOP),
        step(2, [(0, 7)], finished=(BeamEnd(0, 7, 0.0, STOP),), ranking=(0,)),
        step(2, [(0, 7)], finished=(BeamEnd(2, 2, 0.0, STOP),), ranking=(0,)),
        step(2, [(0, 7)], finished=(BeamEnd(0, -2, 0.0, STOP),), ranking=(0,)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, EndReason.NONE),), ranking=(0,)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, STOP),), ranking=(2,)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, STOP),), ranking=(-1,)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, STOP),), ranking=(0, 0)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, STOP),), ranking=(1, 1)),
        step(2, [(0, 7)], logprobs=(TokenLogprobs(-1.0, 1),)),
        step(2, [(0, 7)], finished=(BeamEnd(0, 2, 0.0, STOP, TokenLogprobs(-1.0, 1)),), ranking=(1,)),
        TokenEvent(1, 0, FIRST, 1, (9,)),
        TokenEvent(1, 0, FIRST, 1, (), STOP),
        fence(0, FIRST),
        fence(1, Attempt(1, 0), EndReason.ABORT),
    ],
)
def test_void_events_change_nothing(void: LogEvent) -> None:
    held = BeamEnd(0, 2, -0.5, STOP)
    log = folded(step(0, [(0, 5), (0, 6)]), step(1, [(0, 7), (0, 8)], finished=(held,), ranking=(0,)))
    before = state(log)
    assert log.apply(void) == ()
    assert state(log) == before


def test_a_search_follows_no_tokens() -> None:
    log = folded(TokenEvent(1, 0, FIRST, 0, (5,)))
    assert log.apply(step(0, [(0, 5), (0, 6)])) == ()
    assert log.beams == {}


def test_the_first_attempt_speaks_at_position_zero_only() -> None:
    log = folded(step(1, [(0, 5)]))
    assert state(log) == ({}, {})
    log.apply(step(0, [(0, 5)], attempt=SECOND))
    log.apply(step(1, [(0, 6)], attempt=FIRST))
    assert outputs(log) == [[5], [5]]
    assert log.get(1, 1).attempt == SECOND


@pytest.mark.parametrize("choice", [0, 1])
def test_a_fence_of_any_choice_is_for_the_whole_search(choice: int) -> None:
    log = folded(step(0, [(0, 5), (0, 6)]))
    assert [index for index, _ in log.apply(fence(choice, SECOND))] == [choice]
    assert log.apply(step(1, [(0, 7)])) == ()
    before = log.beams[1]
    log.apply(fence(1 - choice, SECOND))
    log.apply(fence(1 - choice, SECOND))
    log.apply(fence(1 - choice, Attempt(1, 9)))
    assert log.beams[1] is before
    log.apply(step(1, [(1, 7)], attempt=SECOND))
    assert outputs(log) == [[6, 7], [6, 7]]


@pytest.mark.parametrize("choice", [0, 1])
def test_a_fence_before_the_first_step_is_for_the_whole_search_too(choice: int) -> None:
    log = folded(fence(choice, SECOND), step(0, [(0, 5)]))
    assert log.beams == {}
    log.apply(step(0, [(0, 6)], attempt=SECOND))
    assert outputs(log) == [[6], [6]]


def test_an_end_of_one_choice_leaves_the_search_to_the_others() -> None:
    problem = Problem("p")
    for early in (True, False):
        alone = fence(0, Attempt(1, 2), EndReason.ABORT, problem)
        begin = [step(0, [(0, 5), (0, 6)]), step(1, [(0, 7), (0, 8)])]
        log = folded(*([alone, *begin] if early else [*begin, alone]))
        assert ends(log) == [EndReason.ABORT, EndReason.NONE]
        assert outputs(log) == [[] if early else [5], [5]]
        # Nothing that names it counts any more, not even for the search.
        before = state(log)
        assert log.apply(fence(0, Attempt(5, 1))) == ()
        assert state(log) == before
        # The same attempt goes on, and so may the next one.
        assert [index for index, _ in log.apply(step(2, [(1, 9)]))] == [1]
        assert [index for index, _ in log.apply(fence(1, Attempt(1, 2)))] == [1]
        kept = (BeamEnd(0, 2, -1.0, STOP), BeamEnd(0, 3, -2.0, LENGTH))
        log.apply(step(3, [], attempt=Attempt(1, 2), finished=kept, ranking=(0, 1), end=LENGTH))
        assert outputs(log) == [[] if early else [5], [5, 8, 9, 3]]
        assert ends(log) == [EndReason.ABORT, LENGTH]
        assert log.get(1, 0).problem == problem


@pytest.mark.parametrize("steps", [0, 1])
def test_an_end_that_comes_after_the_fences_of_a_resumption_still_counts(steps: int) -> None:
    """The scheduler has decided it before and fences only what it means to resume."""
    second, decided = Attempt(1, 2), fence(0, Attempt(1, 2), EndReason.ABORT)
    log = folded(*[step(0, [(0, 5), (0, 6)])][:steps], fence(1, second))
    log.apply(step(steps, [(0, 7), (0, 8)], attempt=second))
    assert log.beams[1].position == steps + 1
    assert [index for index, _ in log.apply(decided)] == [0]
    assert ends(log) == [EndReason.ABORT, EndReason.NONE]
    log.apply(step(steps + 1, [(0, 9)], attempt=second))
    assert log.beams[1].position == steps + 2


def test_a_search_without_open_choices_is_over() -> None:
    log = folded(step(0, [(0, 5)]), fence(1, Attempt(1, 2), EndReason.ABORT))
    assert 1 in log.beams
    log.apply(fence(0, Attempt(1, 2), EndReason.ABORT))
    assert log.beams == {}
    assert log.apply(step(1, [(0, 6)])) == ()
    assert outputs(log) == [[5], [5]]


def test_log_probabilities_go_with_their_hypotheses() -> None:
    def probs(token: int) -> TokenLogprobs:
        return TokenLogprobs(-float(token), 1, ((token, -float(token)),))

    log = folded(
        step(0, [(0, 5), (0, 6)], logprobs=(probs(5), probs(6))),
        step(1, [(1, 7), (1, 8)], logprobs=(probs(7), probs(8))),
    )
    assert log.get(1, 0).logprobs == [probs(6)]
    finished = (BeamEnd(1, 2, -1.0, STOP, probs(2)), BeamEnd(0, NO_TOKEN, -1.0, EndReason.TIMEOUT))
    log.apply(step(2, [], finished=finished, ranking=(0, 1), end=STOP))
    assert log.get(1, 0).logprobs == [probs(6), probs(8), probs(2)]
    assert log.get(1, 1).logprobs == [probs(6), probs(7)]


def test_every_token_has_its_log_probabilities_or_none_has() -> None:
    probs = TokenLogprobs(-1.0, 1)
    log = folded(step(0, [(0, 5), (0, 6)], logprobs=(probs, probs)))
    for void in (
        step(1, [(0, 7)]),
        step(1, [(0, 7)], logprobs=(probs,), finished=(BeamEnd(1, 2, -1.0, STOP),), ranking=(0,)),
        step(1, [], finished=(BeamEnd(1, 2, -1.0, STOP),), ranking=(0,), end=STOP),
    ):
        assert log.apply(void) == ()
    assert log.beams[1].position == 1
    log.apply(step(1, [(0, 7)], logprobs=(probs,), finished=(BeamEnd(1, 2, -1.0, STOP, probs),), ranking=(0,)))
    assert log.beams[1].position == 2


def test_one_open_choice_carries_the_search_in_a_snapshot() -> None:
    log = folded(step(0, [(0, 5), (0, 6)]), fence(0, Attempt(1, 2), EndReason.ABORT))
    states = list(log.snapshots())
    assert [(one.choice, one.beams is not None) for one in states] == [(0, False), (1, True)]
    late = folded(*states)
    assert state(late) == state(log)
    # A reader that knew less takes the search as it is told.
    behind = folded(step(0, [(0, 5), (0, 6)]))
    log.apply(step(1, [(0, 7), (1, 7)]))
    assert state(behind.apply_all(log.snapshots())) == state(log)
    log.apply(fence(1, Attempt(1, 2), EndReason.ABORT))
    assert state(behind.apply_all(log.snapshots())) == state(log)


def test_a_forgotten_request_has_no_search() -> None:
    log = folded(step(0, [(0, 5)]), replace(step(0, [(0, 5)]), serial=2))
    log.forget(1)
    assert set(log.beams) == {2}
    assert set(log.choices) == {(2, 0), (2, 1)}


# --- properties -------------------------------------------------------------------------------------------------------

ATTEMPTS = st.builds(Attempt, st.integers(1, 3), st.integers(0, 2))
ENDS = st.sampled_from([EndReason.NONE] * 8 + list(EndReason)[1:])
SCORES = st.floats(-99, 0, width=32)
PROBS = st.builds(
    TokenLogprobs, SCORES, st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), SCORES), max_size=2).map(tuple)
)


@st.composite
def steps(draw: st.DrawFn, beams: BeamFold, asked: bool) -> BeamEvent:
    """A step that follows ``beams``, mostly."""
    pairs = st.tuples(st.integers(0, len(beams.live) - 1), st.integers(0, 3))
    chosen = draw(st.lists(pairs, min_size=1, max_size=5, unique=True))
    split = draw(st.integers(0, len(chosen)))
    live, ended = chosen[:split], chosen[split:]
    end = EndReason.NONE if live else draw(st.sampled_from([STOP, LENGTH]))
    finished = tuple(
        BeamEnd(parent, token, draw(SCORES), draw(st.sampled_from([STOP, LENGTH])), draw(PROBS) if asked else None)
        for parent, token in ended
    )
    old = range(draw(st.integers(0, len(beams.kept))))
    new = draw(st.permutations(range(len(beams.kept), len(beams.kept) + len(finished))))
    ranking = list(old)
    for index in new:
        ranking.insert(draw(st.integers(0, len(ranking))), index)
    return BeamEvent(
        serial=1,
        attempt=beams.attempt,
        position=beams.position,
        n=beams.n,
        parents=tuple(parent for parent, _ in live),
        tokens=tuple(token for _, token in live),
        scores=tuple(draw(SCORES) for _ in live),
        finished=finished,
        ranking=tuple(ranking) if finished else (),
        logprobs=tuple(draw(PROBS) for _ in live) if asked else None,
        end=end,
        cached_tokens=draw(st.integers(0, 9)),
    )


@st.composite
def logs(draw: st.DrawFn) -> list[LogEvent]:
    """Steps that mostly follow, among stale ones, repeated ones, damaged ones, fences, tokens."""
    n, asked = draw(st.integers(1, 3)), draw(st.booleans())
    log, events = LogFold(), list[LogEvent]()
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["step"] * 6 + ["stale", "damaged", "again", "fence", "fence", "tokens"]))
        fenced = max((log.get(1, c).attempt for c in range(n) if not log.get(1, c).end), default=NO_ATTEMPT)
        beams = log.beams.get(1) or BeamFold(n, fenced if fenced != NO_ATTEMPT else FIRST)
        event: LogEvent
        if kind == "again" and events:
            event = draw(st.sampled_from(events))
        elif kind == "fence":
            event = FenceEvent(1, draw(st.integers(0, n - 1)), draw(ATTEMPTS), draw(ENDS))
        elif kind == "tokens":
            event = TokenEvent(
                1, draw(st.integers(0, n - 1)), draw(ATTEMPTS), draw(st.integers(0, 3)), (1,), draw(ENDS)
            )
        else:
            event = draw(steps(beams, asked))
            if kind == "stale":
                event = replace(event, attempt=draw(ATTEMPTS))
            elif kind == "damaged":
                changes = [{"position": event.position + 1}, {"n": n + 1}, {"parents": (7,) * len(event.parents)}]
                event = replace(event, **draw(st.sampled_from(changes)))  # type: ignore[arg-type]
        events.append(event)
        log.apply(event)
    return events


def common_beginning(sequences: list[tuple[int, ...]]) -> list[int]:
    """The plain way."""
    longest = [*sequences[0]]
    while any(list(one[: len(longest)]) != longest for one in sequences):
        longest.pop()
    return longest


def check_certainty(log: LogFold) -> None:
    """Open choices have exactly what all agree on that may still be among the n best."""
    for serial, beams in log.beams.items():
        everyone = [one.tokens for one in (*beams.live, *beams.kept[: beams.n])]
        for choice in range(beams.n):
            fold = log.get(serial, choice)
            if not fold.end:
                assert fold.tokens == common_beginning(everyone)
            assert len(fold.logprobs) in (0, len(fold.tokens))


@settings(max_examples=300)
@given(logs())
def test_every_step_keeps_the_promises(events: list[LogEvent]) -> None:
    """Tokens only grow, attempts of open choices only rise, the first end stays, and what changed is said."""
    log = LogFold()
    for event in events:
        before = {key: state_of(choice) for key, choice in log.choices.items()}
        beams = log.beams.get(1)
        changed = log.apply(event)
        named = {(1, index) for index, _ in changed}
        assert all(log.choices[1, index] is choice for index, choice in changed)
        for key, choice in log.choices.items():
            old = before.get(key, NOTHING_SAID)
            new = state_of(choice)
            if old["end"]:
                assert new == old, "nothing follows the first end"
            assert new["tokens"][: len(old["tokens"])] == old["tokens"]
            assert new["attempt"] >= old["attempt"]
            if not isinstance(event, BeamEvent):
                assert (new != old) == (key in named)
            elif key not in named:
                assert (new["tokens"], new["end"]) == (old["tokens"], old["end"])
        if isinstance(event, TokenEvent) and beams is not None:
            assert changed == ()
        if beams is not None and 1 in log.beams:
            assert log.beams[1].attempt >= beams.attempt
            if isinstance(event, BeamEvent) and event.attempt != beams.attempt:
                assert log.beams[1] is beams, "a stale attempt, or one not yet fenced in, changes nothing"
        check_certainty(log)


@settings(max_examples=200)
@given(logs(), st.randoms(use_true_random=False))
def test_what_has_counted_counts_once(events: list[LogEvent], rng: random.Random) -> None:
    """A scheduler that is not sure of an append repeats it: whatever counted before changes nothing, however late."""
    log, counted = LogFold(), list[LogEvent]()
    for event in events:
        before = state(log)
        log.apply(event)
        if state(log) != before:
            counted.append(event)
        before = state(log)
        for again in rng.sample(counted, min(3, len(counted))):
            assert log.apply(again) == ()
        assert state(log) == before


@settings(max_examples=200)
@given(logs(), st.data())
def test_a_snapshot_and_the_rest_equal_the_whole(events: list[LogEvent], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    snapshots = list(folded(*events[:cut]).snapshots())
    assert decode_entry(encode_snapshot(snapshots)) == snapshots
    assert state(folded(*snapshots, *events[cut:])) == state(folded(*events))
    # A reader that has seen the start already is not confused by it.
    assert state(folded(*events[:cut], *snapshots, *events[cut:])) == state(folded(*events))


@settings(max_examples=200)
@given(logs())
def test_readers_of_bytes_come_to_the_same(events: list[LogEvent]) -> None:
    log = LogFold()
    for event in events:
        if isinstance(event, BeamEvent):
            data = encode_beams([event])
        elif isinstance(event, FenceEvent):
            data = encode_fences([event])
        else:
            assert isinstance(event, TokenEvent)
            row = OutputRow(RequestId("g", 1), event.choice, event.attempt.n, event.position, event.tokens, event.end)
            data = encode_tokens([row], term=event.attempt.term, executor="e", epoch=1, step=1)
        (read,) = decode_entry(data)
        assert read == event
        log.apply(read)
    assert state(log) == state(folded(*events))


@settings(max_examples=100)
@given(logs())
def test_what_a_fold_gave_away_does_not_change(events: list[LogEvent]) -> None:
    log = LogFold()
    given_away: list[tuple[BeamFold, BeamFold]] = []
    for event in events:
        log.apply(event)
        if 1 in log.beams:
            beams = log.beams[1]
            copy = BeamFold(
                beams.n, beams.attempt, *(tuple(replace(one) for one in side) for side in (beams.live, beams.kept))
            )
            given_away.append((beams, copy))
    assert all(mine == copy for mine, copy in given_away)

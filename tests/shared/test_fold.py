"""The fold: the one meaning of the log, under duplicates, overlaps, gaps, fences and snapshots in any interleaving."""

from __future__ import annotations

import dataclasses
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo_shared.fold import ChoiceEvent, ChoiceFold, FenceEvent, LogFold, SnapshotEvent, TokenEvent
from octavo_shared.ids import NO_ATTEMPT, Attempt
from octavo_shared.records import EndReason, Problem, TokenLogprobs

FIRST, SECOND = Attempt(1, 1), Attempt(2, 1)


def tokens(position: int, *values: int, attempt: Attempt = FIRST, **more: object) -> TokenEvent:
    return TokenEvent(1, 0, attempt, position, values, **more)  # type: ignore[arg-type]


def fence(attempt: Attempt, end: EndReason = EndReason.NONE, **more: object) -> FenceEvent:
    return FenceEvent(1, 0, attempt, end, **more)  # type: ignore[arg-type]


def state(fold: ChoiceFold) -> tuple[object, ...]:
    return tuple(
        tuple(value) if isinstance(value := getattr(fold, name), list) else value for name in ChoiceFold.__slots__
    )


def folded(*events: ChoiceEvent) -> ChoiceFold:
    return LogFold().apply_all(events).get(1, 0)


# --- one rule at a time -----------------------------------------------------------------------------------------------


def test_tokens_follow_each_other() -> None:
    fold = ChoiceFold()
    assert fold.attempt == NO_ATTEMPT
    assert fold.apply(tokens(0, 5, 6))
    assert fold.apply(tokens(2, 7, end=EndReason.STOP, stop_token=7))
    assert (fold.tokens, fold.end, fold.stop_token) == ([5, 6, 7], EndReason.STOP, 7)


@pytest.mark.parametrize(
    "void",
    [
        tokens(0, 5),
        tokens(0, 5, 6),
        tokens(1, 6),
        tokens(2),
        tokens(3, 9),
        tokens(3, end=EndReason.STOP),
        tokens(1, end=EndReason.STOP),
        tokens(2, 9, attempt=SECOND),
        tokens(0, 9, attempt=SECOND),
        tokens(2, 9, attempt=Attempt(0, 9)),
        tokens(2, 9, attempt=Attempt(1, 2)),
        fence(FIRST),
        fence(Attempt(1, 0), EndReason.ABORT),
        fence(Attempt(0, 9)),
    ],
)
def test_void_events_change_nothing(void: ChoiceEvent) -> None:
    fold = folded(tokens(0, 5, 6))
    before = state(fold)
    assert not fold.apply(void)
    assert state(fold) == before


def test_overlap_is_trimmed_with_its_logprobs() -> None:
    probs = tuple(TokenLogprobs(-float(i), i + 1) for i in range(4))
    fold = folded(tokens(0, 5, 6, logprobs=probs[:2]))
    assert fold.apply(tokens(1, 6, 7, 8, logprobs=probs[1:]))
    assert (fold.tokens, fold.logprobs) == ([5, 6, 7, 8], list(probs))


def test_an_end_may_come_with_an_overlap_or_without_a_token() -> None:
    assert folded(tokens(0, 5, 6), tokens(0, 5, 6, end=EndReason.LENGTH)).end is EndReason.LENGTH
    assert folded(tokens(0, 5, 6), tokens(2, end=EndReason.LENGTH)).end is EndReason.LENGTH
    assert folded(tokens(0, end=EndReason.ERROR, problem=Problem("p"))).problem == Problem("p")


def test_the_first_attempt_speaks_at_position_zero_only() -> None:
    fold = ChoiceFold()
    assert not fold.apply(tokens(1, 5))
    assert fold.attempt == NO_ATTEMPT
    assert fold.apply(tokens(0, 5, attempt=SECOND))
    assert not fold.apply(tokens(1, 6, attempt=FIRST))
    assert fold.attempt == SECOND


def test_a_fence_silences_the_attempts_before_it() -> None:
    fold = folded(tokens(0, 5), fence(SECOND), tokens(1, 6), tokens(1, 7, attempt=SECOND))
    assert (fold.tokens, fold.attempt) == ([5, 7], SECOND)


def test_attempts_are_ordered_by_term_then_count() -> None:
    fold = folded(fence(Attempt(2, 5)))
    for lower in (Attempt(1, 99), Attempt(2, 4), Attempt(2, 5)):
        assert not fold.apply(fence(lower))
    assert fold.apply(fence(Attempt(2, 6)))
    assert fold.apply(fence(Attempt(3, 0)))


@pytest.mark.parametrize("end", [tokens(1, end=EndReason.STOP), fence(SECOND, EndReason.ABORT, problem=Problem("x"))])
def test_nothing_follows_the_first_end(end: ChoiceEvent) -> None:
    fold = folded(tokens(0, 5), end)
    before = state(fold)
    for late in (
        tokens(1, 6),
        tokens(1, 6, attempt=SECOND),
        fence(Attempt(9, 9)),
        fence(Attempt(9, 9), EndReason.STOP),
    ):
        assert not fold.apply(late)
    assert state(fold) == before


def test_prompt_logprobs_are_taken_once() -> None:
    first, again = (TokenLogprobs(-1.0, 1),), (TokenLogprobs(-2.0, 2),)
    fold = folded(tokens(0, 5, prompt_logprobs=first), tokens(0, 5, 6, prompt_logprobs=again))
    assert fold.prompt_logprobs == first


def test_cached_tokens_are_those_of_the_first_row_that_counts() -> None:
    fold = folded(tokens(0, 5, cached_tokens=16), tokens(0, 5, 6, cached_tokens=32), tokens(2, 7, cached_tokens=48))
    assert (fold.tokens, fold.cached_tokens) == ([5, 6, 7], 16)
    assert folded(tokens(0, 5), tokens(0, 5, 6, cached_tokens=32)).cached_tokens == 0
    silenced = folded(fence(SECOND), tokens(0, 5, cached_tokens=16), tokens(0, 5, attempt=SECOND, cached_tokens=32))
    assert silenced.cached_tokens == 32


def test_choices_and_requests_are_kept_apart() -> None:
    log = LogFold()
    for serial in (1, 2):
        for choice in (0, 1):
            changed = log.apply(TokenEvent(serial, choice, FIRST, 0, (serial * 10 + choice,)))
            ((number, fold),) = changed
            assert number == choice
            assert fold is log.get(serial, choice)
    assert [log.get(s, c).tokens for s in (1, 2) for c in (0, 1)] == [[10], [11], [20], [21]]
    log.forget(1)
    assert sorted(log.choices) == [(2, 0), (2, 1)]
    assert log.get(1, 0).tokens == []
    assert log.apply(TokenEvent(2, 0, FIRST, 0, (20,))) == ()


def test_a_reader_of_one_request_is_not_bothered_with_others() -> None:
    log = LogFold(only=2)
    assert log.apply(tokens(0, 5)) == ()
    assert log.choices == {}
    assert log.apply(TokenEvent(2, 0, FIRST, 0, (5,))) == ((0, log.get(2, 0)),)


# --- properties -------------------------------------------------------------------------------------------------------

ATTEMPTS = st.builds(Attempt, st.integers(0, 3), st.integers(0, 2))
ENDS = st.sampled_from([EndReason.NONE] * 5 + list(EndReason)[1:])
PROBS = st.builds(TokenLogprobs, st.floats(-9, 0, width=32), st.integers(1, 9))
PROBLEMS = st.none() | st.builds(Problem, st.text(max_size=3))


@st.composite
def token_events(draw: st.DrawFn) -> TokenEvent:
    values = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    asked = draw(st.booleans())
    return TokenEvent(
        serial=1,
        choice=0,
        attempt=draw(ATTEMPTS.filter(lambda attempt: attempt > NO_ATTEMPT)),
        position=draw(st.integers(0, 6)),
        tokens=values,
        end=draw(ENDS),
        stop_token=draw(st.integers(-1, 5)),
        logprobs=tuple(draw(PROBS) for _ in values) if asked else None,
        prompt_logprobs=draw(st.none() | st.tuples(PROBS)),
        problem=draw(PROBLEMS),
        cached_tokens=draw(st.integers(0, 9)),
    )


FENCES = st.builds(FenceEvent, st.just(1), st.just(0), ATTEMPTS, ENDS, PROBLEMS)
EVENTS = st.lists(st.one_of(token_events(), token_events(), FENCES), max_size=25)


@settings(max_examples=200)
@given(EVENTS)
def test_every_step_keeps_the_promises(events: list[ChoiceEvent]) -> None:
    """Tokens only grow, attempts only rise, the first end stays, and True is said iff something changed."""
    fold = ChoiceFold()
    for event in events:
        before = state(fold)
        known, attempt, end = list(fold.tokens), fold.attempt, fold.end
        changed = fold.apply(event)
        assert changed == (state(fold) != before)
        assert fold.tokens[: len(known)] == known
        assert fold.attempt >= attempt or attempt == NO_ATTEMPT
        if end:
            assert state(fold) == before
        if isinstance(event, TokenEvent) and attempt not in (NO_ATTEMPT, event.attempt):
            assert not changed, "a stale attempt, or one not yet fenced in, changes nothing"
        if isinstance(event, TokenEvent) and event.position > len(known):
            assert not changed, "a gap is void"
        if isinstance(event, FenceEvent):
            assert fold.tokens == known
            assert changed == (not end and event.attempt > attempt)


@settings(max_examples=200)
@given(EVENTS, st.randoms(use_true_random=False))
def test_what_has_counted_counts_once(events: list[ChoiceEvent], rng: random.Random) -> None:
    """An outbox that is not sure of an append repeats it: whatever counted before changes nothing, however late."""
    fold, counted = ChoiceFold(), []
    for event in events:
        if fold.apply(event):
            counted.append(event)
        before = state(fold)
        for again in rng.sample(counted, min(3, len(counted))):
            assert not fold.apply(again)
        assert state(fold) == before


@settings(max_examples=200)
@given(EVENTS, st.data())
def test_a_snapshot_and_the_rest_equal_the_whole(events: list[ChoiceEvent], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    snapshot = folded(*events[:cut]).snapshot(1, 0)
    assert state(folded(snapshot, *events[cut:])) == state(folded(*events))
    # A reader that has seen the start already is not confused by it.
    assert state(folded(*events[:cut], snapshot, *events[cut:])) == state(folded(*events))
    assert not folded(*events[:cut]).apply(snapshot)


def test_a_snapshot_replaces_everything_for_a_late_reader() -> None:
    ended = SnapshotEvent(1, 0, SECOND, (5, 6), EndReason.STOP, 6, (TokenLogprobs(-1.0, 1),) * 2, None, None, 3)
    fold = ChoiceFold()
    assert fold.apply(ended)
    assert fold.snapshot(1, 0) == ended
    assert not fold.apply(tokens(2, 7, attempt=SECOND))


def _truth(length: int) -> list[int]:
    """What the choice's outputs are: sampling is a function of position alone (rule L10)."""
    return [(7 * position + 3) % 50 for position in range(length)]


@st.composite
def two_attempts(draw: st.DrawFn) -> tuple[list[ChoiceEvent], int]:
    """Two executors append for one choice; each may repeat itself; a fence for the second stands somewhere.

    The second starts from the fold at its own fence, so its events are made once the place of the fence is known.
    """
    length = draw(st.integers(1, 8))
    truth = _truth(length)

    def appends(attempt: Attempt, start: int) -> list[ChoiceEvent]:
        events: list[ChoiceEvent] = []
        position = start
        while position < length:
            count = draw(st.integers(1, 3))
            stop = min(position + count, length)
            back = draw(st.integers(0, min(2, position - start)))
            end = EndReason.LENGTH if stop == length else EndReason.NONE
            events.append(tokens(position - back, *truth[position - back : stop], attempt=attempt, end=end))
            if draw(st.booleans()):
                events.append(events[-1])
            position = stop
        return events

    first = appends(FIRST, 0)
    cut = draw(st.integers(0, len(first)))
    log: list[ChoiceEvent] = [*first[:cut], fence(SECOND)]
    second = appends(SECOND, len(folded(*log).tokens)) if not folded(*log).end else []
    rest = first[cut:] + draw(st.sampled_from([[], [fence(SECOND)], [fence(FIRST)], [fence(FIRST, EndReason.ABORT)]]))
    while rest or second:
        source = rest if rest and (not second or draw(st.booleans())) else second
        log.append(source.pop(0))
    return log, length


@settings(max_examples=200)
@given(two_attempts())
def test_two_attempts_in_any_interleaving_tell_one_story(case: tuple[list[ChoiceEvent], int]) -> None:
    log, length = case
    truth = _truth(length)
    fold, ends = ChoiceFold(), 0
    for event in log:
        had_end = fold.end
        fold.apply(event)
        ends += bool(fold.end) and not had_end
        assert fold.tokens == truth[: len(fold.tokens)]
    assert (fold.tokens, fold.end, ends) == (truth, EndReason.LENGTH, 1)


@given(EVENTS)
def test_events_are_never_changed(events: list[ChoiceEvent]) -> None:
    copies = [dataclasses.replace(event) for event in events]
    folded(*events)
    assert events == copies

"""The log's protocol for beam search, explored exhaustively: one request, two schedulers, appends that are repeated.

Beam steps are written by schedulers (rule L12), so it is a scheduler itself that may not know that it has been replaced. The
first one logs the steps of its search. The second takes over: it fences the request's choices in one entry (all, or just one:
that is enough), reads the log and goes on from the search as it stands at that fence, in its own way: the two extend
different hypotheses, and each names its tokens after itself. Either may be unsure of an append and repeat it, late. The first
may still try to end a choice, or all, by a fence of its own attempt. Every interleaving is run.

What must hold of the final log, for a reader of all of it and for one that reads on from a snapshot at any point: no token is
taken back; every token of every choice was made from exactly those before it; every choice has one end.

With the rules of the fold the promise holds; with any one of them taken away it breaks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from octavo_shared.fold import Changed, FenceEvent, LogEvent, LogFold, SnapshotEvent
from octavo_shared.fold_beams import BeamEnd, BeamEvent, BeamFold
from octavo_shared.ids import Attempt
from octavo_shared.records import EndReason

CHOICES = 2
LENGTH = 3
OLD, NEW = Attempt(1, 1), Attempt(2, 1)
# One append: events that stand in one entry, so that nothing comes between them.
Entry = tuple[LogEvent, ...]
Story = tuple[int, ...]


class Tokens:
    """Numbers for (maker, everything before, which of its continuations): equal numbers mean equal origin."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Story, int], int] = {}
        self.origin: dict[int, Story] = {}

    def made_by(self, term: int, before: Story, which: int) -> int:
        number = self._numbers.setdefault((term, before, which), len(self._numbers))
        self.origin[number] = before
        return number


class NoCurrentAttempt(LogFold):
    """Without the rule that a beam step counts only if its attempt is the current one."""

    def _apply_beams(self, event: BeamEvent) -> Changed:
        if event.serial in self.beams:
            self.beams[event.serial] = replace(self.beams[event.serial], attempt=event.attempt)
        return super()._apply_beams(event)


class FenceForOneChoice(LogFold):
    """Without the rule that a fence for any choice is for the search: only one for the first choice is."""

    def _follow(self, event: FenceEvent | SnapshotEvent, counted: bool) -> None:
        super()._follow(event, counted and event.choice == 0)


class EndForAll(LogFold):
    """Without the rule that a fence with an end leaves the search to its attempt: it silences the search."""

    def _follow(self, event: FenceEvent | SnapshotEvent, counted: bool) -> None:
        super()._follow(event, counted)
        if isinstance(event, FenceEvent) and counted and event.end and event.serial in self.beams:
            self.beams[event.serial] = replace(self.beams[event.serial], attempt=event.attempt)


class NoPosition(LogFold):
    """Without the rule that a step follows only at its position."""

    def _apply_beams(self, event: BeamEvent) -> Changed:
        beams = self.beams.get(event.serial)
        if beams is not None and event.position < beams.position:
            event = replace(event, position=beams.position)
        return super()._apply_beams(event)


class ForgetfulSnapshot(LogFold):
    """Without the search in snapshots."""

    def snapshots(self) -> Iterator[SnapshotEvent]:
        for (serial, index), choice in self.choices.items():
            yield choice.snapshot(serial, index)


def search(state: BeamFold, tokens: Tokens) -> list[Entry]:
    """What a scheduler logs that goes on from ``state``, under the attempt there.

    Each step extends one hypothesis in two ways (the first scheduler the first one, the second the last one), and one ends
    on the way. The last step ends all.
    """
    entries: list[Entry] = []
    attempt = state.attempt
    while state.live:
        chosen = 0 if attempt == OLD else len(state.live) - 1
        story = state.live[chosen].tokens
        made = [tokens.made_by(attempt.term, story, which) for which in range(3)]
        is_last = state.position == LENGTH - 1
        ended = made[:2] if is_last else made[2:] if state.position == 1 else []
        finished = tuple(BeamEnd(chosen, token, -1.0, EndReason.STOP) for token in ended)
        event = BeamEvent(
            serial=1,
            attempt=attempt,
            position=state.position,
            n=CHOICES,
            parents=() if is_last else (chosen, chosen),
            tokens=() if is_last else tuple(made[:2]),
            scores=() if is_last else (-1.0, -2.0),
            finished=finished,
            ranking=tuple(range(len(state.kept) + len(finished))) if finished else (),
            end=EndReason.LENGTH if is_last else EndReason.NONE,
        )
        entries.append((event,))
        after = state.after(event)
        assert after is not None
        state = after
    return entries


def interleavings(first: list[Entry], second: list[Entry]) -> Iterator[list[Entry]]:
    if not first or not second:
        yield first + second
        return
    for tail in interleavings(first[1:], second):
        yield [first[0], *tail]
    for tail in interleavings(first, second[1:]):
        yield [second[0], *tail]


def with_retry(log: list[Entry], again: Entry | None, start: int) -> Iterator[list[Entry]]:
    """``log`` with an entry repeated at every place from ``start`` on, if there is one to repeat."""
    if again is None:
        yield log
        return
    for at in range(start, len(log) + 1):
        yield [*log[:at], again, *log[at:]]


def worlds(fold: Callable[[], LogFold], tokens: Tokens) -> Iterator[list[Entry]]:
    """Every log the protocol can bring about, when its parties read the log through ``fold``."""
    old = search(BeamFold(CHOICES, OLD), tokens)
    ended = Attempt(OLD.term, OLD.n + 1)
    abort_one: Entry = (FenceEvent(1, 0, ended, EndReason.ABORT),)
    abort_all: Entry = tuple(FenceEvent(1, choice, ended, EndReason.ABORT) for choice in range(CHOICES))
    every_choice: Entry = tuple(FenceEvent(1, choice, NEW) for choice in range(CHOICES))
    for before, fences, aborted in itertools.product(
        range(len(old), -1, -1), [every_choice[1:], every_choice], [None, abort_one]
    ):
        log = [*old[:before], *([aborted] if aborted else []), fences]
        state = fold().apply_all(itertools.chain(*log))
        still_open = [choice for choice in range(CHOICES) if not state.get(1, choice).end]
        begin = state.beams.get(1) or BeamFold(CHOICES, NEW)
        new = search(replace(begin, attempt=NEW), tokens) if still_open else []
        # It may be dead, or have all of this still to say.
        rest_of_old = [
            [],
            *(old[before:] + words for words in ([], [abort_one], [abort_all], [(FenceEvent(1, 1, OLD),)])),
        ]
        for late in rest_of_old:
            for again in [None, fences, *new[:2], *old[:before][-1:]]:
                for rest in interleavings(late, new):
                    start = len(log) + (rest.index(again) + 1 if again in rest else 0)
                    yield from with_retry([*log, *rest], again, start)


def view(log: LogFold) -> object:
    """All that a fold knows: readers of the same view go on alike, whatever comes."""
    choices = [log.get(1, choice) for choice in range(CHOICES)]
    return [(list(one.tokens), one.end, one.attempt) for one in choices], dict(log.beams)


def faults(fold: Callable[[], LogFold]) -> Iterator[str]:
    """What is wrong in any world."""
    tokens = Tokens()
    for entries in worlds(fold, tokens):
        log, ends = fold(), [0] * CHOICES
        for event in [None, *itertools.chain(*entries)]:
            before = [(list(log.get(1, choice).tokens), log.get(1, choice).end) for choice in range(CHOICES)]
            if event is not None:
                log.apply(event)
            for choice, (known, end) in enumerate(before):
                state = log.get(1, choice)
                ends[choice] += bool(state.end) and not end
                if state.tokens[: len(known)] != known:
                    yield "a token that was read is taken back"
            if view(fold().apply_all(log.snapshots())) != view(log):
                yield "two readers disagree"
        if ends != [1] * CHOICES:
            yield f"ends: {ends}"
        for choice in range(CHOICES):
            told = log.get(1, choice).tokens
            if any(tokens.origin[token] != tuple(told[:at]) for at, token in enumerate(told)):
                yield "a token was made from other tokens than those before it"


def test_the_rules_keep_the_promise_in_every_interleaving() -> None:
    assert not list(faults(LogFold))
    assert sum(1 for _ in worlds(LogFold, Tokens())) > 10_000


@pytest.mark.parametrize("fold", [NoCurrentAttempt, FenceForOneChoice, EndForAll, NoPosition, ForgetfulSnapshot])
def test_without_a_rule_it_breaks(fold: type[LogFold]) -> None:
    """If this fails, the model above no longer tests what it says."""
    assert next(faults(fold), None) is not None


def test_the_model_sees_choices_grow_and_part() -> None:
    log = LogFold()
    log.apply_all(itertools.chain(*search(BeamFold(CHOICES, OLD), Tokens())[:2]))
    assert len(log.get(1, 0).tokens) == 1
    log.apply_all(itertools.chain(*search(log.beams[1], Tokens())))
    assert log.get(1, 0).tokens != log.get(1, 1).tokens

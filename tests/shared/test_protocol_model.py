"""A small model of the log's protocol, explored exhaustively: one request, two schedulers, an ambiguous fence retry.

The first scheduler's executor appends tokens. A second scheduler takes over: it appends a fence for its attempt, reads the
log and starts its own executor from the fold at that fence. Its append may be ambiguous (it never hears that it
succeeded), and then it appends the fence once more, at any time later. The old scheduler, not knowing, may still try to
end the request with a fence of its own attempt. Every interleaving is run.

What must hold of the final log, for a reader that reads it whole and for one that reads on from a snapshot at any point:
the tokens are a prefix-consistent story in which every token was made from exactly the tokens before it, and there is one
end. Executors here are *not* deterministic: each names its tokens after itself, so mixing shows.

With the rules of the fold the promise holds; with either half of its fence rule taken away it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from octavo_shared.fold import ChoiceFold, FenceEvent, LogEvent, SnapshotEvent, TokenEvent
from octavo_shared.ids import NO_ATTEMPT, Attempt
from octavo_shared.records import EndReason

LENGTH = 3
OLD, NEW = Attempt(1, 1), Attempt(2, 1)

# A token says who made it and from which tokens: (attempt's term, tokens before), numbered.
Story = tuple[int, ...]


class Tokens:
    """Numbers for (maker, everything before): equal numbers mean equal origin."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Story], int] = {}
        self.origin: dict[int, tuple[int, Story]] = {}

    def made_by(self, term: int, before: Story) -> int:
        number = self._numbers.setdefault((term, before), len(self._numbers))
        self.origin[number] = (term, before)
        return number


class NoGreaterFence(ChoiceFold):
    """Without the rule that a fence acts only if its attempt is greater."""

    def _apply_fence(self, event: FenceEvent) -> bool:
        if self.end:
            return False
        self.attempt = event.attempt
        if event.end:
            self.end = event.end
        return True


class NoCurrentAttempt(ChoiceFold):
    """Without the rule that a token event counts only if its attempt is the current one."""

    def _apply_tokens(self, event: TokenEvent) -> bool:
        attempt, self.attempt = self.attempt, event.attempt
        changed = super()._apply_tokens(event)
        self.attempt = max(attempt, event.attempt)
        return changed


def outputs(term: Attempt, start: Story, tokens: Tokens) -> list[LogEvent]:
    """What an executor appends that starts from ``start``: one token per step, the last one with the end."""
    events: list[LogEvent] = []
    story = start
    while len(story) < LENGTH:
        token = tokens.made_by(term.term, story)
        end = EndReason.LENGTH if len(story) + 1 == LENGTH else EndReason.NONE
        events.append(TokenEvent(1, 0, term, len(story), (token,), end))
        story = (*story, token)
    return events


def interleavings(first: list[LogEvent], second: list[LogEvent]) -> Iterator[list[LogEvent]]:
    if not first or not second:
        yield first + second
        return
    for head, rest in ((first, (first[1:], second)), (second, (first, second[1:]))):
        for tail in interleavings(*rest):
            yield [head[0], *tail]


def worlds(fold: Callable[[], ChoiceFold], tokens: Tokens) -> Iterator[list[LogEvent]]:
    """Every log the protocol can bring about, when its parties read the log through ``fold``."""
    old = outputs(OLD, (), tokens)
    stale: list[list[LogEvent]] = [
        [],
        [FenceEvent(1, 0, OLD)],
        [FenceEvent(1, 0, OLD, EndReason.ABORT)],
    ]
    for before in range(len(old) + 1):
        log: list[LogEvent] = [*old[:before], FenceEvent(1, 0, NEW)]
        state = fold()
        for event in log:
            state.apply(event)
        # A new attempt starts from the fold at its own fence, and only if it is still current there.
        starts = not state.end and state.attempt == NEW
        new = outputs(NEW, tuple(state.tokens), tokens) if starts else []
        for last_words in stale:
            for retry in ([], [FenceEvent(1, 0, NEW)]):
                # The old executor's outbox repeats its last append, and goes on where it was.
                for late in (old[before:], old[max(0, before - 1) :]):
                    for rest in interleavings(late + last_words, new):
                        for at in range(len(rest) + 1):
                            yield [*log, *rest[:at], *retry, *rest[at:]]
                            if not retry:
                                break


def read(fold: Callable[[], ChoiceFold], log: list[LogEvent]) -> tuple[ChoiceFold, int]:
    """The state a reader comes to, and how many ends it saw on the way."""
    state, ends = fold(), 0
    for event in log:
        ended = bool(state.end)
        known = list(state.tokens)
        state.apply(event)
        assert state.tokens[: len(known)] == known, "a token that was read is taken back"
        ends += bool(state.end) and not ended
    return state, ends


def faults(fold: Callable[[], ChoiceFold]) -> Iterator[str]:
    """What is wrong in any world."""
    tokens = Tokens()
    for log in worlds(fold, tokens):
        state, ends = read(fold, log)
        if ends != 1:
            yield f"{ends} ends"
        story: Story = ()
        for token in state.tokens:
            if tokens.origin[token][1] != story:
                yield "a token was made from other tokens than those before it"
                break
            story = (*story, token)
        for cut in range(len(log)):
            early = fold()
            for event in log[:cut]:
                early.apply(event)
            late = fold()
            late.apply(early.snapshot(1, 0))
            for event in log[cut:]:
                late.apply(event)
            if (late.tokens, late.end) != (state.tokens, state.end):
                yield "two readers disagree"


def test_the_rules_keep_the_promise_in_every_interleaving() -> None:
    assert not list(faults(ChoiceFold))
    assert sum(1 for _ in worlds(ChoiceFold, Tokens())) > 500


@pytest.mark.parametrize("fold", [NoGreaterFence, NoCurrentAttempt])
def test_without_the_fence_rule_it_breaks(fold: type[ChoiceFold]) -> None:
    """If this fails, the model above no longer tests what it says."""
    found = set(faults(fold))
    assert found & {"a token was made from other tokens than those before it", "0 ends"}


def test_the_model_starts_from_nothing() -> None:
    assert ChoiceFold().attempt == NO_ATTEMPT
    assert isinstance(ChoiceFold().snapshot(1, 0), SnapshotEvent)

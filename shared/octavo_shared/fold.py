"""The one meaning of the log (rule L1): a pure fold from events to the state of each choice.

Gateways, schedulers, resume and tests all read the log through this module and through nothing else. It has no clock, no
socket and no randomness: the same events in the same order give the same state to every reader.

The rules, per choice:

* A token event counts iff its attempt is the current one and its position is the next one; what overlaps tokens already
  there is trimmed, and a gap makes the event void. A choice that has no attempt yet takes the first one that speaks at
  position 0.
* A fence counts iff its attempt is greater than the current one; it makes that attempt current, and may end the choice.
* Nothing follows the first end.
* A snapshot is the state at some earlier entry, and whatever came between is told again behind it. So for a reader who is
  further than that it counts for nothing.

The choices of a request that is answered by beam search have one story, told by the scheduler step by step
(``fold_beams``), until they end:

* A beam step counts iff its attempt is the search's current one and it follows the state before it; there is no overlap to
  trim. A search that has none yet takes the greatest attempt of its open choices; where these have none either, all take
  the first one that speaks at position 0. After a step every open choice has the tokens that are certain; the last step
  gives each its own hypothesis and its end.
* Whether a fence counts depends, as ever, on those that named the same choice before. One without an end that counts is
  for the search: its attempt becomes the current one if it is greater. One with an end ends the choice that it names and
  nothing else: the search goes on for the others, under the attempt it had, and the hypothesis that would have been the
  choice's goes to nobody. (So an end that was decided before a resumption, but comes after its fences, still counts: these
  named the other choices only.)
* Tokens of executors count for nothing once a search has begun, nor do beam steps where tokens were before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from octavo_shared.fold_beams import BeamEvent, BeamFold, Hypothesis
from octavo_shared.ids import NO_ATTEMPT, Attempt
from octavo_shared.records import EndReason, Problem, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An executor says: from output position ``position`` on, these tokens; then perhaps an end."""

    serial: int
    choice: int
    attempt: Attempt
    position: int
    tokens: tuple[int, ...]
    end: EndReason = EndReason.NONE
    stop_token: int = -1
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    problem: Problem | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FenceEvent:
    """A scheduler says: only ``attempt`` may speak from here on; with an end, nobody may."""

    serial: int
    choice: int
    attempt: Attempt
    end: EndReason = EndReason.NONE
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """The owner of the log says: this is the whole state of the choice; what came before has been trimmed away.

    ``beams`` is the request's beam search if that goes on; one of its open choices carries it.
    """

    serial: int
    choice: int
    attempt: Attempt
    tokens: tuple[int, ...]
    end: EndReason = EndReason.NONE
    stop_token: int = -1
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    problem: Problem | None = None
    cached_tokens: int = 0
    beams: BeamFold | None = None


ChoiceEvent = TokenEvent | FenceEvent | SnapshotEvent
LogEvent = ChoiceEvent | BeamEvent


class ChoiceFold:
    """The state of one choice: the tokens that count so far, who may speak, and how it ended."""

    __slots__ = ("attempt", "cached_tokens", "end", "logprobs", "problem", "prompt_logprobs", "stop_token", "tokens")

    def __init__(self) -> None:
        self.attempt: Attempt = NO_ATTEMPT
        self.tokens: list[int] = []
        # Parallel to tokens; stays empty when the request did not ask for any.
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        # Prompt tokens that the first attempt to say anything found in the prefix cache.
        self.cached_tokens: int = 0
        self.end: EndReason = EndReason.NONE
        self.stop_token: int = -1
        self.problem: Problem | None = None

    def apply(self, event: ChoiceEvent) -> bool:
        """Take one event in; True iff it changed what a reader sees (tokens or end) or who may speak."""
        if isinstance(event, TokenEvent):
            return self._apply_tokens(event)
        if isinstance(event, FenceEvent):
            return self._apply_fence(event)
        return self._apply_snapshot(event)

    def _apply_tokens(self, event: TokenEvent) -> bool:
        if self.end or (event.attempt != self.attempt and (self.attempt != NO_ATTEMPT or event.position != 0)):
            return False
        known = len(self.tokens) - event.position
        if known < 0 or known > len(event.tokens):
            return False
        fresh = event.tokens[known:] if known else event.tokens
        if not fresh and not event.end:
            return False
        self.attempt = event.attempt
        if event.cached_tokens and not self.tokens:
            self.cached_tokens = event.cached_tokens
        self.tokens.extend(fresh)
        if event.logprobs is not None:
            self.logprobs.extend(event.logprobs[known:])
        if event.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.end:
            self.end, self.stop_token, self.problem = event.end, event.stop_token, event.problem
        return True

    def _apply_fence(self, event: FenceEvent) -> bool:
        if self.end or event.attempt <= self.attempt:
            return False
        self.attempt = event.attempt
        if event.end:
            self.end, self.problem = event.end, event.problem
        return True

    def _apply_snapshot(self, event: SnapshotEvent) -> bool:
        before = (self.attempt, len(self.tokens), self.end)
        if self.end or (event.attempt, len(event.tokens)) < before[:2]:
            return False
        self.attempt = event.attempt
        self.tokens = list(event.tokens)
        self.logprobs = list(event.logprobs or ())
        self.prompt_logprobs, self.cached_tokens = event.prompt_logprobs, event.cached_tokens
        self.end, self.stop_token, self.problem = event.end, event.stop_token, event.problem
        return before != (self.attempt, len(self.tokens), self.end)

    def grow(self, hypothesis: Hypothesis, length: int) -> bool:
        """Take the tokens of a hypothesis that starts with those known, up to ``length``; True iff that is any."""
        known = len(self.tokens)
        self.tokens.extend(hypothesis.tokens[known:length])
        self.logprobs.extend(hypothesis.logprobs[known:length])
        return length > known

    def snapshot(self, serial: int, choice: int) -> SnapshotEvent:
        """This state as an event that reproduces it."""
        return SnapshotEvent(
            serial=serial,
            choice=choice,
            attempt=self.attempt,
            tokens=tuple(self.tokens),
            end=self.end,
            stop_token=self.stop_token,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            problem=self.problem,
            cached_tokens=self.cached_tokens,
        )


# The choices that an event changed, by their number.
Changed = tuple[tuple[int, ChoiceFold], ...]
NOTHING: Changed = ()


class LogFold:
    """The fold of a whole log: one ``ChoiceFold`` per (serial, choice) that has not been forgotten.

    ``beams`` has the beam searches that go on, by serial. Readers of a single request pass its serial as ``only``; events
    of all others then cost nothing.
    """

    def __init__(self, only: int | None = None) -> None:
        self.choices: dict[tuple[int, int], ChoiceFold] = {}
        self.beams: dict[int, BeamFold] = {}
        self._only = only

    def apply(self, event: LogEvent) -> Changed:
        """Take one event in and return the choices in which a reader sees a change (see ``ChoiceFold.apply``)."""
        serial = event.serial
        if self._only is not None and serial != self._only:
            return NOTHING
        if isinstance(event, BeamEvent):
            return self._apply_beams(event)
        key = (serial, event.choice)
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[key] = ChoiceFold()
        if isinstance(event, TokenEvent):
            return ((event.choice, choice),) if serial not in self.beams and choice.apply(event) else NOTHING
        changed = ((event.choice, choice),) if choice.apply(event) else NOTHING
        if isinstance(event, SnapshotEvent) and event.beams is not None:
            known, told = self.beams.get(serial), event.beams
            if known is None or (known.attempt, known.position) <= (told.attempt, told.position):
                self.beams[serial] = told
        if serial in self.beams:
            self._follow(event, bool(changed))
        return changed

    def _follow(self, event: FenceEvent | SnapshotEvent, counted: bool) -> None:
        """What an event for one choice means for the request's beam search."""
        beams = self.beams[event.serial]
        if all(choice.end for _, choice in self._choices_of(event.serial, beams.n)):
            del self.beams[event.serial]
        elif isinstance(event, FenceEvent) and counted and not event.end and event.attempt > beams.attempt:
            self.beams[event.serial] = replace(beams, attempt=event.attempt)

    def _apply_beams(self, event: BeamEvent) -> Changed:
        serial, beams = event.serial, self.beams.get(event.serial)
        choices = self._choices_of(serial, event.n)
        still_open = [pair for pair in choices if not pair[1].end]
        attempt = max((choice.attempt for _, choice in still_open), default=NO_ATTEMPT)
        if beams is None:
            if not still_open or any(choice.tokens for _, choice in still_open):
                return NOTHING
            beams = BeamFold(event.n, event.attempt if attempt == NO_ATTEMPT else attempt)
        after = beams.after(event)
        if after is None:
            return NOTHING
        if event.position == 0:
            for index, choice in choices:
                self.choices[serial, index] = choice
            for _, choice in still_open:
                choice.cached_tokens = event.cached_tokens
                if attempt == NO_ATTEMPT:
                    choice.attempt = event.attempt
        if event.end:
            return self._end_beams(event, after, still_open)
        self.beams[serial] = after
        certain = after.certain(len(still_open[0][1].tokens))
        return tuple([(index, choice) for index, choice in still_open if choice.grow(after.live[0], certain)])

    def _end_beams(self, event: BeamEvent, after: BeamFold, still_open: list[tuple[int, ChoiceFold]]) -> Changed:
        self.beams.pop(event.serial, None)
        for index, choice in still_open:
            choice.end = event.end
            if index < len(after.kept):
                own = after.kept[index]
                choice.grow(own, len(own.tokens))
                choice.end, choice.stop_token = own.end, own.stop_token
        return tuple(still_open)

    def _choices_of(self, serial: int, n: int) -> list[tuple[int, ChoiceFold]]:
        return [(index, self.get(serial, index)) for index in range(n)]

    def apply_all(self, events: Iterable[LogEvent]) -> LogFold:
        """Take many events in, in order; returns itself."""
        for event in events:
            self.apply(event)
        return self

    def get(self, serial: int, choice: int) -> ChoiceFold:
        """The state of a choice; that of a choice nothing was said of yet is the empty one."""
        return self.choices.get((serial, choice)) or ChoiceFold()

    def snapshots(self) -> Iterator[SnapshotEvent]:
        """This state as events that reproduce it; those of one request belong into one entry of the log."""
        beams = dict(self.beams)
        for (serial, index), choice in self.choices.items():
            state = choice.snapshot(serial, index)
            yield state if choice.end or serial not in beams else replace(state, beams=beams.pop(serial))

    def forget(self, serial: int) -> None:
        """Drop every choice of a request whose answer nobody needs any more."""
        self.beams.pop(serial, None)
        for key in [key for key in self.choices if key[0] == serial]:
            del self.choices[key]

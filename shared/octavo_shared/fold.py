"""The one meaning of the log (rule L1): a pure fold from events to the state of each choice.

Gateways, schedulers, resume and tests all read the log through this module and through nothing else. It has no clock, no
socket and no randomness: the same events in the same order give the same state to every reader.

The rules, per choice:

* A token event counts iff its attempt is the current one and its position is the next one; what overlaps tokens already
  there is trimmed, and a gap makes the event void. A choice that has no attempt yet takes the first one that speaks at
  position 0.
* A fence counts iff its attempt is greater than the current one; it makes that attempt current, and may end the choice.
* Nothing follows the first end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """The owner of the log says: this is the whole state of the choice; what came before has been trimmed away."""

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


LogEvent = TokenEvent | FenceEvent | SnapshotEvent


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

    def apply(self, event: LogEvent) -> bool:
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
        self.attempt = event.attempt
        self.tokens = list(event.tokens)
        self.logprobs = list(event.logprobs or ())
        self.prompt_logprobs, self.cached_tokens = event.prompt_logprobs, event.cached_tokens
        self.end, self.stop_token, self.problem = event.end, event.stop_token, event.problem
        return before != (self.attempt, len(self.tokens), self.end)

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


class LogFold:
    """The fold of a whole log: one ``ChoiceFold`` per (serial, choice) that has not been forgotten.

    Readers of a single request pass its serial as ``only``; events of all others then cost nothing.
    """

    def __init__(self, only: int | None = None) -> None:
        self.choices: dict[tuple[int, int], ChoiceFold] = {}
        self._only = only

    def apply(self, event: LogEvent) -> ChoiceFold | None:
        """Take one event in and return the choice it changed, or None when it counted for nothing."""
        if self._only is not None and event.serial != self._only:
            return None
        key = (event.serial, event.choice)
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[key] = ChoiceFold()
        return choice if choice.apply(event) else None

    def apply_all(self, events: Iterable[LogEvent]) -> LogFold:
        """Take many events in, in order; returns itself."""
        for event in events:
            self.apply(event)
        return self

    def get(self, serial: int, choice: int) -> ChoiceFold:
        """The state of a choice; that of a choice nothing was said of yet is the empty one."""
        return self.choices.get((serial, choice)) or ChoiceFold()

    def forget(self, serial: int) -> None:
        """Drop every choice of a request whose answer nobody needs any more."""
        for key in [key for key in self.choices if key[0] == serial]:
            del self.choices[key]

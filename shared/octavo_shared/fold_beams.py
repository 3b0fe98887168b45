"""Beam search in the log: what one step of it says, and the state that the steps add up to. As pure as ``fold``.

A search keeps some live hypotheses (the beams) that all have the same number of tokens, and some that have ended. One step
extends the beams by one token each, drops some, doubles others, and ends some. The scheduler decides and writes a
``BeamEvent`` per step (rule L12); whoever reads the log has the whole state of the search in a ``BeamFold``, which is
immutable: the state after a step is another object.

What a client may be told before the search is over is what *all* hypotheses agree on that can still become one of the n
best: every live one and the n best of those that have ended (one that n others beat already will never be among the n
best). This common beginning only grows, because every later hypothesis descends from those it was taken of.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo_shared.ids import Attempt
from octavo_shared.records import EndReason, TokenLogprobs

# In place of a token: the hypothesis ends as it stands, without a further one.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One sequence of output tokens with its cumulative log-probability (float32); live while ``end`` is NONE.

    ``tokens`` include the stop token, if one ended it. ``logprobs`` are parallel to them, or empty when not asked for.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: EndReason = EndReason.NONE

    @property
    def stop_token(self) -> int:
        """The token that ended it, -1 when none did."""
        return self.tokens[-1] if self.end is EndReason.STOP and self.tokens else NO_TOKEN

    def extended(
        self, token: int, score: float, logprobs: TokenLogprobs | None, end: EndReason = EndReason.NONE
    ) -> Hypothesis:
        """This one and ``token`` (``NO_TOKEN``: only the end)."""
        if token == NO_TOKEN:
            return Hypothesis(self.tokens, score, self.logprobs, end)
        more = self.logprobs if logprobs is None else (*self.logprobs, logprobs)
        return Hypothesis((*self.tokens, token), score, more, end)


# Before the first step there is one live hypothesis: the prompt and nothing else.
ROOT = Hypothesis((), 0.0)


@dataclass(frozen=True, slots=True)
class BeamEnd:
    """A hypothesis that ended in a step: live one number ``parent`` and ``token``, or as it stands (``NO_TOKEN``).

    ``score`` is its cumulative log-probability, ``end`` why it ended.
    """

    parent: int
    token: int
    score: float
    end: EndReason
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class BeamEvent:
    """A scheduler says: one step of the beam search of a request with ``n`` choices.

    ``position`` is how many tokens the live hypotheses have before it. After it, live hypothesis j is ``parents[j]`` of
    those before with ``tokens[j]`` and the cumulative log-probability ``scores[j]`` (float32), best first; ``logprobs``
    are those of ``tokens``, if the request asks for any. ``finished`` ended in this step; if there are any, ``ranking``
    says which ended hypotheses are kept, best first, as indices into those kept before followed by ``finished``.

    With ``end`` nothing is live any more, the search is over and with it every choice: choice i is the hypothesis kept at
    place i and ends as that did; should there be fewer than n, the rest end by ``end`` with what was certain before.

    ``cached_tokens`` (position 0 only): prompt tokens found in the prefix cache.
    """

    serial: int
    attempt: Attempt
    position: int
    n: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    finished: tuple[BeamEnd, ...] = ()
    ranking: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    end: EndReason = EndReason.NONE
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BeamFold:
    """The state of one request's beam search: all that is needed to go on with it, and the attempt that may do so.

    ``live`` hypotheses have the same number of tokens and are never equal; ``kept`` are the best that have ended. Both
    are in order, best first. Once the search is over none is live, and choice i is ``kept[i]``.
    """

    n: int
    attempt: Attempt
    live: tuple[Hypothesis, ...] = (ROOT,)
    kept: tuple[Hypothesis, ...] = ()

    @property
    def position(self) -> int:
        """Output tokens of each live hypothesis."""
        return len(self.live[0].tokens) if self.live else 0

    def after(self, event: BeamEvent) -> BeamFold | None:
        """The state after a step; None when the step does not follow this state (then it counts for nothing)."""
        if event.attempt != self.attempt or event.position != self.position or event.n != self.n:
            return None
        if not self._is_possible(event):
            return None
        pool = self.kept
        if event.finished:
            pool += tuple(self.live[e.parent].extended(e.token, e.score, e.logprobs, e.end) for e in event.finished)
            # Those kept before stay in their order, and go from the end: one that n others beat never rises again.
            before = [index for index in event.ranking if index < len(self.kept)]
            if before != list(range(len(before))) or len(set(event.ranking)) < len(event.ranking):
                return None
            if any(index >= len(pool) for index in event.ranking):
                return None
            pool = tuple(pool[index] for index in event.ranking)
        logprobs = event.logprobs if event.logprobs is not None else (None,) * len(event.tokens)
        columns = zip(event.parents, event.tokens, event.scores, logprobs, strict=True)
        live = tuple(self.live[parent].extended(token, score, own) for parent, token, score, own in columns)
        state = BeamFold(self.n, self.attempt, live, pool)
        return state if state.is_sound else None

    @property
    def is_sound(self) -> bool:
        """Whether this can be the state of a search. Every token has its log-probabilities, or none has."""
        everyone = self.live + self.kept
        return (
            len({len(one.tokens) for one in self.live}) <= 1
            and not any(one.end for one in self.live)
            and all(one.end for one in self.kept)
            and all(len(one.logprobs) in (0, len(one.tokens)) for one in everyone)
            and len({bool(one.logprobs) for one in everyone if one.tokens}) <= 1
        )

    def _is_possible(self, event: BeamEvent) -> bool:
        """Whether a step goes on or is the last one, from live hypotheses that there are, and to ones that differ.

        Hypotheses are told apart by their tokens: two equal ones would have come about in two ways.
        """
        steps = [*zip(event.parents, event.tokens, strict=True), *((e.parent, e.token) for e in event.finished)]
        return (
            bool(event.tokens) != bool(event.end)
            and len(set(steps)) == len(steps)
            and all(0 <= parent < len(self.live) for parent, _ in steps)
            and all(token >= 0 for token in event.tokens)
            and all(e.token >= NO_TOKEN and e.end for e in event.finished)
        )

    def certain(self, known: int) -> int:
        """How many leading tokens every hypothesis has that may still be one of the n best, ``known`` being known to be."""
        candidates = self.live + self.kept[: self.n]
        first, rest = candidates[0].tokens, [one.tokens for one in candidates[1:]]
        limit = min(len(one.tokens) for one in candidates)
        while known < limit and all(tokens[known] == first[known] for tokens in rest):
            known += 1
        return known

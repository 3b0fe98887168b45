"""Beam steps and the state of beam searches as parts of log entries; used by ``entries`` only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo_shared.bounds import MAX_CHOICES
from octavo_shared.codec import (
    MalformedEntryError,
    logprobs_from_proto,
    logprobs_to_proto,
    pack_floats,
    pack_ints,
    unpack,
)
from octavo_shared.fold_beams import NO_TOKEN, BeamEnd, BeamEvent, BeamFold, Hypothesis
from octavo_shared.ids import read_attempt
from octavo_shared.proto import log_pb2
from octavo_shared.records import EndReason, TokenLogprobs


def step_to_proto(event: BeamEvent) -> log_pb2.BeamStep:
    """The wire form of one beam step."""
    ended = event.finished
    message = log_pb2.BeamStep(
        serial=event.serial,
        term=event.attempt.term,
        n=event.attempt.n,
        position=event.position,
        choices=event.n,
        parents=pack_ints(event.parents),
        tokens=pack_ints(event.tokens),
        scores=pack_floats(event.scores),
        ended_parents=pack_ints(end.parent for end in ended),
        ended_tokens=pack_ints(end.token for end in ended),
        ended_scores=pack_floats(end.score for end in ended),
        ended_reasons=pack_ints((end.end for end in ended), "u1"),
        ranking=pack_ints(event.ranking),
        end=log_pb2.EndReason.Name(event.end),  # type: ignore[arg-type]
        cached_tokens=event.cached_tokens,
    )
    if event.logprobs is not None:
        own = [end.logprobs for end in ended if end.logprobs is not None]
        message.logprobs.CopyFrom(logprobs_to_proto([*event.logprobs, *own]))
    return message


def step_from_proto(message: log_pb2.BeamStep) -> BeamEvent:
    """One beam step.

    Raises:
        ValueError: its columns do not fit together.
    """
    if message.position < 0 or not 0 < message.choices <= MAX_CHOICES:
        raise MalformedEntryError(f"a beam step needs a position and from 1 to {MAX_CHOICES} choices")
    tokens = tuple(unpack(message.tokens).tolist())
    ended_tokens = unpack(message.ended_tokens).tolist()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    ended_logprobs: list[TokenLogprobs | None] = [None] * len(ended_tokens)
    if message.HasField("logprobs"):
        known = logprobs_from_proto(message.logprobs)
        logprobs, rest = tuple(known[: len(tokens)]), iter(known[len(tokens) :])
        ended_logprobs = [next(rest, None) if token != NO_TOKEN else None for token in ended_tokens]
        if len(known) != len(tokens) + sum(token != NO_TOKEN for token in ended_tokens):
            raise MalformedEntryError("tokens and their log-probabilities do not agree")
    parents, scores = tuple(unpack(message.parents).tolist()), tuple(unpack(message.scores, "<f4").tolist())
    if not len(parents) == len(tokens) == len(scores):
        raise MalformedEntryError("columns of live hypotheses differ in length")
    columns = zip(
        unpack(message.ended_parents).tolist(),
        ended_tokens,
        unpack(message.ended_scores, "<f4").tolist(),
        (EndReason(reason) for reason in message.ended_reasons),
        ended_logprobs,
        strict=True,
    )
    return BeamEvent(
        serial=message.serial,
        attempt=read_attempt(message.term, message.n),
        position=message.position,
        n=message.choices,
        parents=parents,
        tokens=tokens,
        scores=scores,
        finished=tuple(BeamEnd(*row) for row in columns),
        ranking=tuple(unpack(message.ranking).tolist()),
        logprobs=logprobs,
        end=EndReason(message.end),
        cached_tokens=message.cached_tokens,
    )


def beams_to_proto(beams: BeamFold) -> log_pb2.BeamState:
    """The wire form of a beam search's state; what all its hypotheses start with is told once."""
    everyone = beams.live + beams.kept
    shared = _common_length([one.tokens for one in everyone])
    first = everyone[0]
    message = log_pb2.BeamState(
        choices=beams.n,
        term=beams.attempt.term,
        n=beams.attempt.n,
        shared=pack_ints(first.tokens[:shared]),
        live=(_hypothesis_to_proto(one, shared) for one in beams.live),
        kept=(_hypothesis_to_proto(one, shared) for one in beams.kept),
    )
    # Hypotheses that start alike have the same ancestor there, so its log-probabilities are the same too.
    if first.logprobs:
        message.logprobs.CopyFrom(logprobs_to_proto(first.logprobs[:shared]))
    return message


def beams_from_proto(message: log_pb2.BeamState) -> BeamFold:
    """A beam search's state.

    Raises:
        ValueError: its columns do not fit together, or no search can have such a state.
    """
    shared = tuple(unpack(message.shared).tolist())
    known = _logprobs_of(message, len(shared))
    live, kept = (
        tuple(_hypothesis_from_proto(one, shared, known) for one in side) for side in (message.live, message.kept)
    )
    beams = BeamFold(message.choices, read_attempt(message.term, message.n), live, kept)
    if not live or not beams.is_sound or not 0 < message.choices <= MAX_CHOICES:
        raise MalformedEntryError("the state of a beam search that cannot be")
    return beams


def _hypothesis_to_proto(one: Hypothesis, shared: int) -> log_pb2.Hypothesis:
    message = log_pb2.Hypothesis(
        tokens=pack_ints(one.tokens[shared:]),
        score=one.score,
        end=log_pb2.EndReason.Name(one.end),  # type: ignore[arg-type]
    )
    if one.logprobs:
        message.logprobs.CopyFrom(logprobs_to_proto(one.logprobs[shared:]))
    return message


def _hypothesis_from_proto(
    message: log_pb2.Hypothesis, shared: tuple[int, ...], known: tuple[TokenLogprobs, ...]
) -> Hypothesis:
    own = tuple(unpack(message.tokens).tolist())
    return Hypothesis(shared + own, message.score, known + _logprobs_of(message, len(own)), EndReason(message.end))


def _logprobs_of(message: log_pb2.BeamState | log_pb2.Hypothesis, tokens: int) -> tuple[TokenLogprobs, ...]:
    if not message.HasField("logprobs"):
        return ()
    logprobs = tuple(logprobs_from_proto(message.logprobs))
    if len(logprobs) != tokens:
        raise MalformedEntryError("tokens and their log-probabilities do not agree")
    return logprobs


def _common_length(sequences: Sequence[Iterable[int]]) -> int:
    length = 0
    for column in zip(*sequences, strict=False):
        if any(token != column[0] for token in column):
            break
        length += 1
    return length

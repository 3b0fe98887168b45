"""Log entries, requests and aborts as bytes: the only place where ``log.proto`` and ``request.proto`` are touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from octavo_shared.bounds import MAX_CHOICES, MAX_PROMPTS
from octavo_shared.codec import (
    NO_LOGPROB,
    check_counts,
    logprobs_from_proto,
    logprobs_to_proto,
    pack_ints,
    problem_from_proto,
    problem_to_proto,
    unpack,
)
from octavo_shared.codec import MalformedEntryError as MalformedEntryError
from octavo_shared.entries_beams import beams_from_proto, beams_to_proto, step_from_proto, step_to_proto
from octavo_shared.fold import FenceEvent, LogEvent, SnapshotEvent, TokenEvent
from octavo_shared.fold_beams import BeamEvent
from octavo_shared.ids import NO_ATTEMPT, Attempt, RequestId, read_attempt
from octavo_shared.plan import OutputRow
from octavo_shared.proto import log_pb2, request_pb2
from octavo_shared.records import (
    AbortRecord,
    EarlyStopping,
    EndReason,
    RequestRecord,
    SamplingParams,
)

# By number; cheaper than calling the enumeration.
_ENDS = tuple(EndReason)


# --- requests ---------------------------------------------------------------------------------------------------------


def sampling_to_proto(params: SamplingParams) -> request_pb2.SamplingParams:
    """The wire form of sampling parameters."""
    message = request_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        logit_bias_ids=[token for token, _ in params.logit_bias],
        logit_bias_values=[bias for _, bias in params.logit_bias],
        grammar=params.grammar,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=request_pb2.EarlyStopping.ValueType(params.early_stopping),
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    return message


def sampling_from_proto(message: request_pb2.SamplingParams) -> SamplingParams:
    """The frozen form of sampling parameters.

    Raises:
        ValueError: two columns do not go together, or an enumeration has a number that means nothing.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
        beam_width=message.beam_width,
        length_penalty=message.length_penalty,
        early_stopping=EarlyStopping(message.early_stopping),
    )


def encode_request(record: RequestRecord) -> bytes:
    """A request as it stands in the model stream."""
    return request_pb2.RequestRecord(
        id=str(record.id),
        arrival_us=record.arrival_us,
        prompt=record.prompt.astype("<i4", copy=False).tobytes(),
        sampling=sampling_to_proto(record.sampling),
        n=record.n,
        priority=record.priority,
        tenant=record.tenant,
        cache_salt=record.cache_salt,
        lora=record.lora,
        deadline_us=record.deadline_us,
        traceparent=record.traceparent,
        tracestate=record.tracestate,
        idempotency_key=record.idempotency_key,
        owner_generation=record.owner_generation,
        stop=record.stop,
        include_stop_str_in_output=record.include_stop_str_in_output,
        presentation=record.presentation,
        resume_ttl_ms=record.resume_ttl_ms,
        disconnect_grace_ms=record.disconnect_grace_ms,
        place=record.place,
        places=record.places,
        readmitted=record.readmitted,
        tenant_weight=record.tenant_weight,
    ).SerializeToString()


def decode_request(data: bytes) -> RequestRecord:
    """Read a request from the model stream.

    Raises:
        MalformedEntryError: the bytes are not a request with at least one prompt token and 1 to ``MAX_CHOICES`` choices,
            it wants more beams than that or fewer than it has choices, or it is none of the requests of its answer.
    """
    try:
        message = request_pb2.RequestRecord.FromString(data)
        if not message.prompt or not 0 < message.n <= MAX_CHOICES:
            raise MalformedEntryError(f"a request needs a prompt and from 1 to {MAX_CHOICES} choices")
        beam_width = message.sampling.beam_width
        if beam_width and not message.n <= beam_width <= MAX_CHOICES:
            raise MalformedEntryError(f"a beam search needs from {message.n} (its choices) to {MAX_CHOICES} beams")
        request_id, places = RequestId.parse(message.id), message.places or 1
        if not message.place < places <= MAX_PROMPTS or request_id.serial < message.place:
            raise MalformedEntryError(f"a request is one of 1 to {MAX_PROMPTS} of an answer")
        return RequestRecord(
            id=request_id,
            arrival_us=message.arrival_us,
            prompt=np.frombuffer(message.prompt, "<i4"),
            sampling=sampling_from_proto(message.sampling),
            n=message.n,
            priority=message.priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            lora=message.lora,
            deadline_us=message.deadline_us,
            traceparent=message.traceparent,
            tracestate=message.tracestate,
            idempotency_key=message.idempotency_key,
            owner_generation=message.owner_generation,
            stop=tuple(message.stop),
            include_stop_str_in_output=message.include_stop_str_in_output,
            presentation=message.presentation,
            resume_ttl_ms=message.resume_ttl_ms,
            disconnect_grace_ms=message.disconnect_grace_ms,
            place=message.place,
            places=places,
            readmitted=message.readmitted,
            tenant_weight=message.tenant_weight,
        )
    except (DecodeError, ValueError) as error:
        raise MalformedEntryError(str(error)) from error


def encode_abort(record: AbortRecord) -> bytes:
    """An abort as it stands in the abort stream."""
    return request_pb2.AbortRecord(
        request_id=str(record.request_id),
        choice=record.choice,
        owner_generation=record.owner_generation,
        reason=record.reason,
        new_owner=record.new_owner,
    ).SerializeToString()


def decode_abort(data: bytes) -> AbortRecord:
    """Read an abort.

    Raises:
        MalformedEntryError: the bytes are not an abort.
    """
    try:
        message = request_pb2.AbortRecord.FromString(data)
        return AbortRecord(
            RequestId.parse(message.request_id),
            message.choice,
            message.owner_generation,
            message.reason,
            message.new_owner,
        )
    except (DecodeError, ValueError) as error:
        raise MalformedEntryError(str(error)) from error


# --- the log ----------------------------------------------------------------------------------------------------------


def encode_tokens(rows: Sequence[OutputRow], *, term: int, executor: str, epoch: int, step: int) -> bytes:
    """One step's output for one log. Every row must belong to that log."""
    batch = log_pb2.TokenBatch(
        term=term,
        executor=executor,
        epoch=epoch,
        step=step,
        serials=pack_ints((row.request_id.serial for row in rows), "<u8"),
        choices=pack_ints(row.choice for row in rows),
        attempts=pack_ints((row.attempt for row in rows), "<u4"),
        positions=pack_ints(row.position for row in rows),
        counts=pack_ints(len(row.tokens) for row in rows),
        tokens=pack_ints(token for row in rows for token in row.tokens),
        ends=pack_ints((row.end for row in rows), "u1"),
        stop_tokens=pack_ints(row.stop_token for row in rows),
    )
    if any(row.logprobs is not None for row in rows):
        entries = [
            entry
            for row in rows
            for entry in (row.logprobs if row.logprobs is not None else [NO_LOGPROB] * len(row.tokens))
        ]
        batch.logprobs.CopyFrom(logprobs_to_proto(entries))
    for index, row in enumerate(rows):
        if row.problem is not None or row.prompt_logprobs is not None or row.cached_tokens:
            note = batch.notes.add(row=index, cached_tokens=row.cached_tokens)
            if row.problem is not None:
                note.problem.CopyFrom(problem_to_proto(row.problem))
            if row.prompt_logprobs is not None:
                note.prompt_logprobs.CopyFrom(logprobs_to_proto(row.prompt_logprobs))
    return log_pb2.LogEntry(tokens=batch).SerializeToString()


def encode_fences(fences: Iterable[FenceEvent]) -> bytes:
    """Fences for requests of one log."""
    batch = log_pb2.FenceBatch()
    for fence in fences:
        message = batch.fences.add(
            serial=fence.serial,
            choice=fence.choice,
            term=fence.attempt.term,
            n=fence.attempt.n,
            end=log_pb2.EndReason.Name(fence.end),  # type: ignore[arg-type]
        )
        if fence.problem is not None:
            message.problem.CopyFrom(problem_to_proto(fence.problem))
    return log_pb2.LogEntry(fences=batch).SerializeToString()


def encode_beams(events: Iterable[BeamEvent]) -> bytes:
    """Steps of beam searches for requests of one log."""
    batch = log_pb2.BeamBatch(steps=(step_to_proto(event) for event in events))
    return log_pb2.LogEntry(beams=batch).SerializeToString()


def encode_snapshot(states: Iterable[SnapshotEvent]) -> bytes:
    """The state of the live choices of one log."""
    snapshot = log_pb2.Snapshot()
    for state in states:
        message = snapshot.choices.add(
            serial=state.serial,
            choice=state.choice,
            term=state.attempt.term,
            n=state.attempt.n,
            tokens=pack_ints(state.tokens),
            end=log_pb2.EndReason.Name(state.end),  # type: ignore[arg-type]
            stop_token=state.stop_token,
            cached_tokens=state.cached_tokens,
        )
        if state.logprobs is not None:
            message.logprobs.CopyFrom(logprobs_to_proto(state.logprobs))
        if state.prompt_logprobs is not None:
            message.prompt_logprobs.CopyFrom(logprobs_to_proto(state.prompt_logprobs))
        if state.problem is not None:
            message.problem.CopyFrom(problem_to_proto(state.problem))
        if state.beams is not None:
            message.beams.CopyFrom(beams_to_proto(state.beams))
    return log_pb2.LogEntry(snapshot=snapshot).SerializeToString()


def decode_entry(data: bytes) -> list[LogEvent]:
    """Read one log entry as events, in order.

    Raises:
        MalformedEntryError: the bytes are not a log entry, or its columns do not fit together.
    """
    try:
        entry = log_pb2.LogEntry.FromString(data)
        kind = entry.WhichOneof("kind")
        if kind == "tokens":
            return list(_token_events(entry.tokens))
        if kind == "fences":
            return [_fence_event(message) for message in entry.fences.fences]
        if kind == "beams":
            return [step_from_proto(message) for message in entry.beams.steps]
        if kind == "snapshot":
            return [_snapshot_event(message) for message in entry.snapshot.choices]
    except (DecodeError, ValueError, IndexError) as error:
        raise MalformedEntryError(str(error)) from error
    raise MalformedEntryError("a log entry of no known kind")


def _token_events(batch: log_pb2.TokenBatch) -> Iterator[TokenEvent]:
    tokens = unpack(batch.tokens).tolist()
    logprobs = logprobs_from_proto(batch.logprobs) if batch.HasField("logprobs") else None
    notes = {note.row: note for note in batch.notes}
    columns = (
        unpack(batch.serials, "<u8"),
        unpack(batch.choices),
        unpack(batch.attempts, "<u4"),
        unpack(batch.positions),
        unpack(batch.counts),
        unpack(batch.ends, "u1"),
        unpack(batch.stop_tokens),
    )
    check_counts(columns[4], len(tokens))
    if (columns[3].astype(np.int64) < 0).any():
        raise MalformedEntryError("a position is negative")
    if logprobs is not None and len(logprobs) != len(tokens):
        raise MalformedEntryError("tokens and their log-probabilities do not agree")
    if any(row >= len(columns[0]) for row in notes):
        raise MalformedEntryError("a note on a row that is not there")
    start = 0
    # This runs once per token of every request of a gateway: hence no keyword arguments and no needless objects.
    term, current = batch.term, NO_ATTEMPT
    read_attempt(term, int(columns[2].max(initial=0)))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (serial, choice, attempt, position, count, end, stop_token) in enumerate(rows):
        stop = start + count
        if attempt != current.n or term != current.term:
            current = Attempt(term, attempt)
        own, prompt, problem, cached = None, None, None, 0
        if logprobs is not None and count and logprobs[start].rank:
            own = tuple(logprobs[start:stop])
        if notes and (note := notes.get(row)) is not None:
            if note.HasField("prompt_logprobs"):
                prompt = tuple(logprobs_from_proto(note.prompt_logprobs))
            if note.HasField("problem"):
                problem = problem_from_proto(note.problem)
            cached = note.cached_tokens
        told = (tokens[start],) if count == 1 else tuple(tokens[start:stop])
        yield TokenEvent(serial, choice, current, position, told, _ENDS[end], stop_token, own, prompt, problem, cached)
        start = stop


def _fence_event(message: log_pb2.Fence) -> FenceEvent:
    return FenceEvent(
        serial=message.serial,
        choice=message.choice,
        attempt=read_attempt(message.term, message.n),
        end=EndReason(message.end),
        problem=problem_from_proto(message.problem) if message.HasField("problem") else None,
    )


def _snapshot_event(message: log_pb2.ChoiceState) -> SnapshotEvent:
    has_prompt = message.HasField("prompt_logprobs")
    tokens = tuple(unpack(message.tokens).tolist())
    logprobs = tuple(logprobs_from_proto(message.logprobs)) if message.HasField("logprobs") else None
    if logprobs is not None and len(logprobs) != len(tokens):
        raise MalformedEntryError("tokens and their log-probabilities do not agree")
    return SnapshotEvent(
        serial=message.serial,
        choice=message.choice,
        attempt=read_attempt(message.term, message.n),
        tokens=tokens,
        end=EndReason(message.end),
        stop_token=message.stop_token,
        logprobs=logprobs,
        prompt_logprobs=tuple(logprobs_from_proto(message.prompt_logprobs)) if has_prompt else None,
        problem=problem_from_proto(message.problem) if message.HasField("problem") else None,
        cached_tokens=message.cached_tokens,
        beams=beams_from_proto(message.beams) if message.HasField("beams") else None,
    )

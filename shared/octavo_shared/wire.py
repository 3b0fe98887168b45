"""The step protocol on the wire: the only place where ``executor.proto`` is touched.

Every function is one direction of the adapter between a frozen dataclass of ``octavo_shared.plan`` and its message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from octavo_shared.entries import MalformedEntryError, sampling_from_proto, sampling_to_proto
from octavo_shared.ids import RequestId
from octavo_shared.plan import (
    NO_FLOATS,
    NO_INTS,
    NO_MOVES,
    NO_NAMES,
    NO_OFFER,
    CacheOffer,
    ExecutorInfo,
    MeasuredStep,
    NewSequence,
    PageMoves,
    PageNames,
    StepPlan,
    StepResult,
    StepTimings,
)
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.records import Int32Array

# Both ends of the line ask whether the other still answers. A machine that is switched off, a cut network or a frozen
# process sends no end of stream: without this the other side would wait for ever.
KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default that many questions are taken for an attack, and the other side hangs up.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_500),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(frozen=True, slots=True)
class Logged:
    """Everything an executor appended for steps up to ``step`` of ``epoch`` is in the logs.

    It comes by itself only when no result is about to say the same (``StepResult.logged_step``).
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Resync:
    """An executor got a plan that does not follow its state; it expected ``expected_step`` of ``epoch``."""

    epoch: int
    expected_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An executor lives and has finished ``step`` of ``epoch``; ``draining`` asks to be relieved.

    ``step_s`` is how long the step it is in has lasted (seconds), 0 when it is between steps.
    """

    epoch: int
    step: int
    draining: bool = False
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Welcome:
    """A scheduler of ``term`` begins ``epoch`` with an executor."""

    term: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A scheduler will not work with an executor, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Farewell:
    """An executor that asked to leave has been relieved of everything."""


FromExecutor = ExecutorInfo | StepResult | Logged | Resync | Heartbeat | CacheOffer
FromScheduler = Welcome | StepPlan | Refusal | Farewell

_INFO_FIELDS = tuple(ExecutorInfo.__dataclass_fields__)
_MEASURED_FIELDS = tuple(MeasuredStep.__dataclass_fields__)
_PLAN_ARRAYS = (
    "release",
    "grow_slots",
    "grow_blocks",
    "swap_slots",
    "swap_indices",
    "swap_blocks",
    "row_slots",
    "row_starts",
    "row_tokens",
    "row_samples",
    "sample_slots",
    "row_drafts",
    "draft_tokens",
)


def _pack(array: Int32Array) -> bytes:
    return array.astype("<i4", copy=False).tobytes()


def _ints(data: bytes) -> Int32Array:
    return np.frombuffer(data, "<i4") if data else NO_INTS


def to_executor(message: FromScheduler) -> pb.SchedulerMessage:
    """What a scheduler says, as a message."""
    if isinstance(message, StepPlan):
        return pb.SchedulerMessage(plan=_plan_to_proto(message))
    if isinstance(message, Welcome):
        return pb.SchedulerMessage(welcome=pb.Welcome(term=message.term, epoch=message.epoch))
    if isinstance(message, Farewell):
        return pb.SchedulerMessage(farewell=pb.Farewell())
    return pb.SchedulerMessage(refusal=pb.Refusal(reason=message.reason))


def from_scheduler(message: pb.SchedulerMessage) -> FromScheduler:
    """Read what a scheduler says.

    Raises:
        MalformedEntryError: it is of no known kind or its columns do not fit together.
    """
    kind = message.WhichOneof("kind")
    try:
        if kind == "plan":
            return _plan_from_proto(message.plan)
        if kind == "welcome":
            return Welcome(message.welcome.term, message.welcome.epoch)
        if kind == "refusal":
            return Refusal(message.refusal.reason)
        if kind == "farewell":
            return Farewell()
    except (DecodeError, ValueError) as error:
        raise MalformedEntryError(str(error)) from error
    raise MalformedEntryError("a scheduler message of no known kind")


def to_scheduler(message: FromExecutor) -> pb.ExecutorMessage:
    """What an executor says, as a message."""
    if isinstance(message, StepResult):
        return pb.ExecutorMessage(result=_result_to_proto(message))
    if isinstance(message, Logged):
        return pb.ExecutorMessage(logged=pb.Logged(epoch=message.epoch, step=message.step))
    if isinstance(message, Heartbeat):
        return pb.ExecutorMessage(
            heartbeat=pb.Heartbeat(
                epoch=message.epoch, step=message.step, draining=message.draining, step_s=message.step_s
            )
        )
    if isinstance(message, CacheOffer):
        return pb.ExecutorMessage(offer=_offer_to_proto(message))
    if isinstance(message, Resync):
        return pb.ExecutorMessage(
            resync=pb.Resync(epoch=message.epoch, expected_step=message.expected_step, reason=message.reason)
        )
    return pb.ExecutorMessage(hello=_hello_to_proto(message))


def from_executor(message: pb.ExecutorMessage) -> FromExecutor:
    """Read what an executor says.

    Raises:
        MalformedEntryError: it is of no known kind or its columns do not fit together.
    """
    kind = message.WhichOneof("kind")
    try:
        if kind == "result":
            return _result_from_proto(message.result)
        if kind == "logged":
            return Logged(message.logged.epoch, message.logged.step)
        if kind == "heartbeat":
            beat = message.heartbeat
            return Heartbeat(beat.epoch, beat.step, beat.draining, beat.step_s)
        if kind == "offer":
            return _offer_from_proto(message.offer)
        if kind == "resync":
            resync = message.resync
            return Resync(resync.epoch, resync.expected_step, resync.reason)
        if kind == "hello":
            return _hello_from_proto(message.hello)
    except (DecodeError, ValueError) as error:
        raise MalformedEntryError(str(error)) from error
    raise MalformedEntryError("an executor message of no known kind")


def _hello_to_proto(info: ExecutorInfo) -> pb.Hello:
    fields = {name: getattr(info, name) for name in _INFO_FIELDS}
    fields["measured"] = [
        pb.MeasuredStep(**{name: getattr(step, name) for name in _MEASURED_FIELDS}) for step in info.measured
    ]
    return pb.Hello(**fields)


def _hello_from_proto(message: pb.Hello) -> ExecutorInfo:
    fields = {name: getattr(message, name) for name in _INFO_FIELDS}
    fields["eos_token_ids"] = tuple(message.eos_token_ids)
    fields["measured"] = tuple(
        MeasuredStep(**{name: getattr(step, name) for name in _MEASURED_FIELDS}) for step in message.measured
    )
    return ExecutorInfo(**fields)


def _plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    message = pb.StepPlan(
        term=plan.term,
        epoch=plan.epoch,
        step=plan.step,
        admit=[_sequence_to_proto(sequence) for sequence in plan.admit],
        **{name: _pack(getattr(plan, name)) for name in _PLAN_ARRAYS if len(getattr(plan, name))},  # type: ignore[arg-type]
    )
    for moves, target in (
        (plan.copy_out, message.copy_out),
        (plan.copies, message.copies),
        (plan.restores, message.restores),
    ):
        if len(moves):
            target.source, target.destination = _pack(moves.source), _pack(moves.destination)
            target.generations = moves.generations.astype("<u4", copy=False).tobytes()
    if plan.names is not NO_OFFER:
        _names_to_proto(plan.names.device, message.device_names)
        _names_to_proto(plan.names.host, message.host_names)
        message.roots.extend(pb.CacheRoot(number=number, root=root) for number, root in plan.names.roots)
    return message


def _offer_to_proto(offer: CacheOffer) -> pb.CacheOffer:
    message = pb.CacheOffer(roots=[pb.CacheRoot(number=number, root=root) for number, root in offer.roots])
    _names_to_proto(offer.device, message.device)
    _names_to_proto(offer.host, message.host)
    return message


def _names_to_proto(names: PageNames, target: pb.PageNames) -> None:
    if len(names):
        target.pages, target.tokens = _pack(names.pages), _pack(names.tokens)
        target.numbers = names.numbers.astype("<i8", copy=False).tobytes()
        target.parents = names.parents.astype("<i8", copy=False).tobytes()


def _offer_from_proto(message: pb.CacheOffer) -> CacheOffer:
    roots = tuple((root.number, root.root) for root in message.roots)
    return CacheOffer(_names_from_proto(message.device), _names_from_proto(message.host), roots)


def _names_from_proto(message: pb.PageNames) -> PageNames:
    if not (message.pages or message.numbers or message.parents or message.tokens):
        return NO_NAMES
    numbers, parents = np.frombuffer(message.numbers, "<i8"), np.frombuffer(message.parents, "<i8")
    pages, tokens = _ints(message.pages), _ints(message.tokens)
    named = int((numbers != 0).sum())
    if not len(pages) == len(numbers) == len(parents) or (len(tokens) % named if named else len(tokens)):
        raise ValueError("columns of page names do not fit together")
    return PageNames(pages, numbers, parents, tokens.reshape(named, -1) if named else tokens)


def _plan_from_proto(message: pb.StepPlan) -> StepPlan:
    plan = StepPlan(
        term=message.term,
        epoch=message.epoch,
        step=message.step,
        admit=tuple(_sequence_from_proto(sequence) for sequence in message.admit),
        copy_out=_moves_from_proto(message.copy_out),
        copies=_moves_from_proto(message.copies),
        restores=_moves_from_proto(message.restores),
        names=_plan_names(message),
        **{name: _ints(getattr(message, name)) for name in _PLAN_ARRAYS},
    )
    rows = len(plan.row_slots)
    if not (
        rows == len(plan.row_starts) == len(plan.row_tokens) == len(plan.row_samples)
        and len(plan.grow_slots) == len(plan.grow_blocks)
        and len(plan.swap_slots) == len(plan.swap_indices) == len(plan.swap_blocks)
        and _adds_up(plan.row_samples, len(plan.sample_slots))
        and len(plan.row_drafts) in (0, rows)
        and (not len(plan.draft_tokens) or _adds_up(plan.row_drafts, len(plan.draft_tokens)))
    ):
        raise ValueError("columns of a plan do not fit together")
    return plan


def _plan_names(message: pb.StepPlan) -> CacheOffer:
    device, host = _names_from_proto(message.device_names), _names_from_proto(message.host_names)
    roots = tuple((root.number, root.root) for root in message.roots)
    return CacheOffer(device, host, roots) if len(device) or len(host) or roots else NO_OFFER


def _adds_up(counts: Int32Array, total: int) -> bool:
    return int(counts.sum()) == total and not (counts < 0).any()


def _moves_from_proto(message: pb.PageMoves) -> PageMoves:
    if not (message.source or message.destination or message.generations):
        return NO_MOVES
    moves = PageMoves(_ints(message.source), _ints(message.destination), np.frombuffer(message.generations, "<u4"))
    if not len(moves.source) == len(moves.destination) == len(moves.generations):
        raise ValueError("columns of page moves do not fit together")
    return moves


def _sequence_to_proto(sequence: NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        slot=sequence.slot,
        request_id=str(sequence.request_id),
        choice=sequence.choice,
        attempt=sequence.attempt,
        tokens=_pack(sequence.tokens),
        output_start=sequence.output_start,
        num_computed=sequence.num_computed,
        block_table=_pack(sequence.block_table),
        sampling=sampling_to_proto(sequence.sampling),
        seed=sequence.seed,
        max_total_tokens=sequence.max_total_tokens,
        lora=sequence.lora,
        no_cache_read=sequence.no_cache_read,
        has_grammar=bool(sequence.sampling.grammar),
        deadline_us=sequence.deadline_us,
        traceparent=sequence.traceparent,
    )


def _sequence_from_proto(message: pb.NewSequence) -> NewSequence:
    return NewSequence(
        slot=message.slot,
        request_id=RequestId.parse(message.request_id),
        choice=message.choice,
        attempt=message.attempt,
        tokens=_ints(message.tokens),
        output_start=message.output_start,
        num_computed=message.num_computed,
        block_table=_ints(message.block_table),
        sampling=sampling_from_proto(message.sampling),
        seed=message.seed,
        max_total_tokens=message.max_total_tokens,
        lora=message.lora,
        no_cache_read=message.no_cache_read,
        deadline_us=message.deadline_us,
        traceparent=message.traceparent,
    )


def _result_to_proto(result: StepResult) -> pb.StepResult:
    timings = result.timings
    return pb.StepResult(
        term=result.term,
        epoch=result.epoch,
        step=result.step,
        status=pb.STEP_STATUS_FAILED if result.failed else pb.STEP_STATUS_OK,
        message=result.message,
        sample_counts=_pack(result.sample_counts),
        tokens=_pack(result.tokens),
        ends=result.ends.astype(np.uint8, copy=False).tobytes(),
        timings=pb.StepTimings(
            wait_s=timings.wait_s,
            prepare_s=timings.prepare_s,
            forward_s=timings.forward_s,
            sample_s=timings.sample_s,
            publish_s=timings.publish_s,
            queued_s=timings.queued_s,
            restore_s=timings.restore_s,
        ),
        scores=result.scores.astype("<f4", copy=False).tobytes(),
        logged_step=result.logged_step,
    )


def _result_from_proto(message: pb.StepResult) -> StepResult:
    timings = message.timings
    result = StepResult(
        term=message.term,
        epoch=message.epoch,
        step=message.step,
        sample_counts=_ints(message.sample_counts),
        tokens=_ints(message.tokens),
        ends=np.frombuffer(message.ends, np.uint8),
        failed=message.status == pb.STEP_STATUS_FAILED,
        message=message.message,
        timings=StepTimings(**{name: getattr(timings, name) for name in StepTimings.__dataclass_fields__}),
        scores=np.frombuffer(message.scores, "<f4") if message.scores else NO_FLOATS,
        logged_step=message.logged_step,
    )
    if len(result.scores) > len(result.tokens):
        raise ValueError("a result has more scores than tokens")
    if len(result.ends) != len(result.sample_counts) or not _adds_up(result.sample_counts, len(result.tokens)):
        raise ValueError("columns of a result do not fit together")
    return result

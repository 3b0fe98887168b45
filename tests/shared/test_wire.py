"""The step protocol on the wire: every message comes back the same through real bytes; misfits are refused."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from octavo_shared import wire
from octavo_shared.entries import MalformedEntryError
from octavo_shared.ids import RequestId
from octavo_shared.plan import (
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
from octavo_shared.records import SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)


def ints(size: int | None = None, values: st.SearchStrategy[int] = INT32) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=size or 0, max_size=4 if size is None else size).map(
        lambda items: np.array(items, np.int32)
    )


def plain(value: object) -> object:
    """A record as nested plain values, arrays with their type."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


SAMPLING = st.builds(SamplingParams, temperature=st.floats(0, 2), seed=UINT64, grammar=TEXT, logprobs=st.none() | COUNT)
SEQUENCES = st.builds(
    NewSequence,
    slot=INT32,
    request_id=st.builds(RequestId, st.text(min_size=1, max_size=5), UINT64),
    choice=INT32,
    attempt=UINT32,
    tokens=ints(),
    output_start=INT32,
    num_computed=INT32,
    block_table=ints(),
    sampling=SAMPLING,
    seed=UINT64,
    max_total_tokens=INT32,
    lora=TEXT,
    no_cache_read=st.booleans(),
    deadline_us=INT64,
    traceparent=TEXT,
)


@st.composite
def moves(draw: st.DrawFn) -> PageMoves:
    count = draw(st.integers(0, 3))
    generations = np.array(draw(st.lists(UINT32, min_size=count, max_size=count)), np.uint32)
    return PageMoves(draw(ints(count)), draw(ints(count)), generations)


@st.composite
def names(draw: st.DrawFn) -> PageNames:
    numbers = np.array(draw(st.lists(st.integers(0, 2**63 - 1), max_size=3)), np.int64)
    count, named = len(numbers), int((numbers != 0).sum())
    if not count:
        return PageNames()
    parents = np.array(draw(st.lists(INT64, min_size=count, max_size=count)), np.int64)
    tokens = draw(ints(named * 4))
    return PageNames(draw(ints(count)), numbers, parents, tokens.reshape(named, 4) if named else tokens)


ROOTS = st.lists(st.tuples(st.integers(1, 2**63 - 1), st.binary(max_size=4)), max_size=2).map(tuple)
OFFERS = st.builds(CacheOffer, names(), names(), ROOTS)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows, grown, swapped = (draw(st.integers(0, 4)) for _ in range(3))
    samples = draw(ints(rows, st.integers(0, 3)))
    drafts = draw(st.sampled_from([0, rows]))
    row_drafts = draw(ints(drafts, st.integers(0, 3)))
    return StepPlan(
        term=draw(UINT64),
        epoch=draw(UINT64),
        step=draw(UINT64),
        release=draw(ints()),
        admit=tuple(draw(st.lists(SEQUENCES, max_size=2))),
        grow_slots=draw(ints(grown)),
        grow_blocks=draw(ints(grown)),
        swap_slots=draw(ints(swapped)),
        swap_indices=draw(ints(swapped)),
        swap_blocks=draw(ints(swapped)),
        copy_out=draw(moves()),
        copies=draw(moves()),
        restores=draw(moves()),
        row_slots=draw(ints(rows)),
        row_starts=draw(ints(rows)),
        row_tokens=draw(ints(rows)),
        row_samples=samples,
        sample_slots=draw(ints(int(samples.sum()))),
        row_drafts=row_drafts,
        draft_tokens=draw(ints(draw(st.sampled_from([0, int(row_drafts.sum())])))),
        names=draw(st.just(NO_OFFER) | OFFERS),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    counts = draw(ints(None, st.integers(0, 3)))
    scored = draw(st.integers(0, int(counts.sum())))
    return StepResult(
        term=draw(UINT64),
        epoch=draw(UINT64),
        step=draw(UINT64),
        sample_counts=counts,
        tokens=draw(ints(int(counts.sum()))),
        ends=np.array(draw(st.lists(st.integers(0, 255), min_size=len(counts), max_size=len(counts))), np.uint8),
        failed=draw(st.booleans()),
        message=draw(TEXT),
        timings=StepTimings(*draw(st.tuples(*[st.floats(0, 9)] * len(StepTimings.__dataclass_fields__)))),
        scores=np.array(draw(st.lists(st.floats(-90, 0, width=32), min_size=scored, max_size=scored)), np.float32),
        logged_step=draw(UINT64),
    )


INFOS = st.builds(
    ExecutorInfo,
    name=TEXT,
    incarnation=TEXT,
    model=TEXT,
    fingerprint=TEXT,
    num_device_blocks=UINT32,
    block_size=UINT32,
    max_model_len=UINT32,
    max_num_seqs=UINT32,
    max_num_batched_tokens=UINT32,
    vocab_size=UINT32,
    num_host_blocks=UINT32,
    run_ahead=UINT32,
    kv_dtype=TEXT,
    block_bytes=UINT64,
    eos_token_ids=st.lists(st.integers(0, 1 << 30), max_size=3).map(tuple),
    highest_term=UINT64,
    protocol=UINT32,
    measured=st.lists(st.builds(MeasuredStep, UINT32, UINT32, st.floats(0, 9), UINT32), max_size=3).map(tuple),
)
FROM_SCHEDULER = st.one_of(
    st.builds(wire.Welcome, UINT64, UINT64),
    plans(),
    plans(),
    st.builds(wire.Refusal, TEXT),
    st.builds(wire.Farewell),
)
FROM_EXECUTOR = st.one_of(
    INFOS,
    results(),
    results(),
    st.builds(wire.Logged, UINT64, UINT64),
    st.builds(wire.Resync, UINT64, UINT64, TEXT),
    st.builds(wire.Heartbeat, UINT64, UINT64, st.booleans(), st.floats(0, 9)),
    OFFERS,
)


@given(FROM_SCHEDULER)
def test_what_a_scheduler_says_comes_back_the_same(message: wire.FromScheduler) -> None:
    data = wire.to_executor(message).SerializeToString()
    back = wire.from_scheduler(pb.SchedulerMessage.FromString(data))
    assert type(back) is type(message)
    assert plain(back) == plain(message)


@given(FROM_EXECUTOR)
def test_what_an_executor_says_comes_back_the_same(message: wire.FromExecutor) -> None:
    data = wire.to_scheduler(message).SerializeToString()
    back = wire.from_executor(pb.ExecutorMessage.FromString(data))
    assert type(back) is type(message)
    assert plain(back) == plain(message)


def test_grammar_is_flagged() -> None:
    new = NewSequence(
        0, RequestId("g", 1), 0, 1, np.array([1], np.int32), 1, 0, np.array([0], np.int32), SamplingParams(), 0, 2
    )
    for grammar, flag in (("", False), ("root ::= x", True)):
        sampling = SamplingParams(grammar=grammar)
        fields = {name: getattr(new, name) for name in NewSequence.__dataclass_fields__} | {"sampling": sampling}
        plan = wire.to_executor(StepPlan(1, 1, 1, admit=(NewSequence(**fields),))).plan
        assert plan.admit[0].has_grammar is flag


def _ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _plan(**changes: object) -> pb.SchedulerMessage:
    rows = {name: _ints(1, 1) for name in ("row_slots", "row_starts", "row_tokens", "row_samples")}
    return pb.SchedulerMessage(plan=pb.StepPlan(**rows | {"sample_slots": _ints(0, 1)} | changes))  # type: ignore[arg-type]


def test_the_unchanged_plan_is_read() -> None:
    assert isinstance(wire.from_scheduler(_plan()), StepPlan)


@pytest.mark.parametrize(
    "changes",
    [
        {"row_slots": _ints(1)},
        {"row_starts": _ints(1, 2, 3)},
        {"row_tokens": b""},
        {"row_samples": _ints(1, 2)},
        {"row_samples": _ints(3, -1)},
        {"sample_slots": _ints(0)},
        {"sample_slots": _ints(0, 1) + b"x"},
        {"grow_slots": _ints(1)},
        {"grow_blocks": _ints(1)},
        {"swap_slots": _ints(1)},
        {"swap_slots": _ints(1), "swap_indices": _ints(1)},
        {"row_drafts": _ints(1)},
        {"draft_tokens": _ints(1)},
        {"row_drafts": _ints(1, 1), "draft_tokens": _ints(1)},
        {"row_drafts": _ints(2, -1), "draft_tokens": _ints(1)},
        {"copies": pb.PageMoves(source=_ints(1), destination=_ints(2))},
        {"copies": pb.PageMoves(source=_ints(1), generations=_ints(2))},
        {"copy_out": pb.PageMoves(destination=_ints(1), generations=_ints(2))},
        {"restores": pb.PageMoves(source=_ints(1), destination=_ints(2, 3), generations=_ints(2))},
        {"admit": [pb.NewSequence(request_id="nobody")]},
        {"admit": [pb.NewSequence(request_id="g-1", tokens=b"abc")]},
    ],
)
def test_plans_that_do_not_fit_together_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedEntryError):
        wire.from_scheduler(_plan(**changes))


@pytest.mark.parametrize(
    "result",
    [
        pb.StepResult(sample_counts=_ints(1), tokens=_ints(1)),
        pb.StepResult(sample_counts=_ints(1), ends=b"\0"),
        pb.StepResult(sample_counts=_ints(2, -1), tokens=_ints(1), ends=b"\0\0"),
        pb.StepResult(sample_counts=b"abc", ends=b"\0"),
        pb.StepResult(tokens=_ints(1)),
        pb.StepResult(sample_counts=_ints(1), tokens=_ints(1), ends=b"\0", scores=bytes(8)),
        pb.StepResult(sample_counts=_ints(1), tokens=_ints(1), ends=b"\0", scores=bytes(3)),
    ],
)
def test_results_that_do_not_fit_together_are_refused(result: pb.StepResult) -> None:
    with pytest.raises(MalformedEntryError):
        wire.from_executor(pb.ExecutorMessage(result=result))


def test_messages_of_no_kind_are_refused() -> None:
    with pytest.raises(MalformedEntryError):
        wire.from_executor(pb.ExecutorMessage())
    with pytest.raises(MalformedEntryError):
        wire.from_scheduler(pb.SchedulerMessage())

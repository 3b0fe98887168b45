"""Log entries, requests and aborts: what goes in comes out, and bytes that are none are refused, all in one way."""

from __future__ import annotations

import contextlib
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from octavo_shared.bounds import MAX_CHOICES
from octavo_shared.entries import (
    MalformedEntryError,
    decode_abort,
    decode_entry,
    decode_request,
    encode_abort,
    encode_beams,
    encode_fences,
    encode_request,
    encode_snapshot,
    encode_tokens,
)
from octavo_shared.fold import FenceEvent, SnapshotEvent, TokenEvent
from octavo_shared.fold_beams import NO_TOKEN, BeamEnd, BeamEvent, BeamFold, Hypothesis
from octavo_shared.ids import MOST_ATTEMPTS, MOST_TERM, Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.proto import log_pb2, request_pb2
from octavo_shared.records import (
    AbortRecord,
    EarlyStopping,
    EndReason,
    Problem,
    RequestRecord,
    SamplingParams,
    TokenLogprobs,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
TERM, NUMBER = st.integers(0, MOST_TERM), st.integers(0, MOST_ATTEMPTS)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
FLOAT32 = st.floats(allow_nan=False, width=32)
TEXT = st.text(max_size=8)
LOGS = st.text(min_size=1, max_size=8)
IDS = st.builds(RequestId, LOGS, UINT64)
ENDS = st.sampled_from(list(EndReason))
PROBLEMS = st.builds(Problem, TEXT, st.integers(0, 999), TEXT, TEXT, TEXT)
LOGPROBS = st.builds(
    TokenLogprobs,
    FLOAT32,
    st.integers(1, 2**31 - 1),
    st.lists(st.tuples(INT32, FLOAT32), max_size=3).map(tuple),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=INT32,
    min_p=FLOAT,
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    seed=UINT64,
    max_tokens=INT32,
    min_tokens=INT32,
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(INT32, FLOAT32), max_size=3).map(tuple),
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    grammar=TEXT,
    # As many beams as choices there may be: a request with fewer is none.
    beam_width=st.sampled_from([0, MAX_CHOICES]),
    length_penalty=FLOAT,
    early_stopping=st.sampled_from(EarlyStopping),
)
REQUESTS = st.builds(
    RequestRecord,
    id=IDS,
    arrival_us=INT64,
    prompt=st.lists(INT32, min_size=1, max_size=9).map(lambda tokens: np.array(tokens, np.int32)),
    sampling=SAMPLING,
    n=st.integers(1, MAX_CHOICES),
    priority=INT32,
    tenant=TEXT,
    cache_salt=TEXT,
    lora=TEXT,
    deadline_us=INT64,
    traceparent=TEXT,
    tracestate=TEXT,
    idempotency_key=TEXT,
    owner_generation=UINT32,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    presentation=st.binary(max_size=9),
)


def fields(record: object) -> dict[str, object]:
    """A record's fields, arrays as lists, so that records can be compared."""
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}  # type: ignore[attr-defined]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


@given(REQUESTS)
def test_a_request_comes_back_the_same(record: RequestRecord) -> None:
    back = decode_request(encode_request(record))
    assert fields(back) == fields(record)
    assert back.prompt.dtype == np.int32


def test_an_absent_log_probability_is_not_zero() -> None:
    for wanted in (None, 0, 5):
        sampling = SamplingParams(logprobs=wanted, prompt_logprobs=wanted)
        record = RequestRecord(RequestId("g", 1), 0, np.array([1], np.int32), sampling)
        back = decode_request(encode_request(record)).sampling
        assert (back.logprobs, back.prompt_logprobs) == (wanted, wanted)


def test_a_beam_search_comes_back_the_same() -> None:
    for mode in EarlyStopping:
        sampling = SamplingParams(beam_width=4, length_penalty=-0.5, early_stopping=mode)
        back = decode_request(encode_request(RequestRecord(RequestId("g", 1), 0, np.array([1], np.int32), sampling, 4)))
        assert back.sampling == sampling
        assert isinstance(back.sampling.early_stopping, EarlyStopping)


@given(st.builds(AbortRecord, IDS, INT32, UINT32, TEXT))
def test_an_abort_comes_back_the_same(record: AbortRecord) -> None:
    assert decode_abort(encode_abort(record)) == record


@st.composite
def output_rows(draw: st.DrawFn) -> OutputRow:
    tokens = tuple(draw(st.lists(INT32, max_size=4)))
    return OutputRow(
        request_id=RequestId("g", draw(UINT64)),
        choice=draw(INT32),
        attempt=draw(NUMBER),
        position=draw(COUNT),
        tokens=tokens,
        end=draw(ENDS),
        stop_token=draw(INT32),
        logprobs=draw(st.none() | st.tuples(*[LOGPROBS] * len(tokens))),
        prompt_logprobs=draw(st.none() | st.lists(LOGPROBS, max_size=3).map(tuple)),
        problem=draw(st.none() | PROBLEMS),
        cached_tokens=draw(st.just(0) | UINT32),
    )


@given(st.lists(output_rows(), max_size=5), TERM)
def test_a_steps_output_comes_back_the_same(rows: list[OutputRow], term: int) -> None:
    events = decode_entry(encode_tokens(rows, term=term, executor="e", epoch=3, step=4))
    assert events == [
        TokenEvent(
            serial=row.request_id.serial,
            choice=row.choice,
            attempt=Attempt(term, row.attempt),
            position=row.position,
            tokens=row.tokens,
            end=EndReason(row.end),
            stop_token=row.stop_token,
            # A row without tokens has no log-probabilities to tell of.
            logprobs=row.logprobs or None,
            prompt_logprobs=row.prompt_logprobs,
            problem=row.problem,
            cached_tokens=row.cached_tokens,
        )
        for row in rows
    ]


def test_infinite_log_probabilities_survive() -> None:
    probs = (TokenLogprobs(-math.inf, 7, ((1, -math.inf),)),)
    row = OutputRow(RequestId("g", 1), 0, 1, 0, (5,), logprobs=probs)
    (event,) = decode_entry(encode_tokens([row], term=1, executor="e", epoch=1, step=1))
    assert isinstance(event, TokenEvent)
    assert event.logprobs == probs


def test_only_rows_with_something_rare_have_a_note() -> None:
    rows = [OutputRow(RequestId("g", 1), 0, 1, 0, (5,), cached_tokens=cached) for cached in (0, 16, 0)]
    batch = log_pb2.LogEntry.FromString(encode_tokens(rows, term=1, executor="e", epoch=1, step=1)).tokens
    assert [(note.row, note.cached_tokens) for note in batch.notes] == [(1, 16)]


ATTEMPTS = st.builds(Attempt, TERM, NUMBER)


@given(st.lists(st.builds(FenceEvent, UINT64, INT32, ATTEMPTS, ENDS, st.none() | PROBLEMS), max_size=4))
def test_fences_come_back_the_same(fences: list[FenceEvent]) -> None:
    assert decode_entry(encode_fences(fences)) == fences


TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def beam_steps(draw: st.DrawFn) -> BeamEvent:
    asked = draw(st.booleans())
    live = draw(st.lists(st.tuples(INT32, INT32, FLOAT32), max_size=4))
    finished = []
    for _ in range(draw(st.integers(0, 3))):
        token = draw(st.just(NO_TOKEN) | TOKENS)
        own = draw(LOGPROBS) if asked and token != NO_TOKEN else None
        finished.append(BeamEnd(draw(INT32), token, draw(FLOAT32), draw(ENDS), own))
    return BeamEvent(
        serial=draw(UINT64),
        attempt=draw(ATTEMPTS),
        position=draw(COUNT),
        n=draw(st.integers(1, MAX_CHOICES)),
        parents=tuple(parent for parent, _, _ in live),
        tokens=tuple(token for _, token, _ in live),
        scores=tuple(score for _, _, score in live),
        finished=tuple(finished),
        ranking=tuple(draw(st.lists(INT32, max_size=4))),
        logprobs=tuple(draw(LOGPROBS) for _ in live) if asked else None,
        end=draw(ENDS),
        cached_tokens=draw(st.just(0) | UINT32),
    )


@given(st.lists(beam_steps(), max_size=3))
def test_beam_steps_come_back_the_same(events: list[BeamEvent]) -> None:
    assert decode_entry(encode_beams(events)) == events


def test_a_beam_step_is_small_when_no_log_probabilities_are_asked_for() -> None:
    step = BeamEvent(1, Attempt(1, 1), 1000, 4, (0, 0, 1, 3), (5, 6, 7, 8), (-1.0, -2.0, -3.0, -4.0))
    assert len(encode_beams([step])) < 100


@st.composite
def beam_searches(draw: st.DrawFn) -> BeamFold:
    """A search whose hypotheses share a beginning, with log-probabilities for all or for none."""
    asked = draw(st.booleans())

    def run(tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        return tuple(draw(LOGPROBS) for _ in tokens) if asked else ()

    shared = tuple(draw(st.lists(TOKENS, max_size=3)))
    shared_logprobs, length = run(shared), draw(st.integers(1, 3))
    # The tokens they go on with differ, as those of hypotheses do where they part.
    firsts = draw(st.lists(TOKENS, min_size=1, max_size=6, unique=True))
    width = draw(st.integers(1, len(firsts)))
    live, kept = [], []
    for index, first in enumerate(firsts):
        size = length - 1 if index < width else draw(st.integers(0, 4))
        own = (first, *draw(st.lists(TOKENS, min_size=size, max_size=size)))
        end = EndReason.NONE if index < width else draw(st.sampled_from(list(EndReason)[1:]))
        one = Hypothesis(shared + own, draw(FLOAT32), shared_logprobs + run(own), end)
        (live if index < width else kept).append(one)
    return BeamFold(draw(st.integers(1, MAX_CHOICES)), draw(ATTEMPTS), tuple(live), tuple(kept))


@given(st.lists(beam_searches(), min_size=1, max_size=2))
def test_searches_in_snapshots_come_back_the_same(searches: list[BeamFold]) -> None:
    states = [SnapshotEvent(1, choice, Attempt(1, 1), (), beams=beams) for choice, beams in enumerate(searches)]
    assert decode_entry(encode_snapshot(states)) == states


def test_what_hypotheses_start_with_is_told_once() -> None:
    shared = tuple(range(10_000))
    beams = BeamFold(4, Attempt(1, 1), tuple(Hypothesis((*shared, token), -1.0) for token in range(8)))
    assert len(encode_snapshot([SnapshotEvent(1, 0, Attempt(1, 1), (), beams=beams)])) < 41_000


@st.composite
def snapshots(draw: st.DrawFn) -> SnapshotEvent:
    tokens = tuple(draw(st.lists(INT32, max_size=4)))
    return SnapshotEvent(
        serial=draw(UINT64),
        choice=draw(INT32),
        attempt=draw(ATTEMPTS),
        tokens=tokens,
        end=draw(ENDS),
        stop_token=draw(INT32),
        logprobs=draw(st.none() | st.tuples(*[LOGPROBS] * len(tokens))),
        prompt_logprobs=draw(st.none() | st.lists(LOGPROBS, max_size=3).map(tuple)),
        problem=draw(st.none() | PROBLEMS),
        cached_tokens=draw(st.just(0) | UINT32),
    )


@given(st.lists(snapshots(), max_size=4))
def test_snapshots_come_back_the_same(states: list[SnapshotEvent]) -> None:
    assert decode_entry(encode_snapshot(states)) == states


# --- what is none -----------------------------------------------------------------------------------------------------

DECODERS = [decode_request, decode_abort, decode_entry]


@pytest.mark.parametrize("decode", DECODERS)
@given(st.binary(max_size=60))
def test_garbage_is_refused_in_one_way(decode: object, data: bytes) -> None:
    with contextlib.suppress(MalformedEntryError):
        decode(data)  # type: ignore[operator]


def _valid() -> list[tuple[object, bytes]]:
    probs = (TokenLogprobs(-1.0, 1, ((4, -1.0), (5, -2.0))), TokenLogprobs(-2.0, 2))
    rows = [
        OutputRow(RequestId("g", 1), 0, 1, 0, (4, 5), logprobs=probs, prompt_logprobs=probs),
        OutputRow(RequestId("g", 2), 1, 1, 7, (6,), end=3, problem=Problem("p")),
    ]
    record = RequestRecord(
        RequestId("g", 1), 5, np.array([1, 2, 3], np.int32), SamplingParams(logit_bias=((1, 0.5), (2, 1.5)))
    )
    ended = (BeamEnd(0, 2, -1.0, EndReason.STOP, probs[0]), BeamEnd(1, NO_TOKEN, -1.0, EndReason.LENGTH))
    step = BeamEvent(1, Attempt(2, 1), 3, 2, (0, 1), (4, 5), (-1.0, -2.0), ended, (1, 0), probs)
    beams = BeamFold(
        2, Attempt(2, 1), (Hypothesis((4, 5), -1.0, probs),), (Hypothesis((4, 6), -1.0, probs, EndReason.STOP),)
    )
    return [
        (decode_entry, encode_beams([step])),
        (decode_entry, encode_snapshot([SnapshotEvent(1, 0, Attempt(2, 1), (4,), logprobs=probs[:1], beams=beams)])),
        (decode_entry, encode_tokens(rows, term=1, executor="e", epoch=1, step=1)),
        (decode_entry, encode_fences([FenceEvent(1, 0, Attempt(2, 1), EndReason.ABORT, Problem("p"))])),
        (decode_entry, encode_snapshot([SnapshotEvent(1, 0, Attempt(2, 1), (4, 5), logprobs=probs)])),
        (decode_request, encode_request(record)),
        (decode_abort, encode_abort(AbortRecord(RequestId("g", 1)))),
    ]


@settings(max_examples=400)
@given(st.integers(0, 6), st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["flip", "cut", "double"]))
def test_damaged_entries_are_refused_or_read(which: int, place: int, byte: int, damage: str) -> None:
    decode, data = _valid()[which]
    place %= len(data)
    if damage == "flip":
        data = data[:place] + bytes([byte]) + data[place + 1 :]
    else:
        data = data[:place] if damage == "cut" else data + data[place:]
    with contextlib.suppress(MalformedEntryError):
        decode(data)  # type: ignore[operator]


def _ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _batch(**changes: object) -> bytes:
    """A batch of two rows with 2 and 1 tokens, changed."""
    columns: dict[str, object] = {
        "term": 1,
        "serials": np.array([1, 2], "<u8").tobytes(),
        "choices": _ints(0, 0),
        "attempts": _ints(1, 1),
        "positions": _ints(0, 0),
        "counts": _ints(2, 1),
        "tokens": _ints(7, 8, 9),
        "ends": bytes([0, 0]),
        "stop_tokens": _ints(-1, -1),
    }
    return log_pb2.LogEntry(tokens=log_pb2.TokenBatch(**columns | changes)).SerializeToString()  # type: ignore[arg-type]


def _probs(sampled: int, ranks: int, top_counts: tuple[int, ...], ids: int, values: int) -> log_pb2.Logprobs:
    return log_pb2.Logprobs(
        sampled=np.full(sampled, -1, "<f4").tobytes(),
        ranks=_ints(*[1] * ranks),
        top_counts=_ints(*top_counts),
        top_ids=_ints(*range(ids)),
        top_values=np.zeros(values, "<f4").tobytes(),
    )


def test_the_unchanged_batch_is_read() -> None:
    assert [event.tokens for event in decode_entry(_batch())] == [(7, 8), (9,)]  # type: ignore[union-attr]
    assert len(decode_entry(_batch(logprobs=_probs(3, 3, (1, 0, 2), 3, 3)))) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": _ints(0)},
        {"attempts": _ints(1, 1, 1)},
        {"attempts": _ints(1, -1)},
        {"term": 1 << 63},
        {"serials": b"1234567"},
        {"counts": _ints(2, 2)},
        {"counts": _ints(1, 1)},
        {"counts": _ints(4, -1)},
        {"tokens": _ints(7, 8)},
        {"tokens": _ints(7, 8, 9) + b"x"},
        {"positions": _ints(0, -1)},
        {"ends": bytes([0, 77])},
        {"ends": bytes([0])},
        {"notes": [log_pb2.RowNote(row=2)]},
        {"logprobs": _probs(2, 2, (0, 0), 0, 0)},
        {"logprobs": _probs(4, 4, (0, 0, 0, 0), 0, 0)},
        {"logprobs": _probs(3, 2, (0, 0, 0), 0, 0)},
        {"logprobs": _probs(3, 3, (1, 1, 1), 2, 2)},
        {"logprobs": _probs(3, 3, (1, 1, 1), 4, 4)},
        {"logprobs": _probs(3, 3, (1, 1, 1), 3, 2)},
        {"logprobs": _probs(3, 3, (4, -1, 0), 3, 3)},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedEntryError):
        decode_entry(_batch(**changes))


def _step(**changes: object) -> bytes:
    """A step of three live hypotheses and two that ended, one of them by a token, changed."""
    columns: dict[str, object] = {
        "choices": 2,
        "parents": _ints(0, 1, 2),
        "tokens": _ints(7, 8, 9),
        "scores": np.zeros(3, "<f4").tobytes(),
        "ended_parents": _ints(0, 1),
        "ended_tokens": _ints(5, NO_TOKEN),
        "ended_scores": np.zeros(2, "<f4").tobytes(),
        "ended_reasons": bytes([1, 2]),
        "ranking": _ints(0, 1),
    }
    batch = log_pb2.BeamBatch(steps=[log_pb2.BeamStep(**columns | changes)])  # type: ignore[arg-type]
    return log_pb2.LogEntry(beams=batch).SerializeToString()


def test_the_unchanged_step_is_read() -> None:
    assert len(decode_entry(_step())) == 1
    (event,) = decode_entry(_step(logprobs=_probs(4, 4, (0, 0, 0, 0), 0, 0)))
    assert isinstance(event, BeamEvent)
    assert [end.logprobs for end in event.finished] == [TokenLogprobs(-1.0, 1), None]


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": 0},
        {"choices": MAX_CHOICES + 1},
        {"position": -1},
        {"term": MOST_TERM + 1},
        {"parents": _ints(0, 1)},
        {"tokens": _ints(7, 8)},
        {"tokens": b"12345"},
        {"scores": np.zeros(4, "<f4").tobytes()},
        {"ended_parents": _ints(0)},
        {"ended_tokens": _ints(5)},
        {"ended_scores": np.zeros(1, "<f4").tobytes()},
        {"ended_reasons": bytes([1])},
        {"ended_reasons": bytes([1, 77])},
        {"ranking": b"12345"},
        {"end": 77},
        {"logprobs": _probs(3, 3, (0, 0, 0), 0, 0)},
        {"logprobs": _probs(5, 5, (0, 0, 0, 0, 0), 0, 0)},
    ],
)
def test_steps_that_do_not_fit_together_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedEntryError):
        decode_entry(_step(**changes))


def _search(**changes: object) -> log_pb2.LogEntry:
    columns: dict[str, object] = {"choices": 1, "live": [log_pb2.Hypothesis(tokens=_ints(1))]}
    beams = log_pb2.BeamState(**columns | changes)  # type: ignore[arg-type]
    return log_pb2.LogEntry(snapshot=log_pb2.Snapshot(choices=[log_pb2.ChoiceState(beams=beams)]))


def test_the_unchanged_search_is_read() -> None:
    (event,) = decode_entry(_search().SerializeToString())
    assert isinstance(event, SnapshotEvent)
    assert event.beams == BeamFold(1, Attempt(0, 0), (Hypothesis((1,), 0.0),))


@pytest.mark.parametrize(
    "entry",
    [
        _search(choices=0),
        _search(choices=MAX_CHOICES + 1),
        _search(live=[]),
        _search(live=[log_pb2.Hypothesis(tokens=_ints(1)), log_pb2.Hypothesis()]),
        _search(live=[log_pb2.Hypothesis(end=1)]),  # type: ignore[arg-type]
        _search(kept=[log_pb2.Hypothesis()]),
        _search(logprobs=_probs(1, 1, (0,), 0, 0)),
        _search(shared=_ints(1), logprobs=_probs(1, 1, (0,), 0, 0)),
        log_pb2.LogEntry(),
        log_pb2.LogEntry(fences=log_pb2.FenceBatch(fences=[log_pb2.Fence(end=77)])),  # type: ignore[arg-type]
        log_pb2.LogEntry(fences=log_pb2.FenceBatch(fences=[log_pb2.Fence(term=1 << 63)])),
        log_pb2.LogEntry(fences=log_pb2.FenceBatch(fences=[log_pb2.Fence(term=1, n=MOST_ATTEMPTS + 1)])),
        log_pb2.LogEntry(snapshot=log_pb2.Snapshot(choices=[log_pb2.ChoiceState(term=MOST_TERM + 1)])),
        log_pb2.LogEntry(snapshot=log_pb2.Snapshot(choices=[log_pb2.ChoiceState(tokens=b"abc")])),
        log_pb2.LogEntry(
            snapshot=log_pb2.Snapshot(
                choices=[log_pb2.ChoiceState(tokens=_ints(1, 2), logprobs=_probs(1, 1, (0,), 0, 0))]
            )
        ),
    ],
)
def test_entries_that_mean_nothing_are_refused(entry: log_pb2.LogEntry) -> None:
    with pytest.raises(MalformedEntryError):
        decode_entry(entry.SerializeToString())


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": b""},
        {"prompt": b"abc"},
        {"n": 0},
        {"n": 2**32 - 1},
        {"id": ""},
        {"id": "g"},
        {"id": "-1"},
        {"id": "g-"},
        {"id": "g-xyz"},
        {"id": "g-0x1"},
        {"id": "g-1F"},
        {"id": "g-01"},
        {"id": "g- 1"},
        {"id": "g-1_1"},
        {"id": "g-10000000000000000"},
        {"sampling": request_pb2.SamplingParams(logit_bias_ids=[1, 2], logit_bias_values=[1.0])},
        {"sampling": request_pb2.SamplingParams(early_stopping=3)},  # type: ignore[arg-type]
        {"sampling": request_pb2.SamplingParams(beam_width=MAX_CHOICES + 1)},
        {"n": 3, "sampling": request_pb2.SamplingParams(beam_width=2)},
    ],
)
def test_requests_that_mean_nothing_are_refused(changes: dict[str, object]) -> None:
    fields_: dict[str, object] = {"id": "g-1", "prompt": _ints(1), "n": 1}
    decode_request(request_pb2.RequestRecord(**fields_).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(MalformedEntryError):
        decode_request(request_pb2.RequestRecord(**fields_ | changes).SerializeToString())  # type: ignore[arg-type]


# --- ids --------------------------------------------------------------------------------------------------------------


@given(IDS)
def test_an_id_is_read_back(request_id: RequestId) -> None:
    assert RequestId.parse(str(request_id)) == request_id


@given(st.text(alphabet="g-0123af x", max_size=8))
def test_an_id_has_one_spelling(text: str) -> None:
    try:
        parsed = RequestId.parse(text)
    except ValueError:
        return
    assert str(parsed) == text


def test_attempts_are_ordered() -> None:
    assert Attempt(1, 9) < Attempt(2, 0) < Attempt(2, 1)

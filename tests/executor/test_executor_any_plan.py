"""Whatever a plan says, the runner carries it out or refuses it as a PlanError: it comes from another process."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from late_device import LateDevice
from plan_maker import MAX_MODEL_LEN, MAX_SEQS, PlanMaker, ints, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.batch import PlanError
from octavo_executor.runner import Runner
from octavo_shared import wire
from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, PageMoves, StepPlan
from octavo_shared.records import SamplingParams

HOST_PAGES = 3
EXTREMES = [-(2**31), -1, 2**31 - 1]


def mostly(good: st.SearchStrategy[int], *bad: int) -> st.SearchStrategy[int]:
    """One bad value in ten: a plan full of them would be refused for the first one alone."""
    return st.integers(0, 9).flatmap(lambda i: st.sampled_from([*bad, *EXTREMES]) if i == 9 else good)


# Slots 0 to 2 are live, each with 16 tokens of its own prompt computed and page table[0]; slot 2 is a beam.
LIVE = mostly(st.integers(0, 2), 3, MAX_SEQS)
FREE = mostly(st.integers(3, MAX_SEQS - 1), 0, MAX_SEQS)
PAGE = mostly(st.integers(0, 79), 80)
HOST_PAGE = mostly(st.integers(0, HOST_PAGES - 1), HOST_PAGES)
COUNT = st.sampled_from([0, 1, 2, 5, 16, 17, 33, MAX_MODEL_LEN, MAX_MODEL_LEN + 1, *EXTREMES])
SMALL = st.sampled_from([0, 1, 2, 3, *EXTREMES])
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=SMALL,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=COUNT,
    stop_token_ids=st.sampled_from([(), (5, -1, 2**31 - 1)]),
    logit_bias=st.sampled_from([(), ((7, 3.0), (2**31 - 1, 1.0), (-9, 1.0))]),
    logprobs=st.none() | SMALL,
    prompt_logprobs=st.none() | SMALL,
    beam_width=st.sampled_from([0, 0, 1, 100, 2**32 - 1]),
)


def array(values: st.SearchStrategy[int], size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=size, max_size=size).map(lambda items: ints(*items))


@st.composite
def new_sequences(draw: st.DrawFn) -> NewSequence:
    count = draw(mostly(st.sampled_from([1, 16, 17, 40, MAX_MODEL_LEN - 1, MAX_MODEL_LEN]), 0, MAX_MODEL_LEN + 1))
    count = min(max(count, 0), MAX_MODEL_LEN + 1)
    tokens = draw(st.sampled_from([3, 130, 131, -1, 2**31 - 1]))
    return NewSequence(
        slot=draw(FREE),
        request_id=RequestId("log", 9),
        choice=draw(SMALL),
        attempt=1,
        tokens=np.full(count, tokens, np.int32),
        output_start=draw(mostly(st.integers(min(1, count), count), 0, count + 1)),
        num_computed=draw(mostly(st.integers(0, max(count - 1, 0)), count)),
        block_table=draw(array(st.integers(0, 79), draw(st.sampled_from([0, 1, 3, 13, 13, 13, 14])))),
        sampling=draw(SAMPLING),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_total_tokens=draw(mostly(st.sampled_from([0, 1, MAX_MODEL_LEN]), MAX_MODEL_LEN + 1)),
    )


@st.composite
def moves(draw: st.DrawFn, source: st.SearchStrategy[int], destination: st.SearchStrategy[int]) -> PageMoves:
    size = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return PageMoves(draw(array(source, size)), draw(array(destination, size)), np.zeros(size, np.uint32))


@st.composite
def changes(draw: st.DrawFn) -> dict[str, object]:
    """Some arrays of a plan, of lengths that fit together as the wire ensures, and else anything."""
    change: dict[str, object] = {}
    if draw(st.booleans()):
        change["release"] = draw(array(LIVE, 1))
    if draw(st.booleans()):
        change["admit"] = tuple(draw(st.lists(new_sequences(), max_size=2)))
    if draw(st.booleans()):
        size = draw(st.integers(0, 3))
        change |= {"grow_slots": draw(array(LIVE, size)), "grow_blocks": draw(array(PAGE, size))}
    if draw(st.booleans()):
        size = draw(st.integers(1, 2))
        change |= {"swap_slots": draw(array(LIVE, size)), "swap_indices": draw(array(mostly(st.just(0), 1), size))}
        change["swap_blocks"] = draw(array(PAGE, size))
    change["copy_out"] = draw(moves(PAGE, HOST_PAGE))
    change["copies"] = draw(moves(PAGE, PAGE))
    change["restores"] = draw(moves(HOST_PAGE, PAGE))
    if draw(st.booleans()):
        slots = draw(st.lists(mostly(st.integers(0, 5), MAX_SEQS), max_size=4, unique=True))
        samples = [draw(st.sampled_from([0, 1, 1, 2])) for _ in slots]
        targets = [
            slot if i == 0 else draw(mostly(st.integers(0, 5)))
            for slot, n in zip(slots, samples, strict=True)
            for i in range(n)
        ]
        rows = [(16, 1) if slot < 3 else (draw(COUNT), draw(COUNT)) for slot in slots]
        change |= {
            "row_slots": ints(*slots),
            "row_starts": ints(*(start if draw(st.integers(0, 9)) else draw(COUNT) for start, _ in rows)),
            "row_tokens": ints(*(count if draw(st.integers(0, 9)) else draw(COUNT) for _, count in rows)),
            "row_samples": ints(*samples),
            "sample_slots": ints(*targets),
        }
    return change


@pytest.fixture(scope="module", params=["at once", "late"])
def loaded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runner:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return make_runner(folder, host_pages=HOST_PAGES, device=LateDevice(1) if request.param == "late" else None)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(change=changes())
def test_any_plan_is_carried_out_or_refused(loaded: Runner, change: dict[str, object]) -> None:
    loaded.reset()
    maker = PlanMaker(loaded)
    running = [
        maker.admit(random_tokens(16, i), SamplingParams(max_tokens=9, beam_width=2 * (i == 2))) for i in range(3)
    ]
    maker.step(*((sequence, 16) for sequence in running))
    plan: StepPlan = replace(maker.plan([(sequence, 1) for sequence in running[:2]]), **change)  # type: ignore[arg-type]
    # Through the wire, as it would come.
    message = wire.from_scheduler(wire.to_executor(plan))
    assert isinstance(message, StepPlan)
    try:
        result = loaded.execute(message).result
    except PlanError:
        return
    assert len(result.sample_counts) == len(result.ends) == len(plan.sample_slots)
    assert int(result.sample_counts.sum()) == len(result.tokens) >= len(result.scores)

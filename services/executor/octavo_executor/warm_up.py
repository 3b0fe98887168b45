"""Steps that nobody asked for: kernels are compiled by them, and memory reaches its peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo_executor.batch import BatchState
from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, PageMoves, StepPlan
from octavo_shared.records import Int32Array, SamplingParams

# Everything that sampling can be asked for.
SAMPLING = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    ignore_eos=True,
    max_tokens=8,
)
# Beams have kernels of their own.
BEAM = SamplingParams(beam_width=2, logprobs=1, ignore_eos=True, max_tokens=8)
# A sequence of so many tokens has its keys split among programs, which takes kernels of their own; one of half as many just so.
LONG_TOKENS = 1024
# Tokens for which a sequence has room after its prompt.
ROOM_AFTER = 4


def warm_up_plans(state: BatchState, max_tokens: int, host_pages: int) -> Iterator[StepPlan]:
    """As many prompt tokens as a step may have, of as many sequences as there may be; decodes of all of them, and of one;
    every kind of page move; a beam; a long sequence alone, if there can be one. All sequences write into the same pages: what they
    compute is of no use.
    """
    slots = np.arange(state.num_slots, dtype=np.int32)
    room = min(state.max_model_len, state.num_blocks * state.block_size) - ROOM_AFTER
    count = max(1, min(max_tokens // len(slots), room))
    yield StepPlan(0, 0, 1, **begun(state, slots, count))
    yield StepPlan(0, 0, 2, **rows(slots, count, 1))
    moves: dict[str, Any] = {}
    if state.num_blocks > 1:
        moves["copies"] = _move(0, 1)
    if host_pages:
        moves |= {"copy_out": _move(0, 0), "restores": _move(0, 0)}
    yield StepPlan(0, 0, 3, **moves, **rows(slots[:1], count + 1, 1))
    yield StepPlan(0, 0, 4, release=slots, **begun(state, slots[:1], 1, BEAM))
    long = min(max_tokens, room, LONG_TOKENS)
    if long > LONG_TOKENS // 2:
        yield StepPlan(0, 0, 5, release=slots[:1], **begun(state, slots[:1], long))
        yield StepPlan(0, 0, 6, **rows(slots[:1], long, 1))


def begun(
    state: BatchState, slots: Int32Array, count: int, sampling: SamplingParams = SAMPLING, context_blocks: int = 0
) -> dict[str, Any]:
    """New sequences of ``count`` tokens, computed at once, each of which draws the first of ``ROOM_AFTER``.

    They follow so many pages that count as computed, all of which are the first one: no memory is touched for them.
    """
    context = context_blocks * state.block_size
    cached = np.zeros(context_blocks, np.int32)
    grown = np.arange(-(-(count + ROOM_AFTER) // state.block_size), dtype=np.int32)
    new = [_sequence(slot, context, count, cached, state.max_model_len, sampling) for slot in slots.tolist()]
    return {
        "admit": tuple(new),
        "grow_slots": np.repeat(slots, len(grown)),
        "grow_blocks": np.tile(grown, len(slots)),
        **rows(slots, context, count),
    }


def _sequence(
    slot: int, context: int, count: int, cached: Int32Array, max_model_len: int, sampling: SamplingParams
) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=RequestId("warm-up", slot),
        choice=0,
        attempt=1,
        tokens=np.zeros(context + count, np.int32),
        output_start=context + count,
        num_computed=context,
        block_table=cached,
        sampling=sampling,
        seed=slot,
        max_total_tokens=max_model_len,
    )


def rows(slots: Int32Array, start: int, count: int) -> dict[str, Any]:
    """A row for each of ``slots``: ``count`` tokens from position ``start``, and one is drawn."""

    def filled(value: int) -> Int32Array:
        return np.full(len(slots), value, np.int32)

    return {
        "row_slots": slots,
        "row_starts": filled(start),
        "row_tokens": filled(count),
        "row_samples": filled(1),
        "sample_slots": slots,
    }


def _move(source: int, destination: int) -> PageMoves:
    return PageMoves(np.array([source], np.int32), np.array([destination], np.int32), np.zeros(1, np.uint32))

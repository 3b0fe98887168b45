"""The runner: plans in, tokens out, on tiny real models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice
from plan_maker import MAX_MODEL_LEN, PlanMaker, ints, make_runner, moves
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.batch import PlanError
from octavo_executor.runner import Runner
from octavo_shared.plan import PageMoves, StepPlan
from octavo_shared.records import EndReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return save_tiny_model("qwen3", folder)


@pytest.fixture(scope="module", params=["at once", "late"])
def loaded(folder: Path, theirs: Any, request: pytest.FixtureRequest) -> Runner:
    return make_runner(folder, device=LateDevice(1) if request.param == "late" else None)


@pytest.fixture
def maker(loaded: Runner) -> PlanMaker:
    loaded.reset()
    return PlanMaker(loaded)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=count, max_new_tokens=count, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("block_size", "chunk"), [(8, 16), (16, 7), (32, 1000)])
def test_greedy_equals_transformers(folder: Path, theirs: Any, backend: str, block_size: int, chunk: int) -> None:
    maker = PlanMaker(make_runner(folder, backend, block_size))
    prompts = [random_tokens(n, n) for n in (1, 7, 16, 33, 60)]
    sequences = [maker.admit(prompt, GREEDY) for prompt in prompts]
    maker.finish(*sequences[:2], chunk=chunk)
    maker.finish(*sequences, chunk=min(chunk, 25))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.tokens == greedy(theirs, prompt, 12)
        assert sequence.end == EndReason.LENGTH
        assert [row.position for row in sequence.outputs] == list(range(12))
        assert all(row.attempt == 3 and row.choice == 0 for row in sequence.outputs)
    maker.runner.state.check_integrity()


def test_a_plan_ahead_of_an_end_is_skipped(maker: PlanMaker) -> None:
    short = maker.admit(random_tokens(5, 1), replace(GREEDY, max_tokens=2))
    long = maker.admit(random_tokens(9, 2), GREEDY)
    maker.step((short, 5), (long, 9))
    ahead = [maker.plan([(short, 1), (long, 1)]) for _ in range(2)]
    assert maker.run(ahead[0]).result.ends.tolist() == [EndReason.LENGTH, EndReason.NONE]
    late = maker.run(ahead[1]).result
    assert late.sample_counts.tolist() == [0, 1]
    assert late.ends.tolist() == [0, 0]
    assert len(late.tokens) == 1
    assert short.end == EndReason.LENGTH
    assert len(short.tokens) == 2


def test_a_released_slot_serves_the_next_sequence(maker: PlanMaker, theirs: Any) -> None:
    first = maker.admit(random_tokens(20, 3), GREEDY)
    maker.step((first, 20))
    maker.release(first)
    prompt = random_tokens(30, 4)
    second = maker.admit(prompt, GREEDY)
    assert second.slot == first.slot
    maker.finish(second)
    assert second.tokens == greedy(theirs, prompt, 12)


def test_ends(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(12, 5)
    expected = greedy(theirs, prompt, 12)
    stop = expected[4]
    first = expected.index(stop)
    stopped = maker.admit(prompt, replace(GREEDY, stop_token_ids=(stop,)))
    patient = maker.admit(prompt, replace(GREEDY, stop_token_ids=(stop,), min_tokens=first + 1))
    maker.finish(stopped, patient)
    assert stopped.tokens == expected[: first + 1]
    assert (stopped.end, stopped.outputs[-1].stop_token) == (EndReason.STOP, stop)
    assert all(row.stop_token == -1 for row in stopped.outputs[:-1])
    assert patient.tokens[:first] == expected[:first]
    assert stop not in patient.tokens[: first + 1]


def test_eos_ends_unless_ignored(maker: PlanMaker) -> None:
    """Token 2 is this model's end; a bias makes it certain."""
    bias = ((2, 1000.0),)
    plain, ignoring, waiting = (
        maker.admit(random_tokens(4, 6), replace(GREEDY, logit_bias=bias, **change))
        for change in ({"ignore_eos": False}, {"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 3})
    )
    maker.finish(plain, ignoring, waiting)
    assert (plain.tokens, plain.end, plain.outputs[0].stop_token) == ([2], EndReason.STOP, 2)
    assert (ignoring.tokens, ignoring.end) == ([2] * 12, EndReason.LENGTH)
    assert 2 not in waiting.tokens[:3]
    assert waiting.tokens[3:] == [2]


def test_logprobs_of_outputs_and_prompt(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(23, 7)
    sampling = replace(GREEDY, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3, max_tokens=4)
    sequence = maker.admit(prompt, sampling)
    other = maker.admit(random_tokens(8, 8), GREEDY)
    maker.finish(other, sequence, chunk=9)
    with torch.no_grad():
        raw = theirs(torch.tensor([prompt + sequence.tokens])).logits[0].log_softmax(-1)

    def check(found: Any, row: torch.Tensor, token: int, alternatives: int) -> None:
        assert math.isclose(found.logprob, row[token], abs_tol=1e-3)
        assert found.rank == int((row > row[token]).sum()) + 1
        assert [i for i, _ in found.top] == row.topk(alternatives).indices.tolist()
        assert np.allclose([x for _, x in found.top], row.topk(alternatives).values, atol=1e-3)

    scores = sequence.outputs[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == 22
    for i, found in enumerate(scores):
        check(found, raw[i], prompt[i + 1], 2)
    for i, row in enumerate(sequence.outputs):
        assert row.logprobs is not None
        check(row.logprobs[0], raw[22 + i], sequence.tokens[i], 3)
        assert i == 0 or row.prompt_logprobs is None
    assert all(row.logprobs is None and row.prompt_logprobs is None for row in other.outputs)


def test_sampling_survives_resumption_and_company(maker: PlanMaker) -> None:
    """A sequence draws the same tokens alone, in a batch, and resumed elsewhere from prompt + outputs (L10, L11)."""
    sampling = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=2**64 - 5,
        max_tokens=20,
        ignore_eos=True,
    )
    prompt = random_tokens(18, 9)
    alone = maker.admit(prompt, sampling)
    maker.finish(alone)
    expected = alone.tokens
    assert len(set(expected)) > 8
    other_seed = maker.admit(prompt, replace(sampling, seed=1))
    again = maker.admit(prompt, sampling)
    maker.step((other_seed, 18))
    while len(again.tokens) < 7:
        maker.step((other_seed, 1), (again, min(5, again.known - again.computed)))
    assert again.tokens == expected[:7]
    maker.release(again)
    resumed = maker.admit(prompt + expected[:7], sampling, output_start=18)
    maker.finish(resumed, other_seed, chunk=11)
    assert resumed.tokens == expected[7:]
    assert [row.position for row in resumed.outputs] == list(range(7, 20))
    assert other_seed.tokens != expected


def test_a_row_that_is_not_finite_ends_alone(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(10, 10)
    bad, good = maker.admit(random_tokens(10, 11), GREEDY), maker.admit(prompt, GREEDY)
    maker.step((bad, 10), (good, 10))
    maker.runner._cache.v[:, bad.table[0]] = float("nan")
    result = maker.step((bad, 1), (good, 1)).result
    assert result.sample_counts.tolist() == [0, 1]
    assert result.ends.tolist() == [EndReason.ERROR, EndReason.NONE]
    assert bad.outputs[-1].problem is not None
    assert bad.outputs[-1].tokens == ()
    maker.finish(good)
    assert good.tokens == greedy(theirs, prompt, 12)
    maker.release(bad)


def test_a_row_with_every_token_ruled_out_ends_alone(maker: PlanMaker) -> None:
    sampling = replace(GREEDY, logit_bias=tuple((i, -math.inf) for i in range(131)))
    bad, good = maker.admit([5, 6], sampling), maker.admit([5, 6], GREEDY)
    maker.step((bad, 2), (good, 2))
    assert bad.end == EndReason.ERROR
    assert good.tokens


def test_copied_pages_serve_like_their_originals(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(40, 12)
    sequence = maker.admit(prompt, GREEDY)
    maker.step((sequence, 40))
    old, new = sequence.table[1], maker.free.pop()
    sequence.table[1] = new
    swap = {"swap_slots": ints(sequence.slot), "swap_indices": ints(1), "swap_blocks": ints(new)}
    maker.step((sequence, 1), copies=moves((old, new)), **swap)
    maker.runner._cache.k[:, old] = float("nan")
    maker.runner._cache.v[:, old] = float("nan")
    maker.finish(sequence)
    assert sequence.tokens == greedy(theirs, prompt, 12)


def test_cached_pages_need_no_second_pass(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(40, 13)
    first = maker.admit(prompt, GREEDY)
    maker.step((first, 40))
    shared = ints(*first.table[:2])
    second = maker.admit([*prompt[:35], 9], GREEDY, num_computed=32, block_table=shared)
    maker.finish(second, first)
    assert second.tokens == greedy(theirs, [*prompt[:35], 9], 12)
    assert first.tokens == greedy(theirs, prompt, 12)
    assert [row.cached_tokens for row in second.outputs] == [32] + [0] * 11
    assert not any(row.cached_tokens for row in first.outputs)
    # Resumed with outputs: what is found now is no news about the prompt.
    resumed = maker.admit(
        prompt + first.tokens[:5], GREEDY, output_start=40, num_computed=32, block_table=ints(*first.table[:2])
    )
    maker.finish(resumed)
    assert resumed.tokens == first.tokens[5:]
    assert not any(row.cached_tokens for row in resumed.outputs)


def test_forked_samples_draw_from_one_row(maker: PlanMaker) -> None:
    sampling = replace(GREEDY, temperature=1.5)
    prompt = random_tokens(16, 14)
    parent = maker.admit(prompt, sampling, seed=1)
    twin = maker.admit(prompt, sampling, seed=1)
    child = maker.admit(prompt, sampling, seed=2)
    plan = maker.plan([(parent, 16)])
    slots = ints(parent.slot, twin.slot, child.slot)
    page = parent.table[0]
    grow = {"grow_slots": slots, "grow_blocks": ints(page, page, page)}
    output = maker.run(replace(plan, row_samples=ints(3), sample_slots=slots, **grow))
    assert output.result.sample_counts.tolist() == [1, 1, 1]
    assert parent.tokens == twin.tokens
    assert maker.runner.state.num_computed[slots].tolist() == [16, 16, 16]
    alone = maker.admit(prompt, sampling, seed=2)
    maker.step((alone, 16))
    assert child.tokens == alone.tokens


def test_a_step_without_rows_only_changes_the_state(maker: PlanMaker) -> None:
    sequence = maker.admit([1, 2, 3], GREEDY)
    output = maker.step()
    assert output.rows == ()
    assert maker.runner.state.live[sequence.slot]


def test_timings_are_measured(maker: PlanMaker) -> None:
    sequence = maker.admit(random_tokens(50, 1), GREEDY)
    timings = maker.step((sequence, 50)).result.timings
    assert timings.prepare_s > 0
    assert timings.forward_s > 0
    assert timings.sample_s > 0


BAD: dict[str, dict[str, Any]] = {
    "holds no sequence": {"release": ints(4)},
    "is not free": {"admit": "occupied"},
    "exceed 200": {"admit": "long"},
    "make no sense": {"admit": "all computed"},
    "do not suit": {"admit": "no pages"},
    "there is no page 80": {"grow_slots": ints(0), "grow_blocks": ints(80)},
    "has no block 9": {"swap_slots": ints(0), "swap_indices": ints(9), "swap_blocks": ints(1)},
    "cannot compute 1 tokens from 3": {"row_starts": ints(3)},
    "cannot compute 2 tokens": {"row_tokens": ints(2)},
    "cannot compute 0 tokens": {"row_tokens": ints(0)},
    "without a sequence": {"row_slots": ints(5)},
    "differ in length": {"row_tokens": ints(1, 1)},
    "sample slots for": {"sample_slots": ints()},
    "two rows": {
        "row_slots": ints(0, 0),
        "row_starts": ints(16, 16),
        "row_tokens": ints(1, 1),
        "row_samples": ints(1, 0),
    },
    "two samples": {"row_samples": ints(2), "sample_slots": ints(0, 0)},
    "for 0 samples": {
        "row_slots": ints(0, 1),
        "row_starts": ints(16, 16),
        "row_tokens": ints(1, 1),
        "row_samples": ints(1, -1),
        "sample_slots": ints(),
    },
    "cannot compute 2147483647 tokens": {"row_tokens": ints(2**31 - 1)},
    "a beam width of -1": {"admit": "negative beam"},
    "copies: there is no page 80; there are 80": {"copies": moves((1, 80))},
    "copies: there is no page -1": {"copies": moves((-1, 2))},
    "both source and destination": {"copies": moves((1, 2), (2, 3))},
    "copies: a page is the destination twice": {"copies": moves((1, 3), (2, 3))},
    "copies: 2 sources for 1": {"copies": PageMoves(ints(1, 2), ints(3), np.zeros(1, np.uint32))},
    "restores: there is no host page 1; there are 0": {"restores": moves((1, 2))},
    "copy_out: there is no host page 0; there are 0": {"copy_out": moves((1, 0))},
}


@pytest.mark.parametrize("message", BAD)
def test_a_plan_that_contradicts_the_state_is_refused(maker: PlanMaker, message: str) -> None:
    change = dict(BAD[message])
    running = maker.admit(random_tokens(16, 1), GREEDY)
    admitted = maker.plan([(running, 16)])
    maker.run(admitted)
    if kind := change.pop("admit", None):
        new = replace(admitted.admit[0], slot=3, block_table=ints())
        change["admit"] = (
            {
                "occupied": replace(new, slot=0),
                "long": replace(new, max_total_tokens=MAX_MODEL_LEN + 1),
                "all computed": replace(new, num_computed=16, block_table=ints(1)),
                "no pages": replace(new, num_computed=8),
                "negative beam": replace(new, sampling=replace(GREEDY, beam_width=-1)),
            }[kind],
        )
    plan: StepPlan = replace(maker.plan([(running, 1)]), **change)
    with pytest.raises(PlanError, match=message):
        maker.runner.execute(plan)


def test_a_row_without_pages_for_its_tokens_is_refused(maker: PlanMaker) -> None:
    running = maker.admit(random_tokens(16, 1), GREEDY)
    maker.step((running, 16))
    plan = replace(maker.plan([(running, 1)]), grow_slots=ints(), grow_blocks=ints())
    with pytest.raises(PlanError, match="and 1 blocks"):
        maker.runner.execute(plan)


def test_more_tokens_than_the_step_budget_are_refused(maker: PlanMaker) -> None:
    rows = [(maker.admit(random_tokens(65, i), GREEDY), 65) for i in range(2)]
    with pytest.raises(PlanError, match="130 tokens in a step of at most 128"):
        maker.step(*rows)

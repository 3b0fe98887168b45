"""Beam slots: candidates instead of tokens, against transformers' log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice
from plan_maker import PlanMaker, Running, ints, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_shared import wire
from octavo_shared.plan import StepOutput
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.records import EndReason, SamplingParams

VOCAB = 131
BEAM = SamplingParams(temperature=0.3, top_k=1, top_p=0.1, max_tokens=20, ignore_eos=True, beam_width=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return save_tiny_model("qwen3", folder)


@pytest.fixture(scope="module", params=["cpu", "reference", "late"])
def maker_of(folder: Path, theirs: Any, request: pytest.FixtureRequest) -> Any:
    late = request.param == "late"
    runner = make_runner(folder, "cpu" if late else request.param, device=LateDevice(1) if late else None)

    def make() -> PlanMaker:
        runner.reset()
        return PlanMaker(runner)

    return make


@pytest.fixture
def maker(maker_of: Any) -> PlanMaker:
    made: PlanMaker = maker_of()
    return made


@torch.no_grad()
def raw_logits(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [V] after ``tokens``."""
    return theirs(torch.tensor([tokens])).logits[0, -1].float()


def split(output: StepOutput, beams: list[bool] | None = None) -> list[tuple[list[int], list[float]]]:
    """(tokens, scores) per sample; scores are empty for samples that are no beams'. By default all are."""
    result, parts, token, score = output.result, [], 0, 0
    for i, count in enumerate(result.sample_counts.tolist()):
        scored = count if beams is None or beams[i] else 0
        parts.append((result.tokens[token : token + count].tolist(), result.scores[score : score + scored].tolist()))
        token, score = token + count, score + scored
    assert (token, score) == (len(result.tokens), len(result.scores))
    return parts


def check(found: tuple[list[int], list[float]], logits: torch.Tensor, count: int) -> None:
    best = logits.log_softmax(-1).topk(count)
    assert found[0] == best.indices.tolist()
    assert np.allclose(found[1], best.values, atol=1e-4)
    assert found[1] == sorted(found[1], reverse=True)


def test_candidates_are_the_likeliest_tokens(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(23, 1)
    beam = maker.admit(prompt, BEAM)
    output = maker.step((beam, 23))
    check(split(output)[0], raw_logits(theirs, prompt), 6)
    assert output.result.scores.dtype == np.float32
    assert output.result.ends.tolist() == [EndReason.NONE]
    assert output.rows == ()
    state = maker.runner.state
    assert (state.num_tokens[beam.slot], state.num_computed[beam.slot]) == (23, 23)
    assert not state.ended[beam.slot]
    message = wire.to_scheduler(output.result).SerializeToString()
    back = wire.from_executor(pb.ExecutorMessage.FromString(message))
    assert back.tokens.tolist() == output.result.tokens.tolist()  # type: ignore[union-attr]
    assert back.scores.tolist() == output.result.scores.tolist()  # type: ignore[union-attr]


def test_beams_of_any_width_beside_others(maker: PlanMaker, theirs: Any) -> None:
    """More samples than are drawn at once, beams and others mixed; a wide beam gets the whole vocabulary, once."""
    prompts = [random_tokens(n, n) for n in (5, 9, 12, 3, 17, 20)]
    widths = [0, 2, 0, 100, 1, 0]
    sequences = [
        maker.admit(prompt, replace(BEAM, beam_width=width) if width else GREEDY)
        for prompt, width in zip(prompts, widths, strict=True)
    ]
    output = maker.step(*((sequence, len(prompt)) for sequence, prompt in zip(sequences, prompts, strict=True)))
    assert output.result.sample_counts.tolist() == [1, 4, 1, VOCAB, 2, 1]
    for found, prompt, width in zip(split(output, [width > 0 for width in widths]), prompts, widths, strict=True):
        logits = raw_logits(theirs, prompt)
        if width:
            check(found, logits, min(2 * width, VOCAB))
        else:
            assert found == ([int(logits.argmax())], [])
    assert [row.request_id.serial for row in output.rows] == [sequences[i].serial for i in (0, 2, 5)]


def test_penalties_bias_and_minimum_length_count(maker: PlanMaker, theirs: Any) -> None:
    prompt, outputs = random_tokens(14, 2), [7, 7, 9]
    sampling = replace(
        BEAM,
        beam_width=40,
        ignore_eos=False,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((11, 4.0), (7, 1.0), (9999, 5.0)),
        stop_token_ids=(20,),
        min_tokens=4,
    )
    beam = maker.admit(prompt + outputs, sampling, output_start=14)
    output = maker.step((beam, 17))
    expected = raw_logits(theirs, prompt + outputs)
    for token in set(prompt + outputs):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(outputs):
        expected[token] -= 0.4 + 0.3 * outputs.count(token)
    expected[11] += 4.0
    expected[7] += 1.0
    expected[[2, 20]] = -math.inf
    found = split(output)[0]
    check(found, expected, 80)
    assert not {2, 20} & set(found[0])
    # Once it is long enough, nothing is banned.
    maker.release(beam)
    longer = maker.admit([*prompt, *outputs, 8], replace(sampling, beam_width=66), output_start=14)
    assert {2, 20} < set(split(maker.step((longer, 18)))[0][0])


def test_what_is_ruled_out_is_no_candidate(maker: PlanMaker) -> None:
    everything = replace(BEAM, beam_width=VOCAB, logit_bias=tuple((i, -math.inf) for i in range(3, VOCAB)))
    beam = maker.admit([5, 6], everything)
    output = maker.step((beam, 2))
    assert sorted(split(output)[0][0]) == [0, 1, 2]
    assert math.isclose(np.exp(output.result.scores).sum(), 1.0, rel_tol=1e-5)


def test_a_beam_that_is_not_finite_ends_alone(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(10, 3)
    bad, good = maker.admit(random_tokens(18, 4), BEAM), maker.admit(prompt, BEAM)
    maker.step((bad, 16))
    maker.runner._cache.v[:, bad.table[0]] = float("nan")
    output = maker.step((bad, 2), (good, 10))
    assert output.result.sample_counts.tolist() == [0, 6]
    assert output.result.ends.tolist() == [EndReason.ERROR, EndReason.NONE]
    assert output.rows == ()
    assert maker.runner.state.ended[[bad.slot, good.slot]].tolist() == [True, False]
    check(split(output)[1], raw_logits(theirs, prompt), 6)
    nothing = maker.admit([5, 6], replace(BEAM, logit_bias=tuple((i, -math.inf) for i in range(VOCAB))))
    assert maker.step((nothing, 2)).result.ends.tolist() == [EndReason.ERROR]


def test_beams_go_on_as_new_sequences_over_shared_pages(maker: PlanMaker, theirs: Any) -> None:
    """Two live beams, chosen step by step as a scheduler would: by cumulative log-probability, pages copied on write."""
    prompt = random_tokens(15, 5)
    sampling = replace(BEAM, beam_width=2)
    first = maker.admit(prompt, sampling)
    parts = split(maker.step((first, 15)))
    live: list[tuple[Running, list[int], float]] = [(first, [], 0.0)]
    for _ in range(8):
        options = sorted(
            (-(total + score), parent, token)
            for parent, (total, (tokens, scores)) in enumerate(zip((beam[2] for beam in live), parts, strict=True))
            for token, score in zip(tokens, scores, strict=True)
        )[:2]
        parents = [(live[parent], token, -total) for total, parent, token in options]
        tables = [ints(*beam.table) for (beam, _, _), _, _ in parents]
        # Released and admitted in one plan: the pages go from hand to hand.
        before = live
        grown = [
            (
                maker.admit(
                    prompt + outputs + [token],
                    sampling,
                    output_start=15,
                    num_computed=beam.computed,
                    block_table=table,
                ),
                [*outputs, token],
                total,
            )
            for ((beam, outputs, _), token, total), table in zip(parents, tables, strict=True)
        ]
        for beam, _, _ in before:
            maker.release(beam)
        live = grown
        parts = split(maker.step(*((beam, 1) for beam, _, _ in live)))
    assert len({tuple(outputs) for _, outputs, _ in live}) == 2
    for _, outputs, total in live:
        expected = sum(
            float(raw_logits(theirs, prompt + outputs[:i]).log_softmax(-1)[token]) for i, token in enumerate(outputs)
        )
        assert math.isclose(total, expected, abs_tol=1e-3)
    with torch.no_grad():
        best = theirs.generate(
            torch.tensor([prompt]),
            do_sample=False,
            num_beams=2,
            num_return_sequences=2,
            min_new_tokens=8,
            max_new_tokens=8,
            eos_token_id=None,
            length_penalty=0.0,
        )
    assert [outputs for _, outputs, _ in live] == best[:, 15:].tolist()

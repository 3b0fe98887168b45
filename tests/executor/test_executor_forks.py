"""Forks: one row sampled into several slots that share its pages, and copy-on-write afterwards, on a tiny real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from late_device import LateDevice
from plan_maker import PlanMaker, Running, ints, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.batch import PlanError
from octavo_executor.runner import Runner
from octavo_shared.plan import StepPlan
from octavo_shared.records import EndReason, SamplingParams

BLOCK = 16
CHOICES = 4
PLAIN = SamplingParams(temperature=1.2, top_p=0.95, seed=2**64 - 2, max_tokens=24, ignore_eos=True, logprobs=3)
# Ends at different times, after at least three tokens, and with every kind of preference.
PICKY = replace(
    PLAIN,
    ignore_eos=False,
    stop_token_ids=tuple(range(40, 60)),
    min_tokens=3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias=((50, 2.0), (70, 3.0), (5, -50.0)),
    prompt_logprobs=2,
)


@pytest.fixture(scope="module", params=["at once", "late"])
def loaded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runner:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3", folder)
    return make_runner(folder, block_size=BLOCK, device=LateDevice(1) if request.param == "late" else None)


@pytest.fixture
def maker(loaded: Runner) -> PlanMaker:
    loaded.reset()
    loaded._cache.k.fill_(float("nan"))
    loaded._cache.v.fill_(float("nan"))
    return PlanMaker(loaded)


def outputs(sequence: Running) -> list[tuple[Any, ...]]:
    """Everything a sequence has told the log."""
    return [
        (row.position, row.tokens, row.end, row.stop_token, row.logprobs, row.prompt_logprobs, row.cached_tokens)
        for row in sequence.outputs
    ]


def separate(maker: PlanMaker, prompt: list[int], sampling: SamplingParams, chunk: int) -> list[list[tuple[Any, ...]]]:
    """What the choices come to as sequences of their own, one after the other."""
    everything = []
    for choice in range(CHOICES):
        alone = maker.admit(prompt, sampling, seed=sampling.seed_of(choice))
        maker.finish(alone, chunk=chunk)
        everything.append(outputs(alone))
        maker.release(alone)
    return everything


def fork(maker: PlanMaker, prompt: list[int], sampling: SamplingParams, chunk: int) -> tuple[StepPlan, list[Running]]:
    """One prefill in chunks; the plan of the last chunk, sampled for all choices, is returned and not run."""
    leader = maker.admit(prompt, sampling, seed=sampling.seed_of(0))
    while leader.known - leader.computed > chunk:
        maker.step((leader, chunk))
    plan, children = maker.fork(leader, [(sampling, sampling.seed_of(i)) for i in range(1, CHOICES)])
    return plan, [leader, *children]


@pytest.mark.parametrize("sampling", [PLAIN, PICKY], ids=["plain", "picky"])
@pytest.mark.parametrize("chunk", [1000, 10])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_forks_equal_separate_sequences(maker: PlanMaker, length: int, chunk: int, sampling: SamplingParams) -> None:
    prompt = random_tokens(length, length)
    expected = separate(maker, prompt, sampling, chunk)
    plan, family = fork(maker, prompt, sampling, chunk)
    maker.run(plan)
    assert len({tuple(sequence.table) for sequence in family}) == 1, "all hold the very same pages"
    last = family[0].table[-1]
    maker.finish(*family)
    assert [outputs(sequence) for sequence in family] == expected
    assert len({tuple(sequence.tokens) for sequence in family}) == CHOICES
    writers = [sequence for sequence in family if len(sequence.tokens) > 1]
    if length % BLOCK == 0:
        assert maker.copied == 0, "a full page is never written again"
        assert {sequence.table[length // BLOCK - 1] for sequence in family} == {last}
    else:
        pages = [sequence.table[length // BLOCK] for sequence in writers]
        assert len(set(pages)) == len(pages)
        # All have copied; the last of all its holders writes in place, unless one that has ended still holds it.
        assert maker.copied == len(writers) - (len(writers) == CHOICES)
        assert (last in pages) == (len(writers) == CHOICES)
    if sampling is PICKY:
        assert all(len(sequence.tokens) >= 3 for sequence in family)


def test_the_picky_choices_end_differently(maker: PlanMaker) -> None:
    """The comparison above would say less if all ended alike."""
    ends = {rows[-1][2:4] for rows in separate(maker, random_tokens(17, 17), PICKY, 1000)}
    assert len(ends) > 1
    assert {end for end, _ in ends} & {int(EndReason.STOP)}


def test_the_plan_after_a_fork_needs_no_result(maker: PlanMaker) -> None:
    """Run-ahead: copies and rows of the children are planned before their first tokens are known."""
    prompt = random_tokens(21, 3)
    expected = separate(maker, prompt, PICKY, 1000)
    plan, family = fork(maker, prompt, PICKY, 1000)
    ahead = maker.plan([(sequence, 1) for sequence in family])
    assert len(ahead.copies) == CHOICES - 1
    maker.run(plan)
    maker.run(ahead)
    maker.finish(*family)
    assert [outputs(sequence) for sequence in family] == expected


def test_a_child_can_be_forked_again(maker: PlanMaker) -> None:
    """As beams do: what a choice has drawn meanwhile is shared as well."""
    prompt = random_tokens(14, 5)
    plan, family = fork(maker, prompt, PLAIN, 1000)
    maker.run(plan)
    for _ in range(5):
        maker.step(*((sequence, 1) for sequence in family))
    child = family[2]
    grown = prompt + child.tokens
    twin = maker.admit(
        grown,
        PLAIN,
        seed=PLAIN.seed_of(2),
        output_start=14,
        num_computed=child.computed,
        block_table=ints(*child.table),
    )
    maker.release(family[0])
    maker.release(family[1])
    maker.step((twin, 1), (child, 1))
    maker.finish(twin, child, family[3])
    assert twin.tokens == child.tokens[6:]
    assert [row.logprobs for row in twin.outputs] == [row.logprobs for row in child.outputs[6:]]


def test_children_tell_of_the_cache_what_their_leader_found(maker: PlanMaker) -> None:
    prompt = random_tokens(45, 6)
    first = maker.admit(prompt, PLAIN)
    maker.step((first, 45))
    leader = maker.admit(prompt, PLAIN, num_computed=32, block_table=ints(*first.table[:2]))
    maker.step((leader, 6))
    plan, children = maker.fork(leader, [(PLAIN, 1), (PLAIN, 2)])
    assert [new.num_computed for new in plan.admit] == [38, 38]
    maker.run(plan)
    assert [sequence.outputs[0].cached_tokens for sequence in (leader, *children)] == [32, 32, 32]


def test_a_child_asks_for_prompt_logprobs_and_its_leader_has_none(maker: PlanMaker) -> None:
    """Better none than half of them."""
    prompt = random_tokens(20, 7)
    wants = replace(PLAIN, prompt_logprobs=2)
    leader = maker.admit(prompt, PLAIN)
    plan, (child,) = maker.fork(leader, [(wants, 1)])
    maker.run(plan)
    assert child.outputs[0].prompt_logprobs is None


def test_a_row_that_is_not_finite_ends_every_choice(maker: PlanMaker) -> None:
    leader = maker.admit(random_tokens(20, 8), PLAIN)
    maker.step((leader, 16))
    maker.runner._cache.v[:, leader.table[0]] = float("nan")
    plan, children = maker.fork(leader, [(PLAIN, 1)])
    result = maker.run(plan).result
    assert result.ends.tolist() == [EndReason.ERROR] * 2
    assert result.sample_counts.tolist() == [0, 0]
    assert all(sequence.outputs[-1].problem is not None for sequence in (leader, *children))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tokens", "has not the tokens and pages of slot 0"),
        ("longer", "has not the tokens and pages of slot 0"),
        ("pages", "has not the tokens and pages of slot 0"),
        ("fewer pages", "has not the tokens and pages of slot 0"),
        ("a row of its own", "and has a row itself"),
        ("twice", "two rows or two samples"),
        ("nobody", "without a sequence"),
    ],
)
def test_impossible_forks_are_refused(maker: PlanMaker, what: str, message: str) -> None:
    leader = maker.admit(random_tokens(20, 9), PLAIN)
    plan, (child,) = maker.fork(leader, [(PLAIN, 1)])
    mine, its = plan.admit
    change: dict[str, Any] = {}
    if what == "tokens":
        its = replace(its, tokens=ints(*its.tokens[:-1], 3))
    elif what == "longer":
        its = replace(its, tokens=ints(*its.tokens, 3))
    elif what == "pages":
        its = replace(its, block_table=ints(its.block_table[0], maker.free[-1]))
    elif what == "fewer pages":
        its = replace(its, block_table=its.block_table[:1])
    elif what == "a row of its own":
        rows = {name: ints(*getattr(plan, name), *getattr(plan, name)) for name in ("row_starts", "row_tokens")}
        change = {"row_slots": ints(leader.slot, child.slot), "row_samples": ints(2, 0), **rows}
    elif what == "twice":
        change = {"sample_slots": ints(leader.slot, leader.slot)}
    else:
        change = {"sample_slots": ints(leader.slot, 5)}
    with pytest.raises(PlanError, match=message):
        maker.runner.execute(replace(plan, admit=(mine, its), **change))

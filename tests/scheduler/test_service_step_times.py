"""What steps take is learned from those that were done."""

from __future__ import annotations

import random

import pytest

from octavo_scheduler.step_times import ENOUGH_STEPS, StepTimes
from octavo_shared.plan import MeasuredStep

KINDS = ((0, 1), (0, 8), (16, 1), (128, 1))


def true_s(prompt_tokens: int, sequences: int) -> float:
    return 0.025 + 0.003 * sequences + (0.01 + 0.0016 * prompt_tokens if prompt_tokens else 0.0)


def measured(times: float = 1.0) -> list[MeasuredStep]:
    return [MeasuredStep(*kind, times * true_s(*kind)) for kind in KINDS]


def taught(steps: int, noise: float = 0.0) -> StepTimes:
    rng, times = random.Random(1), StepTimes()
    for _ in range(steps):
        prompt_tokens = rng.choice((0, 0, 0, rng.randint(1, 500)))
        sequences = rng.randint(1, 60)
        times.observe(prompt_tokens, sequences, true_s(prompt_tokens, sequences) * (1 + noise * rng.uniform(-1, 1)))
    return times


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_times_of_all_kinds_of_steps_are_found(noise: float) -> None:
    times = taught(2000, noise)
    assert times.knows
    for prompt_tokens, sequences in ((0, 1), (0, 50), (400, 20), (2000, 1)):
        assert times.expected_s(prompt_tokens, sequences) == pytest.approx(true_s(prompt_tokens, sequences), rel=0.2)
    assert times.prompt_token_s == pytest.approx(0.0016, rel=0.15)


def test_nothing_is_claimed_before_enough_was_seen() -> None:
    times = StepTimes()
    assert (times.knows, times.prompt_token_s, times.decode_s(1), times.expected_s(100, 1)) == (False, 0.0, 0.0, 0.0)
    for _ in range(100):
        times.observe(0, 1, 0.03)
    assert not times.knows, "no prompt was seen"


def test_what_is_done_for_the_first_time_says_nothing() -> None:
    times = StepTimes()
    times.observe(100, 1, 30.0)
    times.observe(100, 1, 5.0)
    for _ in range(20):
        times.observe(100, 1, 0.1)
        times.observe(0, 1, 0.03)
    assert times.expected_s(100, 1) == pytest.approx(0.1, rel=0.1)


def test_prompts_that_are_all_alike_tell_nothing_of_longer_ones_but_an_upper_bound() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(0, 1, 0.03)
        times.observe(100, 1, 0.13)
    assert times.prompt_token_s < 1e-6
    assert times.prompt_s == pytest.approx(0.1, rel=0.05)
    assert times.expected_s(1000, 1) == pytest.approx(1.03, rel=0.05)
    times.observe(1000, 1, 1.03)
    assert times.prompt_token_s == pytest.approx(0.001, rel=0.1), "one that differs is enough"


def test_found_prompts_cost_little() -> None:
    times = taught(500)
    for _ in range(200):
        times.observe_lookup(1000, 900)
    assert times.prompt_token_s == pytest.approx(0.00016, rel=0.2)


def test_a_pause_of_the_machine_is_not_taken_for_its_pace() -> None:
    times = taught(500)
    times.observe(0, 10, 600.0)
    assert times.expected_s(0, 10) < 2 * true_s(0, 10)
    for _ in range(1000):
        times.observe(0, 10, 0.5)
    assert times.expected_s(0, 10) == pytest.approx(0.5, rel=0.1), "a lasting change is learned"


def test_what_was_measured_counts_until_enough_was_learned() -> None:
    times = StepTimes()
    times.begin(measured())
    assert times.knows
    assert times.foretells
    assert times.prompt_token_s == pytest.approx(0.0016, rel=0.05)
    assert times.prompt_s == pytest.approx(0.01, rel=0.1)
    assert times.decode_s(4) == pytest.approx(true_s(0, 4), rel=0.05)
    for kind in ((0, 1), (0, 60), (500, 1), (2000, 30)):
        assert 1.5 * true_s(*kind) < times.expected_s(*kind) < 3 * true_s(*kind)
    for _ in range(ENOUGH_STEPS):
        times.observe(0, 1, true_s(0, 1))
        times.observe(100, 1, true_s(100, 1))
    assert times.expected_s(100, 1) == pytest.approx(true_s(100, 1), rel=0.1)


@pytest.mark.parametrize("steps_before", [0, 100])
def test_what_is_attended_to_takes_its_time(steps_before: int) -> None:
    times = StepTimes()
    after = MeasuredStep(16, 1, true_s(16, 1) + 16 * 2000 * 1e-6, 2000)
    times.begin([*measured(), after])
    for _ in range(steps_before):
        times.observe(0, 1, true_s(0, 1))
        times.observe(100, 1, true_s(100, 1))
    longer_s = times.expected_s(2000, 1, 2000 * 31_000) - times.expected_s(2000, 1)
    assert longer_s == pytest.approx(2 * 62.0, rel=0.05)
    assert times.prompt_token_s < 0.0017, "it is told apart from what prompts take"


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_machine_that_was_otherwise_when_it_was_measured_is_soon_known(factor: float) -> None:
    times = StepTimes()
    times.begin(measured(factor))
    rng = random.Random(2)
    for step in range(3 * ENOUGH_STEPS):
        kind = (0 if step % 3 else rng.randint(10, 500), rng.randint(1, 8))
        times.observe(*kind, true_s(*kind))
    for kind in ((0, 4), (300, 4)):
        assert times.expected_s(*kind) == pytest.approx(true_s(*kind), rel=0.3)
    assert times.prompt_token_s == pytest.approx(0.0016, rel=0.3)


def test_first_steps_may_take_as_long_as_they_did_before_or_were_measured_now() -> None:
    times = taught(500)
    assert times.foretells
    times.begin(())
    assert not times.foretells, "another process, which says nothing of itself"
    assert times.knows
    assert times.expected_s(0, 1) == pytest.approx(true_s(0, 1), rel=0.3)
    times.begin(measured(10.0))
    assert times.foretells
    assert times.expected_s(0, 1) == pytest.approx(20 * true_s(0, 1), rel=0.3)
    times.begin(measured(0.1))
    assert times.expected_s(0, 1) == pytest.approx(true_s(0, 1), rel=0.3)
    assert times.decode_s(1) == pytest.approx(true_s(0, 1), rel=0.3)


@pytest.mark.parametrize("kinds", [slice(0), slice(2), slice(2, 4)])
def test_measurements_of_one_kind_of_step_say_nothing(kinds: slice) -> None:
    times = StepTimes()
    times.begin(measured()[kinds])
    assert (times.knows, times.foretells, times.expected_s(100, 1)) == (False, False, 0.0)
    times.begin([MeasuredStep(0, 1, 0.03), MeasuredStep(16, 1, 0.13, 100)])
    assert not times.foretells


def test_one_size_of_each_kind_tells_something() -> None:
    times = StepTimes()
    times.begin([MeasuredStep(0, 1, 0.03), MeasuredStep(16, 1, 0.13)])
    assert times.foretells
    assert 1.5 * 0.1 * 100 / 16 < times.expected_s(100, 1) < 3 * 0.1 * 100 / 16

"""What steps take is learned from those that were done."""

from __future__ import annotations

import random

import pytest

from octavo_scheduler.step_times import StepTimes


def true_s(prompt_tokens: int, sequences: int) -> float:
    return 0.025 + 0.003 * sequences + (0.01 + 0.0016 * prompt_tokens if prompt_tokens else 0.0)


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

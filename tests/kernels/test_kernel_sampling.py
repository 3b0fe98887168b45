"""Sampling: the C kernel against the reference, its noise against the distribution it must have."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_inputs import filter_columns, sample_rows

from octavo_kernels import SampleStatus
from octavo_kernels.interface import Kernels
from octavo_kernels.reference.sampling import gumbel_noise


def both(cpu: Kernels, reference: Kernels, logits: torch.Tensor, **columns: object) -> list[int]:
    rows = sample_rows(logits.shape[0], **columns)  # type: ignore[arg-type]
    before = logits.clone()
    token, status = cpu.sample(logits, rows)
    expected, expected_status = reference.sample(logits, rows)
    assert torch.equal(logits, before)
    assert token.tolist() == expected.tolist()
    assert status.tolist() == expected_status.tolist()
    return token.tolist()


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 1000, 49152])
def test_greedy_takes_the_first_of_the_best(cpu: Kernels, reference: Kernels, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab)
    logits[1] = 2.5
    logits[2, [vocab // 2, vocab - 1]] = 50.0
    assert both(cpu, reference, logits)[1:3] == [0, vocab // 2]


@pytest.mark.parametrize("vocab", [5, 1003, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_filters_and_noise(cpu: Kernels, reference: Kernels, vocab: int, spread: float) -> None:
    torch.manual_seed(vocab)
    columns = filter_columns(4)
    count = len(columns["top_k"])
    logits = torch.randn(count, vocab) * spread
    both(
        cpu,
        reference,
        logits,
        seed=torch.randint(-(2**62), 2**62, (count,)),
        **columns,
    )


def test_ties_at_the_border_of_top_k_and_top_p(cpu: Kernels, reference: Kernels) -> None:
    logits = torch.zeros(64, 32)
    drawn = both(cpu, reference, logits[:32], temperature=1.0, top_k=5, seed=3)
    assert set(drawn) <= set(range(5))
    assert len(set(drawn)) == 5
    drawn = both(cpu, reference, logits, temperature=1.0, top_p=0.25, seed=4)
    assert set(drawn) <= set(range(8))


def test_penalties_bias_and_banned_ids(cpu: Kernels, reference: Kernels) -> None:
    torch.manual_seed(0)
    count, vocab = 6, 50
    history = [[1, 2, 3, 3, 3, 4], [], [5] * 9, [-1, 50, 2**30, 7], [0, 1], [49, 49, 48]]
    for seed in range(20):
        both(
            cpu,
            reference,
            torch.randn(count, vocab) * 2,
            history=history,
            output_start=[2, 0, 9, 0, 2, 1],
            presence=[0.5, 1.0, 2.0, 0.0, -2.0, 0.3],
            frequency=[0.3, 0.0, 1.0, 2.0, 0.0, -1.0],
            repetition=[1.0, 1.2, 2.0, 0.5, 1.1, 1.0],
            bias_start=[0, 2, 2, 3, 3, 3, 6],
            bias_ids=[1, 2, 40, 49, 50, -3],
            bias_values=[3.0, -100.0, 1.5, -1.0, 100.0, 100.0],
            banned_start=[0, 0, 3, 3, 3, 4, 4],
            banned_ids=[3, 50, -1, 0],
            temperature=[0.0, 0.8, 1.0, 0.0, 1.0, 1.5],
            seed=seed,
        )


def test_each_penalty_does_what_its_name_says(cpu: Kernels) -> None:
    logits = torch.tensor([[3.0, 2.9, 1.0]]).repeat(4, 1)
    rows = sample_rows(
        4,
        history=[[0, 0], [0, 0], [0], [0, 0]],
        output_start=[0, 0, 0, 2],
        presence=[0.2, 0.0, 0.0, 2.0],
        frequency=[0.0, 0.04, 0.0, 2.0],
        repetition=[1.0, 1.0, 1.5, 1.0],
    )
    # presence and repetition push token 0 under token 1; 2 x 0.04 does not; prompt tokens bear no presence penalty.
    assert cpu.sample(logits, rows)[0].tolist() == [1, 0, 1, 0]


def test_bad_rows_are_told_apart_and_leave_the_others_alone(cpu: Kernels, reference: Kernels) -> None:
    logits = torch.randn(5, 100)
    logits[1, 99] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = -math.inf
    rows = sample_rows(5, temperature=[0.0, 1.0, 0.0, 1.0, 1.0])
    for kernels in (cpu, reference):
        token, status = kernels.sample(logits, rows)
        fine, bad, nothing = SampleStatus.FINE, SampleStatus.NOT_FINITE, SampleStatus.NOTHING_LEFT
        assert status.tolist() == [fine, bad, bad, nothing, fine]
        assert token[1:4].tolist() == [-1, -1, -1]
        assert token[0] == logits[0].argmax()


def test_a_draw_depends_on_nothing_but_seed_and_position(cpu: Kernels) -> None:
    torch.manual_seed(5)
    logits = torch.randn(16, 5000)
    seeds, positions = torch.arange(16) * 77, torch.arange(16, dtype=torch.int32) + 9
    together = cpu.sample(logits, sample_rows(16, temperature=1.0, seed=seeds, position=positions))[0]
    for r in range(16):
        alone = sample_rows(1, temperature=1.0, seed=seeds[r : r + 1], position=positions[r : r + 1])
        assert cpu.sample(logits[r : r + 1], alone)[0][0] == together[r]


def test_draws_follow_the_distribution(cpu: Kernels) -> None:
    """Chi-square over positions at one seed and over seeds at one position, 19 degrees of freedom."""
    probabilities = torch.softmax(torch.linspace(0, 3, 20), 0)
    draws = 20000
    logits = probabilities.log().repeat(draws, 1)
    for seed, position in (
        (torch.full((draws,), 11), torch.arange(draws)),
        (torch.arange(draws), torch.full((draws,), 4)),
    ):
        rows = sample_rows(draws, temperature=1.0, seed=seed, position=position)
        counts = torch.bincount(cpu.sample(logits, rows)[0].long(), minlength=20)
        expected = probabilities * draws
        assert ((counts - expected) ** 2 / expected).sum() < 43.8  # p = 0.001


def test_noise_is_gumbel_and_fresh_at_every_position() -> None:
    ids = torch.arange(100_000)
    noise = gumbel_noise(1, 2, ids)
    assert abs(noise.mean() - 0.57722) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
    for other in (gumbel_noise(1, 3, ids), gumbel_noise(2, 2, ids), noise.roll(1)):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", [3, 1000, 49155])
def test_logprobs(cpu: Kernels, reference: Kernels, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab) * 5
    logits[2, :] = 1.0
    target = torch.tensor([0, vocab - 1, 1, -1, vocab], dtype=torch.int32)
    top_n = torch.tensor([0, 2, 3, 5, 20], dtype=torch.int32)
    got, expected = (kernels.logprobs(logits, target, top_n, 20) for kernels in (cpu, reference))
    torch.testing.assert_close(got.logprob, expected.logprob, rtol=1e-5, atol=1e-5)
    assert got.rank.tolist() == expected.rank.tolist()
    for r, n in enumerate(top_n.tolist()):
        n = min(n, vocab)
        assert got.top_ids[r, :n].tolist() == expected.top_ids[r, :n].tolist()
        torch.testing.assert_close(got.top_logprobs[r, :n], expected.top_logprobs[r, :n], rtol=1e-5, atol=1e-5)


def same_candidates(
    cpu: Kernels, reference: Kernels, logits: torch.Tensor, wanted: list[int], **columns: object
) -> list:
    """Both backends' candidates, which must agree, as (ids, log-probabilities) per row."""
    rows = sample_rows(logits.shape[0], **columns)  # type: ignore[arg-type]
    before, width = logits.clone(), max(wanted)
    most = torch.tensor(wanted, dtype=torch.int32)
    got, expected = (kernels.candidates(logits, rows, most, width) for kernels in (cpu, reference))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    assert got.found.tolist() == expected.found.tolist()
    assert got.status.tolist() == expected.status.tolist()
    result = []
    for r, n in enumerate(got.found.tolist()):
        assert got.ids[r, :n].tolist() == expected.ids[r, :n].tolist()
        torch.testing.assert_close(got.logprobs[r, :n], expected.logprobs[r, :n], rtol=1e-5, atol=1e-5)
        result.append((got.ids[r, :n].long(), got.logprobs[r, :n]))
    return result


@pytest.mark.parametrize("vocab", [1, 9, 131, 49155])
@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
def test_candidates_are_the_best_of_the_softmax(cpu: Kernels, reference: Kernels, vocab: int, spread: float) -> None:
    """Few are found one way, many another; temperature and filters play no part."""
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab) * spread
    wanted = [4, 1, 12, 64, 65, 400, 0]
    found = same_candidates(
        cpu, reference, logits, wanted, temperature=0.5, top_k=1, top_p=0.01, min_p=0.9, seed=torch.arange(7)
    )
    for row, (ids, logprobs), n in zip(logits, found, wanted, strict=True):
        best = row.double().log_softmax(-1).topk(min(n, vocab))
        assert ids.tolist() == best.indices.tolist()
        torch.testing.assert_close(logprobs.double(), best.values, rtol=1e-5, atol=1e-5)


def test_candidates_of_equal_rank_come_by_id(cpu: Kernels, reference: Kernels) -> None:
    logits = torch.zeros(2, 300)
    logits[:, [7, 250]] = 1.0
    few, many = same_candidates(cpu, reference, logits, [5, 100])
    assert few[0].tolist() == [7, 250, 0, 1, 2]
    assert many[0].tolist() == [7, 250, *(i for i in range(99) if i != 7)]


@pytest.mark.parametrize("most", [6, 100])
def test_candidates_after_penalties_bias_and_bans(cpu: Kernels, reference: Kernels, most: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 150) * 2
    found = same_candidates(
        cpu,
        reference,
        logits,
        [most] * 3,
        history=[[1, 2, 3, 3, 3, 4], [], [-1, 150, 2**30, 7]],
        output_start=[2, 0, 0],
        presence=[0.5, 1.0, 0.0],
        frequency=[0.3, 0.0, 2.0],
        repetition=[1.5, 1.2, 0.5],
        bias_start=[0, 2, 2, 4],
        bias_ids=[1, 2, 149, -3],
        bias_values=[3.0, -100.0, 10.0, 100.0],
        banned_start=[0, 1, 3, 4],
        banned_ids=[9, 150, 5, 20],
    )
    z = logits[0].clone()
    for token in (1, 2, 3, 4):
        z[token] = z[token] / 1.5 if z[token] > 0 else z[token] * 1.5
    z[3] -= 3 * 0.3 + 0.5
    z[4] -= 0.3 + 0.5
    z[1] += 3.0
    z[2] -= 100.0
    z[9] = -math.inf
    best = z.log_softmax(-1).topk(most)
    assert found[0][0].tolist() == best.indices.tolist()
    torch.testing.assert_close(found[0][1], best.values, rtol=1e-5, atol=1e-5)
    assert found[2][0][0] == 149
    assert all(banned not in ids for (ids, _), banned in zip(found, (9, 5, 20), strict=True))


def test_what_has_no_probability_is_no_candidate(cpu: Kernels, reference: Kernels) -> None:
    logits = torch.full((5, 200), -math.inf)
    logits[0, [3, 150]] = torch.tensor([1.0, 2.0])
    logits[1] = logits[0]
    logits[3, 5] = float("nan")
    logits[4, 5] = math.inf
    found = same_candidates(cpu, reference, logits, [10, 100, 10, 10, 100])
    for ids, logprobs in found[:2]:
        assert ids.tolist() == [150, 3]
        torch.testing.assert_close(logprobs, torch.tensor([2.0, 1.0]).log_softmax(-1))
    assert all(len(ids) == 0 for ids, _ in found[2:])
    fine, bad, nothing = SampleStatus.FINE, SampleStatus.NOT_FINITE, SampleStatus.NOTHING_LEFT
    rows = sample_rows(5)
    assert cpu.candidates(logits, rows, torch.full((5,), 10, dtype=torch.int32), 10).status.tolist() == [
        fine,
        fine,
        nothing,
        bad,
        bad,
    ]

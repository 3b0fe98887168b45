"""Log-probabilities and candidates by Triton's interpreter against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_inputs import sample_rows

from octavo_kernels import SampleStatus
from octavo_kernels.interface import Kernels
from octavo_kernels.triton import sampling

INF = math.inf
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(("vocab", "tile"), [(3, 16), (300, 64), (20000, 2048)])
def test_logprobs(reference: Kernels, vocab: int, tile: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) * 5
    logits[2, :] = 1.0
    logits[5, 1::2] = -INF
    target = torch.tensor([0, vocab - 1, 1, -1, vocab, 1], dtype=torch.int32)
    top_n = torch.tensor([0, 2, 3, 5, 12, 3], dtype=torch.int32)
    before = logits.clone()
    got, expected = (
        sampling.logprobs(logits, target, top_n, 12, tile=tile),
        reference.logprobs(logits, target, top_n, 12),
    )
    assert torch.equal(logits, before)
    torch.testing.assert_close(got.logprob, expected.logprob, **CLOSE)
    assert got.rank.tolist() == expected.rank.tolist()
    for r, n in enumerate(top_n.tolist()):
        n = min(n, vocab)
        assert got.top_ids[r, :n].tolist() == expected.top_ids[r, :n].tolist()
        torch.testing.assert_close(got.top_logprobs[r, :n], expected.top_logprobs[r, :n], **CLOSE)


def test_logprobs_of_large_logits_keep_their_digits(reference: Kernels) -> None:
    logits = torch.tensor([[1e6, 1e6 - 1, 1e6 - 40], [-1e6, -1e6 - 2, 3.0]])
    target, top_n = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    got, expected = sampling.logprobs(logits, target, top_n, 3), reference.logprobs(logits.double(), target, top_n, 3)
    torch.testing.assert_close(got.logprob.double(), expected.logprob.double(), **CLOSE)
    torch.testing.assert_close(got.top_logprobs.double(), expected.top_logprobs.double(), **CLOSE)


def test_logprobs_of_rows_that_are_not_finite() -> None:
    logits = torch.randn(4, 40)
    logits[0, 39], logits[1, 0], logits[2] = math.nan, INF, -INF
    target, top_n = torch.full((4,), 3, dtype=torch.int32), torch.full((4,), 2, dtype=torch.int32)
    got = sampling.logprobs(logits, target, top_n, 2, tile=32)
    assert got.logprob[:3].isnan().all()
    assert got.top_logprobs[:3].isnan().all()
    assert got.logprob[3].isfinite()


def same_candidates(
    reference: Kernels, logits: torch.Tensor, wanted: list[int], tile: int, **columns: object
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both backends' candidates, which must agree, as (ids, log-probabilities) per row."""
    rows = sample_rows(logits.shape[0], **columns)  # type: ignore[arg-type]
    before, width = logits.clone(), max(wanted)
    most = torch.tensor(wanted, dtype=torch.int32)
    got = sampling.candidates(logits, rows, most, width, tile=tile)
    expected = reference.candidates(logits, rows, most, width)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    assert got.found.tolist() == expected.found.tolist()
    assert got.status.tolist() == expected.status.tolist()
    result = []
    for r, n in enumerate(got.found.tolist()):
        assert got.ids[r, :n].tolist() == expected.ids[r, :n].tolist()
        torch.testing.assert_close(got.logprobs[r, :n], expected.logprobs[r, :n], **CLOSE)
        result.append((got.ids[r, :n].long(), got.logprobs[r, :n]))
    return result


@pytest.mark.parametrize(("vocab", "tile"), [(1, 16), (9, 16), (131, 64), (5000, 2048)])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_candidates_are_the_best_of_the_softmax(reference: Kernels, vocab: int, tile: int, spread: float) -> None:
    """Temperature and filters play no part."""
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab) * spread
    wanted = [4, 1, 20, 0]
    settings = {"temperature": 0.5, "top_k": 1, "top_p": 0.01, "min_p": 0.9, "seed": torch.arange(4)}
    found = same_candidates(reference, logits, wanted, tile, **settings)
    for row, (ids, logprobs), n in zip(logits, found, wanted, strict=True):
        best = row.double().log_softmax(-1).topk(min(n, vocab))
        assert ids.tolist() == best.indices.tolist()
        torch.testing.assert_close(logprobs.double(), best.values, **CLOSE)


def test_candidates_of_equal_rank_come_by_id(reference: Kernels) -> None:
    logits = torch.zeros(1, 100)
    logits[:, [7, 90]] = 1.0
    assert same_candidates(reference, logits, [12], 32)[0][0].tolist() == [7, 90, *(i for i in range(11) if i != 7)]


def test_candidates_after_penalties_bias_and_bans(reference: Kernels) -> None:
    torch.manual_seed(1)
    found = same_candidates(
        reference,
        torch.randn(3, 150) * 2,
        [8] * 3,
        64,
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
    assert found[2][0][0] == 149
    assert all(banned not in ids for (ids, _), banned in zip(found, (9, 5, 20), strict=True))


def test_what_has_no_probability_is_no_candidate(reference: Kernels) -> None:
    logits = torch.full((4, 200), -INF)
    logits[0, [3, 150]] = torch.tensor([1.0, 2.0])
    logits[2, 5], logits[3, 5] = math.nan, INF
    found = same_candidates(reference, logits, [10, 10, 10, 10], 64)
    assert found[0][0].tolist() == [150, 3]
    torch.testing.assert_close(found[0][1], torch.tensor([2.0, 1.0]).log_softmax(-1))
    assert all(len(ids) == 0 for ids, _ in found[1:])
    fine, bad, nothing = SampleStatus.FINE, SampleStatus.NOT_FINITE, SampleStatus.NOTHING_LEFT
    status = sampling.candidates(logits, sample_rows(4), torch.full((4,), 10, dtype=torch.int32), 10).status
    assert status.tolist() == [fine, nothing, bad, bad]


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert sampling.logprobs(torch.empty(0, 10), none, none, 3).top_ids.shape == (0, 3)
    assert sampling.candidates(torch.empty(0, 10), sample_rows(0), none, 3).ids.shape == (0, 3)

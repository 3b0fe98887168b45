"""Sampling by Triton's interpreter: the same tokens as the reference and the C kernel, however a row is cut into tiles."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from sampling_inputs import filter_columns, sample_rows

from octavo_kernels import SampleStatus
from octavo_kernels.interface import Kernels
from octavo_kernels.reference.sampling import gumbel_noise, sample_row
from octavo_kernels.triton import sampling
from octavo_kernels.triton.sampling_keys import gumbel, key_id, key_value, noise_key, pack_key, precise_log

INF, NAN = math.inf, math.nan
FINE, NOT_FINITE, NOTHING_LEFT = SampleStatus.FINE, SampleStatus.NOT_FINITE, SampleStatus.NOTHING_LEFT


def same(
    cpu: Kernels, reference: Kernels, logits: torch.Tensor, tile: int = sampling.TILE, **columns: object
) -> list[int]:
    """The tokens that all three backends draw."""
    rows = sample_rows(logits.shape[0], **columns)  # type: ignore[arg-type]
    before = logits.clone()
    token, status = sampling.sample(logits, rows, tile=tile)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    for kernels in (reference, cpu):
        expected, expected_status = kernels.sample(logits, rows)
        assert token.tolist() == expected.tolist(), kernels.name
        assert status.tolist() == expected_status.tolist(), kernels.name
    return token.tolist()


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, position_ptr, TILE: tl.constexpr):
    """out float32[rows, TILE]: the noise of ids 0..TILE."""
    row, ids = tl.program_id(0), tl.arange(0, TILE)
    key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    tl.store(out_ptr + row * TILE + ids, gumbel(ids, key))


@triton.jit
def _key_kernel(values_ptr, keys_ptr, back_ptr, ids_ptr, log_ptr, TILE: tl.constexpr):
    """Keys int64[TILE] of values float32[TILE] under ids 0..TILE, and what is unpacked from them."""
    ids = tl.arange(0, TILE)
    values = tl.load(values_ptr + ids)
    keys = pack_key(values, ids)
    tl.store(keys_ptr + ids, keys)
    tl.store(back_ptr + ids, key_value(keys))
    tl.store(ids_ptr + ids, key_id(keys))
    tl.store(log_ptr + ids, precise_log(values))


def test_noise_is_the_reference_s() -> None:
    """To the last bits: what a choice of tokens can depend on only if two scores are as close as those."""
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63), 1234567], [0, 1, 7, 2**31 - 1, 131072, 5]
    out = torch.empty(len(seeds), 4096)
    _noise_kernel[(len(seeds),)](out, torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), TILE=4096)
    expected = torch.stack([gumbel_noise(s, p, torch.arange(4096)) for s, p in zip(seeds, positions, strict=True)])
    torch.testing.assert_close(out, expected, rtol=4e-7, atol=4e-7)
    assert out.max() < 22.89
    assert out.min() > -2.82


def test_keys_order_by_value_then_id() -> None:
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (512,), generator=gen).to(torch.int32).view(torch.float32)
    values = torch.where(bits.isnan(), torch.randn(512, generator=gen), bits)
    values[:16] = torch.tensor(
        [0.0, -0.0, INF, -INF, 1.0, 1.0, -1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, 0.0, -0.0, INF, -INF]
    )
    keys, back = torch.empty(512, dtype=torch.int64), torch.empty(512)
    ids, logs = torch.empty(512, dtype=torch.int32), torch.empty(512)
    _key_kernel[(1,)](values, keys, back, ids, logs, TILE=512)
    order = sorted(range(512), key=lambda i: (-values[i].item(), i))
    assert keys.sort(descending=True).indices.tolist() == order
    assert len(set(keys.tolist())) == 512
    assert torch.equal(back, values)
    assert ids.tolist() == list(range(512))


def test_the_logarithm_holds_near_one() -> None:
    values = torch.cat([1 + torch.linspace(-0.01, 0.01, 255), torch.logspace(-37, 37, 256), torch.tensor([1.0])])
    keys, back = torch.empty(512, dtype=torch.int64), torch.empty(512)
    ids, logs = torch.empty(512, dtype=torch.int32), torch.empty(512)
    _key_kernel[(1,)](values, keys, back, ids, logs, TILE=512)
    torch.testing.assert_close(logs.double(), values.double().log(), rtol=3e-7, atol=0)


@pytest.mark.parametrize(("vocab", "tile"), [(1, 16), (17, 16), (131, 64), (5000, 2048)])
def test_greedy_takes_the_first_of_the_best(cpu: Kernels, reference: Kernels, vocab: int, tile: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab)
    logits[1] = 2.5
    logits[2, [vocab // 2, vocab - 1]] = 50.0
    logits[3] = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)
    assert same(cpu, reference, logits, tile)[1:] == [0, vocab // 2, 0]


@pytest.mark.parametrize(
    ("vocab", "tile", "spread"),
    [(5, 16, 1.0), (131, 64, 0.01), (131, 64, 1.0), (131, 64, 10.0), (1003, 256, 1.0)],
)
def test_filters_and_noise(cpu: Kernels, reference: Kernels, vocab: int, tile: int, spread: float) -> None:
    torch.manual_seed(vocab)
    columns = filter_columns()
    count = len(columns["top_k"])
    same(
        cpu,
        reference,
        torch.randn(count, vocab) * spread,
        tile,
        seed=torch.randint(-(2**62), 2**62, (count,)),
        **columns,
    )


def test_a_large_vocabulary(cpu: Kernels, reference: Kernels) -> None:
    """A flat row collects every token, a peaked one few of them."""
    torch.manual_seed(0)
    logits = torch.randn(3, 49155) * torch.tensor([1.0, 0.01, 3.0])[:, None]
    filters = {"temperature": [1.0, 1.0, 0.6], "top_k": [0, 0, 50], "top_p": [1.0, 0.9, 0.95]}
    same(cpu, reference, logits, seed=torch.arange(3), **filters)


def test_the_kept_tokens_are_the_reference_s(reference: Kernels) -> None:
    """What can be drawn is exactly what the reference keeps, ties included: 5 settings under noise that beats any logit."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, -1.0, -INF]).repeat(15, 1)
    settings = [(3, 1.0, 0.0), (6, 0.8, 0.0), (0, 0.62, 0.0), (0, 1.0, 0.36), (0, 0.3, 0.0)]
    kept = [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2, 3}, {0}]
    top_k, top_p, min_p = map(list, zip(*settings * 3, strict=True))
    rows = sample_rows(15, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=torch.arange(15) // 5 + 3)
    drawn = sampling.sample(logits, rows)[0].tolist()
    for r in range(15):
        assert drawn[r] == sample_row(logits[r], rows, r)[0]
        assert drawn[r] in kept[r % 5]
    assert [len(set(drawn[r::5])) > 1 for r in range(5)] == [True, True, True, True, False]


def test_ties_at_the_border_of_top_k_and_top_p(cpu: Kernels, reference: Kernels) -> None:
    logits = torch.zeros(12, 32)
    positions = torch.arange(12, dtype=torch.int32)
    by_count = same(cpu, reference, logits, 16, temperature=1.0, top_k=5, seed=3, position=positions)
    assert set(by_count) == set(range(5))
    by_share = same(cpu, reference, logits, 16, temperature=1.0, top_p=0.25, seed=4, position=positions)
    assert set(by_share) <= set(range(8))
    assert len(set(by_share)) > 4


def test_penalties_bias_and_banned_ids(cpu: Kernels, reference: Kernels) -> None:
    torch.manual_seed(0)
    for seed in range(2):
        same(
            cpu,
            reference,
            torch.randn(6, 50) * 2,
            16,
            history=[[1, 2, 3, 3, 3, 4], [], [5] * 9, [-1, 50, 2**30, 7], [0, 1], [49, 49, 48]],
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
            top_k=[0, 5, 0, 0, 0, 4],
            seed=seed,
        )


def test_a_long_history_is_counted_once(cpu: Kernels, reference: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than all walkers' first chunks; rows without penalties are left alone."""
    monkeypatch.setattr(sampling, "CHUNK", 16)
    monkeypatch.setattr(sampling, "WALKERS", 2)
    torch.manual_seed(2)
    history = [torch.randint(0, 20, (n,)).tolist() for n in (100, 33, 90)]
    same(
        cpu,
        reference,
        torch.randn(3, 20),
        16,
        history=history,
        output_start=[40, 0, 5],
        frequency=[0.05, 0.0, 0.0],
        presence=[0.0, 0.4, 0.0],
        repetition=[1.3, 1.0, 1.0],
        token_row=[0, 1, 2],
        temperature=1.0,
    )


def test_each_penalty_does_what_its_name_says() -> None:
    logits = torch.tensor([[3.0, 2.9, 1.0]]).repeat(4, 1)
    rows = sample_rows(
        4,
        history=[[0, 0], [0, 0], [0], [0, 0]],
        output_start=[0, 0, 0, 2],
        presence=[0.2, 0.0, 0.0, 2.0],
        frequency=[0.0, 0.04, 0.0, 2.0],
        repetition=[1.0, 1.0, 1.5, 1.0],
    )
    assert sampling.sample(logits, rows)[0].tolist() == [1, 0, 1, 0]


def test_bad_rows_are_told_apart_and_leave_the_others_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    logits[1, 99], logits[2, 3], logits[3] = NAN, INF, -INF
    rows = sample_rows(6, temperature=[0.0, 1.0, 0.0, 1.0, 1.0, 1e-37], top_k=[0, 5, 0, 5, 5, 5])
    token, status = sampling.sample(logits, rows, tile=64)
    assert status.tolist() == [FINE, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, FINE, FINE]
    assert token[1:4].tolist() == [-1, -1, -1]
    assert token[0] == logits[0].argmax()
    assert token[4] == sample_row(logits[4], rows, 4)[0]
    assert logits[5, token[5]] > 0.9 * logits[5].max()  # all large values divided by so little are infinite


def test_a_filter_that_lets_nothing_through() -> None:
    """min-p above 1 is refused long before it comes here; if it did come, no token is made up."""
    token, status = sampling.sample(torch.randn(1, 40), sample_rows(1, temperature=1.0, min_p=2.0))
    assert (token.tolist(), status.tolist()) == ([-1], [NOTHING_LEFT])


def test_no_rows() -> None:
    token, status = sampling.sample(torch.empty(0, 10), sample_rows(0))
    assert token.shape == status.shape == (0,)


def test_a_draw_depends_on_nothing_but_seed_and_position() -> None:
    """Not on its batch mates, and not on how rows are cut."""
    torch.manual_seed(5)
    logits = torch.randn(4, 300) * 3
    options = {
        "temperature": 1.0,
        "top_k": [0, 0, 30, 0],
        "top_p": [1.0, 0.9, 0.8, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.05],
    }
    columns = {name: torch.as_tensor(value).repeat(4)[:4] for name, value in options.items()}
    columns |= {"seed": torch.arange(4) * 77, "position": torch.arange(4) + 9}
    together = sampling.sample(logits, sample_rows(4, **columns), tile=512)[0]
    for r in range(4):
        alone = sample_rows(1, **{name: value[r : r + 1] for name, value in columns.items()})
        assert sampling.sample(logits[r : r + 1], alone, tile=32)[0][0] == together[r]


def test_draws_follow_the_distribution() -> None:
    """Chi-square of Gumbel-max draws from ten tokens, 9 degrees of freedom: over positions at one seed, and over seeds."""
    probabilities = torch.softmax(torch.linspace(0, 2, 10), 0)
    rows = torch.arange(64)
    for seeds, positions in ((rows, rows * 0), (rows * 0, rows)):
        out = torch.empty(64, 2048)
        _noise_kernel[(64,)](out, seeds, positions.to(torch.int32), TILE=2048)
        drawn = (probabilities.log() + out[:, :2040].reshape(-1, 10)).argmax(-1)
        expected = probabilities * len(drawn)
        assert (((torch.bincount(drawn, minlength=10) - expected) ** 2) / expected).sum() < 27.9  # p = 0.001


def test_other_logits_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        sampling.sample(torch.zeros(1, 4, dtype=torch.float16), sample_rows(1))
    with pytest.raises(TypeError, match="contiguous"):
        sampling.sample(torch.zeros(4, 2).t(), sample_rows(2))
    with pytest.raises(TypeError, match="contiguous"):
        sampling.sample(torch.zeros(2, 4), sample_rows(2, top_p=torch.ones(1).expand(2)))

"""Weights in fp8 and in 4 bits by Triton's interpreter, against plain arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo_kernels import Fp8Rows, Int4Rows, LinearWeight, choose_kernels
from octavo_kernels.interface import Kernels
from octavo_kernels.quantized import fp8_product, to_fp8, widen
from octavo_kernels.triton import fp8, int4, weights
from octavo_kernels.triton.attention_config import Gpu
from octavo_kernels.triton.backend import TritonKernels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUNDS = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    chosen = choose_kernels("triton", head_dim=16, block_size=8, max_tokens=32, max_seqs=4)
    assert isinstance(chosen, TritonKernels)
    return chosen


def random_int4(rows: int, width: int, group: int, seed: int = 0, scale: torch.dtype = F16) -> Int4Rows:
    generator = torch.Generator().manual_seed(seed)
    return Int4Rows(
        torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8),
        (torch.rand((rows, width // group), generator=generator) * 0.1 + 0.01).to(scale),
        torch.randint(0, 17, (rows, width // group), generator=generator, dtype=torch.uint8),
    )


def exact(rows: Int4Rows) -> Tensor:
    """float64[n, K], number by number."""
    group = rows.codes.shape[1] // rows.scale.shape[1]
    values = torch.empty(rows.codes.shape, dtype=torch.float64)
    for k in range(rows.codes.shape[1]):
        g = k // group
        values[:, k] = (rows.codes[:, k].double() - rows.zero[:, g].double()) * rows.scale[:, g].double()
    return values


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference against the largest number expected."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(
    ("rows", "outputs", "width", "group"),
    [(1, 40, 64, 32), (3, 130, 1536, 128), (17, 24, 192, 64), (2, 16, 96, 96), (257, 40, 64, 32), (0, 16, 64, 64)],
)
def test_int4_products(kernels: Kernels, dtype: torch.dtype, rows: int, outputs: int, width: int, group: int) -> None:
    """Parts of K, tiles of rows, groups larger than a span or equal to it, edges that are no multiples of tiles."""
    torch.manual_seed(rows)
    given = random_int4(outputs, width, group)
    weight = kernels.pack(given, dtype)
    for bias in (None, torch.randn(outputs).to(dtype)):
        x, out = torch.randn(rows, width).to(dtype), torch.full((rows, outputs), float("nan"), dtype=dtype)
        kernels.linear(x, weight, bias, out)
        expected = x.double() @ exact(given).t() + (0 if bias is None else bias.double())
        assert out.shape == expected.shape
        if rows:
            assert error(out, expected) < BOUNDS[dtype]


def test_scales_of_any_type(kernels: Kernels) -> None:
    for scale in (F16, BF16, F32):
        given, x, out = random_int4(16, 64, 32, scale=scale), torch.randn(2, 64), torch.empty(2, 16)
        kernels.linear(x, kernels.pack(given, F32), None, out)
        assert error(out, x.double() @ exact(given).t()) < 1e-5


@pytest.mark.parametrize("dtype", [F32, F16])  # the interpreter rounds to bfloat16 by cutting off
def test_int4_widened_is_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    given = random_int4(70, 192, 64)
    assert torch.equal(int4.widen(kernels.pack(given, dtype), dtype), widen(given, dtype))
    assert error(widen(given, F32), exact(given)) < 1e-6


def test_parts_are_set_into_their_place(kernels: Kernels, reference: Kernels) -> None:
    """As q, k and v of a layer: whatever the order, the same as all at once."""
    for first, second in (
        (random_int4(32, 64, 32, 1), random_int4(16, 64, 32, 2)),
        (to_fp8(torch.randn(32, 64)), to_fp8(torch.randn(16, 64))),
        (torch.randn(32, 64), torch.randn(16, 64).to(F16)),
    ):
        matrix = torch.cat([widen(first, F32), widen(second, F32)])
        for backend in (kernels, reference):
            weight = backend.new_weight(first, 48, F32)
            backend.set_rows(weight, 32, second)
            backend.set_rows(weight, 0, first)
            x, out, whole = torch.randn(2, 64), torch.empty(2, 48), torch.empty(2, 48)
            backend.linear(x, weight, None, out)
            if isinstance(first, Fp8Rows):
                assert isinstance(second, Fp8Rows)
                joined = Fp8Rows(torch.cat([first.values, second.values]), torch.cat([first.scale, second.scale]))
                backend.linear(x, backend.pack(joined, F32), None, whole)
                assert torch.equal(out, whole)
            else:
                assert error(out, x @ matrix.t()) < 1e-5


def test_a_row_of_an_int4_product_does_not_depend_on_the_others(kernels: Kernels) -> None:
    given = random_int4(24, 1024, 64)
    weight, x = kernels.pack(given, F32), torch.randn(9, 1024)
    together, alone = torch.empty(9, 24), torch.empty(1, 24)
    kernels.linear(x, weight, None, together)
    kernels.linear(x[3:4], weight, None, alone)
    assert error(alone[0], together[3]) < 1e-6


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [16, 40, 9000])
def test_rounding_to_e4m3_is_the_reference(dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(5, width) * torch.tensor([1.0, 1e-3, 50.0, 0.0, 1.0])[:, None]).to(dtype)
    x[4, 3] = float("nan")
    got, expected = fp8.to_fp8(x), to_fp8(x)
    torch.testing.assert_close(got.scale, expected.scale, rtol=1e-6, atol=0.0, equal_nan=True)
    assert got.scale[4].isnan()
    assert (got.values[3].float() == 0).all()
    differ = (got.values[:4].view(torch.uint8) != expected.values[:4].view(torch.uint8)).float().mean()
    assert differ < 1e-3  # a scale may differ in its last bit
    assert fp8.to_fp8(x[:0]).values.shape == (0, width)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("rows", [1, 5])
def test_fp8_products(kernels: Kernels, reference: Kernels, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, matrix, bias = torch.randn(rows, 64).to(dtype), torch.randn(48, 64), torch.randn(48).to(dtype)
    given = to_fp8(matrix)
    for b in (None, bias):
        out, expected = torch.empty(rows, 48, dtype=dtype), torch.empty(rows, 48, dtype=dtype)
        kernels.linear(x, kernels.pack(given, dtype), b, out)
        reference.linear(x, reference.pack(given, dtype), b, expected)
        assert error(out, expected) < 1e-2  # bfloat16's rounding of the product
        plain = x.float() @ matrix.t() + (0 if b is None else b.float())
        assert 1e-4 < error(out, plain) < 0.08
        older = torch.empty(rows, 48, dtype=dtype)
        weights.linear(x, kernels.pack(given, dtype), b, older, Gpu("sm_80", 108, 166912))
        assert error(older, plain) < 0.06


def test_what_is_not_finite_stays_in_its_row(kernels: Kernels) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    given = to_fp8(torch.randn(32, 64))
    out, clean = torch.empty(3, 32), torch.empty(2, 32)
    kernels.linear(x, kernels.pack(given, F32), None, out)
    kernels.linear(x[[0, 2]], kernels.pack(given, F32), None, clean)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean)


def test_fp8_arithmetic_number_by_number() -> None:
    x, weight = to_fp8(torch.randn(2, 16)), to_fp8(torch.randn(3, 16))
    got = fp8_product(x, weight)
    for t in range(2):
        for n in range(3):
            total = sum(float(x.values[t, k]) * float(weight.values[n, k]) for k in range(16))
            assert float(got[t, n]) == pytest.approx(total * float(x.scale[t]) * float(weight.scale[n]), rel=1e-5)


H200 = Gpu("sm_90", 132, 232448)


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "group", "expected"),
    [
        (1, 4096, 4096, 128, int4.Int4Launch(16, 128, 1, 8, 4)),
        (16, 28672, 4096, 128, int4.Int4Launch(16, 128, 1, 1, 32)),
        (64, 4096, 14336, 128, int4.Int4Launch(64, 128, 1, 8, 14)),
        (17, 6144, 4096, 64, int4.Int4Launch(64, 64, 1, 5, 13)),
        (1, 1024, 1024, 1024, int4.Int4Launch(16, 128, 8, 2, 4)),
        (1, 32, 96, 96, int4.Int4Launch(16, 32, 3, 1, 3)),
    ],
)
def test_launches(rows: int, outputs: int, width: int, group: int, expected: int4.Int4Launch) -> None:
    launch = int4.plan_launch(rows, outputs, width, group, H200)
    assert launch == expected
    spans = width // launch.span
    assert (launch.parts - 1) * launch.part_spans < spans <= launch.parts * launch.part_spans


def test_what_can_be_held(kernels: Kernels, reference: Kernels) -> None:
    cpu = choose_kernels("cpu", head_dim=16, block_size=8)
    for rows, held in (
        (random_int4(8, 64, 32), True),
        (random_int4(8, 48, 16), False),
        (to_fp8(torch.randn(16, 32)), True),
        (to_fp8(torch.randn(8, 32)), False),
        (to_fp8(torch.randn(16, 24)), False),
    ):
        assert kernels.can_hold(rows) is held
        assert reference.can_hold(rows)
        assert not cpu.can_hold(rows)


def test_bytes_of_a_weight(kernels: Kernels) -> None:
    def stored(weight: LinearWeight) -> int:
        return weight.nbytes

    assert stored(kernels.pack(torch.zeros(32, 64), F16)) == 32 * 64 * 2
    assert stored(kernels.pack(to_fp8(torch.zeros(32, 64)), F16)) == 32 * 64 + 32 * 4
    assert stored(kernels.pack(random_int4(32, 64, 32), F16)) == 32 * 32 + 32 * 2 * 3

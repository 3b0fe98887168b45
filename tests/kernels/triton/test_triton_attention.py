"""Paged attention's kernels against the reference in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import GpuCase, attend, gpu_case, reference
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from octavo_kernels import AttentionExtras, AttentionShape, StepBounds

F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Outputs are rounded to their type; the interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {F32: (1e-4, 1e-5), F16: (2e-3, 1e-3), BF16: (1e-2, 4e-3)}


def check(case: GpuCase, shape: AttentionShape, **options: object) -> None:
    got, expected = attend(case, shape, **options), reference(case, shape)  # type: ignore[arg-type]
    assert not expected.isnan().any()
    rtol, atol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected, rtol=rtol, atol=atol)
    assert (got[-1] == 77.0).all()  # the row past the last sequence


def decodes(block: int) -> list[tuple[int, int]]:
    return [(1, n) for n in (1, block - 1, block, block + 1, 2 * block + 3)]


@pytest.mark.parametrize(
    ("heads", "dim", "block", "dtype"),
    [
        ((3, 3), 64, 16, BF16),
        ((3, 1), 80, 8, F16),
        ((8, 1), 96, 32, F32),
        ((4, 2), 128, 64, BF16),
        ((2, 1), 256, 16, F16),
        ((2, 1), 64, 256, F32),
        ((6, 2), 64, 24, F32),
    ],
)
def test_decodes_and_chunks_in_one_launch(heads: tuple[int, int], dim: int, block: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(*heads, dim, block, dim**-0.5)
    chunks = [(block, block), (0, block), (0, 0), (2, block + 1), (23, 2 * block + 1)]
    check(gpu_case([*decodes(block), *chunks], shape, dtype), shape)


def test_decodes_alone_have_a_launch_of_their_own() -> None:
    shape = AttentionShape(8, 1, 64, 16, 0.125)
    check(gpu_case([*decodes(16), (2, 70)], shape), shape, bounds=StepBounds(6, 2, 70))


def test_more_heads_than_a_small_tile_has_rows() -> None:
    shape = AttentionShape(17, 1, 64, 16, 0.125)
    check(gpu_case([(1, 20), (6, 9)], shape), shape)


@pytest.mark.parametrize(("window", "dtype"), [(1, F32), (7, F16), (16, F32), (65, F16)])
def test_a_window(window: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(6, 2, 64, 16, 0.125, window)
    check(gpu_case([(1, 15), (1, 16), (1, 17), (1, 130), (40, 40), (40, 130)], shape, dtype), shape)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_soft_cap(dtype: torch.dtype) -> None:
    shape = AttentionShape(2, 1, 64, 16, 1.0, soft_cap=3.0)
    check(gpu_case([(1, 33), (20, 33)], shape, dtype), shape)


@pytest.mark.parametrize(("window", "dtype"), [(0, F32), (24, F16)])
def test_sinks_and_slopes(window: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125, window)
    extras = AttentionExtras(sinks=torch.tensor([0.5, -3.0, 4.0, 0.0]), slopes=torch.tensor([0.5, 0.25, 0.1, 0.01]))
    case = gpu_case([(1, 1), (1, 100), (20, 100), (8, 130)], shape, dtype, extras=extras)
    check(case, shape)
    check(case, shape, split_keys=64)


@pytest.mark.parametrize("page_dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("dim", [64, 80])
def test_quantised_pages(page_dtype: torch.dtype, dim: int) -> None:
    shape = AttentionShape(4, 2, dim, 16, dim**-0.5)
    extras = AttentionExtras(k_scale=torch.tensor([0.02, 0.01]), v_scale=torch.tensor([0.5, 0.007]))
    extras_or_none = extras if page_dtype == E4M3 else None
    for dtype in (F32, BF16):
        case = gpu_case([(1, 1), (1, 33), (9, 70)], shape, dtype, page_dtype, extras_or_none)
        check(case, shape, split_keys=32)


def test_a_split_range_adds_up() -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125)
    case = gpu_case([(1, 64), (1, 65), (2, 300), (0, 300)], shape)
    check(case, shape, split_keys=64)
    assert not torch.equal(attend(case, shape, split_keys=64), attend(case, shape))  # it was split


def test_more_parts_than_the_reduction_takes_in_one_go() -> None:
    shape = AttentionShape(1, 1, 64, 64, 0.125)
    check(gpu_case([(1, 20 * 64 - 1)], shape), shape, split_keys=64, bounds=StepBounds(1, 1, 2000))


@pytest.mark.parametrize("dtype", [F32, F16])
def test_chunks_are_split_where_there_are_few(dtype: torch.dtype) -> None:
    shape = AttentionShape(1, 1, 64, 16, 0.125)
    case = gpu_case([(20, 600)], shape, dtype)
    bounds = StepBounds(1, 20, 600)
    check(case, shape, bounds=bounds, split_keys=16, partial_rows=100)
    assert not torch.equal(attend(case, shape, bounds, 100, 16), attend(case, shape, bounds))  # it was split


def test_without_memory_for_partial_sums_nothing_is_split() -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125)
    case = gpu_case([(1, 200), (1, 300), (1, 100)], shape)
    check(case, shape, split_keys=64, partial_rows=0)
    # Room for the first and the last, not for the one between.
    check(case, shape, split_keys=64, partial_rows=5)


def test_pages_behind_the_window_are_not_read() -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125, window=20)
    case = gpu_case([(1, 200), (3, 200)], shape)
    expected = attend(case, shape)
    for s, first in ((0, 180), (1, 178)):
        case.plain.batch.block_tables[s, : first // 16] = 2**30
    assert torch.equal(attend(case, shape), expected)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products in float64: those of numpy round a row otherwise at another place of the matrix, a GPU's do not."""

    def dot(_: object, a: Any, b: Any, d: Any, *__: object) -> TensorHandle:
        return TensorHandle((a.data.astype("f8") @ b.data.astype("f8") + d.data).astype("f4"), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("window", [0, 50])
def test_a_row_does_not_depend_on_the_rows_beside_it(window: int) -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125, window)
    case = gpu_case([(150, 150), (1, 90)], shape)
    together = attend(case, shape, split_keys=64)
    # The decode last: alone, it has a launch of its own.
    for start, end, keys in ((0, 40, 40), (40, 103, 103), (103, 150, 150), (150, 151, 90)):
        batch = replace(
            case.plain.batch,
            num_seqs=torch.tensor([1], dtype=torch.int32),
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([keys], dtype=torch.int32),
            block_tables=case.plain.batch.block_tables[int(keys == 90) :],
        )
        part = replace(case, plain=replace(case.plain, qkv=case.plain.qkv[start:end].contiguous(), batch=batch))
        assert torch.equal(attend(part, shape, split_keys=64), together[start:end]), (start, end)


def test_large_scores_do_not_overflow() -> None:
    shape = AttentionShape(2, 1, 64, 16, 40.0)
    case = gpu_case([(5, 100), (1, 1)], shape)
    got, expected = attend(case, shape, split_keys=64), reference(case, shape)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    shape = AttentionShape(2, 2, 64, 16, 0.125)
    case = gpu_case([(1, 20), (9, 20)], shape)
    expected = attend(case, shape)
    case.plain.qkv[4, :128] = float("nan")
    got = attend(case, shape)
    assert got[4].isnan().all()
    others = [i for i in range(11) if i != 4]
    assert torch.equal(got[others], expected[others])

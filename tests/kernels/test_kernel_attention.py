"""Paged attention: the C kernel against the reference, and the reference against torch's own attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import Paged, paged_batch

from octavo_kernels import AttentionShape
from octavo_kernels.interface import Kernels


def run(kernels: Kernels, case: Paged, shape: AttentionShape) -> torch.Tensor:
    out = torch.full((case.qkv.shape[0], shape.num_heads * shape.head_dim), 77.0)
    kernels.attention(case.qkv, case.k_pages, case.v_pages, case.batch, shape, out)
    return out


def edges(block: int) -> list[tuple[int, int]]:
    """Decodes and prefills (whole, chunked, empty) around the block's borders."""
    keys = [1, block - 1, block, block + 1, 3 * block, 3 * block + 5]
    decodes = [(1, n) for n in keys]
    prefills = [(n, n) for n in keys] + [(block, 2 * block), (2, block + 1), (block + 3, 4 * block + 1)]
    return [*decodes, (0, block), *prefills, (0, 0), (1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [8, 16, 32, 256])
@pytest.mark.parametrize(
    ("heads", "dim"), [((3, 3), 64), ((9, 3), 64), ((8, 1), 80), ((4, 2), 96), ((6, 2), 128), ((2, 2), 256)]
)
def test_mixed_batch(
    cpu: Kernels, reference: Kernels, heads: tuple[int, int], dim: int, block: int, dtype: torch.dtype
) -> None:
    shape = AttentionShape(*heads, dim, block, dim**-0.5)
    case = paged_batch(edges(block), shape, dtype)
    got, expected = run(cpu, case, shape), run(reference, case, shape)
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (got[-1] == 77.0).all()  # the row past the last sequence


@pytest.mark.parametrize("window", [1, 7, 8, 9, 16, 100])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_window_and_soft_cap(cpu: Kernels, reference: Kernels, window: int, soft_cap: float) -> None:
    shape = AttentionShape(6, 2, 64, 8, 0.3, window, soft_cap)
    case = paged_batch([*edges(8), (1, 300), (130, 300), (300, 300)], shape)
    torch.testing.assert_close(run(cpu, case, shape), run(reference, case, shape), rtol=1e-4, atol=1e-5)


def test_pages_behind_the_window_are_not_read(cpu: Kernels, reference: Kernels) -> None:
    shape = AttentionShape(4, 2, 64, 16, 0.125, window=20)
    case = paged_batch([(1, 200), (3, 200)], shape)
    expected = run(cpu, case, shape)
    for s, first in ((0, 180), (1, 178)):
        for page in case.batch.block_tables[s, : first // 16].tolist():
            case.k_pages[page], case.v_pages[page] = float("nan"), float("nan")
        case.batch.block_tables[s, : first // 16] = 2**30
    assert torch.equal(run(cpu, case, shape), expected)
    assert not run(reference, case, shape).isnan().any()


def test_the_reference_agrees_with_torch(reference: Kernels) -> None:
    shape = AttentionShape(6, 2, 32, 8, 32**-0.5)
    case = paged_batch([(19, 19)], shape)
    pages = case.batch.block_tables[0, :3].long()
    k = case.k_pages[pages].permute(1, 0, 3, 2).reshape(2, 24, 32)[:, :19]
    v = case.v_pages[pages].permute(1, 0, 2, 3).reshape(2, 24, 32)[:, :19]
    q = case.qkv[:19, : 6 * 32].view(19, 6, 32).transpose(0, 1)
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    got = run(reference, case, shape)[:19].view(19, 6, 32).transpose(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 50])
def test_a_token_does_not_depend_on_chunks_or_batch_mates(cpu: Kernels, window: int) -> None:
    shape = AttentionShape(9, 3, 64, 16, 0.125, window)
    case = paged_batch([(300, 300)], shape)
    whole = run(cpu, case, shape)[:300]
    for size in (1, 7, 64, 299):
        for start in range(0, 300, size):
            if size == 1 and start % 37:
                continue
            end = min(300, start + size)
            batch = replace(
                case.batch,
                query_start=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
            )
            part = replace_queries(case, start, end, batch)
            assert torch.equal(run(cpu, part, shape), whole[start:end]), (size, start)


def replace_queries(case: Paged, start: int, end: int, batch: object) -> Paged:
    return Paged(case.k_pages, case.v_pages, batch, case.qkv[start:end].contiguous())  # type: ignore[arg-type]


def test_large_scores_do_not_overflow(cpu: Kernels, reference: Kernels) -> None:
    shape = AttentionShape(2, 1, 64, 16, 40.0)
    case = paged_batch([(5, 200), (1, 1)], shape)
    got = run(cpu, case, shape)
    assert got.isfinite().all()
    torch.testing.assert_close(got, run(reference, case, shape), rtol=1e-3, atol=1e-3)

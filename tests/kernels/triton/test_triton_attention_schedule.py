"""What is launched: the rules' choices, and the work list made on the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import TINY_GPU, attend, gpu_case

from octavo_kernels import AttentionBatch, AttentionShape, StepBounds
from octavo_kernels.triton.attention import PagedAttention
from octavo_kernels.triton.attention_config import (
    AttentionLaunch,
    Gpu,
    choose_attention,
    large_tiles,
    power_of_two,
    small_tiles,
)
from octavo_kernels.triton.attention_reduce import attention_reduce_kernel
from octavo_kernels.triton.attention_reference import Cut, reduced, work_list
from octavo_kernels.triton.attention_schedule import attention_schedule_kernel

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
H200 = Gpu("sm_90", 132, 232448)
A100 = Gpu("sm_80", 108, 166912)
B200 = Gpu("sm_100", 148, 232448)
MI300 = Gpu("gfx942", 304, 65536)


def launch_for(
    gpu: Gpu, seqs: int, tokens: int, keys: int, *, heads: tuple[int, int] = (64, 8), dim: int = 128, window: int = 0
) -> AttentionLaunch:
    """What is chosen in bfloat16 for a step whose bounds the host knows."""
    shape = AttentionShape(*heads, dim, 16, dim**-0.5, window)
    queries = 1 if tokens == seqs else tokens - seqs + 1
    batch = replace(batch_of([(1, keys)] * seqs, 0), block_tables=torch.zeros((seqs, 8192), dtype=torch.int32))
    return choose_attention(shape, BF16, BF16, replace(batch, bounds=StepBounds(seqs, queries, keys)), tokens, gpu)


@pytest.mark.parametrize(
    ("gpu", "seqs", "tokens", "keys", "options", "expected"),
    [
        # Decodes: one launch of small tiles. Splits of 512 keys, none where no sequence has more.
        (H200, 64, 64, 512, {}, ("16x64", None, 0, 0, 64, 0)),
        (H200, 64, 64, 513, {}, ("16x64", None, 512, 0, 128, 0)),
        (H200, 64, 64, 8192, {}, ("16x64", None, 512, 0, 198, 0)),
        (H200, 1, 1, 131072, {}, ("16x64", None, 512, 0, 198, 0)),
        (A100, 1, 1, 1024, {"heads": (32, 32)}, ("16x64", None, 512, 0, 2, 0)),
        # Drafts are decodes as long as all their rows fit into a small tile.
        (H200, 8, 9, 100, {}, ("16x64", None, 0, 0, 8, 0)),
        (H200, 8, 10, 100, {}, ("16x64", "128x32", 0, 0, 8, 8)),
        # A window bounds the keys that a split can be of.
        (H200, 64, 64, 8192, {"window": 500}, ("16x64", None, 0, 0, 64, 0)),
        # Chunks: split only where there are too few tiles for all multiprocessors.
        (H200, 64, 2111, 4096, {}, ("16x64", "128x32", 512, 0, 198, 66)),
        (H200, 1, 128, 4097, {}, ("16x64", "128x32", 512, 4096, 9, 18)),
        (H200, 1, 128, 4096, {}, ("16x64", "128x32", 512, 0, 8, 9)),
        (MI300, 4, 2051, 4096, {}, ("16x64", "128x32", 512, 0, 32, 132)),
        # Many heads per key head, large heads.
        (H200, 4, 4, 100, {"heads": (20, 1)}, ("32x64", None, 0, 0, 4, 0)),
        (H200, 4, 400, 100, {"dim": 256}, ("16x32", "64x32", 0, 0, 4, 54)),
        (H200, 4, 400, 100, {"dim": 64}, ("16x64", "128x64", 0, 0, 4, 29)),
    ],
)
def test_what_is_launched(
    gpu: Gpu, seqs: int, tokens: int, keys: int, options: dict[str, Any], expected: tuple[object, ...]
) -> None:
    launch = launch_for(gpu, seqs, tokens, keys, **options)
    tiles = [t and f"{t.block_m}x{t.block_n}" for t in (launch.small, launch.large)]
    splits = launch.small_split, launch.large_split
    assert (*tiles, *splits, launch.small_programs, launch.large_programs) == expected


@pytest.mark.parametrize("page_dtype", [BF16, F32, E4M3, torch.int8])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("gpu", [A100, H200, B200, MI300])
def test_tiles_fit_into_shared_memory(gpu: Gpu, dim: int, page_dtype: torch.dtype) -> None:
    shape = AttentionShape(64, 8, dim, 16, dim**-0.5)
    dtype = F32 if page_dtype == F32 else BF16
    for tiles in (small_tiles(shape, page_dtype, gpu), large_tiles(shape, dtype, page_dtype, gpu)):
        width = power_of_two(dim)
        buffers = (tiles.stages - 1) * tiles.block_n * 2 * width * page_dtype.itemsize
        assert buffers + tiles.block_m * width * dtype.itemsize <= gpu.shared_bytes
        assert tiles.stages >= 2


@pytest.mark.parametrize(
    ("gpu", "dim", "page_dtype", "expected"),
    [
        (B200, 96, torch.int8, (64, 64, 4)),  # with 128 rows registers are spilled
        (B200, 96, E4M3, (128, 64, 8)),
        (B200, 128, torch.int8, (128, 64, 8)),
        (H200, 96, torch.int8, (128, 64, 8)),
        (B200, 256, torch.int8, (64, 32, 8)),
    ],
)
def test_tiles_of_chunks_by_type(gpu: Gpu, dim: int, page_dtype: torch.dtype, expected: tuple[int, int, int]) -> None:
    tiles = large_tiles(AttentionShape(32, 8, dim, 16, dim**-0.5), BF16, page_dtype, gpu)
    assert (tiles.block_m, tiles.block_n, tiles.warps) == expected


def test_loads_of_decodes_cover_the_latency_of_memory() -> None:
    """4.8 TB/s for a microsecond are 36 KB for each of 132 multiprocessors."""
    for dim, page_dtype in itertools.product((64, 128, 256), (BF16, E4M3, torch.int8)):
        tiles = small_tiles(AttentionShape(64, 8, dim, 16, 0.1), page_dtype, H200)
        buffer = tiles.block_n * 2 * dim * page_dtype.itemsize
        blocks = min(4, H200.shared_bytes // ((tiles.stages - 1) * buffer + 8192))
        assert blocks * (tiles.stages - 2) * buffer >= 32768  # at the moment when least is on its way


def batch_of(lengths: list[tuple[int, int]], spare: int = 2) -> AttentionBatch:
    """Sequences of (query tokens, all keys); of ``spare`` more the tensors hold nonsense."""
    starts = [0]
    for queries, _ in lengths:
        starts.append(starts[-1] + queries)
    return AttentionBatch(
        num_seqs=torch.tensor([len(lengths)], dtype=torch.int32),
        query_start=torch.tensor(starts + [-9] * spare, dtype=torch.int32),
        seq_lens=torch.tensor([keys for _, keys in lengths] + [10**6] * spare, dtype=torch.int32),
        block_tables=torch.zeros((len(lengths) + spare, 1), dtype=torch.int32),
    )


def scheduled(batch: AttentionBatch, cut: Cut, block_s: int) -> tuple[list[list[int]], ...]:
    """The three lists."""
    items = torch.full((2, 400, 8), 77, dtype=torch.int32)
    reductions = torch.full((400, 4), 77, dtype=torch.int32)
    counts = torch.full((3,), 77, dtype=torch.int32)
    programs = batch.query_start.shape[0] - 1
    attention_schedule_kernel[(programs,)](
        *(batch.num_seqs, batch.query_start, batch.seq_lens, items, reductions, counts),
        *(400, cut.window or 1 << 30, cut.tile_queries, cut.small_queries, cut.small_split, cut.large_split),
        cut.partial_rows,
        SMALL_N=cut.small_n,
        LARGE_N=cut.large_n,
        BLOCK_S=block_s,
    )
    lists = []
    for table, n in zip((items[0], items[1], reductions), counts.tolist(), strict=True):
        assert (table[n:] == 77).all()
        lists.append(table[:n].tolist())
    return tuple(lists)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("split", "partial_rows"), [((0, 0), 0), ((64, 0), 20), ((64, 128), 1000)])
def test_the_work_list(window: int, split: tuple[int, int], partial_rows: int) -> None:
    lengths = [(1, 1), (1, 700), (0, 50), (40, 300), (3, 64), (17, 17), (1, 65), (4, 999), (1, 130)]
    cut = Cut(window, 16, 4, *split, partial_rows, 32, 16)
    batch = batch_of(lengths)
    expected = work_list(batch, cut)
    for block_s in (4, 16):
        assert scheduled(batch, cut, block_s) == expected


def test_the_parts_of_a_tile_are_its_keys() -> None:
    lengths = [(1, 700), (40, 300), (7, 7), (33, 1000)]
    small, large, _ = scheduled(batch_of(lengths), Cut(0, 16, 1, 64, 128, 1000, 32, 32), 16)
    assert {entry[0] for entry in small} == {0}
    seen: dict[tuple[int, int], list[range]] = {}
    for sequence, row, queries, position, begin, end, _, leading in small + large:
        parts = seen.setdefault((sequence, row), [])
        assert leading == int(not parts)
        parts.append(range(begin, end))
        assert position + queries <= lengths[sequence][1]
        assert not begin % 32
    for (sequence, row), parts in seen.items():
        last = min(row - sum(q for q, _ in lengths[:sequence]) + 16, lengths[sequence][0])
        keys = lengths[sequence][1] - lengths[sequence][0] + last
        assert [key for part in parts for key in part] == list(range(keys))


def test_an_empty_batch_has_an_empty_list() -> None:
    assert scheduled(batch_of([]), Cut(0, 16, 4, 64, 0, 10, 32, 32), 16) == ([], [], [])


@pytest.mark.parametrize("parts", [1, 2, 16, 17, 40])
def test_the_reduction(parts: int) -> None:
    gen = torch.Generator().manual_seed(parts)
    heads, dim, queries = 2, 80, 2
    partial = torch.randn(3 + parts * queries, heads, dim, generator=gen)
    sums = torch.rand(3 + parts * queries, heads, 2, generator=gen) * 5 + 0.1
    sums[3] = torch.tensor([-1e30, 0.0])  # a part without keys
    partial[3] = 0.0
    reductions = torch.tensor([[1, 3, queries, parts], [0, 4, queries, parts]], dtype=torch.int32)
    out = torch.full((3, heads * dim), 77.0)
    count = torch.tensor([2], dtype=torch.int32)
    attention_reduce_kernel[heads, 1](reductions, count, partial, sums, out, out.stride(0), heads, D=dim, PARTS=16)
    for row, first in ((1, 3), (0, 4)):
        if parts == 1 and first == 3:
            assert (out[row] == 0).all()
            continue
        for head in range(heads):
            rows = slice(first, first + parts * queries, queries)
            expected = reduced(partial[rows, head], sums[rows, head])
            torch.testing.assert_close(out[row, head * dim : (head + 1) * dim], expected, rtol=1e-5, atol=1e-6)
    assert (out[2] == 77).all()


def test_a_list_is_made_once_per_step_where_steps_are_announced() -> None:
    shape = AttentionShape(2, 1, 64, 16, 0.125)
    case = gpu_case([(1, 40)], shape)
    longer = gpu_case([(1, 40), (1, 20)], shape)
    batch, qkv = longer.plain.batch, longer.plain.qkv
    attention = PagedAttention(TINY_GPU, qkv.device, max_tokens=8, max_seqs=8)

    def run(num_seqs: int) -> torch.Tensor:
        batch.num_seqs[0] = num_seqs
        out = torch.full((qkv.shape[0], 128), 77.0)
        attention.attention(qkv, longer.k_pages, longer.v_pages, batch, shape, out)
        return out

    full = run(2)
    assert (run(1)[1] == 77.0).all()  # nobody announces steps: every call looks anew
    attention.start_step()
    run(2)
    assert torch.equal(run(1), full)  # the same step still
    attention.start_step()
    assert (run(1)[1] == 77.0).all()
    assert case.plain.qkv.shape[0] < qkv.shape[0]


def test_more_than_there_is_memory_for_is_refused() -> None:
    shape = AttentionShape(2, 1, 64, 16, 0.125)
    case = gpu_case([(9, 9)], shape)
    out = torch.empty(case.plain.qkv.shape[0], 128)
    for tokens, seqs in ((9, 8), (10, 1)):
        attention = PagedAttention(TINY_GPU, out.device, max_tokens=tokens, max_seqs=seqs)
        with pytest.raises(ValueError, match="at most"):
            attention.attention(case.plain.qkv, case.k_pages, case.v_pages, case.plain.batch, shape, out)


def test_more_pages_than_addresses_reach_are_refused() -> None:
    shape = AttentionShape(2, 1, 64, 16, 0.125)
    case = gpu_case([(1, 9)], shape)
    case.k_pages = case.v_pages = torch.empty((1 << 23, 1, 16, 64), dtype=F32, device="meta")
    assert case.k_pages.nbytes == 1 << 35  # as many as addresses reach
    case.k_pages = case.k_pages.as_strided((1 << 22, 1, 16, 64), (2049, 1024, 64, 1))
    with pytest.raises(ValueError, match="32 GiB"):
        attend(case, shape)


def test_no_tokens_are_no_launch() -> None:
    shape = AttentionShape(2, 1, 64, 16, 0.125)
    case = gpu_case([(1, 9)], shape)
    case.plain = replace(case.plain, qkv=case.plain.qkv[:0])
    assert attend(case, shape).shape == (0, 128)

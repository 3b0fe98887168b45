"""What the kernels of the work lists and of the reduction compute, in plain torch. Attention's own is the reference backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class Cut:
    """How query tiles and key ranges are cut; see ``attention_schedule_kernel``. ``window`` 0 means none.

    ``small_n`` and ``large_n`` are keys of a tile.
    """

    window: int
    tile_queries: int
    small_queries: int
    small_split: int
    large_split: int
    partial_rows: int
    small_n: int
    large_n: int


def _up(n: int, unit: int) -> int:
    return -(-n // unit)


def work_list(batch: AttentionBatch, cut: Cut) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """(entries of small tiles, of large ones, reductions), as rows of the kernels' int32 tables."""
    window = cut.window or 1 << 30
    small: list[list[int]] = []
    large: list[list[int]] = []
    reductions: list[list[int]] = []
    partial = 0
    for s in range(int(batch.num_seqs[0])):
        row, keys = int(batch.query_start[s]), int(batch.seq_lens[s])
        queries = int(batch.query_start[s + 1]) - row
        few = queries <= cut.small_queries
        split = cut.small_split if few else cut.large_split
        tile_queries, block_n = (cut.small_queries, cut.small_n) if few else (cut.tile_queries, cut.large_n)
        parts = max(1, _up(min(keys, queries - 1 + window), split)) if split else 1
        wanted = queries * parts if parts > 1 else 0
        if partial + wanted > cut.partial_rows:
            parts = 1
        for tile in reversed(range(_up(queries, tile_queries))):
            done = tile * tile_queries
            count = min(tile_queries, queries - done)
            position = keys - queries + done
            first, last = max(0, position + 1 - window), position + count
            base = first // block_n * block_n
            length = _up(_up(last - base, parts), block_n) * block_n
            for part in range(parts):
                start, stop = base + part * length, min(base + (part + 1) * length, last)
                at = partial + part * queries + done if parts > 1 else -1
                begin = first if part == 0 else start
                entry = [s, row + done, count, position, begin, max(start, stop), at, int(part == 0)]
                (small if few else large).append(entry)
        if parts > 1:
            reductions += [[row + i, partial + i, queries, parts] for i in range(queries)]
        partial += wanted
    return small, large, reductions


def reduced(partial: Tensor, sums: Tensor) -> Tensor:
    """Of parts' weighted sums [parts, D] and their largest scores (in log2) and totals [parts, 2]: the attention [D]."""
    weights = torch.exp2(sums[:, 0] - sums[:, 0].max())
    return (weights[:, None] * partial).sum(0) / (weights * sums[:, 1]).sum()

"""Builders of kernel inputs shared by the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels import AttentionBatch, AttentionShape


@dataclass
class Paged:
    """A paged cache whose unused places all hold NaN, and the batch that reads it."""

    k_pages: Tensor
    v_pages: Tensor
    batch: AttentionBatch
    qkv: Tensor


def paged_batch(
    lengths: list[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Paged:
    """Sequences of (query tokens, all keys); what is no key of a sequence is NaN, spare table entries are out of range."""
    gen = torch.Generator().manual_seed(seed)
    size = shape.block_size
    need = [-(-keys // size) for _, keys in lengths]
    blocks = sum(need) + 3
    order = torch.randperm(blocks, generator=gen).tolist()
    k_pages = torch.full((blocks, shape.num_kv_heads, shape.head_dim, size), float("nan")).to(dtype)
    v_pages = torch.full((blocks, shape.num_kv_heads, size, shape.head_dim), float("nan")).to(dtype)
    tables = torch.full((len(lengths) + 1, max([*need, 1]) + 2), 2**30, dtype=torch.int32)
    for s, (_, keys) in enumerate(lengths):
        for i in range(need[s]):
            page = order.pop()
            tables[s, i] = page
            filled = min(size, keys - i * size)
            k_pages[page, :, :, :filled] = torch.randn(shape.num_kv_heads, shape.head_dim, filled, generator=gen).to(
                dtype
            )
            v_pages[page, :, :filled] = torch.randn(shape.num_kv_heads, filled, shape.head_dim, generator=gen).to(dtype)
    starts = torch.tensor([0, *torch.tensor([q for q, _ in lengths]).cumsum(0).tolist(), -7], dtype=torch.int32)
    batch = AttentionBatch(
        num_seqs=torch.tensor([len(lengths)], dtype=torch.int32),
        query_start=starts,
        seq_lens=torch.tensor([keys for _, keys in lengths] + [10**6], dtype=torch.int32),
        block_tables=tables,
    )
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(sum(q for q, _ in lengths) + 1, width, generator=gen)
    return Paged(k_pages, v_pages, batch, qkv)

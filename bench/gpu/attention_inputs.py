"""Paged attention's inputs, and what it should come to in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from stage import Stage
from torch import Tensor

from octavo_kernels import AttentionBatch, AttentionExtras, AttentionShape, StepBounds
from octavo_kernels.triton.quant import page_scales, page_shape

E4M3, I8 = torch.float8_e4m3fn, torch.int8
BEYOND = 2**30  # no page, and no token

Lengths = list[tuple[int, int]]  # query tokens and all keys, by sequence


@dataclass
class Paged:
    """A step's inputs. ``lengths`` are the host's."""

    qkv: Tensor
    k_pages: Tensor
    v_pages: Tensor
    batch: AttentionBatch
    lengths: Lengths
    extras: AttentionExtras | None = None


def paged(
    stage: Stage,
    lengths: Lengths,
    shape: AttentionShape,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None = None,
    extras: AttentionExtras | None = None,
    *,
    sharp: float = 1.5,
    bounds: bool = True,
) -> Paged:
    """Pages in random order. Whatever is no key of a sequence is NaN; table entries of no page are out of range.

    Queries are multiplied by ``sharp``, so that some keys matter more than others.
    """
    rng = np.random.RandomState(len(lengths))
    size, page_dtype = shape.block_size, page_dtype or dtype
    need = [-(-keys // size) for _, keys in lengths]
    blocks = sum(need) + 3
    order = rng.permutation(blocks)
    tables = np.full((len(lengths) + 1, max([*need, 1]) + 2), BEYOND, np.int32)
    filled = np.zeros(blocks, np.int32)
    used = 0
    for s, ((_, keys), count) in enumerate(zip(lengths, need, strict=True)):
        tables[s, :count] = order[used : used + count]
        filled[tables[s, :count]] = np.minimum(size, keys - np.arange(count) * size)
        used += count
    inside = torch.arange(size, device=stage.device)[None, :] < stage.put(filled)[:, None]
    scales = (None, None) if extras is None else (extras.k_scale, extras.v_scale)
    k_pages, v_pages = (_pages(stage, blocks, shape, page_dtype, scale, inside) for scale in scales)
    starts = np.concatenate([[0], np.cumsum([queries for queries, _ in lengths]), [-7]]).astype(np.int32)
    batch = AttentionBatch(
        num_seqs=stage.put(np.array([len(lengths)], np.int32)),
        query_start=stage.put(starts),
        seq_lens=stage.put(np.array([keys for _, keys in lengths] + [10**6], np.int32)),
        block_tables=stage.put(tables),
        bounds=StepBounds(len(lengths), max(q for q, _ in lengths), max(n for _, n in lengths)) if bounds else None,
    )
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = (stage.randn(int(starts[-2]) + 1, width) * sharp).to(dtype)
    return Paged(qkv, k_pages, v_pages, batch, lengths, extras)


def _pages(
    stage: Stage, blocks: int, shape: AttentionShape, dtype: torch.dtype, scale: Tensor | None, inside: Tensor
) -> Tensor:
    """Pages of normal numbers where ``inside`` [blocks, B], NaN elsewhere (of int8 the scales are)."""
    values = stage.randn(blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    outside = ~inside[:, None, :]
    if dtype == I8:
        own = values.abs().amax(-1) / 127
        pages = torch.full((blocks, *page_shape(shape, I8)), 77, dtype=I8, device=stage.device)
        numbers = (values / own[..., None]).round().masked_fill_(outside[..., None], 77)
        pages[:, : numbers[0].numel()] = numbers.to(I8).flatten(1)
        scales = page_scales(pages, shape)
        assert scales is not None
        scales.copy_(own.masked_fill(outside, float("nan")).flatten(1))
        return pages
    if dtype == E4M3:
        assert scale is not None
        pages = (values / scale[:, None, None]).clamp(-448, 448).to(E4M3)
        pages.view(torch.uint8).masked_fill_(outside[..., None], 0x7F)
        return pages
    return values.masked_fill_(outside[..., None], float("nan")).to(dtype)


def page_values(pages: Tensor, index: Tensor, shape: AttentionShape, scale: Tensor | None) -> Tensor:
    """What pages ``index`` [n] stand for: float64[n B, Hk, D]."""
    some = pages[index.long()]
    heads, size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
    if pages.dtype == I8:
        scales = page_scales(some.contiguous(), shape)
        assert scales is not None
        values = some[:, : heads * size * dim].view(-1, heads, size, dim).double()
        values = values * scales.reshape(-1, heads, size, 1).double()
    else:
        values = some.float().double()
        if pages.dtype == E4M3 and scale is not None:
            values = values * scale.double()[:, None, None]
    return values.transpose(1, 2).reshape(-1, heads, dim)


def attention(case: Paged, shape: AttentionShape, rows: int = 256) -> Tensor:
    """float64[T, Hq D] of the step's T query tokens, ``rows`` queries at a time."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    group = heads // kv_heads
    extras = case.extras or AttentionExtras()
    total = sum(queries for queries, _ in case.lengths)
    out = torch.zeros((total, heads * dim), dtype=torch.float64, device=case.qkv.device)
    start = 0
    for s, (queries, keys) in enumerate(case.lengths):
        index = case.batch.block_tables[s, : -(-keys // shape.block_size)]
        k = page_values(case.k_pages, index, shape, extras.k_scale)[:keys]
        v = page_values(case.v_pages, index, shape, extras.v_scale)[:keys]
        at = torch.arange(keys, device=k.device)
        for done in range(0, queries, rows):
            count = min(rows, queries - done)
            first = start + done
            q = case.qkv[first : first + count, : heads * dim].double().view(count, kv_heads, group, dim)
            scores = torch.einsum("nhgd,khd->hgnk", q, k) * shape.scale
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            position = (keys - queries + done + torch.arange(count, device=k.device))[:, None]
            if extras.slopes is not None:
                scores = scores + extras.slopes.double().view(kv_heads, group, 1, 1) * (at - position)
            seen = at <= position
            if shape.window:
                seen &= at > position - shape.window
            scores = scores.masked_fill(~seen, float("-inf"))
            if extras.sinks is not None:
                sinks = extras.sinks.double().view(kv_heads, group, 1, 1).expand(-1, -1, count, 1)
                weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            result = torch.einsum("hgnk,khd->nhgd", weights, v)
            out[first : first + count] = result.reshape(count, heads * dim)
        start += queries
    return out

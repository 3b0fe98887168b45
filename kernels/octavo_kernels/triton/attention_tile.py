"""One tile of attention: its queries against a range of its sequence's keys, by online softmax.

A tile's rows are (query token, head of the group) pairs, so that all query heads that share a key head use each key that
is read (grouped heads packed into rows). The sums are kept as in FlashAttention (Dao, arXiv 2307.08691): per row the
largest score so far, the sum of weights and the weighted sum of values. Scores are in units of log2, since the hardware's
exponential is exp2.

The smallest score is a large negative number instead of minus infinity: a row that has seen no key yet then needs no
special case, because exp2(-inf - LOWEST) is 0 and exp2(LOWEST - LOWEST) meets sums that are still 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.quant import widen

LOWEST = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)
# Weights times the scales of int8 values become float16. So much larger they keep all their bits for values (per token and
# head, at most) from 0.00013 to 131,000.
LIFT = tl.constexpr(64.0)


@triton.jit
def tanh(x):
    """Exact at both ends: exp2 runs into 0 or infinity there."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def keys_of(start, begin, end, BLOCK_N: tl.constexpr):
    """int32[BLOCK_N]: a tile's keys. For what is none between ``begin`` and ``end`` stands the nearest that is.

    So whatever is loaded is a key of this sequence, and no load needs a mask: scores of the wrong ones are ruled out by their
    position, their values are finite and weigh nothing. The range has a key at least.
    """
    return tl.minimum(tl.maximum(start + tl.arange(0, BLOCK_N), begin), end - 1)


@triton.jit
def pages_of(table_ptr, start, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of a tile's keys: one number where they share a page, else int32[BLOCK_N]."""
    if PAGE % BLOCK_N == 0:
        pages = tl.load(table_ptr + tl.minimum(start, end - 1) // PAGE)
    else:
        pages = tl.load(table_ptr + keys_of(start, begin, end, BLOCK_N) // PAGE)
    return pages


@triton.jit
def load_tile(base_ptr, chunks, CHUNK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """[BLOCK_N, D_PAD]: D elements from each of ``chunks`` on, zeros beyond."""
    column = tl.arange(0, D_PAD)
    at = base_ptr + chunks.to(tl.int64)[:, None] * CHUNK + column[None, :]
    if D == D_PAD:
        tile = tl.load(at)
    else:
        tile = tl.load(at, (column < D)[None, :], 0.0)
    return tile


@triton.jit
def scores_of(
    tile, memory, chunks, scales, D: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr
):
    """q k^T, float32[M, BLOCK_N], of the keys at ``chunks``, whose scales (int8's) are at ``scales``."""
    q, q_scale, _, _ = tile
    CHUNK: tl.constexpr = 128 // memory[0].dtype.element_ty.primitive_bitwidth
    k = widen(load_tile(memory[0], chunks, CHUNK, D, q.shape[1]), DTYPE, PACKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CHUNK == 16:
        scores *= q_scale[:, None]
    if memory[2] is not None:
        scores *= tl.load(memory[2] + scales)[None, :]
    return scores


@triton.jit
def biased(scores, key, position, rule, slope, MASKED: tl.constexpr):
    """(scores with soft cap, slopes and mask, the factor that still makes them units of log2)."""
    scale, soft_cap, window, slopes_ptr = rule
    factor = scale
    if soft_cap is not None:
        scores = soft_cap * tanh(scores * scale)
        factor = 1.0
    if slopes_ptr is not None:
        scores = scores * factor + slope * (key[None, :] - position[:, None]).to(tl.float32)
        factor = 1.0
    if MASKED:
        if window is None:
            seen = key[None, :] <= position[:, None]
        else:
            # Unsigned, so that one comparison rules out what is too late as well as what is too far back.
            seen = (position[:, None] - key[None, :]).to(tl.uint32) < window.to(tl.uint32)
        scores = tl.where(seen, scores, float("-inf"))
    return scores, factor


@triton.jit
def online_softmax(scores, factor, sums):
    """Scores [M, N], times ``factor``, join the sums: (their weights [M, N], the new sums)."""
    largest, total, values = sums
    new = tl.maximum(largest, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new[:, None])
    shrink = tl.exp2(largest - new)
    return weights, (new, total * shrink + tl.sum(weights, 1), values * shrink[:, None])


@triton.jit
def attend(
    tile,  # q [M, D_PAD], what its rows are multiples of float32[M], positions int32[M], heads int32[M]
    sums,  # float32: largest score [M], total of weights [M], weighted values [M, D_PAD]
    pages,  # of the first tile of keys, see pages_of
    memory,  # see attention_kernel, from this head on: keys and values, their scales or None, distances of pages
    rule,  # see attention_kernel: scale, soft_cap, window, slopes
    table_ptr,  # int32[pages] of this sequence
    begin,  # first key
    end,  # past the last key
    start,  # where the first tile of keys lies, a multiple of BLOCK_N
    tiles,  # how many there are
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # whether a query of these tiles may not see a key of them
    DTYPE: tl.constexpr,  # of the matrix products' operands
    PRECISION: tl.constexpr,  # how float32 ones are multiplied
    PACKED: tl.constexpr,  # see widen
):
    """(the sums after ``tiles`` tiles of keys, the pages of the tile after those).

    The pages of the next tile are looked up a round ahead: with the lookup inside the round, the compiler's software
    pipeline is cut in half, since the addresses of a load then wait for a load themselves. Where rows lie is kept in chunks
    of 16 bytes: a layer's pages reach over 2**31 elements, and 64 bits for each would cost the registers of a larger tile.
    """
    _, _, position, head = tile
    _, v_ptr, _, v_scales_ptr, page_stride, scale_stride = memory
    CHUNK: tl.constexpr = 128 // v_ptr.dtype.element_ty.primitive_bitwidth
    slope = 0.0
    if rule[3] is not None:
        slope = tl.load(rule[3] + head).to(tl.float32)[:, None] * LOG2E
    for i in tl.range(tiles):
        key = start + i * BLOCK_N + tl.arange(0, BLOCK_N)
        row = keys_of(start + i * BLOCK_N, begin, end, BLOCK_N)
        chunks = pages * (page_stride // CHUNK) + row % PAGE * (D // CHUNK)
        scales = pages.to(tl.int64) * scale_stride + row % PAGE
        pages = pages_of(table_ptr, start + (i + 1) * BLOCK_N, begin, end, PAGE, BLOCK_N)
        scores = scores_of(tile, memory, chunks, scales, D, DTYPE, PRECISION, PACKED)
        scores, factor = biased(scores, key, position, rule, slope, MASKED)
        weights, sums = online_softmax(scores, factor, sums)
        largest, total, values = sums
        if v_scales_ptr is not None:
            weights *= tl.load(v_scales_ptr + scales)[None, :] * LIFT
        v = widen(load_tile(v_ptr, chunks, CHUNK, D, tile[0].shape[1]), DTYPE, PACKED)
        values = tl.dot(weights.to(DTYPE), v, values, input_precision=PRECISION)
        sums = (largest, total, values)
    return sums, pages

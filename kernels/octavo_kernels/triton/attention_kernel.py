"""Paged attention over a work list, and the sum of what was split.

One launch takes prefill chunks, drafts and decodes alike: the list (``attention_schedule``) names tiles of queries with a
range of their keys, and each program works through its share. A long range is split among several entries (Flash-Decoding,
Dao et al. 2023); their sums go to memory and ``attention_reduce_kernel`` adds them up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.attention_tile import LIFT, LOG2E, LOWEST, attend

ITEM = tl.constexpr(8)  # int32 of an entry of the work list: 32 bytes, one sector
REDUCTION = tl.constexpr(4)


@triton.jit
def _queries(
    qkv_ptr,
    first_row,
    queries,
    kv_head,
    qkv_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NARROW: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rows of a tile: (q [M, D_PAD], what it is multiples of float32[M], query and head int32[M], which rows count).

    With NARROW rows become multiples of their largest magnitude, so that any number of bfloat16 fits into float16.
    """
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, triton.next_power_of_2(D))
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    live = query < queries
    at = (first_row + query).to(tl.int64) * qkv_stride + head * D
    q = tl.load(qkv_ptr + at[:, None] + column[None, :], live[:, None] & (column < D)[None, :], 0.0)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if NARROW:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        scale = tl.where(largest > 0.0, largest, 1.0)
        q = q.to(tl.float32) / scale[:, None]
    return q.to(DTYPE), scale, query, head, live


@triton.jit
def _first_sums(sinks_ptr, head, live, leading, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """Sums before any key. A sink is a key without a value; of a split range only the leading part may count it."""
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        counts = live & (leading != 0)
        largest = tl.where(counts, tl.load(sinks_ptr + head, counts, 0.0).to(tl.float32) * LOG2E, largest)
        total = tl.where(counts, 1.0, total)
    return largest, total, tl.zeros([BLOCK_M, D_PAD], tl.float32)


@triton.jit
def _attend_item(
    item_ptr,
    kv_head,
    inputs,
    memory,
    rule,
    v_scale,
    outputs,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One entry of the list for one key head. The tuples hold parameters of ``attention_kernel``."""
    qkv_ptr, sinks_ptr, tables_ptr, qkv_stride, table_stride = inputs
    out_ptr, partial_ptr, sums_ptr, out_stride, num_heads = outputs
    sequence = tl.load(item_ptr).to(tl.int64)
    first_row = tl.load(item_ptr + 1)
    queries = tl.load(item_ptr + 2)
    first_position = tl.load(item_ptr + 3)
    begin = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    partial = tl.load(item_ptr + 6)
    leading = tl.load(item_ptr + 7) & 1

    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    NARROW: tl.constexpr = memory[0].dtype.element_ty.primitive_bitwidth == 8
    q, q_scale, query, head, live = _queries(
        qkv_ptr, first_row, queries, kv_head, qkv_stride, GROUP, D, BLOCK_M, NARROW, DTYPE
    )
    sums = _first_sums(sinks_ptr, head, live, leading, BLOCK_M, D_PAD)
    tile = (q, q_scale, first_position + query, head)
    table_ptr = tables_ptr + sequence * table_stride

    # Tiles of keys lie at multiples of BLOCK_N and are taken in order, so that no row's sum depends on the rows beside it.
    # Up to ``close`` every query sees all keys. A tile of few rows is bound by memory: masking all of it costs nothing.
    start = begin // BLOCK_N * BLOCK_N
    close = start
    if BLOCK_M > 16 and rule[2] is None:
        close = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
        sums = attend(
            tile, sums, memory, rule, table_ptr, begin, end, start, (close - start) // BLOCK_N,
            PAGE, D, BLOCK_N, False, DTYPE, PRECISION, PACKED,
        )  # fmt: skip
    largest, total, values = attend(
        tile, sums, memory, rule, table_ptr, begin, end, close, tl.cdiv(end - close, BLOCK_N),
        PAGE, D, BLOCK_N, True, DTYPE, PRECISION, PACKED,
    )  # fmt: skip

    values *= v_scale
    column = tl.arange(0, D_PAD)
    cells = live[:, None] & (column < D)[None, :]
    if partial < 0:
        values /= tl.where(total > 0.0, total, 1.0)[:, None]
        rows = (first_row + query).to(tl.int64) * out_stride + head * D
        tl.store(out_ptr + rows[:, None] + column[None, :], values.to(out_ptr.dtype.element_ty), cells)
    else:
        rows = (partial + query).to(tl.int64) * num_heads + head
        tl.store(partial_ptr + rows[:, None] * D + column[None, :], values, cells)
        tl.store(sums_ptr + rows * 2, largest, live)
        tl.store(sums_ptr + rows * 2 + 1, total, live)


@triton.jit
def attention_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hk) D], rows qkv_stride apart
    k_ptr,  # [blocks, Hk, PAGE, D], pages page_stride apart
    v_ptr,  # as k_ptr
    k_scales_ptr,  # float32[blocks, Hk, PAGE], pages scale_stride apart, or None: scales of int8 keys
    v_scales_ptr,  # as k_scales_ptr
    k_scale_ptr,  # float32[Hk] or None: scales of e4m3 keys
    v_scale_ptr,  # as k_scale_ptr
    sinks_ptr,  # [Hq] or None
    slopes_ptr,  # [Hq] or None
    tables_ptr,  # int32[S, pages], rows table_stride apart
    items_ptr,  # int32[items, ITEM]: the work list
    counts_ptr,  # int32[2]: its length, and that of the reductions
    out_ptr,  # [T, Hq D], rows out_stride apart
    partial_ptr,  # float32[P, Hq, D]: weighted sums of split ranges
    sums_ptr,  # float32[P, Hq, 2]: their largest scores and sums of weights
    scale,  # of the scores: to units of log2, with a soft cap to units of the cap
    soft_cap,  # in units of log2, or None
    window,  # keys a query sees, itself included, or None: all
    qkv_stride,
    out_stride,
    table_stride,
    page_stride,
    scale_stride,
    num_heads,  # Hq
    GROUP: tl.constexpr,  # Hq / Hk
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SMALL_M: tl.constexpr,  # rows of a tile that is small (a decode), a power of two
    BLOCK_M: tl.constexpr,  # rows of any other
    BLOCK_N: tl.constexpr,  # keys of a tile
    DTYPE: tl.constexpr,  # of the matrix products' operands
    PRECISION: tl.constexpr,  # how float32 ones are multiplied
    PACKED: tl.constexpr,  # whether bytes are widened four at a time, see widen
):
    """Programs (Hk, any number): program (h, p) takes entries p, p + programs, ... for key head h.

    Decodes beside prefill chunks get a tile of their own size in the same launch: they are bound by memory, the chunks by
    arithmetic, and a multiprocessor that holds some of each has both units busy.
    """
    kv_head = tl.program_id(0)
    # All that depends on the head alone; the tuples keep parameter lists short.
    v_scale = 1.0
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
    if k_scales_ptr is not None:
        v_scale = 1.0 / LIFT
        k_scales_ptr += kv_head * PAGE
        v_scales_ptr += kv_head * PAGE
    k_ptr += kv_head * (PAGE * D)
    v_ptr += kv_head * (PAGE * D)
    inputs = (qkv_ptr, sinks_ptr, tables_ptr, qkv_stride, table_stride)
    memory = (k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page_stride, scale_stride)
    rule = (scale, soft_cap, window, slopes_ptr)
    outputs = (out_ptr, partial_ptr, sums_ptr, out_stride, num_heads)
    for i in range(tl.program_id(1), tl.load(counts_ptr), tl.num_programs(1)):
        item_ptr = items_ptr + i * ITEM
        # Of the whole sequence, not of what is left of it in its last tile, whose rows would then be summed up otherwise.
        few_queries = tl.load(item_ptr + 7) & 2
        if BLOCK_M == SMALL_M or few_queries != 0:
            _attend_item(
                item_ptr, kv_head, inputs, memory, rule, v_scale, outputs,
                GROUP, PAGE, D, SMALL_M, BLOCK_N, DTYPE, PRECISION, PACKED,
            )  # fmt: skip
        else:
            _attend_item(
                item_ptr, kv_head, inputs, memory, rule, v_scale, outputs,
                GROUP, PAGE, D, BLOCK_M, BLOCK_N, DTYPE, PRECISION, PACKED,
            )  # fmt: skip

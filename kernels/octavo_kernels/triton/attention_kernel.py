"""Paged attention over a work list.

Prefill chunks, drafts and decodes are all one thing: the list (``attention_schedule``) names tiles of queries with a range
of their keys, and each program works through its share. A long range is split among several entries (Flash-Decoding, Dao et
al. 2023); their sums go to memory and ``attention_reduce_kernel`` adds them up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.attention_tile import LIFT, LOG2E, LOWEST, attend, pages_of

ITEM = tl.constexpr(8)  # int32 of an entry of the work list: 32 bytes, one sector
REDUCTION = tl.constexpr(4)


@triton.jit
def _rows(item_ptr, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each row of a tile: (its query int32[M], its head int32[M], whether it counts).

    Nothing here may be known before the entry is: the compiler would compute it once, before the loop over entries, and the
    matrix products would have dozens of registers less. So rows start at a zero that is read, and read again when asked again.
    """
    zero = tl.load(item_ptr + 7, volatile=True) >> 1
    row = zero + tl.arange(0, BLOCK_M)
    query = row // GROUP
    return query, kv_head * GROUP + row % GROUP, query < tl.load(item_ptr + 2, volatile=True)


@triton.jit
def _queries(
    qkv_ptr,
    first_row,
    rows,
    qkv_stride,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NARROW: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The numbers of a tile's rows: (q [M, D_PAD], what it is multiples of float32[M]).

    With NARROW rows become multiples of their largest magnitude, so that any number of bfloat16 fits into float16.
    """
    query, head, live = rows
    column = tl.arange(0, triton.next_power_of_2(D))
    at = (first_row + query).to(tl.int64) * qkv_stride + head * D
    q = tl.load(qkv_ptr + at[:, None] + column[None, :], live[:, None] & (column < D)[None, :], 0.0)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if NARROW:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        scale = tl.where(largest > 0.0, largest, 1.0)
        q = q.to(tl.float32) / scale[:, None]
    return q.to(DTYPE), scale


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
def _store_sums(item_ptr, kv_head, sums, outputs, v_scale, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """The attention of a tile's rows, or their partial sums if the range was split."""
    out_ptr, partial_ptr, sums_ptr, out_stride, num_heads = outputs
    largest, total, values = sums
    query, head, live = _rows(item_ptr, kv_head, GROUP, BLOCK_M)
    partial = tl.load(item_ptr + 6, volatile=True)
    values *= v_scale
    column = tl.arange(0, values.shape[1])
    cells = live[:, None] & (column < D)[None, :]
    if partial < 0:
        values /= tl.where(total > 0.0, total, 1.0)[:, None]
        rows = (tl.load(item_ptr + 1, volatile=True) + query).to(tl.int64) * out_stride + head * D
        tl.store(out_ptr + rows[:, None] + column[None, :], values.to(out_ptr.dtype.element_ty), cells)
    else:
        rows = (partial + query).to(tl.int64) * num_heads + head
        tl.store(partial_ptr + rows[:, None] * D + column[None, :], values, cells)
        tl.store(sums_ptr + rows * 2, largest, live)
        tl.store(sums_ptr + rows * 2 + 1, total, live)


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
    table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
    first_position = tl.load(item_ptr + 3)
    begin, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    rows = _rows(item_ptr, kv_head, GROUP, BLOCK_M)
    NARROW: tl.constexpr = memory[0].dtype.element_ty.primitive_bitwidth == 8
    q, q_scale = _queries(qkv_ptr, tl.load(item_ptr + 1), rows, qkv_stride, D, BLOCK_M, NARROW, DTYPE)
    query, head, live = rows
    sums = _first_sums(sinks_ptr, head, live, tl.load(item_ptr + 7), BLOCK_M, q.shape[1])
    tile = (q, q_scale, first_position + query, head)

    # Tiles of keys lie at multiples of BLOCK_N and are taken in order, so that no row's sum depends on the rows beside it.
    # Up to ``close`` every query sees all keys. A tile of few rows is bound by memory: masking all of it costs nothing.
    start = begin // BLOCK_N * BLOCK_N
    pages = pages_of(table_ptr, start, begin, end, PAGE, BLOCK_N)
    close = start
    if BLOCK_M > 16 and rule[2] is None:
        close = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
        sums, pages = attend(
            tile, sums, pages, memory, rule, table_ptr, begin, end, start, (close - start) // BLOCK_N,
            PAGE, D, BLOCK_N, False, DTYPE, PRECISION, PACKED,
        )  # fmt: skip
    sums, _ = attend(
        tile, sums, pages, memory, rule, table_ptr, begin, end, close, tl.cdiv(end - close, BLOCK_N),
        PAGE, D, BLOCK_N, True, DTYPE, PRECISION, PACKED,
    )  # fmt: skip
    _store_sums(item_ptr, kv_head, sums, outputs, v_scale, GROUP, D, BLOCK_M)


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
    count_ptr,  # int32[1]: its length
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
    BLOCK_M: tl.constexpr,  # rows of a tile, a power of two
    BLOCK_N: tl.constexpr,  # keys of a tile
    DTYPE: tl.constexpr,  # of the matrix products' operands
    PRECISION: tl.constexpr,  # how float32 ones are multiplied
    PACKED: tl.constexpr,  # how bytes are widened, see widen
):
    """Programs (Hk, any number): program (h, p) takes entries p, p + programs, ... for key head h."""
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
    for i in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        _attend_item(
            items_ptr + i * ITEM, kv_head, inputs, memory, rule, v_scale, outputs,
            GROUP, PAGE, D, BLOCK_M, BLOCK_N, DTYPE, PRECISION, PACKED,
        )  # fmt: skip

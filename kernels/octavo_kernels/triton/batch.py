"""What happens between a plan and the first layer: differences written into tables on the device, inputs read off them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import StepRows

# Words of one round of a program.
BLOCK = 1024
PUT_BLOCK = 128


@triton.jit
def write_rows_kernel(
    table_ptr,  # int32[rows, width]
    segments_ptr,  # int32[n, 4]: row, first column, first of its words, how many
    words_ptr,  # int32[...]
    width,
    BLOCK: tl.constexpr,
):
    """Programs (segment, block of it)."""
    at = segments_ptr + tl.program_id(0) * 4
    row, column, source, length = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table_ptr + row * width + column + i, tl.load(words_ptr + source + i, i < length), i < length)


@triton.jit(do_not_specialize=["count"])
def put_tokens_kernel(
    table_ptr,  # int32[rows, width]
    rows_ptr,  # int32[n]
    columns_ptr,  # int32[n]
    tokens_ptr,  # int32[n]
    count,  # n
    width,
    BLOCK: tl.constexpr,
):
    """A thread for each token."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row, column = tl.load(rows_ptr + i, inside, 0).to(tl.int64), tl.load(columns_ptr + i, inside, 0)
    tl.store(table_ptr + row * width + column, tl.load(tokens_ptr + i, inside), inside)


@triton.jit(do_not_specialize=["num_tokens"])
def prepare_inputs_kernel(
    num_rows_ptr,  # int32[1]
    row_slots_ptr,  # int32[S]
    starts_ptr,  # int32[S]
    query_start_ptr,  # int32[S + 1]
    tokens_ptr,  # int32[slots, length]
    tables_ptr,  # int32[slots, pages]
    ids_ptr,  # int32[T]
    positions_ptr,  # int32[T]
    slots_ptr,  # int32[T]
    block_tables_ptr,  # int32[S, ...], rows block_tables_stride apart
    num_tokens,  # T
    length,
    pages,
    block_tables_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; those beyond the last row pad one token each."""
    row = tl.program_id(0)
    count = tl.load(num_rows_ptr)
    if row >= count:
        token = tl.load(query_start_ptr + count) + row - count
        if token < num_tokens:
            tl.store(ids_ptr + token, -1)
            tl.store(positions_ptr + token, 0)
            tl.store(slots_ptr + token, -1)
        return
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    start, first = tl.load(starts_ptr + row), tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - first
    for begin in range(0, queries, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < queries
        position = start + i
        page = tl.load(tables_ptr + slot * pages + position // PAGE, inside, 0)
        tl.store(ids_ptr + first + i, tl.load(tokens_ptr + slot * length + position, inside, 0), inside)
        tl.store(positions_ptr + first + i, position, inside)
        tl.store(slots_ptr + first + i, page * PAGE + position % PAGE, inside)
    used = tl.cdiv(start + queries, PAGE)
    out_ptr = block_tables_ptr + row.to(tl.int64) * block_tables_stride
    for begin in range(0, used, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.load(tables_ptr + slot * pages + i, i < used), i < used)


def _check_table(table: Tensor) -> None:
    """Raises ValueError: it is not contiguous."""
    if table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"expected a contiguous matrix, not {tuple(table.shape)} by {table.stride()}")


def write_rows(table: Tensor, segments: Tensor, words: Tensor, longest: int) -> None:
    """As ``Kernels.write_rows``."""
    _check_table(table)
    if segments.shape[0] and longest:
        grid = (segments.shape[0], triton.cdiv(longest, BLOCK))
        write_rows_kernel[grid](table, segments, words, table.shape[1], BLOCK=BLOCK, num_warps=4)


def put_tokens(table: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
    """As ``Kernels.put_tokens``."""
    _check_table(table)
    count = tokens.shape[0]
    if count:
        put_tokens_kernel[(triton.cdiv(count, PUT_BLOCK),)](
            table, rows, columns, tokens, count, table.shape[1], BLOCK=PUT_BLOCK, num_warps=PUT_BLOCK // 32
        )


def prepare_inputs(
    rows: StepRows, block_size: int, ids: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor
) -> None:
    """As ``Kernels.prepare_inputs``."""
    _check_table(rows.tokens)
    _check_table(rows.tables)
    if rows.slots.shape[0]:
        prepare_inputs_kernel[(rows.slots.shape[0],)](
            *(rows.num_rows, rows.slots, rows.starts, rows.query_start, rows.tokens, rows.tables),
            *(ids, positions, slots, block_tables, ids.shape[0], rows.tokens.shape[1], rows.tables.shape[1]),
            block_tables.stride(0),
            PAGE=block_size,
            BLOCK=BLOCK,
            num_warps=4,
        )

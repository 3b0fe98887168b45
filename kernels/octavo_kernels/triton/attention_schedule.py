"""The work list of a step: which queries meet which keys in which entry, worked out on the device.

On the device, because a captured graph is replayed with other lengths, and under speculation only the device knows them.
The list is the same for all layers of one shape and costs one small launch per step.

How a range is split depends on its own sequence alone (its length and the lengths asked for), so that a row's result does
not depend on the rows beside it, as the kernel interface promises. A split range is cut into parts of equal length.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.attention_kernel import ITEM, REDUCTION


@triton.jit
def _shares(
    sequence,  # int32[BLOCK_S]
    count,
    query_start_ptr,
    seq_lens_ptr,
    window,
    tile_queries,
    small_queries,
    small_split,
    large_split,
):
    """Of each ``sequence`` below ``count``: (parts of its key range, were memory no limit; queries; tiles of queries)."""
    inside = sequence < count
    queries = tl.load(query_start_ptr + sequence + 1, inside, 0) - tl.load(query_start_ptr + sequence, inside, 0)
    keys = tl.load(seq_lens_ptr + sequence, inside, 0)
    seen = tl.minimum(keys, queries - 1 + window)
    split = tl.where(queries <= small_queries, small_split, large_split)
    parts = tl.where(split > 0, tl.cdiv(seen, tl.maximum(split, 1)), 1)
    return tl.maximum(parts, 1), queries, tl.cdiv(queries, tile_queries)


@triton.jit
def attention_schedule_kernel(
    num_seqs_ptr,  # int32[1]
    query_start_ptr,  # int32[S + 1]
    seq_lens_ptr,  # int32[S]
    items_ptr,  # int32[items, ITEM]: sequence, first row, queries, first position, first key, past the last key,
    #             first row of partial sums or -1, 1 for a leading part plus 2 for a sequence of few queries
    reductions_ptr,  # int32[T, REDUCTION]: row, its first row of partial sums, distance to the next, how many
    counts_ptr,  # int32[2]: entries of the two lists
    window,  # keys a query sees
    tile_queries,  # queries of a tile
    small_queries,  # a sequence with at most so many is split by small_split, any other by large_split;
    small_split,  # keys of a part at most, 0: never split
    large_split,
    partial_rows,  # P, room for partial sums; a sequence that finds none is not split
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,  # sequences looked at in one go
):
    """Program s writes the entries of sequence s, after those of all sequences before it."""
    own = tl.program_id(0)
    count = tl.load(num_seqs_ptr)
    if own >= tl.maximum(count, 1):
        return
    item, reduction, partial = 0, 0, 0
    parts, queries = 0, 0
    for begin in range(0, own + 1, BLOCK_S):
        sequence = begin + tl.arange(0, BLOCK_S)
        n, q, tiles = _shares(
            sequence, tl.minimum(count, own + 1), query_start_ptr, seq_lens_ptr, window, tile_queries, small_queries,
            small_split, large_split,
        )  # fmt: skip
        rows = tl.where(n > 1, q * n, 0)
        # Room is given in order whether or not a sequence before went without: every program finds the same.
        room = partial + tl.cumsum(rows, 0) <= partial_rows
        n = tl.where(room, n, 1)
        before = sequence < own
        item += tl.sum(tl.where(before, tiles * n, 0), 0)
        reduction += tl.sum(tl.where(before & (n > 1), q, 0), 0)
        partial += tl.sum(tl.where(before, rows, 0), 0)
        parts += tl.sum(tl.where(sequence == own, n, 0), 0)
        queries += tl.sum(tl.where(sequence == own, q, 0), 0)

    tiles = tl.cdiv(queries, tile_queries)
    items = tiles * parts
    split = parts > 1
    if own + 1 >= count:
        tl.store(counts_ptr, item + items)
        tl.store(counts_ptr + 1, reduction + tl.where(split, queries, 0))
    if items > 0:
        first_row = tl.load(query_start_ptr + own)
        keys = tl.load(seq_lens_ptr + own)
        flags = tl.where(queries <= small_queries, 2, 0)
        for begin in range(0, items, BLOCK_S):
            i = begin + tl.arange(0, BLOCK_S)
            # The last tile first: it has the most keys, and what is long had better not start last.
            tile, part = tiles - 1 - i // parts, i % parts
            done = tile * tile_queries
            own_queries = tl.minimum(queries - done, tile_queries)
            position = keys - queries + done
            first, last = tl.maximum(position + 1 - window, 0), position + own_queries
            base = first // BLOCK_N * BLOCK_N
            length = tl.cdiv(tl.cdiv(last - base, parts), BLOCK_N) * BLOCK_N
            start, stop = base + part * length, tl.minimum(base + (part + 1) * length, last)
            # Rounding up may leave nothing to the last parts of a short tile: an empty range, and aligned.
            stop = tl.maximum(start, stop)
            start = tl.where(part == 0, first, start)
            at = items_ptr + (item + i) * ITEM
            inside = i < items
            tl.store(at, own, inside)
            tl.store(at + 1, first_row + done, inside)
            tl.store(at + 2, own_queries, inside)
            tl.store(at + 3, position, inside)
            tl.store(at + 4, start, inside)
            tl.store(at + 5, stop, inside)
            tl.store(at + 6, tl.where(split, partial + part * queries + done, -1), inside)
            tl.store(at + 7, (part == 0).to(tl.int32) + flags, inside)
        if split:
            for begin in range(0, queries, BLOCK_S):
                i = begin + tl.arange(0, BLOCK_S)
                at = reductions_ptr + (reduction + i) * REDUCTION
                inside = i < queries
                tl.store(at, first_row + i, inside)
                tl.store(at + 1, partial + i, inside)
                tl.store(at + 2, queries, inside)
                tl.store(at + 3, parts, inside)

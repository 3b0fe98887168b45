"""The work lists of a step: which queries meet which keys in which entry, worked out on the device.

On the device, because a captured graph is replayed with other lengths, and under speculation only the device knows them.
The lists are the same for all layers of one shape and cost one small launch per step.

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
    sequence, count, query_start_ptr, seq_lens_ptr, window, tile_queries, small_queries, small_split, large_split
):
    """Of each ``sequence`` (int32[BLOCK_S]) below ``count``: (queries, whether they are few, tiles of them, parts of keys).

    Parts are what the lengths ask for, were memory no limit. A sequence of few queries is one tile of the small list.
    """
    inside = sequence < count
    queries = tl.load(query_start_ptr + sequence + 1, inside, 0) - tl.load(query_start_ptr + sequence, inside, 0)
    keys = tl.load(seq_lens_ptr + sequence, inside, 0)
    few = queries <= small_queries
    split = tl.where(few, small_split, large_split)
    parts = tl.where(split > 0, tl.cdiv(tl.minimum(keys, queries - 1 + window), tl.maximum(split, 1)), 1)
    tiles = tl.where(few, tl.minimum(queries, 1), tl.cdiv(queries, tile_queries))
    return queries, few, tiles, tl.maximum(parts, 1)


@triton.jit
def _survey(own, count, query_start_ptr, seq_lens_ptr, rule, partial_rows, BLOCK_S: tl.constexpr):
    """What precedes sequence ``own``: (entries of the small list, of the large one, reductions, rows of partial sums), and its
    own number of parts.

    Every program adds up all that is before it: a few loads, and no second launch to hand out places.
    """
    window, tile_queries, small_queries, small_split, large_split = rule
    small, large, reduction, partial, own_parts = 0, 0, 0, 0, 0
    for begin in range(0, own + 1, BLOCK_S):
        sequence = begin + tl.arange(0, BLOCK_S)
        queries, few, tiles, parts = _shares(
            sequence, tl.minimum(count, own + 1), query_start_ptr, seq_lens_ptr,
            window, tile_queries, small_queries, small_split, large_split,
        )  # fmt: skip
        rows = tl.where(parts > 1, queries * parts, 0)
        # Room is given in order whether or not a sequence before went without: every program finds the same.
        room = partial + tl.cumsum(rows, 0) <= partial_rows
        parts = tl.where(room, parts, 1)
        before = sequence < own
        small += tl.sum(tl.where(before & few, tiles * parts, 0), 0)
        large += tl.sum(tl.where(before & (few == 0), tiles * parts, 0), 0)
        reduction += tl.sum(tl.where(before & (parts > 1), queries, 0), 0)
        partial += tl.sum(tl.where(before, rows, 0), 0)
        own_parts += tl.sum(tl.where(sequence == own, parts, 0), 0)
    return small, large, reduction, partial, own_parts


@triton.jit
def _write_items(
    items_ptr,  # of this sequence
    sequence,
    lengths,  # first row, queries, keys
    window,
    tile_queries,
    tiles,
    parts,
    partial,  # first row of partial sums
    block_n,  # keys of a tile of this list
    BLOCK_S: tl.constexpr,
):
    """The entries of one sequence, ``parts`` for each of its ``tiles``."""
    first_row, queries, keys = lengths
    for begin in range(0, tiles * parts, BLOCK_S):
        i = begin + tl.arange(0, BLOCK_S)
        # The last tile first: it has the most keys, and what is long had better not start last.
        tile, part = tiles - 1 - i // parts, i % parts
        done = tile * tile_queries
        own_queries = tl.minimum(queries - done, tile_queries)
        position = keys - queries + done
        first, last = tl.maximum(position + 1 - window, 0), position + own_queries
        base = first // block_n * block_n
        length = tl.cdiv(tl.cdiv(last - base, parts), block_n) * block_n
        start, stop = base + part * length, tl.minimum(base + (part + 1) * length, last)
        # Rounding up may leave nothing to the last parts of a short tile: an empty range, and aligned.
        stop = tl.maximum(start, stop)
        start = tl.where(part == 0, first, start)
        at = items_ptr + i * ITEM
        inside = i < tiles * parts
        tl.store(at, sequence, inside)
        tl.store(at + 1, first_row + done, inside)
        tl.store(at + 2, own_queries, inside)
        tl.store(at + 3, position, inside)
        tl.store(at + 4, start, inside)
        tl.store(at + 5, stop, inside)
        tl.store(at + 6, tl.where(parts > 1, partial + part * queries + done, -1), inside)
        tl.store(at + 7, (part == 0).to(tl.int32), inside)


@triton.jit
def _write_reductions(reductions_ptr, first_row, queries, parts, partial, BLOCK_S: tl.constexpr):
    """One entry for each query of a sequence whose keys are split."""
    for begin in range(0, queries, BLOCK_S):
        i = begin + tl.arange(0, BLOCK_S)
        at = reductions_ptr + i * REDUCTION
        inside = i < queries
        tl.store(at, first_row + i, inside)
        tl.store(at + 1, partial + i, inside)
        tl.store(at + 2, queries, inside)
        tl.store(at + 3, parts, inside)


@triton.jit
def attention_schedule_kernel(
    num_seqs_ptr,  # int32[1]
    query_start_ptr,  # int32[S + 1]
    seq_lens_ptr,  # int32[S]
    items_ptr,  # int32[2, capacity, ITEM], entries of small tiles and of large ones: sequence, first row, queries, first
    #             position, first key, past the last key, first row of partial sums or -1, 1 for a leading part
    reductions_ptr,  # int32[T, REDUCTION]: row, its first row of partial sums, distance to the next, how many
    counts_ptr,  # int32[3]: entries of the three lists
    capacity,
    window,  # keys a query sees
    tile_queries,  # queries of a large tile
    small_queries,  # a sequence with at most so many is one small tile, split by small_split; any other by large_split
    small_split,  # keys of a part at most, 0: never split
    large_split,
    partial_rows,  # P, room for partial sums; a sequence that finds none is not split
    SMALL_N: tl.constexpr,  # keys of a small tile
    LARGE_N: tl.constexpr,
    BLOCK_S: tl.constexpr,  # sequences looked at in one go
):
    """Program s writes the entries of sequence s, after those of all sequences before it."""
    own = tl.program_id(0)
    count = tl.load(num_seqs_ptr)
    if own >= tl.maximum(count, 1):
        return
    rule = (window, tile_queries, small_queries, small_split, large_split)
    small, large, reduction, partial, parts = _survey(
        own, count, query_start_ptr, seq_lens_ptr, rule, partial_rows, BLOCK_S
    )
    inside = own < count
    first_row = tl.load(query_start_ptr + own)
    queries = tl.where(inside, tl.load(query_start_ptr + own + 1) - first_row, 0)
    few = queries <= small_queries
    tiles = tl.where(few, tl.minimum(queries, 1), tl.cdiv(queries, tile_queries))
    if own + 1 >= count:
        tl.store(counts_ptr, small + tl.where(few, tiles * parts, 0))
        tl.store(counts_ptr + 1, large + tl.where(few, 0, tiles * parts))
        tl.store(counts_ptr + 2, reduction + tl.where(parts > 1, queries, 0))
    lengths = (first_row, queries, tl.load(seq_lens_ptr + own))
    at = items_ptr + tl.where(few, small, capacity + large) * ITEM
    block_n = tl.where(few, SMALL_N, LARGE_N)
    own_tile = tl.where(few, small_queries, tile_queries)
    _write_items(at, own, lengths, window, own_tile, tiles, parts, partial, block_n, BLOCK_S)
    if parts > 1:
        _write_reductions(reductions_ptr + reduction * REDUCTION, first_row, queries, parts, partial, BLOCK_S)

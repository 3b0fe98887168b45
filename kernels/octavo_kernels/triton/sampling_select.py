"""From a row of values to the few tokens that matter: how many lie how deep, and then their keys side by side.

A sort of the vocabulary is what this spares. The survey counts, for a handful of depths below the row's best value, the tokens
that lie no deeper and their weight. That tells which depth holds all that is asked for (the best k, or a share p of the
weight), usually a few hundred tokens of 150,000. Their keys are collected; all exact work is done on those
(``sampling_pick``).

R rows, V vocabulary, tiles = ceil(V / TILE) <= TILES, a power of two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.sampling_keys import LEVELS, depth_limit, pack_key, precise_log, weight_units
from octavo_kernels.triton.sampling_process import is_filtered

# One more token in a sum of at most 2,048 weights, each at most 2^38.
TOKEN = tl.constexpr(1 << 51)


@triton.jit
def row_top(row, top_ptr, tiles, TILES: tl.constexpr):
    """The row's largest value; NaN where a tile holds what is not finite."""
    tile = tl.arange(0, TILES)
    tops = tl.load(top_ptr + row * tiles + tile, tile < tiles, float("-inf"))
    bad = tl.max((tops != tops).to(tl.int32), 0)
    return tl.where(bad != 0, float("nan"), tl.max(tl.where(tops != tops, float("-inf"), tops), 0))


@triton.jit
def is_finite(x):
    """False for NaN and both infinities."""
    return tl.abs(x) < float("inf")


@triton.jit
def survey_totals(row, counts_ptr, tiles, TILES: tl.constexpr):
    """[LEVELS] sums over all tiles of the row."""
    tile, level = tl.arange(0, TILES), tl.arange(0, LEVELS)
    at = (row * tiles + tile[:, None]) * LEVELS + level[None, :]
    return tl.sum(tl.load(counts_ptr + at, (tile < tiles)[:, None], 0), 0)


@triton.jit
def share_units(total, share):
    """The fewest units, at least one, that make up ``share`` float32 of ``total`` int64 units; a float64 holds both exactly
    enough, as the products of the other backends do."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def chosen_level(row, wanted, share, counts_ptr, masses_ptr, tiles, TILES: tl.constexpr):
    """The shallowest level that holds the best ``wanted`` tokens, or, where that is 0, ``share`` of the weight; else the
    deepest. Of the best k tokens top-p only drops some, so that k alone decides where both are asked for."""
    level = tl.arange(0, LEVELS)
    if wanted > 0:
        enough = survey_totals(row, counts_ptr, tiles, TILES) >= wanted
    else:
        masses = survey_totals(row, masses_ptr, tiles, TILES)
        enough = masses >= share_units(tl.max(masses, 0), share)
    return tl.min(tl.where(enough, level, LEVELS - 1), 0)


@triton.jit
def min_p_floor(row, top, min_p_ptr):
    """The least value that min-p lets through: best + log(min_p), as probabilities are exp(value) but for a factor."""
    min_p = tl.load(min_p_ptr + row)
    return tl.where(min_p > 0.0, top + precise_log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))


@triton.jit
def _is_wanted(row, top, wanted_ptr, temperature_ptr, top_p_ptr, min_p_ptr, LIST: tl.constexpr):
    """Whether the row is looked at at all; bad ones and those that were settled in the first pass are not."""
    if LIST:
        return is_finite(top)
    else:
        return is_finite(top) & is_filtered(row, temperature_ptr, wanted_ptr, top_p_ptr, min_p_ptr)


@triton.jit
def survey_kernel(
    values_ptr,  # float32[R, V]
    top_ptr,  # float32[R, tiles]
    counts_ptr,  # int32[R, tiles, LEVELS]: tokens no deeper than the level
    masses_ptr,  # int64[R, tiles, LEVELS]: their weight, in units
    above_ptr,  # int32[R, tiles]: tokens of a larger value than the target (TARGET only)
    target_ptr,  # int32[R] (TARGET only)
    wanted_ptr,  # int32[R]: top-k, or how many are to be listed
    temperature_ptr,  # float32[R] (not for LIST)
    top_p_ptr,  # float32[R] (not for LIST)
    min_p_ptr,  # float32[R] (not for LIST)
    vocab,  # V
    tiles,
    LIST: tl.constexpr,  # the best tokens of every row are listed; if not, one is drawn in rows with filters
    TARGET: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs (row, tile)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = row_top(row, top_ptr, tiles, TILES)
    if _is_wanted(row, top, wanted_ptr, temperature_ptr, top_p_ptr, min_p_ptr, LIST):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < vocab
        values = tl.load(values_ptr + row * vocab + ids, inside, float("-inf"))
        depth = top - values
        units = weight_units(depth)
        if not LIST:
            inside = inside & (values >= min_p_floor(row, top, min_p_ptr))
        at = (row * tiles + tile) * LEVELS
        for level in range(LEVELS):
            # Number and weight are added up as one integer: the weights of a tile come to less than a TOKEN.
            both = tl.sum(tl.where(inside & (depth <= depth_limit(level)), units + TOKEN, 0), 0)
            tl.store(counts_ptr + at + level, (both >> 51).to(tl.int32))
            tl.store(masses_ptr + at + level, both & (TOKEN - 1))
        if TARGET:
            target = tl.load(target_ptr + row)
            known = (target >= 0) & (target < vocab)
            value = tl.load(values_ptr + row * vocab + target, known, float("inf"))
            tl.store(above_ptr + row * tiles + tile, tl.sum((inside & (values > value)).to(tl.int32), 0))


@triton.jit
def collect_kernel(
    values_ptr,  # float32[R, V]
    top_ptr,  # float32[R, tiles]
    counts_ptr,  # int32[R, tiles, LEVELS]
    masses_ptr,  # int64[R, tiles, LEVELS]
    keys_ptr,  # int64[R, V]: the keys of the chosen level's tokens, side by side
    found_ptr,  # int32[R]: how many they are
    wanted_ptr,  # int32[R]: top-k, or how many are to be listed
    temperature_ptr,  # float32[R] (not for LIST)
    top_p_ptr,  # float32[R] (not for LIST)
    min_p_ptr,  # float32[R] (not for LIST)
    vocab,  # V
    tiles,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs (row, tile). A tile's keys come after those of the tiles before it, which the survey counted."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = row_top(row, top_ptr, tiles, TILES)
    wanted = tl.load(wanted_ptr + row)
    needed = _is_wanted(row, top, wanted_ptr, temperature_ptr, top_p_ptr, min_p_ptr, LIST)
    if LIST:
        share = 1.0
        needed = needed & (wanted > 0)
    else:
        share = tl.load(top_p_ptr + row)
    if needed:
        level = chosen_level(row, wanted, share, counts_ptr, masses_ptr, tiles, TILES)
        others = tl.arange(0, TILES)
        counts = tl.load(counts_ptr + (row * tiles + others) * LEVELS + level, others < tiles, 0)
        if tile == 0:
            tl.store(found_ptr + row, tl.sum(counts, 0))
        if tl.load(counts_ptr + (row * tiles + tile) * LEVELS + level) > 0:
            ids = tile * TILE + tl.arange(0, TILE)
            inside = ids < vocab
            values = tl.load(values_ptr + row * vocab + ids, inside, float("-inf"))
            within = inside & (top - values <= depth_limit(level))
            if not LIST:
                within = within & (values >= min_p_floor(row, top, min_p_ptr))
            before = tl.sum(tl.where(others < tile, counts, 0), 0)
            place = before + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(keys_ptr + row * vocab + place, pack_key(values, ids), within)

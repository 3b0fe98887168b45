"""The last pass, one program a row: the exact top-k and top-p of the collected tokens and the draw, or their list in order.

All of it asks of keys (``sampling_keys.pack_key``) only which is larger, and no two are equal: "the best k, of equals the
lower ids" is a threshold on keys, and so is the least set of best tokens that makes up a share.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.sampling_keys import (
    HIGHEST,
    LOWEST,
    UNITS,
    gumbel,
    key_id,
    key_value,
    noise_key,
    pack_key,
    precise_log,
    weight_units,
)
from octavo_kernels.triton.sampling_process import is_filtered
from octavo_kernels.triton.sampling_select import is_finite, row_top, share_units, survey_totals

# octavo_kernels.interface.SampleStatus
FINE = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
NOTHING_LEFT = tl.constexpr(2)


@triton.jit
def _measured(keys_ptr, count, least, top, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Of ``count`` keys those not below ``least``: how many, and their weight in units (or their number again)."""
    number = tl.zeros([TILE], tl.int32)
    weight = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        keys = tl.load(keys_ptr + at, at < count, LOWEST)
        taken = keys >= least
        number += taken.to(tl.int32)
        if BY_WEIGHT:
            weight += weight_units(tl.where(taken, top - key_value(keys), float("inf")))
    n = tl.sum(number, 0)
    if BY_WEIGHT:
        return n, tl.sum(weight, 0)
    else:
        return n, n.to(tl.int64)


@triton.jit
def _smallest_key(keys_ptr, count, TILE: tl.constexpr):
    """The smallest of ``count`` keys."""
    least = tl.full([TILE], HIGHEST, tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(keys_ptr + at, at < count, HIGHEST))
    return tl.min(least, 0)


@triton.jit
def _largest_threshold(keys_ptr, count, lowest, lowest_count, need, top, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """The largest threshold t such that the keys not below t measure at least ``need`` > 0; all do from ``lowest`` on.

    Bisection over integers: the measure falls as t rises, and the search ends when one key is left between what is enough and
    what is not, after some twenty steps, or at the latest after 64. The mean of the bounds is taken without overflow. Also
    returns how many keys are not below t.
    """
    enough, too_high = lowest, pack_key(top, 0) + 1
    enough_count, too_high_count = lowest_count, 0
    while enough_count - too_high_count > 1:
        middle = (enough >> 1) + (too_high >> 1) + (enough & too_high & 1)
        n, measure = _measured(keys_ptr, count, middle, top, BY_WEIGHT, TILE)
        if measure >= need:
            enough = middle
            enough_count = n
        else:
            too_high = middle
            too_high_count = n
    return enough, enough_count


@triton.jit
def _lowest_kept(
    row, keys_ptr, count, top, top_k_ptr, top_p_ptr, masses_ptr, tiles, TILE: tl.constexpr, TILES: tl.constexpr
):
    """The threshold of top-k and then top-p over the row's collected keys; what they did not collect is below both."""
    least, kept = _smallest_key(keys_ptr, count, TILE), count
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (top_k > 0) & (top_k < count):
        least, kept = _largest_threshold(keys_ptr, count, least, kept, top_k.to(tl.int64), top, False, TILE)
    if top_p < 1.0:
        if top_k > 0:
            _, total = _measured(keys_ptr, count, least, top, True, TILE)
        else:
            total = tl.max(survey_totals(row, masses_ptr, tiles, TILES), 0)
        least, kept = _largest_threshold(keys_ptr, count, least, kept, share_units(total, top_p), top, True, TILE)
    return least


@triton.jit
def _drawn(keys_ptr, count, least, noise, TILE: tl.constexpr):
    """The id whose value plus noise is largest among the keys not below ``least``: one draw from their softmax (Gumbel-max).

    -1 if there are none.
    """
    best = tl.full([TILE], LOWEST, tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        keys = tl.load(keys_ptr + at, at < count, LOWEST)
        ids = key_id(keys)
        scores = pack_key(key_value(keys) + gumbel(ids, noise), ids)
        best = tl.maximum(best, tl.where((at < count) & (keys >= least), scores, LOWEST))
    winner = tl.max(best, 0)
    return tl.where(winner == LOWEST, -1, key_id(winner))


@triton.jit
def draw_kernel(
    best_ptr,  # int64[R, tiles]
    top_ptr,  # float32[R, tiles]
    masses_ptr,  # int64[R, tiles, LEVELS], of rows with filters
    keys_ptr,  # int64[R, V], of rows with filters
    found_ptr,  # int32[R], of rows with filters
    temperature_ptr,  # float32[R]
    top_k_ptr,  # int32[R]
    top_p_ptr,  # float32[R]
    min_p_ptr,  # float32[R]
    seed_ptr,  # int64[R]
    position_ptr,  # int32[R]
    token_ptr,  # int32[R]: the drawn token, -1: none
    status_ptr,  # uint8[R]: SampleStatus
    vocab,  # V
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per row. A value that overflowed to +inf leaves nothing to chance: the first of those is taken."""
    row = tl.program_id(0).to(tl.int64)
    top = row_top(row, top_ptr, tiles, TILES)
    tile = tl.arange(0, TILES)
    token = key_id(tl.max(tl.load(best_ptr + row * tiles + tile, tile < tiles, LOWEST), 0))
    if is_finite(top) & is_filtered(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
        keys, count = keys_ptr + row * vocab, tl.load(found_ptr + row)
        least = _lowest_kept(row, keys, count, top, top_k_ptr, top_p_ptr, masses_ptr, tiles, TILE, TILES)
        token = _drawn(keys, count, least, noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row)), TILE)
    nothing = (top == float("-inf")) | (token < 0)
    status = tl.where(top != top, NOT_FINITE, tl.where(nothing, NOTHING_LEFT, FINE))
    tl.store(token_ptr + row, tl.where(status == FINE, token, -1))
    tl.store(status_ptr + row, status.to(tl.uint8))


@triton.jit
def _next_key(keys_ptr, count, previous, TILE: tl.constexpr):
    """The largest key below ``previous``."""
    best = tl.full([TILE], LOWEST, tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        keys = tl.load(keys_ptr + at, at < count, LOWEST)
        best = tl.maximum(best, tl.where(keys < previous, keys, LOWEST))
    return tl.max(best, 0)


@triton.jit
def _log_sum(row, masses_ptr, tiles, TILES: tl.constexpr):
    """log of the sum over the row of exp(value - best): a log-probability is (value - best) less this. Through the best plus
    this, large values would lose digits."""
    total = tl.max(survey_totals(row, masses_ptr, tiles, TILES), 0)
    return precise_log(total.to(tl.float32) / UNITS)


@triton.jit(do_not_specialize=["width"])
def list_kernel(
    top_ptr,  # float32[R, tiles]
    masses_ptr,  # int64[R, tiles, LEVELS]
    keys_ptr,  # int64[R, V]
    found_ptr,  # int32[R]
    wanted_ptr,  # int32[R]
    ids_ptr,  # int32[R, width]: the best tokens, the best first
    logprobs_ptr,  # float32[R, width]
    listed_ptr,  # int32[R]: how many of them have a probability above zero (not for TARGET)
    status_ptr,  # uint8[R]: SampleStatus (not for TARGET)
    values_ptr,  # float32[R, V] (TARGET only)
    above_ptr,  # int32[R, tiles] (TARGET only)
    target_ptr,  # int32[R] (TARGET only)
    target_logprob_ptr,  # float32[R], -inf for a target outside the vocabulary (TARGET only)
    target_rank_ptr,  # int32[R], 0 for such and in rows that are not finite (TARGET only)
    vocab,  # V
    tiles,
    width,
    TARGET: tl.constexpr,  # log-probabilities beside a target's; if not, candidates
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per row: as many passes over the collected keys as are wanted. Few are, so that nothing is sorted."""
    row = tl.program_id(0).to(tl.int64)
    top = row_top(row, top_ptr, tiles, TILES)
    wanted = tl.minimum(tl.load(wanted_ptr + row), width)
    listed = 0
    if is_finite(top):
        log_sum = _log_sum(row, masses_ptr, tiles, TILES)
        if wanted > 0:
            count = tl.load(found_ptr + row)
            key = tl.full([], HIGHEST, tl.int64)
            for i in range(tl.minimum(wanted, count)):
                key = _next_key(keys_ptr + row * vocab, count, key, TILE)
                value = key_value(key)
                tl.store(ids_ptr + row * width + i, key_id(key))
                tl.store(logprobs_ptr + row * width + i, value - top - log_sum)
                listed += (value > float("-inf")).to(tl.int32)
    else:
        log_sum = float("nan")
        for i in range(wanted):
            tl.store(ids_ptr + row * width + i, -1)
            tl.store(logprobs_ptr + row * width + i, log_sum)
    if TARGET:
        target = tl.load(target_ptr + row)
        known = (target >= 0) & (target < vocab)
        value = tl.load(values_ptr + row * vocab + target, known, float("-inf"))
        tile = tl.arange(0, TILES)
        rank = tl.sum(tl.load(above_ptr + row * tiles + tile, tile < tiles, 0), 0) + 1
        tl.store(target_logprob_ptr + row, tl.where(known, value - top - log_sum, float("-inf")))
        tl.store(target_rank_ptr + row, tl.where(known & is_finite(top), rank, 0))
    else:
        nothing = top == float("-inf")
        tl.store(listed_ptr + row, listed)
        tl.store(
            status_ptr + row, tl.where(is_finite(top), FINE, tl.where(nothing, NOTHING_LEFT, NOT_FINITE)).to(tl.uint8)
        )

"""The first pass over logits: penalties, bias, banned ids, temperature, and the best token of every tile.

R rows, V vocabulary, tiles = ceil(V / TILE). ``work`` int32[R, V] first holds token counts, of rows with penalties only,
and then the bits of processed values, of rows that a later pass reads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.sampling_keys import gumbel, noise_key, pack_key

# In a count: the token occurs before the outputs.
IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def is_penalised(row, presence_ptr, frequency_ptr, repetition_ptr):
    """Whether any penalty of the row does anything."""
    outputs = (tl.load(presence_ptr + row) != 0.0) | (tl.load(frequency_ptr + row) != 0.0)
    return outputs | (tl.load(repetition_ptr + row) != 1.0)


@triton.jit
def is_random(row, temperature_ptr):
    """Whether the row is drawn; if not, it takes the best."""
    return tl.load(temperature_ptr + row) > 0.0


@triton.jit
def is_filtered(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """Whether the row is drawn from some of its tokens only. With a top-k of one nothing is left to draw."""
    top_k = tl.load(top_k_ptr + row)
    by_share = (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    return is_random(row, temperature_ptr) & ((top_k > 1) | ((top_k <= 0) & by_share))


@triton.jit
def clear_counts_kernel(
    work_ptr,  # int32[R, V], zeroed in rows with penalties
    presence_ptr,  # float32[R]
    frequency_ptr,  # float32[R]
    repetition_ptr,  # float32[R]
    vocab,  # V
    TILE: tl.constexpr,
):
    """Programs (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    if is_penalised(row, presence_ptr, frequency_ptr, repetition_ptr):
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        tl.store(work_ptr + row * vocab + ids, tl.zeros([TILE], tl.int32), ids < vocab)


@triton.jit
def count_tokens_kernel(
    work_ptr,  # int32[R, V], zero: per token how often it occurs among the outputs, + IN_PROMPT if before them
    presence_ptr,  # float32[R]
    frequency_ptr,  # float32[R]
    repetition_ptr,  # float32[R]
    tokens_ptr,  # int32[rows, length]
    token_row_ptr,  # int32[R]
    token_count_ptr,  # int32[R]
    output_start_ptr,  # int32[R]
    length,
    vocab,  # V
    CHUNK: tl.constexpr,
):
    """Programs (row, one of several walkers over its chunks). Integer additions come out alike in any order."""
    row = tl.program_id(0).to(tl.int64)
    if is_penalised(row, presence_ptr, frequency_ptr, repetition_ptr):
        history = tokens_ptr + tl.load(token_row_ptr + row).to(tl.int64) * length
        count, output_start = tl.load(token_count_ptr + row), tl.load(output_start_ptr + row)
        for start in range(tl.program_id(1) * CHUNK, count, tl.num_programs(1) * CHUNK):
            at = start + tl.arange(0, CHUNK)
            token = tl.load(history + at, at < count, -1)
            known = (token >= 0) & (token < vocab)
            counter = work_ptr + row * vocab + token
            tl.atomic_add(counter, 1, known & (at >= output_start), sem="relaxed")
            tl.atomic_or(counter, IN_PROMPT, known & (at < output_start), sem="relaxed")


@triton.jit
def _penalised(z, counts, presence, frequency, repetition):
    """The repetition penalty on every token seen, presence and frequency on outputs. No rounding is left to the compiler."""
    smaller, larger = tl.div_rn(z, repetition), z * repetition
    z = tl.where(counts != 0, tl.where(z > 0.0, smaller, larger), z)
    outputs = counts & (IN_PROMPT - 1)
    return z - tl.fma(outputs.to(tl.float32), frequency, tl.where(outputs > 0, presence, 0.0))


@triton.jit
def _biased(z, ids, row, start_ptr, ids_ptr, values_ptr):
    """The row's biases added one after the other; ids outside the tile match none of ``ids``."""
    for i in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        z = tl.where(ids == tl.load(ids_ptr + i), z + tl.load(values_ptr + i), z)
    return z


@triton.jit
def _banned(z, ids, row, start_ptr, ids_ptr):
    """-inf for the row's banned ids."""
    for i in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        z = tl.where(ids == tl.load(ids_ptr + i), float("-inf"), z)
    return z


@triton.jit
def process_kernel(
    logits_ptr,  # float32[R, V]
    work_ptr,  # int32[R, V]: counts of rows with penalties; processed values' bits of rows that are read again
    best_ptr,  # int64[R, tiles]: key of the tile's best token, with noise in rows drawn from all tokens
    top_ptr,  # float32[R, tiles]: the tile's largest processed value; NaN where a logit is NaN or +inf
    temperature_ptr,  # float32[R]
    top_k_ptr,  # int32[R]
    top_p_ptr,  # float32[R]
    min_p_ptr,  # float32[R]
    presence_ptr,  # float32[R]
    frequency_ptr,  # float32[R]
    repetition_ptr,  # float32[R]
    seed_ptr,  # int64[R]
    position_ptr,  # int32[R]
    bias_start_ptr,  # int32[R + 1]
    bias_ids_ptr,  # int32[...]
    bias_values_ptr,  # float32[...]
    banned_start_ptr,  # int32[R + 1]
    banned_ids_ptr,  # int32[...]
    vocab,  # V
    tiles,
    DRAW: tl.constexpr,  # tokens are drawn; if not, they are listed: without temperature, and all rows are read again
    TILE: tl.constexpr,
):
    """Programs (row, tile). Greedy rows and those without filters need no other pass over the vocabulary."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    z = tl.load(logits_ptr + row * vocab + ids, inside, float("-inf"))
    bad = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    if is_penalised(row, presence_ptr, frequency_ptr, repetition_ptr):
        counts = tl.load(work_ptr + row * vocab + ids, inside, 0)
        penalties = (tl.load(presence_ptr + row), tl.load(frequency_ptr + row), tl.load(repetition_ptr + row))
        z = _penalised(z, counts, penalties[0], penalties[1], penalties[2])
    z = _biased(z, ids, row, bias_start_ptr, bias_ids_ptr, bias_values_ptr)
    z = _banned(z, ids, row, banned_start_ptr, banned_ids_ptr)
    score = z
    read_again = row >= 0
    if DRAW:
        read_again = is_filtered(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
        if is_random(row, temperature_ptr):
            z = tl.div_rn(z, tl.load(temperature_ptr + row))
            score = z
            if (not read_again) & (tl.load(top_k_ptr + row) != 1):
                score = z + gumbel(ids, noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row)))
    if read_again:
        tl.store(work_ptr + row * vocab + ids, z.to(tl.int32, bitcast=True), inside)
    tl.store(best_ptr + row * tiles + tile, tl.max(pack_key(score, ids), 0))
    tl.store(top_ptr + row * tiles + tile, tl.where(bad != 0, float("nan"), tl.max(z, 0)))


@triton.jit
def tops_kernel(
    logits_ptr,  # float32[R, V]
    top_ptr,  # float32[R, tiles]: the tile's largest logit; NaN where one is NaN or +inf
    vocab,  # V
    tiles,
    TILE: tl.constexpr,
):
    """Programs (row, tile): the first pass where logits are taken as they are."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits_ptr + row * vocab + ids, ids < vocab, float("-inf"))
    bad = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    tl.store(top_ptr + row * tiles + tile, tl.where(bad != 0, float("nan"), tl.max(z, 0)))

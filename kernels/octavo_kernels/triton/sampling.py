"""Sampling, candidates and log-probabilities over whole rows of logits, without sorting the vocabulary.

A draw takes one pass over the vocabulary (``process_kernel``) for greedy rows and those without filters, three for rows
with top-k, top-p or min-p: process, survey, collect; the exact choice is then made among the few tokens collected. Every
launch covers the whole batch and nothing is read back, so that a step's sampling never waits for the host and can be part of
a CUDA graph.

The set top-k, top-p and min-p keep is the reference's, ties by lower id included: weights add as integers (``sampling_keys``),
so a share is reached at the same token in whatever order they are added. Backends can differ only where a sum comes within
rounding (some 1e-7) of the share asked for, or two noisy scores within the last bits of each other.

R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
from torch import Tensor

from octavo_kernels.interface import Candidates, Logprobs, SampleRows
from octavo_kernels.triton.sampling_keys import LEVELS
from octavo_kernels.triton.sampling_pick import draw_kernel, list_kernel
from octavo_kernels.triton.sampling_process import (
    clear_counts_kernel,
    count_tokens_kernel,
    process_kernel,
    tops_kernel,
)
from octavo_kernels.triton.sampling_select import collect_kernel, survey_kernel

# Tokens of one program of the passes over the vocabulary, the most that the survey can add up: 75 programs for a row of
# 150,000.
TILE = 2048
# Programs that walk over one row's history, each in steps of CHUNK tokens.
WALKERS = 16
CHUNK = 1024


@dataclass(frozen=True, slots=True)
class _Cut:
    """How rows are cut into tiles; no result depends on it."""

    tile: int
    tiles: int

    @staticmethod
    def of(vocab: int, tile: int) -> _Cut:
        assert tile <= TILE
        tile = min(tile, max(16, triton.next_power_of_2(vocab)))
        return _Cut(tile, triton.cdiv(vocab, tile))

    @property
    def first(self) -> dict[str, int]:
        """Launch options of the first pass: 8 elements a thread."""
        return {"TILE": self.tile, "num_warps": max(1, self.tile // 256)}

    @property
    def later(self) -> dict[str, int]:
        """Launch options of the kernels that look at all tiles of a row."""
        return {**self.first, "TILES": triton.next_power_of_2(self.tiles)}


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the passes leave for each other; see the kernels for what the entries hold."""

    top: Tensor  # float32[R, tiles]
    counts: Tensor  # int32[R, tiles, LEVELS]
    masses: Tensor  # int64[R, tiles, LEVELS]
    keys: Tensor  # int64[R, V]
    found: Tensor  # int32[R]

    @staticmethod
    def on(device: torch.device, rows: int, vocab: int, cut: _Cut) -> _Scratch:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        levels = int(LEVELS.value)
        return _Scratch(
            empty(rows, cut.tiles, dtype=torch.float32),
            empty(rows, cut.tiles, levels),
            empty(rows, cut.tiles, levels, dtype=torch.int64),
            empty(rows, vocab, dtype=torch.int64),
            empty(rows),
        )


def _check(logits: Tensor, *vectors: Tensor) -> None:
    """Raises TypeError: logits are no contiguous float32 matrix, or another tensor is not contiguous on their device."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise TypeError(f"expected contiguous logits float32[R, V], not {logits.dtype} {tuple(logits.shape)}")
    for vector in vectors:
        if not vector.is_contiguous() or vector.device != logits.device:
            raise TypeError(f"expected contiguous tensors on {logits.device}, not {vector.stride()} on {vector.device}")


def _columns(rows: SampleRows) -> tuple[Tensor, ...]:
    """All tensors of ``rows``."""
    return tuple(getattr(rows, field.name) for field in fields(rows))


def _process(logits: Tensor, rows: SampleRows, scratch: _Scratch, cut: _Cut, *, draw: bool) -> tuple[Tensor, Tensor]:
    """Count histories and run the first pass: processed values float32[R, V], the tiles' best keys int64[R, tiles].

    Values are set in the rows that later passes read.
    """
    count, vocab = logits.shape
    work = torch.empty((count, vocab), dtype=torch.int32, device=logits.device)
    best = torch.empty((count, cut.tiles), dtype=torch.int64, device=logits.device)
    penalties = (rows.presence, rows.frequency, rows.repetition)
    clear_counts_kernel[(count, cut.tiles)](work, *penalties, vocab, **cut.first)
    length = rows.tokens.shape[1]
    walkers = max(1, min(WALKERS, triton.cdiv(length, CHUNK)))
    history = (rows.tokens, rows.token_row, rows.token_count, rows.output_start)
    count_tokens_kernel[(count, walkers)](work, *penalties, *history, length, vocab, CHUNK=CHUNK, num_warps=4)
    process_kernel[(count, cut.tiles)](
        *(logits, work, best, scratch.top, rows.temperature, rows.top_k, rows.top_p, rows.min_p, *penalties),
        *(rows.seed, rows.position, rows.bias_start, rows.bias_ids, rows.bias_values, rows.banned_start),
        *(rows.banned_ids, vocab, cut.tiles),
        DRAW=draw,
        **cut.first,
    )
    return work.view(torch.float32), best


def _list(values: Tensor, wanted: Tensor, scratch: _Scratch, cut: _Cut, above: Tensor | None, target: Tensor) -> None:
    """Survey and collect the best ``wanted`` int32[R] tokens of every row; with ``above`` count those above ``target``."""
    count, vocab = values.shape
    unused = scratch.top
    survey_kernel[(count, cut.tiles)](
        *(values, scratch.top, scratch.counts, scratch.masses, wanted if above is None else above, target, wanted),
        *(unused, unused, unused, vocab, cut.tiles),
        LIST=True,
        TARGET=above is not None,
        **cut.later,
    )
    collect_kernel[(count, cut.tiles)](
        *(values, scratch.top, scratch.counts, scratch.masses, scratch.keys, scratch.found, wanted),
        *(unused, unused, unused, vocab, cut.tiles),
        LIST=True,
        **cut.later,
    )


def sample(logits: Tensor, rows: SampleRows, *, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """See ``Kernels.sample``. ``tile`` (a power of two) is for tests: no result depends on it."""
    _check(logits, *_columns(rows))
    count, vocab = logits.shape
    token = torch.empty(count, dtype=torch.int32, device=logits.device)
    status = torch.empty(count, dtype=torch.uint8, device=logits.device)
    if not count:
        return token, status
    cut = _Cut.of(vocab, tile)
    scratch = _Scratch.on(logits.device, count, vocab, cut)
    values, best = _process(logits, rows, scratch, cut, draw=True)
    filters = (rows.temperature, rows.top_p, rows.min_p)
    survey_kernel[(count, cut.tiles)](
        *(values, scratch.top, scratch.counts, scratch.masses, rows.top_k, rows.top_k, rows.top_k, *filters),
        *(vocab, cut.tiles),
        LIST=False,
        TARGET=False,
        **cut.later,
    )
    collect_kernel[(count, cut.tiles)](
        *(values, scratch.top, scratch.counts, scratch.masses, scratch.keys, scratch.found, rows.top_k, *filters),
        *(vocab, cut.tiles),
        LIST=False,
        **cut.later,
    )
    draw_kernel[(count,)](
        *(best, scratch.top, scratch.masses, scratch.keys, scratch.found, rows.temperature, rows.top_k, rows.top_p),
        *(rows.min_p, rows.seed, rows.position, token, status, vocab, cut.tiles),
        **cut.later,
    )
    return token, status


def candidates(logits: Tensor, rows: SampleRows, wanted: Tensor, width: int, *, tile: int = TILE) -> Candidates:
    """See ``Kernels.candidates``. ``tile`` (a power of two) is for tests."""
    _check(logits, wanted, *_columns(rows))
    count, vocab = logits.shape
    ids = torch.empty((count, width), dtype=torch.int32, device=logits.device)
    result = Candidates(
        ids,
        torch.empty((count, width), dtype=torch.float32, device=logits.device),
        torch.empty(count, dtype=torch.int32, device=logits.device),
        torch.empty(count, dtype=torch.uint8, device=logits.device),
    )
    if not count:
        return result
    cut = _Cut.of(vocab, tile)
    scratch = _Scratch.on(logits.device, count, vocab, cut)
    values, _ = _process(logits, rows, scratch, cut, draw=False)
    _list(values, wanted, scratch, cut, None, wanted)
    list_kernel[(count,)](
        *(scratch.top, scratch.masses, scratch.keys, scratch.found, wanted),
        *(result.ids, result.logprobs, result.found, result.status),
        *(values, wanted, wanted, scratch.top, wanted, vocab, cut.tiles, width),
        TARGET=False,
        **cut.later,
    )
    return result


def logprobs(logits: Tensor, target: Tensor, top_n: Tensor, width: int, *, tile: int = TILE) -> Logprobs:
    """See ``Kernels.logprobs``; rows that are not finite get NaN. ``tile`` (a power of two) is for tests."""
    _check(logits, target, top_n)
    count, vocab = logits.shape
    result = Logprobs(
        torch.empty(count, dtype=torch.float32, device=logits.device),
        torch.empty(count, dtype=torch.int32, device=logits.device),
        torch.empty((count, width), dtype=torch.int32, device=logits.device),
        torch.empty((count, width), dtype=torch.float32, device=logits.device),
    )
    if not count:
        return result
    cut = _Cut.of(vocab, tile)
    scratch = _Scratch.on(logits.device, count, vocab, cut)
    above = torch.empty((count, cut.tiles), dtype=torch.int32, device=logits.device)
    tops_kernel[(count, cut.tiles)](logits, scratch.top, vocab, cut.tiles, **cut.first)
    _list(logits, top_n, scratch, cut, above, target)
    list_kernel[(count,)](
        *(scratch.top, scratch.masses, scratch.keys, scratch.found, top_n),
        *(result.top_ids, result.top_logprobs, top_n, top_n, logits, above, target, result.logprob, result.rank),
        *(vocab, cut.tiles, width),
        TARGET=True,
        **cut.later,
    )
    return result

"""Low-rank adapters, many in one batch: out += scale * (x @ down^T) @ up^T, by each token's own adapter.

Tokens are grouped by adapter into tiles of 16, what matrix units take at least, so that a tile reads one adapter. "Shrink"
computes the low-rank activations in float32, in parts of K that are added up when "expand" reads them: few tokens would
otherwise keep few multiprocessors busy. How K is cut depends on K alone, and a tile's size on nothing, so that batch-mates
never change what a token gets. The idea of grouped kernels is Punica's (Chen et al., arXiv 2310.18547).

T tokens, K and N input and output features, A adapters, r rank, G tiles of tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
# Input features of one part of K, and of one step of the product.
PART = 512
STEP = 128
# Low-rank features of a program of "shrink", output features of one of "expand".
LOW_SPAN, SPAN = 64, 64
MAX_RANK = 256
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Which tokens use which adapter. Spare tiles may follow, for buffers of a fixed size; they cost next to nothing."""

    tokens: Tensor  # int32[G, TOKENS], token rows; negative: none
    adapters: Tensor  # int32[G]; negative: a spare tile


def group_tokens(
    adapter: npt.NDArray[np.int32],  # [T], negative: none
    tiles: int | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Host arrays for ``LoraTiles``: tokens int32[G, TOKENS] and adapters int32[G], with G ``tiles`` or as many as needed.

    Raises:
        ValueError: ``tiles`` are too few; T / TOKENS + the number of different adapters always suffice.
    """
    order = np.argsort(adapter, kind="stable")
    order = order[np.searchsorted(adapter[order], 0) :]
    owners, first, counts = np.unique(adapter[order], return_index=True, return_counts=True)
    per_owner = -(-counts // TOKENS)
    needed = int(per_owner.sum())
    if tiles is not None and tiles < needed:
        raise ValueError(f"{needed} tiles of tokens for {tiles} places")
    tokens = np.full((needed if tiles is None else tiles, TOKENS), -1, np.int32)
    adapters = np.full(len(tokens), -1, np.int32)
    adapters[:needed] = np.repeat(owners, per_owner)
    first_tile = np.cumsum(per_owner) - per_owner
    within = np.arange(len(order)) - np.repeat(first, counts)
    tokens[np.repeat(first_tile, counts) + within // TOKENS, within % TOKENS] = order
    return tokens, adapters


@triton.jit
def _product(x, y, WIDEN: tl.constexpr):
    """x @ y in float32. Interpreted products of bfloat16 are wrong, as it is held as integers: ``WIDEN`` makes them float32."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,  # [T, K], rows x_stride apart
    down_ptr,  # [A, r, K], contiguous
    tokens_ptr,  # int32[G, TOKENS]
    adapters_ptr,  # int32[G]
    low_ptr,  # float32[parts, T, r], contiguous
    num_tokens,  # T
    features,  # K
    rank,  # r
    x_stride,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    RANK: tl.constexpr,  # a power of two, at least 16
    WIDEN: tl.constexpr,
):
    """Programs (tile, part of K, span of RANK low-rank features): low = x @ down^T of that part and span."""
    tile, part = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(adapters_ptr + tile).to(tl.int64)
    if adapter >= 0:
        token = tl.load(tokens_ptr + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        column, row = tl.arange(0, STEP), tl.program_id(2) * RANK + tl.arange(0, RANK)
        low = tl.zeros([TOKENS, RANK], tl.float32)
        for start in range(0, PART, STEP):
            feature = part * PART + start + column
            inside = (feature < features)[None, :]
            x = tl.load(x_ptr + token[:, None] * x_stride + feature[None, :], (token >= 0)[:, None] & inside, 0.0)
            at = (adapter * rank + row[:, None]) * features + feature[None, :]
            down = tl.load(down_ptr + at, (row < rank)[:, None] & inside, 0.0)
            low += _product(x, tl.trans(down), WIDEN)
        at = (part.to(tl.int64) * num_tokens + token[:, None]) * rank + row[None, :]
        tl.store(low_ptr + at, low, (token >= 0)[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    low_ptr,  # float32[parts, T, r], rows low_stride apart, parts T times that
    up_ptr,  # [A, N, r], contiguous
    scale_ptr,  # float32[A]
    tokens_ptr,  # int32[G, TOKENS]
    adapters_ptr,  # int32[G]
    out_ptr,  # [T, N], rows out_stride apart, changed in place
    parts,
    num_tokens,  # T
    features,  # N
    rank,  # r
    low_stride,
    out_stride,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    RANK: tl.constexpr,  # a power of two, at least r and 16
    WIDEN: tl.constexpr,
):
    """Programs (tile, span of N): out += scale * low @ up^T, each element by one program."""
    tile = tl.program_id(0)
    adapter = tl.load(adapters_ptr + tile).to(tl.int64)
    if adapter >= 0:
        token = tl.load(tokens_ptr + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        row = tl.arange(0, RANK)
        live, within = (token >= 0)[:, None], (row < rank)[None, :]
        low = tl.zeros([TOKENS, RANK], tl.float32)
        for part in range(parts):
            at = (part * num_tokens + token[:, None]) * low_stride + row[None, :]
            low += tl.load(low_ptr + at, live & within, 0.0)
        feature = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        inside = feature < features
        at = (adapter * features + feature[:, None]) * rank + row[None, :]
        up = tl.load(up_ptr + at, inside[:, None] & within, 0.0)
        added = tl.load(scale_ptr + adapter) * _product(low.to(up.dtype), tl.trans(up), WIDEN)
        out_at = out_ptr + token[:, None] * out_stride + feature[None, :]
        written = live & inside[None, :]
        out = tl.load(out_at, written, 0.0).to(tl.float32) + added
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), written)


def shrink(x: Tensor, down: Tensor, tiles: LoraTiles) -> Tensor:
    """float32[parts, T, r]: parts of x [T, K] @ down [A, r, K]^T. Rows of tokens without an adapter are not set."""
    (count, features), rank = x.shape, down.shape[1]
    if down.shape[2] != features or not down.is_contiguous() or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and adapters {tuple(down.shape)} do not fit or do not lie as they should")
    parts = triton.cdiv(features, PART)
    low = torch.empty((parts, count, rank), dtype=torch.float32, device=x.device)
    if count and len(tiles.adapters):
        shrink_kernel[(len(tiles.adapters), parts, triton.cdiv(rank, LOW_SPAN))](
            *(x, down, tiles.tokens, tiles.adapters, low, count, features, rank, x.stride(0)),
            **_sizes(min(rank, LOW_SPAN)),
            PART=PART,
            STEP=STEP,
            num_warps=4,
        )
    return low


def expand(low: Tensor, up: Tensor, scale: Tensor, tiles: LoraTiles, out: Tensor) -> None:
    """out [T, N] += scale float32[A] * (sum of the parts of ``low``) @ up [A, N, r]^T.

    ``low`` and ``out`` may be some columns of more: the adapters of q, k and v shrink together and expand apart.
    """
    (parts, count, rank), features = low.shape, out.shape[1]
    if rank > MAX_RANK:
        raise ValueError(f"a rank of {rank}; adapters have at most {MAX_RANK}")
    columns = low.stride(2) == out.stride(1) == 1 and low.stride(0) == max(1, count) * low.stride(1)
    if up.shape[1:] != (features, rank) or not up.is_contiguous() or not columns:
        raise ValueError(
            f"adapters {tuple(up.shape)} and out {tuple(out.shape)} do not fit or do not lie as they should"
        )
    if count and len(tiles.adapters):
        expand_kernel[(len(tiles.adapters), triton.cdiv(features, SPAN))](
            *(low, up, scale, tiles.tokens, tiles.adapters, out, parts, count, features, rank),
            *(low.stride(1), out.stride(0)),
            **_sizes(rank),
            SPAN=SPAN,
            num_warps=4,
        )


def add_lora(x: Tensor, down: Tensor, up: Tensor, scale: Tensor, tiles: LoraTiles, out: Tensor) -> None:
    """As ``reference.lora.add_lora``, with its tokens grouped by ``group_tokens``."""
    expand(shrink(x, down, tiles), up, scale, tiles, out)


def _sizes(rank: int) -> dict[str, int | bool]:
    return {"TOKENS": TOKENS, "RANK": max(16, triton.next_power_of_2(rank)), "WIDEN": INTERPRETED}

"""Queries, keys and values made ready and keys and values put into their pages, in one pass over memory.

The steps between a layer's projection and its attention (per-head norm, rotary embedding, quantising, scattering by slot)
move the same bytes and compute next to nothing: apart they would read and write everything four times.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import AttentionExtras, AttentionShape
from octavo_kernels.triton.attention_config import power_of_two
from octavo_kernels.triton.quant import float_to_e4m3, page_scales, readable_pages, to_int8

# Numbers of a head and token block for a program, of one warp: each lane moves 16 bytes (of two-byte numbers) of each half.
SPAN = 512


@triton.jit
def _load_head(row_ptr, live, HALF: tl.constexpr, D: tl.constexpr):
    """Rows of a head in float32, in three parts: the halves that rotate, [TOKENS, HALF] each, and the rest of D.

    In parts, so that the two numbers of a rotation lie in one lane. Widths are padded to powers of two, with zeros.
    """
    half, rest = _columns(HALF, D)
    inside, left = live & (half < HALF), live & (rest < D - 2 * HALF)
    a = tl.load(row_ptr + half, inside, 0.0).to(tl.float32)
    b = tl.load(row_ptr + HALF + half, inside, 0.0).to(tl.float32)
    c = tl.load(row_ptr + 2 * HALF + rest, left, 0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _columns(HALF: tl.constexpr, D: tl.constexpr):
    """[1, padded width] of a half and of the rest; a width of nothing is padded to 1."""
    half = tl.arange(0, triton.next_power_of_2(HALF) if HALF > 0 else 1)
    rest = tl.arange(0, triton.next_power_of_2(D - 2 * HALF) if D > 2 * HALF else 1)
    return half[None, :], rest[None, :]


@triton.jit
def _normed(parts, weight_ptr, eps, HALF: tl.constexpr, D: tl.constexpr):
    """weight * x / rms(x); without weights, x."""
    a, b, c = parts
    if weight_ptr is not None:
        half, rest = _columns(HALF, D)
        squares = tl.sum(a * a + b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        a *= factor * tl.load(weight_ptr + half, half < HALF, 0.0).to(tl.float32)
        b *= factor * tl.load(weight_ptr + HALF + half, half < HALF, 0.0).to(tl.float32)
        c *= factor * tl.load(weight_ptr + 2 * HALF + rest, rest < D - 2 * HALF, 0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _rotated(parts, cos, sin):
    """The halves turned by their angles."""
    a, b, c = parts
    return a * cos - b * sin, b * cos + a * sin, c


@triton.jit
def _store_head(row_ptr, parts, live, HALF: tl.constexpr, D: tl.constexpr):
    """The parts in the type of memory; bytes hold e4m3."""
    half, rest = _columns(HALF, D)
    inside, left = live & (half < HALF), live & (rest < D - 2 * HALF)
    a, b, c = parts
    if row_ptr.dtype.element_ty == tl.uint8:
        a, b, c = float_to_e4m3(a), float_to_e4m3(b), float_to_e4m3(c)
    tl.store(row_ptr + half, a.to(row_ptr.dtype.element_ty), inside)
    tl.store(row_ptr + HALF + half, b.to(row_ptr.dtype.element_ty), inside)
    tl.store(row_ptr + 2 * HALF + rest, c.to(row_ptr.dtype.element_ty), left)


@triton.jit
def _put_away(
    parts,
    pages_ptr,
    scales_ptr,
    scale_ptr,
    page,  # int64[TOKENS]
    place,  # int32[TOKENS]: row of the page, over all heads
    live,  # [TOKENS, 1]
    page_stride,
    scale_stride,
    kv_head,
    HALF: tl.constexpr,
    D: tl.constexpr,
):
    """Rows of a head into their pages: as they are, in multiples of the head's scale, or of a scale of their own."""
    a, b, c = parts
    if scale_ptr is not None:
        factor = 1.0 / tl.load(scale_ptr + kv_head)
        a, b, c = a * factor, b * factor, c * factor
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.maximum(tl.max(tl.abs(b), 1), tl.max(tl.abs(c), 1)))
        scale = tl.where(largest > 0.0, largest / 127.0, 1.0)
        tl.store((scales_ptr + page * scale_stride + place)[:, None], scale[:, None], live)
        a, b, c = to_int8(a, scale[:, None]), to_int8(b, scale[:, None]), to_int8(c, scale[:, None])
    row_ptr = (pages_ptr + page * page_stride + place * D)[:, None]
    _store_head(row_ptr, (a, b, c), live, HALF, D)


@triton.jit
def _angles(positions_ptr, table_ptr, token, live, num_tokens, table_rows, HALF: tl.constexpr, D: tl.constexpr):
    """(cos, sin) of each token's position, [TOKENS, HALF] each. A position past the table is taken for its last."""
    half, _ = _columns(HALF, D)
    position = tl.load(positions_ptr + token, token < num_tokens, 0)
    position = tl.minimum(tl.maximum(position, 0), table_rows - 1)
    angles_ptr = (table_ptr + position.to(tl.int64) * (2 * HALF))[:, None] + half
    inside = live & (half < HALF)
    return tl.load(angles_ptr, inside, 1.0), tl.load(angles_ptr + HALF, inside, 0.0)


@triton.jit
def _ready(head_ptr, live, norm_ptr, eps, angles, HALF: tl.constexpr, D: tl.constexpr):
    """Rows of a query or key head, normed and rotated as far as its model asks for."""
    parts = _normed(_load_head(head_ptr, live, HALF, D), norm_ptr, eps, HALF, D)
    if angles is not None:
        parts = _rotated(parts, angles[0], angles[1])
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def cache_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hk) D], rows qkv_stride apart; its queries are changed in place
    positions_ptr,  # int32[T]
    table_ptr,  # float32[table_rows, 2 HALF] = [cos | sin], or None: nothing rotates
    q_norm_ptr,  # [D] or None
    k_norm_ptr,  # [D] or None
    slots_ptr,  # int32[T], negative: the token is not written
    k_ptr,  # [blocks, Hk, PAGE, D], pages page_stride apart; uint8 for e4m3
    v_ptr,  # as k_ptr
    k_scales_ptr,  # float32[blocks, Hk, PAGE], pages scale_stride apart, or None: scales of int8 keys
    v_scales_ptr,  # as k_scales_ptr
    k_scale_ptr,  # float32[Hk] or None: scales of e4m3 keys
    v_scale_ptr,  # as k_scale_ptr
    eps,
    num_tokens,  # T
    num_heads,  # Hq
    num_kv_heads,  # Hk
    table_rows,
    qkv_stride,
    page_stride,
    scale_stride,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # half of the numbers of a head that rotate
    TOKENS: tl.constexpr,
):
    """Programs (blocks of TOKENS tokens, any number): program (t, p) takes heads p, p + programs, ... of queries, then keys."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = (token < num_tokens)[:, None]
    rows_ptr = (qkv_ptr + token.to(tl.int64) * qkv_stride)[:, None]
    slot = tl.load(slots_ptr + token, token < num_tokens, -1)
    written = (slot >= 0)[:, None]
    slot = tl.maximum(slot, 0)
    page = (slot // PAGE).to(tl.int64)
    # The same for all heads: read once.
    angles = None
    if table_ptr is not None:
        angles = _angles(positions_ptr, table_ptr, token, live, num_tokens, table_rows, HALF, D)
    for head in range(tl.program_id(1), num_heads + num_kv_heads, tl.num_programs(1)):
        head_ptr = rows_ptr + head * D
        if head < num_heads:
            parts = _ready(head_ptr, live, q_norm_ptr, eps, angles, HALF, D)
            _store_head(head_ptr, parts, live, HALF, D)
        else:
            kv_head = head - num_heads
            place = kv_head * PAGE + slot % PAGE
            parts = _ready(head_ptr, live, k_norm_ptr, eps, angles, HALF, D)
            _put_away(
                parts, k_ptr, k_scales_ptr, k_scale_ptr, page, place, written, page_stride, scale_stride, kv_head, HALF, D
            )  # fmt: skip
            parts = _load_head(head_ptr + num_kv_heads * D, live, HALF, D)
            _put_away(
                parts, v_ptr, v_scales_ptr, v_scale_ptr, page, place, written, page_stride, scale_stride, kv_head, HALF, D
            )  # fmt: skip


def rope_kv(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    shape: AttentionShape,
    extras: AttentionExtras | None = None,
    *,
    programs: int = 2048,
) -> None:
    """As ``Kernels.rope_kv``; pages as ``page_shape`` says. What is left of keys in ``qkv`` is as it was.

    ``programs`` is how many the device can well run at once: with fewer tokens each takes fewer heads, with more it takes
    all of them and loads their angles once.
    """
    tokens, heads = qkv.shape[0], shape.num_heads + shape.num_kv_heads
    if not tokens:
        return
    extras = extras or AttentionExtras()
    k_scales, v_scales = page_scales(k_pages, shape), page_scales(v_pages, shape)
    block_tokens = max(1, SPAN // power_of_two(shape.head_dim))
    blocks = triton.cdiv(tokens, block_tokens)
    cache_kernel[blocks, max(1, min(heads, programs // blocks))](
        qkv,
        positions,
        table,
        q_norm,
        k_norm,
        slots,
        readable_pages(k_pages, native=False),
        readable_pages(v_pages, native=False),
        k_scales,
        v_scales,
        extras.k_scale if k_pages.dtype == torch.float8_e4m3fn else None,
        extras.v_scale if v_pages.dtype == torch.float8_e4m3fn else None,
        eps,
        tokens,
        shape.num_heads,
        shape.num_kv_heads,
        0 if table is None else table.shape[0],
        qkv.stride(0),
        k_pages.stride(0),
        0 if k_scales is None else k_scales.stride(0),
        PAGE=shape.block_size,
        D=shape.head_dim,
        HALF=0 if table is None else table.shape[1] // 2,
        TOKENS=block_tokens,
        num_warps=1,
    )

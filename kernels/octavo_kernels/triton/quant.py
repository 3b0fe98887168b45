"""Numbers in fewer bits: reading and writing what quantised pages hold.

fp8 pages hold OCP e4m3 ("fn": no infinities, largest value 448; Micikevicius et al., arXiv 2209.05433) with one scale
per head, int8 pages whole numbers with one scale per token and head. Where the hardware knows e4m3 the pages are read as
such; elsewhere (Ampere, CDNA3, the interpreter) the same bytes come as uint8 and are taken apart here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import AttentionShape


@triton.jit
def e4m3_to_float(bits):
    """uint8 -> float32: exponent and mantissa move to float32's place, a product mends the bias (subnormals too).

    NaN (0x7f) comes out as 480: pages never hold it, since ``float_to_e4m3`` saturates.
    """
    wide = bits.to(tl.uint32)
    shifted = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** (127 - 7)


@triton.jit
def float_to_e4m3(x):
    """float32 -> uint8, to nearest even, saturating; NaN becomes the largest value.

    Below 2**-6 e4m3's steps are all 2**-9: adding and taking away 2**14 rounds a float32 to them. Above, the mantissa is
    rounded in place, and a carry runs into the exponent as it should.
    """
    magnitude = tl.where(tl.abs(x) < 448.0, tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    tiny = ((magnitude + 16384.0) - 16384.0) * 512.0
    code = tl.where(magnitude < 0.015625, tiny.to(tl.uint32), normal)
    return (code | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)).to(tl.uint8)


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """What pages hold -> ``DTYPE``, without scales."""
    if x.dtype == tl.uint8:
        wide = e4m3_to_float(x).to(DTYPE)
    else:
        wide = x.to(DTYPE)
    return wide


@triton.jit
def to_int8(x, scale):
    """float32 in whole multiples of ``scale``, which is at least the largest magnitude / 127; halves away from zero."""
    scaled = x / scale
    whole = tl.where(scaled < 0.0, scaled - 0.5, scaled + 0.5)
    return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)


def page_shape(shape: AttentionShape, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a page's keys (and of its values) in ``dtype``: [Hk, B, D], of int8 that and float32[Hk, B] in one row."""
    heads, block, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
    return (heads * block * (dim + 4),) if dtype == torch.int8 else (heads, block, dim)


def page_scales(pages: Tensor, shape: AttentionShape) -> Tensor | None:
    """The scales float32[blocks, Hk B] within int8 pages (a view); None of any other pages."""
    if pages.dtype != torch.int8:
        return None
    numbers = shape.num_kv_heads * shape.block_size * shape.head_dim
    return pages.view(torch.float32)[:, numbers // 4 :]


def readable_pages(pages: Tensor, native: bool) -> Tensor:
    """Pages as kernels take them: e4m3 as bytes unless it is ``native``."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn and not native else pages

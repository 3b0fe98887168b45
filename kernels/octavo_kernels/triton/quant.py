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


# Four bytes of one register to two registers of two float16 each. Written out, since the compiler takes bytes one by one, at
# three times the instructions. All three are exact.
_E4M3_BY_HARDWARE = tl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
# Bytes go to the upper halves; exponent and mantissa move one place down, which leaves 1/256 of the value.
_E4M3_BY_BITS = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d, k;
    mov.b32 k, 0x5c005c00;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 1;
    shr.u32 d, b, 1;
    and.b32 c, c, 0x3fff3fff;
    and.b32 d, d, 0x3fff3fff;
    lop3.b32 c, a, 0x80008000, c, 0xea;
    lop3.b32 d, b, 0x80008000, d, 0xea;
    mul.rn.f16x2 $0, c, k;
    mul.rn.f16x2 $1, d, k;
    }
    """
)
# With its sign bit turned a byte counts from -128; behind 0x64 it is 1024 more than that.
_INT8 = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, k, m;
    mov.b32 k, 0x64646464;
    mov.b32 m, 0x64806480;
    xor.b32 a, $2, 0x80808080;
    prmt.b32 b, a, k, 0x4140;
    prmt.b32 c, a, k, 0x4342;
    sub.rn.f16x2 $0, b, m;
    sub.rn.f16x2 $1, c, m;
    }
    """
)


@triton.jit
def widen(x, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """What pages hold -> ``DTYPE``, without scales. With PACKED (NVIDIA's only), bytes become float16 four at a time.

    "fenced": those blocks are marked as having side effects, which they have not. Otherwise the compiler turns bytes into the
    operands of matrix products first and widens them there, byte by byte, instead of moving wide numbers by ldmatrix. "pure":
    they are not, where operands lie in shared memory anyway and the compiler must be free to skip the blocks (tcgen05).
    """
    if PACKED is not None and x.dtype == tl.float8e4nv:
        wide = tl.inline_asm_elementwise(_E4M3_BY_HARDWARE, "=r,=r,r", [x], tl.float16, PACKED == "pure", 4)
    elif PACKED is not None and x.dtype == tl.uint8:
        wide = tl.inline_asm_elementwise(_E4M3_BY_BITS, "=r,=r,r", [x], tl.float16, PACKED == "pure", 4)
    elif PACKED is not None and x.dtype == tl.int8:
        wide = tl.inline_asm_elementwise(_INT8, "=r,=r,r", [x], tl.float16, PACKED == "pure", 4)
    elif x.dtype == tl.uint8:
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

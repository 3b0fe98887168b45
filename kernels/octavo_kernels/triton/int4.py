"""Products by weights of 4 bits (AWQ, GPTQ): whole numbers widened on their way to the matrix units.

Two codes lie in a byte, those at the same place of the two halves of a *span* of inputs: the low halves of a row of bytes
are then consecutive inputs, and so are the high halves. Nothing is ever interleaved. A span lies within one group, whose
scale multiplies sums in float32; what the matrix units multiply by are the exact differences of code and zero.

Many rows at once would be bound by arithmetic: for these the weight is widened to memory first and the product is torch's.
Letters as in ``octavo_kernels.interface``, G groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import Int4Rows, LinearWeight
from octavo_kernels.triton.attention_config import Gpu

INTERPRETED: bool = triton.knobs.runtime.interpret
SIZES = (128, 64, 32)
# Beyond so many rows the matrix had better be widened first.
MAX_FUSED_ROWS = 256
# Outputs of a program, and the least inputs of a part of a split sum.
OUTPUTS, LEAST_PART = 128, 512

# A register of four bytes to two of low and two of high codes, less their zero: behind 0x64 a code counts from 1024 in
# float16, behind 0x43 from 128 in bfloat16, and the bias takes that and the zero away. All exact. Written out, since the
# compiler takes bytes one by one.
_WIDEN = """
    {{
    .reg .b32 a, b, c, d, mask, base, one;
    mov.b32 mask, 0x000f000f;
    mov.b32 base, {base};
    mov.b32 one, {one};
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 a, a, mask, base, 0xea;
    lop3.b32 b, b, mask, base, 0xea;
    lop3.b32 c, c, mask, base, 0xea;
    lop3.b32 d, d, mask, base, 0xea;
    fma.rn.{type} $0, a, one, $5;
    fma.rn.{type} $1, b, one, $6;
    fma.rn.{type} $2, c, one, $5;
    fma.rn.{type} $3, d, one, $6;
    }}
"""
_TO_FLOAT16 = tl.constexpr(_WIDEN.format(base="0x64006400", one="0x3c003c00", type="f16x2"))
_TO_BFLOAT16 = tl.constexpr(_WIDEN.format(base="0x43004300", one="0x3f803f80", type="bf16x2"))


@triton.jit
def _codes(packed, zero, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """uint8[n, m] and their zeros uint8[n] -> (low, high), codes less zeros, in ``DTYPE`` [n, m]."""
    if PACKED and tl.float16 == DTYPE:
        bias = tl.broadcast_to((-1024.0 - zero.to(tl.float32)).to(tl.float16)[:, None], packed.shape)
        low, high = tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,=r,=r,=r,r,r,r", [packed, bias], (tl.float16, tl.float16), is_pure=False, pack=4
        )
    elif PACKED and tl.bfloat16 == DTYPE:
        bias = tl.broadcast_to((-128.0 - zero.to(tl.float32)).to(tl.bfloat16)[:, None], packed.shape)
        low, high = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,=r,=r,r,r,r", [packed, bias], (tl.bfloat16, tl.bfloat16), is_pure=False, pack=4
        )
    else:
        wide = packed.to(tl.int32)
        offset = zero.to(tl.int32)[:, None]
        low, high = ((wide & 15) - offset).to(DTYPE), ((wide >> 4) - offset).to(DTYPE)
    return low, high


@triton.jit(do_not_specialize=["rows"])
def int4_linear_kernel(
    x_ptr,  # [T, K], rows x_stride apart
    packed_ptr,  # uint8[N, K / 2], contiguous
    scale_ptr,  # [G, N], contiguous
    zero_ptr,  # uint8[G, N], contiguous
    sums_ptr,  # float32[parts, T, N], contiguous
    rows,  # T
    outputs,  # N
    row_bytes,  # K / 2, given so: its divisibility says how wide loads may be
    part_spans,  # of a program
    x_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,  # of a group
    DTYPE: tl.constexpr,  # what is multiplied: that of x, or float32 in the interpreter, which has no bfloat16
    PACKED: tl.constexpr,
):
    """Programs (outputs, rows, part of K). Outputs go down the tile and rows across: of the two operands the widened one
    is then the one that matrix units can take from registers."""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    known, live = output < outputs, row < rows
    place = tl.arange(0, SPAN // 2)
    first = part * part_spans
    last = tl.minimum(first + part_spans, row_bytes // (SPAN // 2))
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    packed_at = packed_ptr + output[:, None] * row_bytes + place[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for span in range(first, last):
        packed = tl.load(packed_at + span * (SPAN // 2), known[:, None], 0)
        at = span // SPANS * outputs + output
        low, high = _codes(packed, tl.load(zero_ptr + at, known, 0), DTYPE, PACKED)
        x_low = tl.load(x_at + span * SPAN, live[:, None], 0.0).to(DTYPE)
        x_high = tl.load(x_at + span * SPAN + SPAN // 2, live[:, None], 0.0).to(DTYPE)
        products = tl.dot(low, tl.trans(x_low), input_precision="ieee")
        products = tl.dot(high, tl.trans(x_high), products, input_precision="ieee")
        total += products * tl.load(scale_ptr + at, known, 0.0).to(tl.float32)[:, None]
    at = (part.to(tl.int64) * rows + row[None, :]) * outputs + output[:, None]
    tl.store(sums_ptr + at, total, known[:, None] & live[None, :])


@triton.jit(do_not_specialize=["rows"])
def int4_sum_kernel(
    sums_ptr,  # float32[parts, T, N], contiguous
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N], rows out_stride apart
    parts,
    rows,  # T
    outputs,  # N
    out_stride,
    BLOCK: tl.constexpr,
):
    """Programs (row, span of outputs): the parts in their order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = output < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(sums_ptr + (part * rows + row) * outputs + output, known, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, known, 0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + output, total.to(out_ptr.dtype.element_ty), known)


@triton.jit
def int4_widen_kernel(
    packed_ptr,  # uint8[N, K / 2], contiguous
    scale_ptr,  # [G, N], contiguous
    zero_ptr,  # uint8[G, N], contiguous
    out_ptr,  # [N, K], contiguous
    outputs,  # N
    row_bytes,  # K / 2
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,  # of a group
):
    """Programs (outputs, span): the whole matrix, rounded once."""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    span = tl.program_id(1)
    known = output < outputs
    place = tl.arange(0, SPAN // 2)
    packed = tl.load(packed_ptr + output[:, None] * row_bytes + span * (SPAN // 2) + place[None, :], known[:, None], 0)
    at = span // SPANS * outputs + output
    low, high = _codes(packed, tl.load(zero_ptr + at, known, 0), tl.float32, False)
    scale = tl.load(scale_ptr + at, known, 0.0).to(tl.float32)[:, None]
    out_at = out_ptr + output[:, None] * (2 * row_bytes) + span * SPAN + place[None, :]
    tl.store(out_at, (low * scale).to(out_ptr.dtype.element_ty), known[:, None])
    tl.store(out_at + SPAN // 2, (high * scale).to(out_ptr.dtype.element_ty), known[:, None])


@dataclass(frozen=True, slots=True)
class Int4Launch:
    """``rows`` of x per program, K cut into ``parts`` of ``part_spans`` spans."""

    rows: int
    span: int
    group_spans: int
    parts: int
    part_spans: int


def span_of(group: int) -> int:
    """Inputs of a span for groups of that many inputs; 0: there is none."""
    return next((span for span in SIZES if group % span == 0), 0)


def plan_launch(rows: int, outputs: int, width: int, group: int, gpu: Gpu) -> Int4Launch:
    """How a product is launched. The cut of K depends on the matrix and the device alone, never on the rows."""
    span = span_of(group)
    wanted = max(1, 2 * gpu.multiprocessors // triton.cdiv(outputs, OUTPUTS))
    part_spans = max(triton.cdiv(width // span, wanted), triton.cdiv(min(LEAST_PART, width), span))
    return Int4Launch(16 if rows <= 16 else 64, span, group // span, triton.cdiv(width // span, part_spans), part_spans)


def pack(rows: Int4Rows, span: int) -> Tensor:
    """uint8[n, K / 2] of codes uint8[n, K]."""
    count, width = rows.codes.shape
    halves = rows.codes.view(count, width // span, 2, span // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).view(count, width // 2)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor, gpu: Gpu) -> None:
    """out [T, N] = x [T, K] @ weight^T (+ bias [N]); rows of x and out are contiguous."""
    assert weight.scale is not None
    assert weight.zero is not None
    (rows, width), outputs = x.shape, weight.out_features
    if not rows:
        return
    launch = plan_launch(rows, outputs, width, width // len(weight.scale), gpu)
    sums = torch.empty((launch.parts, rows, outputs), dtype=torch.float32, device=x.device)
    int4_linear_kernel[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, launch.rows), launch.parts)](
        *(x, weight.data, weight.scale, weight.zero, sums),
        *(rows, outputs, width // 2, launch.part_spans, x.stride(0)),
        ROWS=launch.rows,
        OUTPUTS=OUTPUTS,
        SPAN=launch.span,
        SPANS=launch.group_spans,
        DTYPE=tl.float32 if INTERPRETED else _TYPES[x.dtype],
        PACKED=gpu.nvidia and not INTERPRETED,
        num_warps=4 if launch.rows == 16 else 8,
        num_stages=4,
    )
    block = 512
    int4_sum_kernel[(rows, triton.cdiv(outputs, block))](
        sums, bias, out, launch.parts, rows, outputs, out.stride(0), BLOCK=block, num_warps=4
    )


def widen(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The whole matrix [N, K] in ``dtype``."""
    assert weight.scale is not None
    outputs, width = weight.out_features, weight.in_features
    group = width // len(weight.scale)
    wide = torch.empty((outputs, width), dtype=dtype, device=weight.data.device)
    span, block = span_of(group), 64
    int4_widen_kernel[(triton.cdiv(outputs, block), width // span)](
        *(weight.data, weight.scale, weight.zero, wide, outputs, width // 2),
        OUTPUTS=block,
        SPAN=span,
        SPANS=group // span,
        num_warps=4,
    )
    return wide


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

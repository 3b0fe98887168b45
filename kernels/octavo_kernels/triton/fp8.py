"""Products in e4m3: every row of a weight and every token has its own scale; the product is torch's."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import Fp8Rows
from octavo_kernels.quantized import E4M3, TINY
from octavo_kernels.triton.quant import float_to_e4m3

# What the libraries' products in e4m3 take: rows of 16 bytes, outputs in sixteens.
MULTIPLE = 16
MAX_BLOCK = 8192


@triton.jit
def to_fp8_kernel(
    x_ptr,  # [T, K], rows x_stride apart
    values_ptr,  # uint8[T, K], contiguous, bits of e4m3
    scale_ptr,  # float32[T]
    width,  # K
    x_stride,
    tiny,  # the least scale
    BLOCK: tl.constexpr,  # a power of two
):
    """One program per row: its largest magnitude becomes 448. NaN makes the scale NaN, and with it the whole row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + row * x_stride + start + column, start + column < width, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        broken = tl.where(x != x, 1, broken)
    scale = tl.maximum(tl.max(largest, 0) / 448.0, tiny)
    scale = tl.where(tl.max(broken, 0) > 0, float("nan"), scale)
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(x_ptr + row * x_stride + start + column, inside, 0.0).to(tl.float32)
        tl.store(values_ptr + row * width + start + column, float_to_e4m3(x / scale), inside)


def to_fp8(x: Tensor) -> Fp8Rows:
    """As ``quantized.to_fp8``, of x [T, K] with contiguous rows."""
    rows, width = x.shape
    values = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(MAX_BLOCK, max(16, triton.next_power_of_2(width)))
    if rows:
        to_fp8_kernel[(rows,)](
            x, values, scale, width, x.stride(0), TINY, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return Fp8Rows(values.view(E4M3), scale)


def linear(x: Tensor, weight: Fp8Rows, bias: Tensor | None, out: Tensor) -> None:
    """out [T, N] = x [T, K] @ weight [N, K]^T (+ bias [N]), on devices that multiply in e4m3."""
    rounded = to_fp8(x)
    # With a scale per row the libraries' only type of result is bfloat16.
    narrow = torch.bfloat16
    target = out if out.dtype == narrow and bias is None else torch.empty(out.shape, dtype=narrow, device=out.device)
    torch._scaled_mm(
        rounded.values,
        weight.values.t(),
        scale_a=rounded.scale[:, None],
        scale_b=weight.scale[None, :],
        out_dtype=narrow,
        out=target,
    )
    if bias is not None:
        torch.add(target, bias, out=out)
    elif target is not out:
        out.copy_(target)

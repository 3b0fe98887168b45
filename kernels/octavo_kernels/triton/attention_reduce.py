"""The sum of a split key range's parts."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.attention_kernel import REDUCTION
from octavo_kernels.triton.attention_tile import LOWEST


@triton.jit
def attention_reduce_kernel(
    reductions_ptr,  # int32[T, REDUCTION]
    count_ptr,  # int32[1]: how many there are
    partial_ptr,  # float32[P, Hq, D]
    sums_ptr,  # float32[P, Hq, 2]
    out_ptr,  # [T, Hq D], rows out_stride apart
    out_stride,
    num_heads,  # Hq
    D: tl.constexpr,
    PARTS: tl.constexpr,  # parts added up in one go
):
    """Programs (Hq, any number): program (h, p) takes rows p, p + programs, ... for head h.

    Parts are added in their order, PARTS at a time, so that one result does not depend on how many programs there are.
    """
    head = tl.program_id(0)
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    column = tl.arange(0, D_PAD)
    for i in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        at = reductions_ptr + i * REDUCTION
        row, partial = tl.load(at), tl.load(at + 1)
        stride, parts = tl.load(at + 2), tl.load(at + 3)
        largest = LOWEST
        total = 0.0
        values = tl.zeros([D_PAD], tl.float32)
        for begin in tl.range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            inside = part < parts
            rows = (partial + part * stride).to(tl.int64) * num_heads + head
            own_largest = tl.load(sums_ptr + rows * 2, inside, LOWEST)
            own_total = tl.load(sums_ptr + rows * 2 + 1, inside, 0.0)
            own = tl.load(
                partial_ptr + rows[:, None] * D + column[None, :], inside[:, None] & (column < D)[None, :], 0.0
            )
            new = tl.maximum(largest, tl.max(own_largest, 0))
            weight = tl.exp2(own_largest - new)
            shrink = tl.exp2(largest - new)
            total = total * shrink + tl.sum(weight * own_total, 0)
            values = values * shrink + tl.sum(weight[:, None] * own, 0)
            largest = new
        values /= tl.where(total > 0.0, total, 1.0)
        at = out_ptr + row.to(tl.int64) * out_stride + head * D + column
        tl.store(at, values.to(out_ptr.dtype.element_ty), column < D)

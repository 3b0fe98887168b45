"""Weight matrices on a GPU: plain, in e4m3 with a scale per row, or in 4 bits with scales and zeros per group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.interface import Fp8Rows, Int4Rows, LinearWeight, WeightRows
from octavo_kernels.quantized import widen
from octavo_kernels.triton import fp8, int4
from octavo_kernels.triton.attention_config import Gpu


def can_hold(rows: Fp8Rows | Int4Rows) -> bool:
    """See ``Kernels.can_hold``."""
    if isinstance(rows, Fp8Rows):
        return rows.values.shape[0] % fp8.MULTIPLE == 0 and rows.values.shape[1] % fp8.MULTIPLE == 0
    return int4.span_of(rows.codes.shape[1] // rows.scale.shape[1]) > 0


def new_weight(rows: WeightRows, out_features: int, dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """See ``Kernels.new_weight``. Scales and zeros of 4 bits lie [G, N], as tiles of outputs read them."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if isinstance(rows, Fp8Rows):
        width = rows.values.shape[1]
        values = empty(out_features, width, dtype=rows.values.dtype)
        return LinearWeight(values, out_features, width, empty(out_features, dtype=torch.float32))
    if isinstance(rows, Int4Rows):
        width, groups = rows.codes.shape[1], rows.scale.shape[1]
        return LinearWeight(
            empty(out_features, width // 2, dtype=torch.uint8),
            out_features,
            width,
            empty(groups, out_features, dtype=rows.scale.dtype),
            empty(groups, out_features, dtype=torch.uint8),
        )
    return LinearWeight(empty(out_features, rows.shape[1], dtype=dtype), out_features, rows.shape[1])


def set_rows(weight: LinearWeight, first: int, rows: WeightRows) -> None:
    """See ``Kernels.set_rows``. Plain rows go straight from where they are to their place."""
    if isinstance(rows, Fp8Rows):
        assert weight.scale is not None
        last = first + len(rows.scale)
        weight.data[first:last].copy_(rows.values)
        weight.scale[first:last].copy_(rows.scale)
    elif isinstance(rows, Int4Rows):
        assert weight.scale is not None
        assert weight.zero is not None
        last = first + len(rows.scale)
        span = int4.span_of(rows.codes.shape[1] // rows.scale.shape[1])
        weight.data[first:last].copy_(int4.pack(rows, span))
        weight.scale[:, first:last].copy_(rows.scale.t())
        weight.zero[:, first:last].copy_(rows.zero.t())
    else:
        weight.data[first : first + len(rows)].copy_(rows)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor, gpu: Gpu) -> None:
    """See ``Kernels.linear``.

    In 4 bits many rows, and in e4m3 GPUs that do not know it (before sm_89), widen the weight for the product: that keeps
    the memory small.
    """
    matrix = weight.data
    if weight.zero is not None:
        if len(x) <= int4.MAX_FUSED_ROWS:
            int4.linear(x, weight, bias, out, gpu)
            return
        matrix = int4.widen(weight, x.dtype)
    elif weight.scale is not None:
        rows = Fp8Rows(matrix, weight.scale)
        if gpu.knows_e4m3:
            fp8.linear(x, rows, bias, out)
            return
        matrix = widen(rows, x.dtype)
    if x.dtype == out.dtype == matrix.dtype and (bias is None or bias.dtype == matrix.dtype):
        if bias is None:
            torch.mm(x, matrix.t(), out=out)
        else:
            torch.addmm(bias, x, matrix.t(), out=out)
    else:
        out.copy_(F.linear(x.to(matrix.dtype), matrix, None if bias is None else bias.to(matrix.dtype)))

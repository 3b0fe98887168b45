"""Weights in fewer bits, in plain torch: what the numbers mean, and how they are made. The reference of every backend.

fp8 is OCP e4m3 (Micikevicius et al., arXiv 2209.05433): 3 bits of mantissa, at most 448. Here every row of a weight, and
every token's activations, has its own scale, so a row's result depends on no other row. int4 is what AWQ (Lin et al.,
arXiv 2306.00978) and GPTQ (Frantar et al., arXiv 2210.17323) make: whole numbers from 0 to 15 that a group of inputs
turns into multiples of its scale, counted from its zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.interface import Fp8Rows, Int4Rows, WeightRows

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The scale of a row of zeros.
TINY = 1e-12


def to_fp8(x: Tensor) -> Fp8Rows:
    """Rows [n, K] in e4m3, the largest magnitude of each becoming 448. A row that is not finite stays so."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / E4M3_MAX).clamp(min=TINY)
    return Fp8Rows((wide / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale)


def widen(rows: WeightRows, dtype: torch.dtype) -> Tensor:
    """The numbers [n, K] that ``rows`` stand for, rounded once to ``dtype``."""
    if isinstance(rows, Fp8Rows):
        return (rows.values.float() * rows.scale[:, None]).to(dtype)
    if isinstance(rows, Int4Rows):
        count, inputs = rows.codes.shape
        groups = rows.codes.view(count, rows.scale.shape[1], -1)
        centred = groups.to(torch.int16) - rows.zero[:, :, None].to(torch.int16)
        return (centred.float() * rows.scale[:, :, None].float()).view(count, inputs).to(dtype)
    return rows.to(dtype)


def fp8_product(x: Fp8Rows, weight: Fp8Rows) -> Tensor:
    """float32[T, N] = x [T, K] @ weight [N, K]^T: products of two e4m3 are exact in float32."""
    product = x.values.float() @ weight.values.float().t()
    return product * x.scale[:, None] * weight.scale

"""Products by weights in 4 bits, and activations rounded to e4m3 for products in 8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from octavo_kernels.interface import LinearWeight
from octavo_kernels.triton import fp8, int4
from octavo_kernels.triton.aot.case import Case, Trait
from octavo_kernels.triton.aot.estimate import Work
from octavo_kernels.triton.attention_config import Gpu

META = torch.device("meta")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16"}
OUTPUTS, INPUTS = 4096, 4096


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _weight(group: int) -> LinearWeight:
    packed = _empty(OUTPUTS, INPUTS // 2, dtype=torch.uint8)
    scale, zero = (_empty(INPUTS // group, OUTPUTS, dtype=dtype) for dtype in (F16, torch.uint8))
    return LinearWeight(packed, OUTPUTS, INPUTS, scale, zero)


def _product(gpu: Gpu, rows: int, group: int, dtype: torch.dtype) -> None:
    x, out = _empty(rows, INPUTS, dtype=dtype), _empty(rows, OUTPUTS, dtype=dtype)
    int4.linear(x, _weight(group), None, out, gpu)


def _widen(gpu: Gpu, dtype: torch.dtype) -> None:
    int4.widen(_weight(128), dtype)


def _round(gpu: Gpu, dtype: torch.dtype, rows: int) -> None:
    fp8.to_fp8(_empty(rows, INPUTS, dtype=dtype))


def weight_cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in (BF16, F16):
        name = NAMES[dtype]
        for rows, group in ((16, 128), (64, 128), (16, 32)):
            # With groups of 32 a tile of activations is too small for 16 bytes a thread.
            wide: tuple[Trait, ...] = ("wide async loads",) if group == 128 else ()
            work = Work(OUTPUTS * (INPUTS / 2 + INPUTS / group * 3) + rows * INPUTS * 2, 2.0 * rows * OUTPUTS * INPUTS)
            yield Case(
                "4-bit product",
                f"{name}, {rows} x {OUTPUTS} x {INPUTS}, groups of {group}",
                "int4_linear_kernel",
                partial(_product, rows=rows, group=group, dtype=dtype),
                work,
                frozenset({"no spills", "matrix units", *wide}),
                chosen=dtype == BF16 and rows == 16 and group == 128,
            )
        moved = OUTPUTS * INPUTS * 2.5
        yield Case(
            "4-bit, widened",
            f"{name}, {OUTPUTS} x {INPUTS}",
            "int4_widen_kernel",
            partial(_widen, dtype=dtype),
            Work(moved),
        )
    yield Case(
        "4-bit, sum of parts",
        f"bf16, 16 x {OUTPUTS}",
        "int4_sum_kernel",
        partial(_product, rows=16, group=128, dtype=BF16),
        Work(16 * OUTPUTS * 10.0),
    )
    for dtype in (BF16, F16, F32):
        work = Work(2048.0 * INPUTS * (dtype.itemsize + 1))
        launch = partial(_round, dtype=dtype, rows=2048)
        yield Case("rounding to e4m3", f"{NAMES[dtype]}, 2048 x {INPUTS}", "to_fp8_kernel", launch, work)

"""What happens between a plan and the first layer, ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo_kernels.interface import StepRows
from octavo_kernels.triton import batch
from octavo_kernels.triton.aot.case import Case
from octavo_kernels.triton.aot.estimate import Work
from octavo_kernels.triton.attention_config import Gpu

ROWS, LENGTH, BLOCK = 256, 4096, 16


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _prepare(gpu: Gpu) -> None:
    pages = LENGTH // BLOCK
    rows = StepRows(
        _ints(1), _ints(ROWS), _ints(ROWS), _ints(ROWS + 1), _ints(2 * ROWS, LENGTH), _ints(2 * ROWS, pages)
    )
    batch.prepare_inputs(rows, BLOCK, _ints(ROWS), _ints(ROWS), _ints(ROWS), _ints(ROWS, pages))


def _write(gpu: Gpu) -> None:
    batch.write_rows(_ints(ROWS, LENGTH), _ints(ROWS, 4), _ints(ROWS), 1)


def _put(gpu: Gpu) -> None:
    batch.put_tokens(_ints(ROWS, LENGTH), _ints(ROWS), _ints(ROWS), _ints(ROWS))


def batch_cases() -> Iterator[Case]:
    """All of this file."""
    tables = 2.0 * ROWS * LENGTH // BLOCK * 4
    variant = f"{ROWS} decodes of {LENGTH} tokens"
    yield Case("step inputs", variant, "prepare_inputs_kernel", _prepare, Work(tables), chosen=True)
    yield Case("step inputs, differences", f"{ROWS} pages", "write_rows_kernel", _write, Work(ROWS * 24.0))
    yield Case("step inputs, drawn tokens", f"{ROWS}", "put_tokens_kernel", _put, Work(ROWS * 16.0))

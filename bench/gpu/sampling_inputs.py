"""Rows for samplers to draw from; tests use them too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo_kernels import SampleRows

FILTERS = [  # temperature, top-k, top-p, min-p
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, 40, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.99, 0.0),
    (0.5, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 10**6, 0.7, 0.02),
    (0.01, 0, 0.9999999, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 20, 0.8, 0.05),
    (1.0, 1000, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
]


def filter_columns(times: int = 1) -> dict[str, list[float]]:
    """All of them as columns of rows, so many times over."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: list(column) * times for name, column in zip(names, zip(*FILTERS, strict=True), strict=True)}


def sample_rows(count: int, history: list[list[int]] | None = None, **columns: object) -> SampleRows:
    """Neutral, greedy rows; override any column by name (lists become tensors, scalars fill)."""
    history = history or [[] for _ in range(count)]
    width = max(1, *(len(h) for h in history)) if history else 1
    tokens = torch.full((count, width), 2**30, dtype=torch.int32)
    for r, row in enumerate(history):
        tokens[r, : len(row)] = torch.tensor(row, dtype=torch.int32)

    def ints(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32)

    def floats(value: float) -> Tensor:
        return torch.full((count,), value)

    rows = SampleRows(
        temperature=floats(0.0),
        top_k=ints(0),
        top_p=floats(1.0),
        min_p=floats(0.0),
        presence=floats(0.0),
        frequency=floats(0.0),
        repetition=floats(1.0),
        seed=torch.zeros(count, dtype=torch.int64),
        position=torch.arange(count, dtype=torch.int32),
        tokens=tokens,
        token_row=torch.arange(count, dtype=torch.int32),
        token_count=torch.tensor([len(h) for h in history], dtype=torch.int32),
        output_start=ints(0),
        bias_start=torch.zeros(count + 1, dtype=torch.int32),
        bias_ids=torch.zeros(0, dtype=torch.int32),
        bias_values=torch.zeros(0),
        banned_start=torch.zeros(count + 1, dtype=torch.int32),
        banned_ids=torch.zeros(0, dtype=torch.int32),
    )
    changes: dict[str, Tensor] = {}
    for name, value in columns.items():
        like: Tensor = getattr(rows, name)
        given = torch.as_tensor(value, dtype=like.dtype)
        changes[name] = given.expand(like.shape).contiguous() if given.dim() == 0 else given
    return replace(rows, **changes)

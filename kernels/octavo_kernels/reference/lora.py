"""Low-rank adapters in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_lora(
    x: Tensor,  # [T, K]
    down: Tensor,  # [adapters, rank, K]
    up: Tensor,  # [adapters, N, rank]
    scale: Tensor,  # float32[adapters]
    adapter: Tensor,  # int32[T], negative: none
    out: Tensor,  # [T, N], changed in place
) -> None:
    """out += scale * (x @ down^T) @ up^T for every token by its own adapter; Hu et al., arXiv 2106.09685.

    An adapter of a lower rank than the others has zeros in the places it lacks.
    """
    for token, a in enumerate(adapter.tolist()):
        if a >= 0:
            low = x[token].float() @ down[a].float().T
            out[token] += (scale[a] * (low @ up[a].float().T)).to(out.dtype)


def grouped(adapter: Tensor, size: int) -> tuple[list[list[int]], list[int]]:
    """Tokens int32[T] by adapter, in groups of up to ``size``: token rows of each group, adapter of each group."""
    groups: list[list[int]] = []
    owners: list[int] = []
    for a in sorted({a for a in adapter.tolist() if a >= 0}):
        tokens = torch.nonzero(adapter == a).flatten().tolist()
        for start in range(0, len(tokens), size):
            groups.append(tokens[start : start + size])
            owners.append(a)
    return groups, owners

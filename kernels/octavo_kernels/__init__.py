"""Octavo's kernels: one narrow interface (``interface.Kernels``), one folder per backend, a torch reference of each."""

from octavo_kernels.interface import (
    AttentionBatch,
    AttentionShape,
    Candidates,
    Kernels,
    LinearWeight,
    Logprobs,
    Program,
    SampleRows,
    SampleStatus,
)
from octavo_kernels.select import UnsupportedShapeError, choose_kernels

__all__ = [
    "AttentionBatch",
    "AttentionShape",
    "Candidates",
    "Kernels",
    "LinearWeight",
    "Logprobs",
    "Program",
    "SampleRows",
    "SampleStatus",
    "UnsupportedShapeError",
    "choose_kernels",
]

"""Octavo's kernels: one narrow interface (``interface.Kernels``), one folder per backend, a torch reference of each."""

from octavo_kernels.interface import (
    AttentionBatch,
    AttentionExtras,
    AttentionShape,
    Candidates,
    Fp8Rows,
    Int4Rows,
    Kernels,
    LinearWeight,
    Logprobs,
    PageShapes,
    Program,
    SampleRows,
    SampleStatus,
    StepBounds,
    StepRows,
    WeightRows,
)
from octavo_kernels.select import UnsupportedShapeError, choose_kernels

__all__ = [
    "AttentionBatch",
    "AttentionExtras",
    "AttentionShape",
    "Candidates",
    "Fp8Rows",
    "Int4Rows",
    "Kernels",
    "LinearWeight",
    "Logprobs",
    "PageShapes",
    "Program",
    "SampleRows",
    "SampleStatus",
    "StepBounds",
    "StepRows",
    "UnsupportedShapeError",
    "WeightRows",
    "choose_kernels",
]

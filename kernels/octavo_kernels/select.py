"""Which backend computes: by name, or the fastest one that can."""

from __future__ import annotations

import logging

from octavo_kernels.cpu.build import BuildError
from octavo_kernels.interface import Kernels
from octavo_kernels.reference.backend import ReferenceKernels

log = logging.getLogger(__name__)


class UnsupportedShapeError(ValueError):
    """The named backend cannot compute a model of this shape."""


def choose_kernels(name: str = "auto", *, head_dim: int, block_size: int, threads: int | None = None) -> Kernels:
    """The backend called ``name`` ("auto", "cpu", "reference") for CPU tensors.

    "auto" takes the compiled kernels, and with a warning the reference where they cannot be built or used.

    Raises:
        UnsupportedShapeError: the shape does not suit the backend asked for by name.
        BuildError: "cpu" was asked for by name and cannot be compiled.
        ValueError: there is no such backend.
    """
    if name == "reference":
        return ReferenceKernels()
    if name not in ("auto", "cpu"):
        raise ValueError(f"no kernel backend {name!r}; there are auto, cpu, reference")
    if head_dim % 8 or block_size % 8:
        message = f"compiled CPU kernels need head and block sizes in multiples of 8, not {head_dim} and {block_size}"
        if name == "cpu":
            raise UnsupportedShapeError(message)
        log.warning("%s: using the slow reference kernels", message)
        return ReferenceKernels()
    from octavo_kernels.cpu.backend import CpuKernels

    try:
        return CpuKernels(threads)
    except BuildError as error:
        if name == "cpu":
            raise
        log.warning("compiled CPU kernels are not available (%s): using the slow reference kernels", error)
        return ReferenceKernels()

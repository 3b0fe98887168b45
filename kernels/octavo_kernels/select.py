"""Which backend computes: by name, or the fastest one that can."""

from __future__ import annotations

import logging

import torch

from octavo_kernels.cpu.build import BuildError
from octavo_kernels.interface import Kernels
from octavo_kernels.reference.backend import ReferenceKernels

log = logging.getLogger(__name__)


class UnsupportedShapeError(ValueError):
    """The named backend cannot compute a model of this shape."""


def choose_kernels(
    name: str = "auto",
    *,
    head_dim: int,
    block_size: int,
    threads: int | None = None,
    device: str | torch.device = "cpu",
    max_tokens: int = 8192,
    max_seqs: int = 1024,
) -> Kernels:
    """The backend called ``name`` ("auto", "cpu", "reference", "triton") for tensors on ``device``.

    "auto" takes Triton's kernels on a GPU and the compiled ones on a CPU; on a CPU with a warning the reference where those
    cannot be built or used. ``threads`` matter to a CPU; ``max_tokens`` and ``max_seqs`` of a step to a GPU, and to
    "triton" on a CPU, which Triton's interpreter runs, for tests.

    Raises:
        UnsupportedShapeError: the shape does not suit the backend asked for by name.
        BuildError: "cpu" was asked for by name and cannot be compiled.
        ValueError: there is no such backend, it is not installed, or it does not run on that device.
    """
    device = torch.device(device)
    if name not in ("auto", "cpu", "reference", "triton"):
        raise ValueError(f"no kernel backend {name!r}; there are auto, cpu, reference, triton")
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton(device, max_tokens, max_seqs)
    if device.type != "cpu":
        raise ValueError(f"the kernel backend {name!r} is one of CPUs: it cannot run on {device}")
    return ReferenceKernels() if name == "reference" else _cpu(name, head_dim, block_size, threads)


def _triton(device: torch.device, max_tokens: int, max_seqs: int) -> Kernels:
    """Raises ValueError: Triton is not installed, or does not run there."""
    try:
        from octavo_kernels.triton.backend import TritonKernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("the kernel backend 'triton' needs the package triton: install octavo[cuda]") from error
    return TritonKernels(device, max_tokens=max_tokens, max_seqs=max_seqs)


def _cpu(name: str, head_dim: int, block_size: int, threads: int | None) -> Kernels:
    """The compiled kernels, or unless they were asked for by name the reference in their stead."""
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

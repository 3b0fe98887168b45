"""Launches compiled for a target instead of run."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch: the kernel's name, its grid, and what the compiler made of it."""

    name: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    shared_bytes: int
    binary: bytes
    assembly: str


class _Absent:
    """A driver of a GPU that is not there: it says what it would be and cannot run anything."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # Kernels keep what they compiled by device: one name per target.
        return f"{self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling(target: GPUTarget) -> Iterator[list[Compiled]]:
    """Within the context launches are compiled for ``target`` and added to the list it yields.

    Raises:
        RuntimeError: the interpreter is on; there is nothing to compile then.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is on: kernels cannot be compiled in this process")
    launches: list[Compiled] = []
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        metadata = kernel.metadata
        nvidia = target.backend == "cuda"
        launches.append(
            Compiled(
                self.fn.__name__,
                tuple(grid),
                metadata.num_warps,
                metadata.num_stages,
                metadata.shared,
                kernel.asm["cubin" if nvidia else "hsaco"],
                kernel.asm["ptx" if nvidia else "amdgcn"],
            )
        )
        return kernel

    before = driver._active
    driver.set_active(_Absent(target))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = before

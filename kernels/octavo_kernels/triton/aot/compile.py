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

    def __init__(self, target: GPUTarget, purpose: str) -> None:
        self._target, self._purpose = target, purpose

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # Kernels keep what they compiled by device: one name per target and purpose.
        return f"{self._purpose} {self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _instead_of_running(target: GPUTarget, purpose: str, launch: Callable[..., Any]) -> Iterator[None]:
    """Within the context ``launch(run, kernel, *args, grid, **kwargs)`` is called for each launch.

    Raises:
        RuntimeError: the interpreter is on; there is nothing to compile then.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is on: kernels cannot be compiled in this process")
    run: Callable[..., Any] = JITFunction.run

    def replaced(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(run, self, *args, grid=grid, **kwargs)

    before = driver._active
    driver.set_active(_Absent(target, purpose))
    JITFunction.run = replaced
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = before


@contextmanager
def compiling(target: GPUTarget) -> Iterator[list[Compiled]]:
    """Within the context launches are compiled for ``target`` and added to the list it yields.

    Raises:
        RuntimeError: the interpreter is on; there is nothing to compile then.
    """
    launches: list[Compiled] = []

    def compile_only(run: Any, kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        metadata = compiled.metadata
        nvidia = target.backend == "cuda"
        launches.append(
            Compiled(
                kernel.fn.__name__,
                tuple(grid),
                metadata.num_warps,
                metadata.num_stages,
                metadata.shared,
                compiled.asm["cubin" if nvidia else "hsaco"],
                compiled.asm["ptx" if nvidia else "amdgcn"],
            )
        )
        return compiled

    with _instead_of_running(target, "compile", compile_only):
        yield launches


@contextmanager
def noting(target: GPUTarget) -> Iterator[list[tuple[str, str]]]:
    """Within the context launches are only noted, each as (name of the kernel, what it would be compiled by).

    Launches of the same kernel that are noted alike share one compilation: the second is types, constants, and of other
    arguments what the compiler takes for granted (an address or number in whole sixteens, the number one).

    Raises:
        RuntimeError: the interpreter is on.
    """
    launches: list[tuple[str, str]] = []

    def note_only(run: Any, kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        run(kernel, *args, grid=grid, warmup=True, **kwargs)

    def note(*, key: str, fn: Any, **more: Any) -> bool:
        launches.append((fn.name, key))
        return True  # "do not compile"

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        with _instead_of_running(target, "note", note_only):
            yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = before

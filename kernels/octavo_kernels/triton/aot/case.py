"""What a kernel's launcher is called with, and what its machine code must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from octavo_kernels.triton.aot.compile import Compiled
from octavo_kernels.triton.aot.estimate import Work
from octavo_kernels.triton.aot.machine_code import Code
from octavo_kernels.triton.aot.targets import Target
from octavo_kernels.triton.attention_config import Gpu

# No registers in local memory; products on matrix units; loads by asynchronous copies of 16 bytes a thread.
Trait = Literal["no spills", "matrix units", "wide async loads"]
# Of the bytes of asynchronous loads. The scales of int8 pages come four at a time, and a tile of few numbers has more threads
# than scales, so that some are loaded twice; keys or values that did not come wide would be half of all.
LEAST_WIDE = 0.75


@dataclass(frozen=True, slots=True)
class Case:
    """``launch`` calls a launcher with tensors on the meta device, for a GPU; ``work`` is that of its first launch.

    ``kernel`` names the launch that is meant, of those it makes. In ``chosen`` cases suffice for a quick check.
    """

    group: str  # row of the table
    variant: str  # types and sizes
    kernel: str
    launch: Callable[[Gpu], None]
    work: Work
    traits: frozenset[Trait] = frozenset({"no spills"})
    chosen: bool = False


def faults(case: Case, compiled: Compiled, code: Code, target: Target) -> list[str]:
    """What the machine code lacks of what the case asks for."""
    found = []
    if "no spills" in case.traits and code.spilled_bytes:
        found.append(f"{code.spilled_bytes} bytes of registers spilled")
    if "matrix units" in case.traits and not code.matrix:
        found.append("no matrix instructions")
    if "wide async loads" in case.traits and target.gpu.nvidia:
        if not code.async_loads:
            found.append("no asynchronous loads")
        elif code.wide_share < LEAST_WIDE:
            found.append(f"only {code.wide_share:.0%} of asynchronous loads are of 16 bytes")
    if compiled.shared_bytes > target.gpu.shared_bytes:
        found.append(f"{compiled.shared_bytes} bytes of shared memory of {target.gpu.shared_bytes}")
    return found

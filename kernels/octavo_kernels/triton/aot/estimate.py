"""How many blocks fit on a multiprocessor, and what bounds a launch: arithmetic on paper, no measurement."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_kernels.triton.aot.compile import Compiled
from octavo_kernels.triton.aot.machine_code import Code
from octavo_kernels.triton.aot.targets import Target

# Registers are given out per warp in units of so many for each thread.
REGISTER_UNIT = 8
# Instructions a multiprocessor of NVIDIA's can issue per clock.
ISSUE = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch must at least move and compute."""

    bytes_: float
    flops: float = 0.0


def blocks_per_multiprocessor(compiled: Compiled, code: Code, target: Target) -> int:
    """Blocks that run on one multiprocessor at once, by registers, shared memory and places for warps."""
    registers = -(-code.registers // REGISTER_UNIT) * REGISTER_UNIT
    if target.gpu.nvidia:
        by_registers = target.registers // (registers * 32 * compiled.warps)
    else:
        # Four units, each with registers for a whole warp of 64; a unit runs at most eight.
        by_registers = min(8, target.registers // max(1, registers)) * 4 // compiled.warps
    used = compiled.shared_bytes + target.reserved_bytes
    by_shared = target.shared_bytes // used if used else target.max_blocks
    return min(by_registers, by_shared, target.max_warps // compiled.warps, target.max_blocks)


def floor_s(work: Work, target: Target, memory_bytes_per_s: float) -> tuple[float, str]:
    """(seconds that no version can beat, what sets them)."""
    by_memory, by_matrix = work.bytes_ / memory_bytes_per_s, work.flops / target.matrix_flops_per_s
    return (by_memory, "memory") if by_memory >= by_matrix else (by_matrix, "matrix")


def issue_share(compiled: Compiled, code: Code, target: Target) -> float | None:
    """Share of issue slots that the main loop takes when its loads or its products run at full speed; None: unknown.

    Near or above 1 the instructions themselves would be the bound.
    """
    if not code.loop or not target.gpu.nvidia:
        return None
    multiprocessors = target.gpu.multiprocessors
    seconds = max(
        code.loop_bytes * compiled.warps / (target.memory_bytes_per_s / multiprocessors),
        2.0 * code.loop_products * compiled.warps / (target.matrix_flops_per_s / multiprocessors),
    )
    return code.loop.total() * compiled.warps / ISSUE / (seconds * target.clock_hz)

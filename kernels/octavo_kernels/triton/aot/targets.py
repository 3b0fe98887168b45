"""The GPUs that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from octavo_kernels.triton.attention_config import Gpu


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU as the compiler and the launch rules see it, and the limits of one of its multiprocessors."""

    name: str  # of a product
    gpu: Gpu
    registers: int  # of 32 bits; of an AMD compute unit those of one lane of one of its four units
    shared_bytes: int  # of a multiprocessor
    reserved_bytes: int  # shared memory of a block that the system takes
    max_warps: int
    max_blocks: int
    clock_hz: float
    memory_bytes_per_s: float
    matrix_flops_per_s: float  # dense bfloat16

    @property
    def compiler(self) -> GPUTarget:
        """What Triton compiles for."""
        arch = self.gpu.arch
        return GPUTarget("cuda", int(arch[3:]), 32) if self.gpu.nvidia else GPUTarget("hip", arch, 64)


# Figures of the vendors' data sheets: SXM parts, boost clocks, dense matrix rates.
TARGETS = {
    "sm_80": Target("A100", Gpu("sm_80", 108, 166912), 65536, 167936, 1024, 64, 32, 1.41e9, 2.039e12, 312e12),
    "sm_90": Target("H200", Gpu("sm_90", 132, 232448), 65536, 233472, 1024, 64, 32, 1.83e9, 4.8e12, 989e12),
    "sm_100": Target("B200", Gpu("sm_100", 148, 232448), 65536, 233472, 1024, 64, 32, 1.85e9, 8.0e12, 2250e12),
    "gfx942": Target("MI300X", Gpu("gfx942", 304, 65536), 512, 65536, 0, 32, 32, 2.1e9, 5.3e12, 1307e12),
}
# The same chip with less memory bandwidth.
H100_BYTES_PER_S = 3.35e12

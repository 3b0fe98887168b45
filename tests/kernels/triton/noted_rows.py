"""Prints how often kernels would be compiled for launches that differ in the number of rows alone, as JSON. In a process of its
own, without the interpreter."""

from __future__ import annotations

import json

import torch

from octavo_kernels.interface import LinearWeight
from octavo_kernels.triton import fp8, int4, layers, lora
from octavo_kernels.triton.aot.compile import noting
from octavo_kernels.triton.aot.targets import TARGETS

META = torch.device("meta")
ROWS = (1, 2, 3, 15, 16, 17, 32, 40, 64, 100, 256)
H200 = TARGETS["sm_90"]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launch(rows: int, rank: int) -> None:
    x, out = empty(rows, 1024), empty(rows, 1024)
    packed, scale = empty(1024, 512, dtype=torch.uint8), empty(8, 1024, dtype=torch.float16)
    weight = LinearWeight(packed, 1024, 1024, scale, empty(8, 1024, dtype=torch.uint8))
    int4.linear(x, weight, None, out, H200.gpu)
    fp8.to_fp8(x)
    layers.add_rms_norm(x, x, x[0], 1e-6, out)
    layers.act_and_mul(x, "silu", out[:, :512])
    layers.embed(empty(rows, dtype=torch.int32), empty(500, 1024), out)
    tiles = lora.LoraTiles(empty(4, lora.TOKENS, dtype=torch.int32), empty(4, dtype=torch.int32))
    low = lora.shrink(x, empty(2, 2 * rank, 1024), tiles)
    lora.expand(low[..., :rank], empty(2, 1024, rank), empty(2, dtype=torch.float32), tiles, out)


def main() -> None:
    counts: dict[str, dict[str, int]] = {}
    for rank in (8, 16):
        with noting(H200.compiler) as launches:
            for rows in ROWS:
                launch(rows, rank)
        names = {name for name, _ in launches}
        counts[str(rank)] = {name: len({key for other, key in launches if other == name}) for name in names}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

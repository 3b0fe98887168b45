"""Prints which kernels of a GPU would be compiled once a warm-up is over, as JSON. In a process of its own, without the interpreter.

The kernels' own launchers are called for real steps and only noted; what they should have computed stays as it was in memory,
but for tokens drawn, which are zeros.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from late_device import LateDevice
from plan_maker import MAX_SEQS, PlanMaker, make_runner, moves
from tiny_models import random_tokens

from octavo_kernels.triton import backend
from octavo_kernels.triton.aot.compile import noting
from octavo_kernels.triton.aot.targets import TARGETS
from octavo_shared.records import SamplingParams

H200 = TARGETS["sm_90"]


class BlindKernels(backend.TritonKernels):
    """Draws token 0."""

    def sample(self, logits: Any, rows: Any) -> Any:
        return tuple(tensor.zero_() for tensor in super().sample(logits, rows))

    def candidates(self, logits: Any, rows: Any, wanted: Any, width: int) -> Any:
        found = super().candidates(logits, rows, wanted, width)
        found.ids.copy_(torch.arange(width))
        found.logprobs.fill_(-1.0)
        found.found.copy_(wanted)
        found.status.zero_()
        return found


def traffic(maker: PlanMaker) -> None:
    """Steps of many sizes: prompts, chunks, decodes, with everything that sampling can be asked for."""
    lengths, tops = (1, 2, 7, 8, 15, 16, 17, 31, 33, 48, 100), (None, 0, 1, 3, 16, 20)
    for i, length in enumerate(lengths):
        sampling = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, logprobs=tops[i % len(tops)])
        sequence = maker.admit(random_tokens(length, length), sampling)
        maker.finish(sequence, chunk=40)
        maker.release(sequence)
    for count in range(1, MAX_SEQS + 1):
        options = {"min_p": 0.1} if count % 2 else {"logit_bias": ((3, 1.0),) * count, "presence_penalty": 1.0}
        sampling = SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True, prompt_logprobs=count, **options)
        together = [maker.admit(random_tokens(5 * i + 3, i), sampling) for i in range(count)]
        maker.finish(*together)
        for sequence in together:
            maker.release(sequence)
    for width in (1, 2, 8):
        beam = maker.admit(random_tokens(9, width), SamplingParams(beam_width=width, max_tokens=9, ignore_eos=True))
        maker.step((beam, 9))
        maker.release(beam)
    sequence = maker.admit(random_tokens(20, 1), SamplingParams(max_tokens=4, ignore_eos=True))
    maker.step((sequence, 20))
    free = maker.free[:3]
    for pairs in ([(free[0], 0)], [(free[0], 1), (free[1], 2)], [(page, i) for i, page in enumerate(free)]):
        maker.step((sequence, 1), copy_out=moves(*pairs), copies=moves((free[0], free[1])))


def main(folder: Path) -> None:
    backend.describe_gpu = lambda device: H200.gpu
    with noting(H200.compiler) as launches:
        kernels = BlindKernels(torch.device("cpu"), max_tokens=128, max_seqs=MAX_SEQS)
        runner = make_runner(
            folder, kernels=kernels, device=LateDevice("compute first"), host_pages=4, dtype="bfloat16"
        )
        runner.warm_up()
        compiled = set(launches)
        traffic(PlanMaker(runner))
    late = sorted(name for name, _ in set(launches) - compiled)
    print(json.dumps({"warm": sorted(name for name, _ in compiled), "late": late, "launches": len(launches)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

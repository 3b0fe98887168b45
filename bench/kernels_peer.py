"""Our decode attention beside other projects' Triton kernels for the same: compiled for the same GPU, none needed.

Usage: ``python bench/kernels_peer.py [--targets sm_90] [WHEEL ...]``, each WHEEL the folder of an unpacked wheel of vLLM
(``unzip vllm-*.whl -d WHEEL``) or SGLang. Their own launchers are called on tensors without memory, so tiles, warps and stages
are those they would run with; of what their files import, whatever no decode kernel uses is stubbed out.

The case: 32 query heads on 4 key heads of 128 bfloat16, pages of 16, one query token per sequence.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: the interpreter compiles nothing

import torch
import triton
import triton.language as tl

from octavo_kernels.interface import AttentionBatch, AttentionShape, StepBounds
from octavo_kernels.triton.aot.compile import Compiled, compiling
from octavo_kernels.triton.aot.estimate import blocks_per_multiprocessor, issue_share
from octavo_kernels.triton.aot.machine_code import Code, read
from octavo_kernels.triton.aot.targets import TARGETS, Target
from octavo_kernels.triton.attention import PagedAttention

META, BF16 = torch.device("meta"), torch.bfloat16
HEADS, KV_HEADS, DIM, PAGE, KEYS = 32, 4, 128, 16, 4096
PAGES = 9


@dataclass(frozen=True, slots=True)
class Kernel:
    """``launch`` decodes a batch of so many sequences; ``name`` is the kernel's that reads keys and values."""

    title: str
    name: str
    launch: Callable[[Target, int], None]


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _octavo(target: Target, seqs: int) -> None:
    shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE, DIM**-0.5)
    pages = _floats(PAGES, KV_HEADS, PAGE, DIM, dtype=BF16)
    batch = AttentionBatch(_ints(1), _ints(seqs + 1), _ints(seqs), _ints(seqs, KEYS // PAGE), StepBounds(seqs, 1, KEYS))
    attention = PagedAttention(target.gpu, META, max_tokens=seqs, max_seqs=seqs)
    qkv = _floats(seqs, (HEADS + 2 * KV_HEADS) * DIM, dtype=BF16)
    attention.attention(qkv, pages, pages, batch, shape, _floats(seqs, HEADS * DIM, dtype=BF16))


def _stub(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


def _load(wheel: Path, name: str) -> Any:
    """The wheel's own file for module ``name``, without its packages' ``__init__``."""
    spec = importlib.util.spec_from_file_location(name, wheel / (name.replace(".", "/") + ".py"))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{wheel} has no module {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Quantised(IntEnum):
    NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)


def _vllm(wheel: Path) -> Iterator[Kernel]:
    capability = [90]
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: family == capability[0],
    )
    for package in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        _stub(package)
    _stub("vllm.envs", VLLM_BATCH_INVARIANT=False)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    _stub("vllm.logger", init_logger=lambda name: None)
    _stub("vllm.platforms", current_platform=platform)
    _stub("vllm.triton_utils", triton=triton, tl=tl)
    _stub("vllm.v1.kv_cache_interface", KVQuantMode=_Quantised)
    ops = "vllm.v1.attention.ops"
    _load(wheel, f"{ops}.triton_attention_helpers")
    module = _load(wheel, f"{ops}.triton_unified_attention")

    def launch(target: Target, seqs: int) -> None:
        capability[0] = int(target.gpu.arch[3:]) if target.gpu.nvidia else 0
        q = _floats(seqs, HEADS, DIM, dtype=BF16)
        pages = _floats(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16)
        segments = 16
        module.unified_attention(
            q=q, k=pages, v=pages, out=q, cu_seqlens_q=_ints(seqs + 1), max_seqlen_q=1, seqused_k=_ints(seqs),
            max_seqlen_k=KEYS, softmax_scale=DIM**-0.5, causal=True, window_size=(-1, -1),
            block_table=_ints(seqs, KEYS // PAGE), softcap=0, q_descale=None, k_descale=None, v_descale=None,
            # As its backend sets them: fewer sequences than this are split.
            seq_threshold_3D=128 // KV_HEADS, num_par_softmax_segments=segments,
            softmax_segm_output=_floats(seqs, HEADS, segments, DIM), softmax_segm_max=_floats(seqs, HEADS, segments),
            softmax_segm_expsum=_floats(seqs, HEADS, segments),
        )  # fmt: skip

    yield Kernel("vLLM, unified", "kernel_unified_attention", launch)


def _sglang(wheel: Path) -> Iterator[Kernel]:
    for package in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention", "sglang.srt"):
        _stub(package)
    _stub("sglang.srt.environ", envs=None)
    no = dict.fromkeys(("is_hip", "is_gfx95_supported", "is_gfx1250_supported"), lambda: False)
    _stub("sglang.srt.utils", get_device_core_count=lambda device: 0, **no)
    ops = "sglang.kernels.ops.attention"
    _load(wheel, f"{ops}.score_mod")
    module = _load(wheel, f"{ops}.decode_attention")

    def launch(target: Target, seqs: int) -> None:
        splits = 8
        pages = _floats(PAGES * PAGE, KV_HEADS, DIM, dtype=BF16)
        module._decode_grouped_att_m_fwd(
            _floats(seqs, HEADS, DIM, dtype=BF16), pages, pages, _floats(seqs, HEADS, splits, DIM),
            _floats(seqs, HEADS, splits), _ints(seqs + 1), _ints(seqs * KEYS, dtype=torch.int64), _ints(seqs), splits,
            DIM**-0.5, 0.0, page_size=PAGE,
        )  # fmt: skip

    yield Kernel("SGLang, grouped", "_fwd_grouped_kernel_stage1", launch)


PEERS = {
    "vllm/v1/attention/ops/triton_unified_attention.py": _vllm,
    "sglang/kernels/ops/attention/decode_attention.py": _sglang,
}


def peers(wheel: Path) -> Iterator[Kernel]:
    """The kernels known in an unpacked wheel.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [make for path, make in PEERS.items() if (wheel / path).exists()]
    if not found:
        raise FileNotFoundError(f"{wheel} has none of {', '.join(PEERS)}")
    for make in found:
        yield from make(wheel)


def compile_kernel(kernel: Kernel, target: Target, seqs: int) -> tuple[Compiled, Code]:
    """The kernel as it would be launched for ``seqs`` sequences, and its machine code."""
    with compiling(target.compiler) as launches:
        kernel.launch(target, seqs)
    compiled = next(launch for launch in launches if launch.name == kernel.name)
    return compiled, read(compiled, target)


def row(title: str, compiled: Compiled, code: Code, target: Target) -> list[str]:
    """Cells of the table. Instructions are those of all warps, for 64 keys of one key head."""
    # What else is copied (a few page numbers) is little beside keys and values, of which there is a power of two.
    keys = 1 << round(math.log2(code.loop_bytes * compiled.warps / (2 * DIM * BF16.itemsize)))
    per_64 = code.loop.total() * compiled.warps * 64 / keys
    share = issue_share(compiled, code, target)
    return [
        title, str(code.registers), str(code.spilled_bytes), f"{compiled.shared_bytes / 1024:.0f}",
        str(blocks_per_multiprocessor(compiled, code, target)), str(keys), f"{per_64:.0f}",
        f"{code.wide_share:.0%}", "–" if share is None else f"{share:.2f}",
    ]  # fmt: skip


HEADER = ["Kernel", "Registers", "Spilled B", "Shared KiB", "Blocks", "Keys a round", "Instructions for 64 keys"]
HEADER += ["16-byte async loads", "Issue"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, help="folders of unpacked wheels")
    parser.add_argument("--targets", default="sm_90", help="architectures of NVIDIA's, separated by commas")
    parser.add_argument("--sequences", default="64,16", help="batch sizes, separated by commas")
    options = parser.parse_args()
    kernels = [Kernel("Octavo", "attention_kernel", _octavo)]
    try:
        for wheel in options.wheels:
            kernels += peers(wheel)
    except FileNotFoundError as error:
        parser.error(str(error))
    for name in options.targets.split(","):
        for seqs in map(int, options.sequences.split(",")):
            print(f"\n{name}, {seqs} sequences\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
            for kernel in kernels:
                compiled, code = compile_kernel(kernel, TARGETS[name], seqs)
                print(f"| {' | '.join(row(kernel.title, compiled, code, TARGETS[name]))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

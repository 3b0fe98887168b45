"""Attention of prompts: operations per second, beside matrix products and torch's own attention on the same device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from attention_inputs import E4M3, I8
from check_attention import NAMES
from stage import Stage, Table, run_timings
from torch import Tensor

from octavo_kernels import AttentionBatch, AttentionExtras, AttentionShape, StepBounds
from octavo_kernels.triton.quant import page_shape

BF16 = torch.bfloat16
COLUMNS = [
    *("kind", "seqs", "queries", "keys", "heads", "pages", "us", "low_us", "high_us", "tflops"),
    *("share_of_matmul", "flash_us", "ratio_to_flash", "cudnn_us"),
]


@dataclass(frozen=True)
class Case:
    """``seqs`` chunks of ``queries`` tokens at the end of ``keys``."""

    seqs: int
    queries: int
    keys: int
    heads: tuple[int, int] = (32, 8)
    pages: torch.dtype = BF16
    block: int = 16
    dim: int = 128
    window: int = 0


def cases(stage: Stage) -> list[Case]:
    """Whole prompts, chunks of long ones, several at once, other pages and heads."""
    if stage.tiny:
        return [Case(1, 20, 20, (2, 1), dim=64), Case(1, 8, 24, (2, 1), E4M3, dim=64)]
    whole = [Case(1, n, n) for n in (4096, 8192, 16384, 2048)]
    chunks = [Case(1, 2048, 16384), Case(1, 2048, 8192), Case(1, 512, 16384), Case(1, 8192, 32768)]
    more = [Case(8, 2048, 2048), Case(4, 2048, 2048, (64, 8)), Case(1, 8192, 8192, block=64)]
    other = [Case(1, 8192, 8192, pages=E4M3), Case(1, 8192, 8192, pages=I8), Case(1, 8192, 8192, (16, 8))]
    last = [Case(4, 4096, 4096, (16, 8), dim=64), Case(2, 4096, 4096, (16, 8), dim=256)]
    return [*whole, *chunks, *more, *other, *last, Case(1, 16384, 16384, window=4096)]


def matmul_rate(stage: Stage) -> float:
    """Operations per second of a large product of bfloat16 matrices: the best of a few shapes."""
    best = 0.0
    for m, n, k in stage.pick([(8192, 8192, 8192), (16384, 8192, 4096), (4096, 14336, 8192)], [(16, 16, 16)]):
        a, b = stage.randn(m, k, dtype=BF16), stage.randn(n, k, dtype=BF16)
        out = torch.empty((m, n), dtype=BF16, device=stage.device)
        rate = 2.0 * m * n * k / stage.time(lambda a=a, b=b, out=out: torch.mm(a, b.t(), out=out)).median_s
        best = max(best, rate) if rate == rate else best
    return best or math.nan


def ours(stage: Stage, case: Case) -> tuple[Callable[[], None], float]:
    """(A layer's attention as a step calls it, its operations: 4 D for each pair of a query and a key it sees.)"""
    heads, kv_heads = case.heads
    shape = AttentionShape(heads, kv_heads, case.dim, case.block, case.dim**-0.5, case.window)
    need, tokens = -(-case.keys // case.block), case.seqs * case.queries
    tables = np.random.RandomState(0).permutation(case.seqs * need).astype(np.int32).reshape(case.seqs, need)
    shapes = (2, case.seqs * need, *page_shape(shape, case.pages))
    if case.pages in (E4M3, I8):
        memory = torch.randint(0, 0x70, shapes, dtype=torch.uint8, device=stage.device).view(case.pages)
        if case.pages == I8:
            memory.view(torch.float32)[..., kv_heads * case.block * case.dim // 4 :] = 0.01
    else:
        memory = torch.empty(shapes, dtype=case.pages, device=stage.device).normal_()
    scale = torch.full((kv_heads,), 0.01, device=stage.device) if case.pages == E4M3 else None
    batch = AttentionBatch(
        stage.put(np.array([case.seqs], np.int32)),
        stage.put(np.arange(case.seqs + 1, dtype=np.int32) * case.queries),
        stage.put(np.full(case.seqs, case.keys, np.int32)),
        stage.put(tables),
        StepBounds(case.seqs, case.queries, case.keys),
    )
    qkv = stage.randn(tokens, (heads + 2 * kv_heads) * case.dim, dtype=BF16)
    out = torch.empty((tokens, heads * case.dim), dtype=BF16, device=stage.device)
    kernels = stage.kernels(max_tokens=tokens, max_seqs=case.seqs)
    extras = AttentionExtras(k_scale=scale, v_scale=scale)

    def work() -> None:
        kernels.start_step()
        kernels.attention(qkv, memory[0], memory[1], batch, shape, out, extras)

    position = np.arange(case.keys - case.queries, case.keys, dtype=np.float64)
    seen = np.minimum(position + 1, case.window) if case.window else position + 1
    return work, 4.0 * case.dim * heads * case.seqs * float(seen.sum())


def torchs(stage: Stage, case: Case, name: str) -> float:
    """Seconds of torch's attention by the backend ``name``, keys and values side by side in memory; NaN: it cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    if stage.mode != "gpu" or case.window:
        return math.nan
    heads, kv_heads = case.heads
    q = stage.randn(case.seqs, heads, case.queries, case.dim, dtype=BF16)
    k, v = (stage.randn(case.seqs, kv_heads, case.keys, case.dim, dtype=BF16) for _ in range(2))
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    whole = case.queries == case.keys

    def call(k: Tensor, v: Tensor, *, grouped: bool) -> Callable[[], object]:
        more = {"enable_gqa": True} if grouped else {}
        if whole:
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)
        mask = causal_lower_right(case.queries, case.keys)
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)

    def plain(k: Tensor, v: Tensor) -> Callable[[], object]:
        return lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)

    spread = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
    best = math.nan
    ways = [call(k, v, grouped=True), call(*spread, grouped=False)]
    for work in [*ways, plain(*spread)] if name == "flash" else ways:
        try:
            with sdpa_kernel(backend):
                seconds = stage.time(work, 10, graph=False).median_s
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"torch's {name} attention, {case}: {str(error).splitlines()[0]}", flush=True)
            continue
        best = seconds if math.isnan(best) else min(best, seconds)
    return best


def measure(stage: Stage, case: Case, matmul: float) -> dict[str, object]:
    """One row of the table."""
    work, flops = ours(stage, case)
    timing = stage.time(work, 10)
    flash, cudnn = (torchs(stage, case, name) for name in ("flash", "cudnn"))
    return {
        "kind": f"window {case.window}" if case.window else "whole" if case.queries == case.keys else "chunk",
        "seqs": case.seqs,
        "queries": case.queries,
        "keys": case.keys,
        "heads": f"{case.heads[0]}/{case.heads[1]} of {case.dim}",
        "pages": f"{NAMES[case.pages]} of {case.block}",
        "us": 1e6 * timing.median_s,
        "low_us": 1e6 * timing.low_s,
        "high_us": 1e6 * timing.high_s,
        "tflops": flops / timing.median_s / 1e12,
        "share_of_matmul": flops / timing.median_s / matmul,
        "flash_us": 1e6 * flash,
        "ratio_to_flash": timing.median_s / flash,
        "cudnn_us": 1e6 * cudnn,
    }


def run(stage: Stage, path: Path) -> int:
    """The section."""
    table = Table(path, COLUMNS)
    stage.warm_up()
    matmul = matmul_rate(stage)
    table.add(kind="matmul", tflops=matmul / 1e12, share_of_matmul=1.0)
    return run_timings(stage, table, cases(stage), lambda case: measure(stage, case, matmul))

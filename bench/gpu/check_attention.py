"""Attention against float64: sizes, types, pages, windows, caps, sinks, slopes, graphs and what a row depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from attention_inputs import E4M3, I8, Lengths, Paged, attention, paged
from stage import Finding, Stage
from torch import Tensor

from octavo_kernels import AttentionExtras, AttentionShape, StepBounds

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", E4M3: "e4m3", I8: "int8"}
# Of a row's distance from the truth, in lengths of the row: some roundings of the type.
LIMITS = {F32: 5e-5, F16: 1.5e-3, BF16: 8e-3}
HEAD_SIZES = (64, 80, 96, 128, 256)
Check = tuple[str, Callable[[Stage], Iterable[Finding]]]


@dataclass(frozen=True)
class Case:
    """One launch. ``kind`` names its lengths, see ``lengths_of``."""

    kind: str
    dim: int = 128
    block: int = 16
    dtype: torch.dtype = BF16
    pages: torch.dtype | None = None
    heads: tuple[int, int] = (32, 8)
    window: int = 0
    soft_cap: float = 0.0
    extras: bool = False
    bounds: bool = True

    @property
    def name(self) -> str:
        """All that is not as usual."""
        parts = [self.kind, NAMES[self.dtype], f"pages {NAMES[self.pages or self.dtype]} of {self.block}"]
        parts += [f"head {self.dim}", f"{self.heads[0]}/{self.heads[1]} heads"]
        parts += [f"window {self.window}"] * bool(self.window) + [f"cap {self.soft_cap:g}"] * bool(self.soft_cap)
        parts += ["sinks, slopes"] * self.extras + ["no bounds"] * (not self.bounds)
        return ", ".join(parts)


def lengths_of(stage: Stage, kind: str, block: int, window: int) -> Lengths:
    """Decodes; decodes among chunks and drafts, some empty; few but long ones."""
    edges = [1, block - 1, block, block + 1, 2 * block + 3]
    if stage.tiny:
        chunks = [(block + 1, block + 1), (2, 2 * block + 1), (0, block)]
        return {
            "decodes": [(1, n) for n in edges[-3:]],
            "mixed": [(1, block + 1), *chunks],
            "long": [(1, 530)],
        }[kind]
    rng = np.random.RandomState(block)
    edges += [511, 512, 513, 1023, 1025, 8192] + [window, window + 1] * bool(window)
    if kind == "long":
        return [(1, 16384), (1, 9001), (3, 12345)]
    decodes = [(1, int(n)) for n in [*edges, *rng.randint(1, 4097, 64 - len(edges))]]
    if kind == "decodes":
        return decodes
    chunks = [(1000, 1000), (512, 4096), (17, 2048), (129, 130), (5, 300), (16, 16), (128, 128), (0, 64), (0, 0)]
    return [*decodes[:12], *chunks, (1, 777), (2, 3000)]


def extras_of(stage: Stage, case: Case) -> AttentionExtras:
    """Sinks and slopes where the case has them, scales of heads where pages need them."""
    heads, kv_heads = case.heads
    scales = (
        stage.put(np.linspace(0.01, 0.02, kv_heads, dtype=np.float32)),
        stage.put(np.linspace(0.02, 0.007, kv_heads, dtype=np.float32)),
    )
    sinks = stage.put(np.linspace(-3, 4, heads, dtype=np.float32)) if case.extras else None
    slopes = stage.put(np.linspace(0.5, 0.004, heads, dtype=np.float32)) if case.extras else None
    k_scale, v_scale = scales if case.pages == E4M3 else (None, None)
    return AttentionExtras(sinks, slopes, k_scale, v_scale)


def shape_of(case: Case) -> AttentionShape:
    """Scores are sharper under a cap, so that it matters."""
    scale = case.dim**-0.5 * (4.0 if case.soft_cap else 1.0)
    return AttentionShape(*case.heads, case.dim, case.block, scale, case.window, case.soft_cap)


def run(stage: Stage, case: Paged, shape: AttentionShape) -> Tensor:
    """The kernels' answer: the rows of sequences."""
    tokens = sum(queries for queries, _ in case.lengths)
    kernels = stage.kernels(max_tokens=max(64, tokens + 1), max_seqs=len(case.lengths) + 1)
    out = torch.full((tokens + 1, shape.num_heads * shape.head_dim), 77.0, dtype=case.qkv.dtype, device=stage.device)
    kernels.start_step()
    kernels.attention(case.qkv, case.k_pages, case.v_pages, case.batch, shape, out, case.extras)
    if stage.mode != "compile" and not bool((out[tokens:] == 77.0).all()):
        raise AssertionError("a row of no sequence was written")
    return out[:tokens]


def check_case(stage: Stage, case: Case) -> Iterator[Finding]:
    """One launch against float64."""
    shape = shape_of(case)
    lengths = lengths_of(stage, case.kind, case.block, case.window)
    inputs = paged(stage, lengths, shape, case.dtype, case.pages, extras_of(stage, case), bounds=case.bounds)
    got = run(stage, inputs, shape)
    yield stage.close("attention", case.name, got, lambda: attention(inputs, shape), LIMITS[case.dtype], shape.head_dim)


def check_rows(stage: Stage) -> Iterator[Finding]:
    """What the rows beside a row, and the cut of its prompt, do not change."""
    shape = AttentionShape(8, 2, 128, 16, 128**-0.5)
    long = stage.pick(1000, 140)
    lengths = [(1, n) for n in stage.pick([3000, 17, 600, 1, 8000], [40, 17])] + [(long, long)]
    decodes = lengths[:-1]
    inputs = paged(stage, decodes, shape, BF16)
    together = run(stage, inputs, shape)
    yield stage.equal("attention repeats", "decodes", run(stage, inputs, shape), lambda: together)
    for s in range(len(decodes)):
        alone = run(stage, _part(stage, inputs, [s], s, s + 1, decodes[s][1]), shape)
        yield stage.equal(
            "attention alone", f"decode of {decodes[s][1]} keys", alone, lambda s=s: together[s : s + 1], computed=True
        )
    inputs = paged(stage, [(long, long)], shape, BF16)
    whole = run(stage, inputs, shape)
    cut = 3 * long // 10
    for first, last in ((0, cut), (cut, long)):
        part = run(stage, _part(stage, inputs, [0], first, last, last), shape)
        yield stage.equal(
            "attention in chunks", f"{first} to {last}", part, lambda a=first, b=last: whole[a:b], computed=True
        )


def _part(stage: Stage, inputs: Paged, sequence: list[int], first: int, last: int, keys: int) -> Paged:
    """Rows ``first`` to ``last`` of a sequence as a step of their own."""
    batch = replace(
        inputs.batch,
        num_seqs=stage.put(np.array([1], np.int32)),
        query_start=stage.put(np.array([0, last - first], np.int32)),
        seq_lens=stage.put(np.array([keys], np.int32)),
        block_tables=inputs.batch.block_tables[sequence],
        bounds=StepBounds(1, last - first, keys),
    )
    return Paged(inputs.qkv[first:last].contiguous(), inputs.k_pages, inputs.v_pages, batch, [(last - first, keys)])


def check_graph(stage: Stage) -> Iterator[Finding]:
    """A step captured once and replayed with other lengths, fewer sequences, and padding rows behind them."""
    shape = AttentionShape(16, 2, 128, 16, 128**-0.5)
    most = stage.pick(4096, 40)
    inputs = paged(stage, [(1, most)] * stage.pick(24, 3), shape, BF16)
    seqs, batch = len(inputs.lengths), inputs.batch
    kernels = stage.kernels(max_tokens=64, max_seqs=seqs + 1)
    outs = [torch.zeros((seqs, 16 * 128), dtype=BF16, device=stage.device) for _ in range(2)]

    def step() -> None:
        kernels.start_step()
        for out in outs:  # two layers, one list
            kernels.attention(inputs.qkv[:seqs], inputs.k_pages, inputs.v_pages, batch, shape, out)

    replay = stage.replay(step)
    rng = np.random.RandomState(1)
    for count in (seqs, seqs - 1, 1):
        lengths = [(1, int(n)) for n in rng.randint(1, most + 1, count)]
        batch.num_seqs.copy_(stage.put(np.array([count], np.int32)))
        batch.seq_lens[:count] = stage.put(np.array([n for _, n in lengths], np.int32))
        for out in outs:
            out.fill_(77.0)
        replay()
        now = replace(inputs, lengths=lengths)
        for layer, out in enumerate(outs):
            yield stage.close(
                *("attention in a graph", f"{count} of {seqs} sequences, layer {layer}", out[:count]),
                *(lambda now=now: attention(now, shape), LIMITS[BF16], 128),
            )
            yield stage.measured(
                *("attention in a graph", f"padding behind {count} of {seqs}, layer {layer}"),
                *(lambda out=out, count=count: float((out[count:] != 77.0).any()), 0.0),
            )


def cases() -> list[Case]:
    """One thing varied at a time, decodes and mixed steps of each."""
    both = [replace(Case("decodes"), kind=kind) for kind in ("decodes", "mixed")]
    found = [Case("long"), Case("long", pages=I8), *(replace(case, bounds=False) for case in both)]
    for case in both:
        found += [replace(case, dim=dim, dtype=dtype) for dim in HEAD_SIZES for dtype in (BF16, F16, F32)]
        found += [replace(case, dim=dim, pages=pages) for dim in HEAD_SIZES for pages in (E4M3, I8)]
        found += [replace(case, dtype=F16, pages=pages) for pages in (E4M3, I8)]
        found += [replace(case, block=block) for block in (8, 24, 32, 64, 128, 256)]
        found += [replace(case, block=block, pages=pages) for block in (32, 256) for pages in (E4M3, I8)]
        found += [replace(case, heads=heads) for heads in ((16, 16), (64, 8), (24, 8), (16, 1), (34, 2), (28, 4))]
        found += [replace(case, window=window) for window in (1, 128, 1000)]
        found += [replace(case, soft_cap=30.0), replace(case, soft_cap=30.0, window=1000, dim=256)]
        found += [replace(case, extras=True), replace(case, extras=True, window=128, dim=64)]
        found += [replace(case, extras=True, pages=I8, window=128, soft_cap=30.0)]
    return list(dict.fromkeys(found))


def small_cases() -> list[Case]:
    """What the interpreter is to show that this file runs."""
    one = Case("decodes", dim=64, heads=(4, 2))
    return [
        *(one, replace(one, kind="mixed", window=20, soft_cap=30.0), replace(one, kind="long", dtype=F32)),
        *(replace(one, kind="mixed", pages=I8, block=8, extras=True), replace(one, pages=E4M3, dtype=F16)),
    ]


def checks(stage: Stage) -> list[Check]:
    """All of this file."""
    found: list[Check] = [("attention in a graph", check_graph), ("attention rows", check_rows)]
    some = small_cases() if stage.tiny else cases()
    return [*found, *((f"attention {case.name}", partial(check_case, case=case)) for case in some)]

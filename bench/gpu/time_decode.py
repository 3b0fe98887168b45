"""Attention of decodes: bytes per second, beside what a large copy reaches on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attention_inputs import E4M3, I8
from check_attention import NAMES
from stage import Stage, Table, run_timings

from octavo_kernels import AttentionBatch, AttentionExtras, AttentionShape, StepBounds
from octavo_kernels.triton.quant import page_shape

BF16 = torch.bfloat16
COLUMNS = ["kind", "seqs", "keys", "heads", "pages", "block", "us", "low_us", "high_us", "gb_per_s", "share_of_copy"]
# Layers that one work list serves and one graph holds; each has pages of its own, so that none finds its keys in the L2 cache.
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """``keys`` 0: lengths spread evenly over 1k to 8k."""

    seqs: int
    keys: int
    heads: tuple[int, int] = (64, 8)
    pages: torch.dtype = BF16
    block: int = 16
    window: int = 0


def cases(stage: Stage) -> list[Case]:
    """Goals first: bfloat16 and eight heads to a key head."""
    if stage.tiny:
        return [Case(2, 40, (4, 2), block=8), Case(2, 0, (4, 2), E4M3)]
    main = [Case(seqs, keys) for seqs in (64, 256, 128, 16) for keys in (0, 1024, 2048, 4096, 8192)]
    other = [Case(64, 0, (32, 8)), Case(256, 2048, (32, 8)), Case(16, 4096, (32, 8)), Case(64, 0, block=64)]
    other += [Case(64, 0, pages=E4M3), Case(256, 2048, pages=E4M3), Case(64, 0, pages=I8), Case(256, 2048, pages=I8)]
    few = [Case(1, 8192), Case(4, 8192), Case(64, 8192, window=1024), Case(64, 0, (16, 8)), Case(64, 0, (32, 32))]
    return [*main, *other, *few]


def copy_rate(stage: Stage) -> float:
    """Bytes per second that are read and written by a large copy within the device."""
    size = stage.pick(4 << 30, 1 << 20)
    source = torch.randint(0, 2**31 - 1, (size // 4,), dtype=torch.int32, device=stage.device)
    target = torch.empty_like(source)
    return 2 * size / stage.time(lambda: target.copy_(source), 10, graph=False).median_s


def read_rate(stage: Stage) -> float:
    """The same of a large sum, which only reads."""
    size = stage.pick(4 << 30, 1 << 20)
    source, total = torch.rand(size // 4, device=stage.device), torch.empty((), device=stage.device)
    return size / stage.time(lambda: torch.sum(source, 0, out=total), 10, graph=False).median_s


def lengths_of(stage: Stage, case: Case) -> np.ndarray:
    """int32[seqs]."""
    if case.keys:
        return np.full(case.seqs, case.keys, np.int32)
    most = stage.pick(8192, 40)
    lengths = np.linspace(most // 8, most, case.seqs).astype(np.int32)
    return np.random.RandomState(0).permutation(lengths).astype(np.int32)


class Decode:
    """Inputs of a decode step of some layers; memory is the same for all cases of one type."""

    def __init__(self, stage: Stage, case: Case) -> None:
        heads, kv_heads = case.heads
        dim = stage.pick(128, 64)
        self.shape = AttentionShape(heads, kv_heads, dim, case.block, dim**-0.5, case.window)
        self.lengths = lengths_of(stage, case)
        need = -(-self.lengths // case.block)
        blocks = int(need.sum())
        order = np.random.RandomState(1).permutation(blocks).astype(np.int32)
        tables = np.zeros((case.seqs, int(need.max())), np.int32)
        starts = np.cumsum(need) - need
        for s in range(case.seqs):
            tables[s, : need[s]] = order[starts[s] : starts[s] + need[s]]
        shapes = (2, LAYERS, blocks, *page_shape(self.shape, case.pages))
        if case.pages in (E4M3, I8):
            memory = torch.randint(0, 0x70, shapes, dtype=torch.uint8, device=stage.device).view(case.pages)
            if case.pages == I8:  # scales of one
                numbers = kv_heads * case.block * dim
                memory.view(torch.float32)[..., numbers // 4 :] = 0.01
        else:
            memory = torch.empty(shapes, dtype=case.pages, device=stage.device).normal_()
        self.k, self.v = memory[0], memory[1]
        scale = torch.full((kv_heads,), 0.01, device=stage.device) if case.pages == E4M3 else None
        self.extras = AttentionExtras(k_scale=scale, v_scale=scale)
        self.batch = AttentionBatch(
            stage.put(np.array([case.seqs], np.int32)),
            stage.put(np.arange(case.seqs + 1, dtype=np.int32)),
            stage.put(self.lengths),
            stage.put(tables),
            StepBounds(case.seqs, 1, int(self.lengths.max())),
        )
        self.qkv = stage.randn(case.seqs, (heads + 2 * kv_heads) * dim, dtype=BF16)
        self.out = torch.empty((case.seqs, heads * dim), dtype=BF16, device=stage.device)
        self.kernels = stage.kernels(max_tokens=case.seqs, max_seqs=case.seqs)

    def step(self) -> None:
        """All layers, as a step calls them."""
        self.kernels.start_step()
        for k, v in zip(self.k, self.v, strict=True):
            self.kernels.attention(self.qkv, k, v, self.batch, self.shape, self.out, self.extras)

    def nbytes(self) -> float:
        """What one layer must at least move: its keys and values, with their scales, queries and outputs."""
        shape = self.shape
        seen = np.minimum(self.lengths, shape.window) if shape.window else self.lengths
        row = 2 * (shape.head_dim * self.k.element_size() + (4 if self.k.dtype == I8 else 0))
        return float(seen.sum()) * shape.num_kv_heads * row + 2 * self.out.nbytes


def measure(stage: Stage, case: Case, copied: float) -> dict[str, object]:
    """One row of the table: microseconds of a layer, its share of the step's work list included."""
    decode = Decode(stage, case)
    timing = stage.time(decode.step, 10)
    us = [1e6 * s / LAYERS for s in (timing.median_s, timing.low_s, timing.high_s)]
    rate = decode.nbytes() / (timing.median_s / LAYERS)
    keys = case.keys or f"{decode.lengths.min()} to {decode.lengths.max()}"
    return {
        "kind": f"window {case.window}" if case.window else "decode",
        "seqs": case.seqs,
        "keys": keys,
        "heads": f"{case.heads[0]}/{case.heads[1]}",
        "pages": NAMES[case.pages],
        "block": case.block,
        "us": us[0],
        "low_us": us[1],
        "high_us": us[2],
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / copied,
    }


def _rates(stage: Stage) -> Iterator[tuple[str, float]]:
    yield "copy", copy_rate(stage)
    yield "read", read_rate(stage)


def run(stage: Stage, path: Path) -> int:
    """The section."""
    table = Table(path, COLUMNS)
    stage.warm_up()
    rates = dict(_rates(stage))
    for name, rate in rates.items():
        table.add(kind=name, gb_per_s=rate / 1e9, share_of_copy=rate / rates["copy"])
    return run_timings(stage, table, cases(stage), lambda case: measure(stage, case, rates["copy"]))

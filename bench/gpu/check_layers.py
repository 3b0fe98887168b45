"""Norms, activations, embedding, products and low-rank adapters against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from check_attention import NAMES
from stage import Finding, Stage
from torch import Tensor

from octavo_kernels.triton import lora

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMITS = {F32: 2e-6, F16: 1e-3, BF16: 6e-3}
EPS = 1e-6
Check = tuple[str, Callable[[Stage], Iterable[Finding]]]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def check_norms(stage: Stage, dtype: torch.dtype, rows: int, hidden: int) -> Iterator[Finding]:
    """All three norms."""
    kernels, case = stage.kernels(), f"{NAMES[dtype]}, {rows} x {hidden}"
    x, residual = stage.randn(rows, hidden, dtype=dtype), stage.randn(rows, hidden, dtype=dtype)
    weight, out = stage.randn(hidden, dtype=dtype), torch.empty((rows, hidden), dtype=dtype, device=stage.device)
    limit = LIMITS[dtype]
    kernels.rms_norm(x, weight, EPS, out)
    yield stage.close("RMS norm", case, out, lambda: _normed(x.double(), weight), limit, hidden)
    first = out.clone()
    index = stage.put(np.random.RandomState(0).randint(0, rows, max(1, rows // 3)).astype(np.int32))
    gathered = torch.empty((len(index), hidden), dtype=dtype, device=stage.device)
    kernels.gather_add_rms_norm(x, residual, index, weight, EPS, gathered)
    total = (x.float() + residual.float()).to(dtype)
    some = total.double()[index.long()] if stage.mode != "compile" else total
    yield stage.close("gather, add, RMS norm", case, gathered, lambda: _normed(some, weight), limit, hidden)
    kernels.add_rms_norm(x, residual, weight, EPS, out)
    yield stage.equal("add, RMS norm: the sum", case, residual, lambda: total, computed=True)
    yield stage.close("add, RMS norm", case, out, lambda: _normed(total.double(), weight), limit, hidden)
    kernels.rms_norm(x, weight, EPS, x)
    yield stage.equal("RMS norm in place", case, x, lambda: first)


def check_activations(stage: Stage, dtype: torch.dtype, rows: int, width: int) -> Iterator[Finding]:
    """Both gated activations, and the embedding."""
    kernels, case = stage.kernels(), f"{NAMES[dtype]}, {rows} x {width}"
    gate_up = stage.randn(rows, 2 * width, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, -1)
    out = torch.empty((rows, width), dtype=dtype, device=stage.device)
    kernels.act_and_mul(gate_up, "silu", out)
    yield stage.close("SwiGLU", case, out.clone(), lambda: F.silu(gate) * up, LIMITS[dtype], width)
    kernels.act_and_mul(gate_up, "gelu_tanh", out)
    yield stage.close("GeGLU", case, out, lambda: F.gelu(gate, approximate="tanh") * up, LIMITS[dtype], width)
    vocab = stage.pick(50000, 40)
    matrix = kernels.pack(stage.randn(vocab, width, dtype=dtype), dtype)
    ids = np.random.RandomState(0).randint(0, vocab, rows).astype(np.int32)
    ids[:: max(1, rows // 4)] = -1
    ids[-1] = vocab
    known = stage.put((ids >= 0) & (ids < vocab))
    kernels.embed(stage.put(ids), matrix, out)
    index = stage.put(np.clip(ids, 0, vocab - 1)).long()
    yield stage.equal("embedding", case, out, lambda: torch.where(known[:, None], matrix.data[index], 0))


def check_products(stage: Stage, dtype: torch.dtype, rows: int, sizes: tuple[int, int]) -> Iterator[Finding]:
    """torch's products as the backend calls them: with and without a bias, and into another type."""
    kernels, (n, k) = stage.kernels(), sizes
    case = f"{NAMES[dtype]}, {rows} x {k} x {n}"
    x, matrix = stage.randn(rows, k, dtype=dtype), kernels.pack(stage.randn(n, k, dtype=dtype) / k**0.5, dtype)
    bias = stage.randn(n, dtype=dtype)
    for given, into in ((None, dtype), (bias, dtype), (bias, F32)):
        out = torch.empty((rows, n), dtype=into, device=stage.device)
        kernels.linear(x, matrix, given, out)
        added = 0 if given is None else given.double()
        # float32 products may run on matrix units that round operands if torch is told so; it is not by default.
        limit = LIMITS[dtype] if dtype != F32 else 1e-5
        name = f"{case}{'' if given is None else ', bias'} into {NAMES[into]}"
        yield stage.close("product", name, out, lambda a=added: x.double() @ matrix.data.double().T + a, limit, n)


def check_lora(stage: Stage, dtype: torch.dtype, rank: int, tokens: int) -> Iterator[Finding]:
    """Many adapters in one batch, tokens without one left as they are."""
    adapters, k, n = stage.pick((20, 4096, 6144), (3, 40, 48))
    rng = np.random.RandomState(rank)
    owner = rng.randint(-1, adapters, tokens).astype(np.int32)
    grouped, owners = lora.group_tokens(owner, -(-tokens // lora.TOKENS) + adapters + 2)
    tiles = lora.LoraTiles(stage.put(grouped), stage.put(owners))
    x = stage.randn(tokens, k, dtype=dtype)
    down = stage.randn(adapters, rank, k, dtype=dtype) / k**0.5
    up = stage.randn(adapters, n, rank, dtype=dtype) / rank**0.5
    scale = stage.put(np.linspace(0.5, 2, adapters, dtype=np.float32))
    out = stage.randn(tokens, n, dtype=dtype)
    before = out.clone()
    lora.add_lora(x, down, up, scale, tiles, out)

    def wanted() -> Tensor:
        added = before.double()
        for a in range(adapters):
            own = stage.put(np.flatnonzero(owner == a)).long()
            low = x[own].double() @ down[a].double().T
            added[own] += float(scale[a]) * (low @ up[a].double().T)
        return added

    case = f"{NAMES[dtype]}, {adapters} adapters of rank {rank}, {tokens} x {k} to {n}"
    limit = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}[dtype]
    yield stage.close("LoRA", case, out, wanted, limit, n)
    alone = stage.put(np.flatnonzero(owner < 0)).long()
    yield stage.equal("LoRA: tokens without", case, out[alone], lambda: before[alone])


def checks(stage: Stage) -> list[Check]:
    """All of this file."""
    found: list[Check] = []
    norms = stage.pick([(1, 1024), (256, 4096), (4096, 5120), (33, 16384), (7, 32768)], [(3, 72)])
    gated = stage.pick([(1, 3072), (256, 14336), (2048, 11008)], [(3, 40)])
    products = stage.pick([(1, (6144, 4096)), (256, (4096, 1024)), (513, (1000, 333))], [(3, (8, 16))])
    for dtype in (BF16, F16, F32):
        name = NAMES[dtype]
        found += [(f"norms {name} {s}", partial(check_norms, dtype=dtype, rows=s[0], hidden=s[1])) for s in norms]
        found += [(f"gated {name} {s}", partial(check_activations, dtype=dtype, rows=s[0], width=s[1])) for s in gated]
        found += [
            (f"product {name} {s}", partial(check_products, dtype=dtype, rows=s[0], sizes=s[1])) for s in products
        ]
        for rank, tokens in stage.pick([(8, 1), (16, 256), (64, 300), (100, 64), (256, 40)], [(8, 5)]):
            found.append((f"LoRA {name} {rank}", partial(check_lora, dtype=dtype, rank=rank, tokens=tokens)))
    return found

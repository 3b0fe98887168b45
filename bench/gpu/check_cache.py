"""Cache writes against float64, and pages copied and moved, also to the host's memory and beside other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from attention_inputs import E4M3, I8, page_values
from check_attention import HEAD_SIZES, NAMES
from stage import Finding, Stage
from torch import Tensor

from octavo_kernels import AttentionExtras, AttentionShape
from octavo_kernels.triton.quant import page_shape

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMITS = {F32: 2e-6, F16: 1e-3, BF16: 6e-3}
FILLER = 0x35
EPS = 1e-6
Check = tuple[str, Callable[[Stage], Iterable[Finding]]]


@dataclass(frozen=True)
class Case:
    """One launch; ``rot`` of the ``dim`` numbers of a head rotate."""

    tokens: int
    dim: int = 128
    rot: int = 128
    block: int = 16
    dtype: torch.dtype = BF16
    pages: torch.dtype | None = None
    heads: tuple[int, int] = (32, 8)
    norms: bool = True

    @property
    def name(self) -> str:
        """All of it."""
        pages = NAMES[self.pages or self.dtype]
        parts = [f"{self.tokens} tokens", NAMES[self.dtype], f"pages {pages} of {self.block}", f"head {self.dim}"]
        return ", ".join([*parts, f"{self.rot} rotate", "norms" if self.norms else "no norms"])


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _rotated(x: Tensor, table: Tensor | None, positions: Tensor) -> Tensor:
    if table is None:
        return x
    cos, sin = table[positions.long().clamp(0, table.shape[0] - 1)].double()[:, None].chunk(2, -1)
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def check_write(stage: Stage, case: Case) -> Iterator[Finding]:
    """Queries turned, keys and values in their pages, all other places as they were."""
    heads, kv_heads = case.heads
    shape = AttentionShape(heads, kv_heads, case.dim, case.block, case.dim**-0.5)
    dtype, page_dtype = case.dtype, case.pages or case.dtype
    blocks = -(-case.tokens // case.block) + 3
    rng = np.random.RandomState(case.tokens)
    slots = rng.permutation(blocks * case.block)[: case.tokens].astype(np.int32)
    slots[1::7] = -1  # padding rows
    positions = rng.randint(0, 5000, case.tokens).astype(np.int32)
    angles = stage.put(np.outer(np.arange(4096), 1e4 ** -np.linspace(0, 1, case.rot // 2)).astype(np.float32))
    table = torch.cat([angles.cos(), angles.sin()], -1) if case.rot else None
    qkv = stage.randn(case.tokens, (heads + 2 * kv_heads) * case.dim, dtype=dtype)
    before = qkv.clone()
    norms = [stage.randn(case.dim, dtype=dtype) if case.norms else None for _ in range(2)]
    shapes = (blocks, *page_shape(shape, page_dtype))
    pages = [torch.full(shapes, FILLER, dtype=I8, device=stage.device) for _ in range(2)]
    if page_dtype != I8:
        raw = (*shapes[:-1], shapes[-1] * page_dtype.itemsize)
        pages = [torch.full(raw, FILLER, dtype=I8, device=stage.device).view(page_dtype) for _ in range(2)]
    scales = [stage.put(np.linspace(0.02, 0.05, kv_heads, dtype=np.float32)) for _ in range(2)]
    extras = AttentionExtras(k_scale=scales[0], v_scale=scales[1]) if page_dtype == E4M3 else AttentionExtras()
    on_device = stage.put(positions)
    stage.kernels().rope_kv(
        qkv, on_device, table, norms[0], norms[1], EPS, stage.put(slots), pages[0], pages[1], shape, extras
    )
    split = before.double().view(case.tokens, -1, case.dim).split([heads, kv_heads, kv_heads], 1)

    def turned(part: int) -> Tensor:
        return _rotated(_normed(split[part], norms[part]), table, on_device) if part < 2 else split[part]

    width = heads * case.dim
    yield stage.close(
        "cache write", f"{case.name}: queries", qkv[:, :width], lambda: turned(0), LIMITS[dtype], case.dim
    )
    kept = slots[slots >= 0]
    places = stage.put(kept).long()
    rows = stage.put(slots >= 0)
    for part, name in ((1, "keys"), (2, "values")):
        own = pages[part - 1]
        held = partial(_held, own, blocks, shape, extras.k_scale if part == 1 else extras.v_scale, places)
        if page_dtype in (E4M3, I8):
            yield stage.measured(
                *("cache write", f"{case.name}: {name}"),
                *(lambda part=part, held=held: _steps_off(held(), turned(part)[rows], page_dtype, scales[0]), 0.52),
            )
        elif stage.mode != "compile":
            wanted = partial(lambda part: turned(part)[rows], part)
            yield stage.close("cache write", f"{case.name}: {name}", held(), wanted, LIMITS[dtype], case.dim)
        yield stage.measured(
            "cache write", f"{case.name}: other places of {name}", partial(_touched, own, blocks, shape, kept), 0.0
        )


def _held(pages: Tensor, blocks: int, shape: AttentionShape, scale: Tensor | None, places: Tensor) -> Tensor:
    """float64[n, Hk, D] of what slots hold."""
    return page_values(pages, torch.arange(blocks, device=pages.device), shape, scale)[places]


def _steps_off(held: Tensor, wanted: Tensor, dtype: torch.dtype, scale: Tensor) -> float:
    """The largest distance from the truth in steps of the number format at that place; rounding makes it a half."""
    if dtype == I8:
        step = wanted.abs().amax(-1, keepdim=True) / 127
    else:
        scale = scale.double()[:, None]
        magnitude = (wanted / scale).abs().clamp(2.0**-6, 447.0)
        step = torch.exp2(torch.floor(torch.log2(magnitude)) - 3) * scale
        wanted = wanted.clamp(-448 * scale, 448 * scale)
    return float(((held - wanted).abs() / (step + 1e-30)).max())


def _touched(pages: Tensor, blocks: int, shape: AttentionShape, kept: np.ndarray) -> float:
    """The share of bytes that changed in places no slot names."""
    numbers = shape.num_kv_heads * shape.block_size * shape.head_dim
    raw = pages.reshape(blocks, -1).view(torch.uint8)
    free = torch.ones(blocks * shape.block_size, dtype=torch.bool)
    free[torch.from_numpy(kept).long()] = False
    places = free.view(blocks, 1, shape.block_size, 1).to(raw.device)
    item = pages.element_size()
    body = raw[:, : numbers * item].view(blocks, shape.num_kv_heads, shape.block_size, -1)
    changed = ((body != FILLER) & places).float().sum()
    if raw.shape[1] > numbers * item:  # scales of int8
        tail = raw[:, numbers * item :].view(blocks, shape.num_kv_heads, shape.block_size, 4)
        changed += ((tail != FILLER) & places).float().sum()
    return float(changed) / raw.numel()


def check_copies(stage: Stage) -> Iterator[Finding]:
    """Pages of all layers at once: within the device, and to pinned memory and back while the device computes."""
    kernels = stage.kernels()
    layers, blocks, moved = stage.pick((32, 512, 200), (2, 7, 3))
    for dtype, page in ((BF16, (8, 16, 128)), (I8, (8 * 16 * 132,)), (F32, (4, 16, 80)), (E4M3, (8, 16, 128))):
        pages = (stage.randn(layers, blocks, *page) * 50).to(dtype)
        before = pages.clone()
        order = np.random.RandomState(0).permutation(blocks).astype(np.int32)
        source, destination = stage.put(order[:moved]), stage.put(order[moved : 2 * moved])
        kernels.copy_pages(pages, source, destination)
        wanted = before.view(torch.uint8).clone()
        wanted[:, destination.long()] = before.view(torch.uint8)[:, source.long()]
        yield stage.equal("page copies", f"{moved} pages of {layers} layers, {NAMES[dtype]}", pages, lambda w=wanted: w)
        host = stage.pinned(moved, 2, layers, int(np.prod(page)), dtype=dtype)
        host.view(torch.uint8).fill_(FILLER)
        side = host[:, 1].transpose(0, 1)
        yield from _round_trip(stage, before, side, host, source, destination, f"{NAMES[dtype]}, {layers} layers")


def _round_trip(
    stage: Stage, pages: Tensor, side: Tensor, host: Tensor, source: Tensor, destination: Tensor, case: str
) -> Iterator[Finding]:
    """Out to the host and back to other pages, on a stream of its own with matrix products on another."""
    kernels, moved = stage.kernels(), len(source)
    index = stage.put(np.arange(moved, dtype=np.int32))
    fresh = torch.zeros_like(pages.view(torch.uint8)).view(pages.dtype)
    if stage.mode == "gpu":
        busy = torch.randn(4096, 4096, device=stage.device, dtype=BF16)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for _ in range(50):
            torch.mm(busy, busy)
        with torch.cuda.stream(stream):
            kernels.move_pages(pages, source, side, index)
            kernels.move_pages(side, index, fresh, destination)
    else:
        kernels.move_pages(pages, source, side, index)
        kernels.move_pages(side, index, fresh, destination)
    wanted = pages.view(torch.uint8)[:, source.long()].flatten(2)
    yield stage.equal("page moves", f"{case}: to the host", side, lambda: wanted.to(side.device))
    back = fresh.view(torch.uint8)[:, destination.long()].flatten(2)
    yield stage.equal("page moves", f"{case}: back to other pages", back, lambda: wanted)
    other = host.view(torch.uint8)[:, 0]
    yield stage.measured("page moves", f"{case}: beside them", lambda: float((other != FILLER).any()), 0.0)


def cases() -> list[Case]:
    """Types by head sizes, rotation, norms, and few as well as many tokens."""
    found = [
        Case(2048, dim, dim, dtype=dtype, pages=pages)
        for dim in HEAD_SIZES
        for dtype, pages in ((BF16, None), (F16, None), (F32, None), (BF16, E4M3), (BF16, I8))
    ]
    found += [Case(tokens, norms=norms) for tokens in (1, 7, 64, 256) for norms in (True, False)]
    found += [Case(500, rot=rot, norms=False, pages=pages) for rot in (0, 32, 64) for pages in (BF16, E4M3, I8)]
    found += [Case(777, block=block, pages=pages) for block in (8, 24, 64, 256) for pages in (BF16, I8)]
    return [*found, Case(300, 80, 20, heads=(9, 3)), Case(300, heads=(16, 8), pages=F16), Case(300, heads=(64, 8))]


def checks(stage: Stage) -> list[Check]:
    """All of this file."""
    some = cases()
    if stage.tiny:
        small = Case(5, 64, 64, heads=(2, 2))
        some = [small, Case(5, 80, 20, 8, F32, heads=(3, 1)), Case(5, 64, 0, 16, F32, I8, (2, 2), False)]
        some += [Case(5, 64, 32, 16, F16, E4M3, (2, 2))]
    copies: list[Check] = [("page copies and moves", check_copies)]
    return [*copies, *((f"cache write {case.name}", partial(check_write, case=case)) for case in some)]

"""Products by weights of 8 and 4 bits against float64, and what prepares a step's inputs against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
from check_attention import NAMES
from stage import Finding, Stage

from octavo_kernels import StepRows
from octavo_kernels.interface import Fp8Rows, Int4Rows
from octavo_kernels.quantized import E4M3, to_fp8, widen
from octavo_kernels.reference.batch import PlainInputs

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Sums of products that are rounded once; fp8's come as bfloat16 whatever is asked for.
LIMITS = {F32: 1e-5, F16: 1e-3, BF16: 6e-3}
Check = tuple[str, Callable[[Stage], Iterable[Finding]]]


def check_int4(stage: Stage, dtype: torch.dtype, rows: int, sizes: tuple[int, int], group: int) -> Iterator[Finding]:
    """With and without a bias; many rows take another way."""
    kernels, (n, k) = stage.kernels(), sizes
    shape = (n, k // group)
    given = Int4Rows(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, device=stage.device),
        (torch.rand(shape, device=stage.device) * 0.1 + 0.01).to(F16),
        torch.randint(0, 16, shape, dtype=torch.uint8, device=stage.device),
    )
    weight, bias = kernels.pack(given, dtype), stage.randn(n, dtype=dtype)
    x = stage.randn(rows, k, dtype=dtype)
    for added in (None, bias):
        out = torch.empty((rows, n), dtype=dtype, device=stage.device)
        kernels.linear(x, weight, added, out)
        case = f"{NAMES[dtype]}, {rows} x {k} x {n}, groups of {group}{'' if added is None else ', bias'}"
        more = 0 if added is None else added.double()
        # Beyond some rows the matrix is widened to the type first, and so rounded.
        limit = LIMITS[dtype] if rows <= 256 else 2 * LIMITS[dtype]
        yield stage.close("4-bit product", case, out, lambda m=more: x.double() @ widen(given, F64).T + m, limit, n)


def check_fp8(stage: Stage, dtype: torch.dtype, rows: int, sizes: tuple[int, int]) -> Iterator[Finding]:
    """Rows are rounded as the reference rounds them, and the product is that of what came of it."""
    kernels, (n, k) = stage.kernels(), sizes
    if stage.mode == "compile":
        given = Fp8Rows(torch.empty((n, k), dtype=E4M3, device=stage.device), stage.randn(n))
    else:
        given = to_fp8(stage.randn(n, k) / k**0.5)
    weight, bias, x = kernels.pack(given, dtype), stage.randn(n, dtype=dtype), stage.randn(rows, k, dtype=dtype)
    for added in (None, bias):
        out = torch.empty((rows, n), dtype=dtype, device=stage.device)
        kernels.linear(x, weight, added, out)
        case = f"{NAMES[dtype]}, {rows} x {k} x {n}{'' if added is None else ', bias'}"
        more = 0 if added is None else added.double()

        def wanted(more: torch.Tensor | int = more) -> torch.Tensor:
            return widen(to_fp8(x), F64) @ widen(given, F64).T + more

        yield stage.close("fp8 product", case, out, wanted, 1e-2, n)


def check_step(stage: Stage) -> Iterator[Finding]:
    """Differences into tables, inputs off them, drawn tokens into them, padding rows behind."""
    kernels = stage.kernels()
    slots, length, block = stage.pick((300, 4096, 16), (5, 40, 8))
    count, padded = stage.pick((200, 208), (3, 4))
    rng = np.random.RandomState(0)
    tokens = rng.randint(0, 1000, (slots, length)).astype(np.int32)
    pages = rng.randint(0, 10**6, (slots, length // block)).astype(np.int32)
    starts = rng.randint(0, length // 2, padded).astype(np.int32)
    queries = np.ones(count, np.int32)
    queries[:: max(1, count // 4)] = rng.randint(1, length // 2, len(queries[:: max(1, count // 4)]))
    query_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    query_start = np.concatenate([query_start, np.full(padded - count, query_start[-1], np.int32)])
    total = int(query_start[-1]) + padded - count
    segments, words, width = [], rng.randint(0, 99, 10 * length).astype(np.int32), length
    for row in range(min(slots, 9)):
        segments.append((row, 7 * row % (width // 2), row * 31, int(rng.randint(1, width // 2))))
    written, expected = stage.put(tokens), torch.from_numpy(tokens.copy())
    kernels.write_rows(written, stage.put(np.array(segments, np.int32)), stage.put(words), length)
    PlainInputs.write_rows(expected, torch.tensor(segments, dtype=torch.int32), torch.from_numpy(words), len(words))
    rows, columns, drawn = (rng.randint(0, 30, 40 if not stage.tiny else 3).astype(np.int32) for _ in range(3))
    rows = np.arange(len(rows), dtype=np.int32)
    kernels.put_tokens(written, *(stage.put(x) for x in (rows, columns, drawn)))
    PlainInputs.put_tokens(expected, *(torch.from_numpy(x) for x in (rows, columns, drawn)))
    yield stage.equal(
        "tables", f"{len(segments)} pieces, {len(rows)} tokens", written, lambda: expected.to(stage.device)
    )

    def inputs(device: torch.device) -> list[torch.Tensor]:
        sizes = (total,), (total,), (total,), (padded, pages.shape[1] + 3)
        return [torch.full(size, -9, dtype=torch.int32, device=device) for size in sizes]

    def step(put: Callable[[np.ndarray], torch.Tensor]) -> StepRows:
        which = rng_slots.astype(np.int32)
        return StepRows(*(put(x) for x in (np.array([count], np.int32), which, starts, query_start, tokens, pages)))

    rng_slots = np.resize(rng.permutation(slots), padded)
    mine, theirs = inputs(stage.device), inputs(torch.device("cpu"))
    kernels.prepare_inputs(step(stage.put), block, *mine)
    PlainInputs.prepare_inputs(step(torch.from_numpy), block, *theirs)
    for name, got, want in zip(("ids", "positions", "slots", "block tables"), mine, theirs, strict=True):
        yield stage.equal("step inputs", f"{name} of {count} rows", got, lambda want=want: want.to(stage.device))


def checks(stage: Stage) -> list[Check]:
    """All of this file."""
    found: list[Check] = [("step inputs", check_step)]
    wide = stage.pick(
        [(1, (4096, 4096)), (16, (6144, 4096)), (64, (4096, 14336)), (256, (1024, 3072))], [(3, (48, 64))]
    )
    wide += stage.pick([(300, (4096, 4096)), (5, (1000, 768))], [])
    for dtype in stage.pick((BF16, F16, F32), (F16,)):
        for rows, sizes in wide:
            for group in stage.pick((128, 32), (32,)):
                check = partial(check_int4, dtype=dtype, rows=rows, sizes=sizes, group=group)
                found.append((f"4 bits {NAMES[dtype]} {rows} x {sizes} / {group}", check))
            if not sizes[0] % 16:
                check = partial(check_fp8, dtype=dtype, rows=rows, sizes=sizes)
                found.append((f"fp8 {NAMES[dtype]} {rows} x {sizes}", check))
    return found

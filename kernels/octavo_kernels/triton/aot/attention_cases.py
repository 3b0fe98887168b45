"""Attention, its work list and its reduction; cache writes and page moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from octavo_kernels.interface import AttentionBatch, AttentionExtras, AttentionShape, StepBounds
from octavo_kernels.triton.aot.case import Case, Trait
from octavo_kernels.triton.aot.estimate import Work
from octavo_kernels.triton.attention import PagedAttention
from octavo_kernels.triton.attention_config import Gpu
from octavo_kernels.triton.cache import rope_kv
from octavo_kernels.triton.pages import move_pages
from octavo_kernels.triton.quant import page_shape

META = torch.device("meta")
F32, F16, BF16, E4M3, I8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", E4M3: "e4m3", I8: "int8"}
HEAD_SIZES = (64, 80, 96, 128, 256)
TYPES = ((BF16, BF16), (F16, F16), (F32, F32), (BF16, E4M3), (BF16, I8))
QUICK: frozenset[Trait] = frozenset({"no spills", "matrix units", "wide async loads"})
HEADS, KV_HEADS = 32, 8
# 64 sequences of 4,096 tokens decode one each; a chunk of 2,048 tokens follows as many.
SEQS, KEYS, CHUNK = 64, 4096, 2048


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _batch(seqs: int, max_queries: int, block: int) -> AttentionBatch:
    bounds = StepBounds(seqs, max_queries, KEYS)
    return AttentionBatch(_ints(1), _ints(seqs + 1), _ints(seqs), _ints(seqs, 16384 // block), bounds)


def _attention(
    gpu: Gpu, shape: AttentionShape, dtype: torch.dtype, pages: torch.dtype, seqs: int, tokens: int, extras: bool
) -> None:
    max_queries = 1 if tokens == seqs else tokens
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.empty((tokens, width), dtype=dtype, device=META)
    memory = torch.empty((9, *page_shape(shape, pages)), dtype=pages, device=META)
    out = torch.empty((tokens, shape.num_heads * shape.head_dim), dtype=dtype, device=META)
    per_head = torch.empty(shape.num_kv_heads, device=META)
    queries = torch.empty(shape.num_heads, device=META) if extras else None
    attention = PagedAttention(gpu, META, max_tokens=tokens, max_seqs=seqs)
    more = AttentionExtras(queries, queries, per_head, per_head)
    attention.attention(qkv, memory, memory, _batch(seqs, max_queries, shape.block_size), shape, out, more)


def _row_bytes(shape: AttentionShape, pages: torch.dtype) -> int:
    """Bytes of a key and a value of one head."""
    return 2 * (shape.head_dim * pages.itemsize + (4 if pages == I8 else 0))


def _decode_work(shape: AttentionShape, dtype: torch.dtype, pages: torch.dtype) -> Work:
    """Every key and value is read once; queries and outputs are little beside them."""
    keys = SEQS * KEYS * shape.num_kv_heads
    little = 2 * SEQS * shape.num_heads * shape.head_dim * dtype.itemsize
    return Work(keys * _row_bytes(shape, pages) + little, 4.0 * SEQS * KEYS * shape.num_heads * shape.head_dim)


def _chunk_work(shape: AttentionShape, dtype: torch.dtype, pages: torch.dtype) -> Work:
    """Queries see the KEYS - CHUNK keys before the chunk and half of the chunk, on average."""
    pairs = CHUNK * (KEYS - CHUNK + (CHUNK + 1) / 2)
    moved = KEYS * shape.num_kv_heads * _row_bytes(shape, pages)
    moved += 2 * CHUNK * shape.num_heads * shape.head_dim * dtype.itemsize
    return Work(moved, 4.0 * pairs * shape.num_heads * shape.head_dim)


def _shape(dim: int, block: int = 16, window: int = 0, soft_cap: float = 0.0) -> AttentionShape:
    return AttentionShape(HEADS, KV_HEADS, dim, block, dim**-0.5, window, soft_cap)


def _attention_cases() -> Iterator[Case]:
    for dim in HEAD_SIZES:
        for dtype, pages in TYPES:
            shape = _shape(dim)
            variant = f"{NAMES[dtype]}, pages {NAMES[pages]}, head {dim}"
            decode = partial(_attention, shape=shape, dtype=dtype, pages=pages, seqs=SEQS, tokens=SEQS, extras=False)
            work = _decode_work(shape, dtype, pages)
            quick = dim == 128 and pages in (BF16, E4M3)
            yield Case("attention, decodes", variant, "attention_kernel", decode, work, QUICK, quick)
            chunk = partial(_attention, shape=shape, dtype=dtype, pages=pages, seqs=SEQS, tokens=CHUNK, extras=False)
            work = _chunk_work(shape, dtype, pages)
            yield Case(
                "attention, chunks", variant, "attention_kernel", chunk, work, QUICK, dim == 128 and pages == BF16
            )
    for name, shape, extras in (
        ("pages of 64", _shape(128, 64), False),
        ("pages of 256", _shape(128, 256), False),
        ("window", _shape(128, window=1024), False),
        ("soft cap", _shape(128, soft_cap=50.0), False),
        ("sinks, slopes", _shape(128), True),
    ):
        for group, tokens in (("attention, decodes", SEQS), ("attention, chunks", CHUNK)):
            launch = partial(_attention, shape=shape, dtype=BF16, pages=BF16, seqs=SEQS, tokens=tokens, extras=extras)
            work = _decode_work(shape, BF16, BF16) if tokens == SEQS else _chunk_work(shape, BF16, BF16)
            yield Case(group, f"bf16, head 128, {name}", "attention_kernel", launch, work, QUICK)


def _small_cases() -> Iterator[Case]:
    for dim in HEAD_SIZES:
        decode = partial(_attention, shape=_shape(dim), dtype=BF16, pages=BF16, seqs=SEQS, tokens=SEQS, extras=False)
        parts = SEQS * HEADS * KEYS // 512
        work = Work(parts * (dim + 2) * 4 + SEQS * HEADS * dim * 2)
        yield Case(
            "attention, reduction", f"bf16, head {dim}", "attention_reduce_kernel", decode, work, chosen=dim == 128
        )
    decode = partial(_attention, shape=_shape(128), dtype=BF16, pages=BF16, seqs=SEQS, tokens=SEQS, extras=False)
    yield Case("attention, work list", "64 sequences", "attention_schedule_kernel", decode, Work(SEQS * 8 * 40.0))


def _cache(gpu: Gpu, shape: AttentionShape, dtype: torch.dtype, pages: torch.dtype, tokens: int) -> None:
    dim = shape.head_dim
    qkv = torch.empty((tokens, (shape.num_heads + 2 * shape.num_kv_heads) * dim), dtype=dtype, device=META)
    norm = torch.empty(dim, dtype=dtype, device=META)
    table = torch.empty((KEYS, dim), device=META)
    memory = torch.empty((9, *page_shape(shape, pages)), dtype=pages, device=META)
    per_head = torch.empty(shape.num_kv_heads, device=META)
    extras = AttentionExtras(k_scale=per_head, v_scale=per_head)
    rope_kv(qkv, _ints(tokens), table, norm, norm, 1e-6, _ints(tokens), memory, memory, shape, extras)


def _cache_cases() -> Iterator[Case]:
    for dim in HEAD_SIZES:
        for dtype, pages in TYPES:
            heads = 2 * HEADS + 2 * KV_HEADS
            moved = CHUNK * (heads * dim * dtype.itemsize + KV_HEADS * _row_bytes(_shape(dim), pages) + dim * 4)
            launch = partial(_cache, shape=_shape(dim), dtype=dtype, pages=pages, tokens=CHUNK)
            variant = f"{NAMES[dtype]}, pages {NAMES[pages]}, head {dim}"
            chosen = dim == 128 and pages in (BF16, I8)
            yield Case("cache write", variant, "cache_kernel", launch, Work(moved), chosen=chosen)


def _moves(gpu: Gpu, page: tuple[int, ...]) -> None:
    pages = torch.empty((32, 1000, *page), dtype=BF16, device=META)
    move_pages(pages, _ints(64), pages, _ints(64))


def attention_cases() -> Iterator[Case]:
    """All of this file."""
    yield from _attention_cases()
    yield from _small_cases()
    yield from _cache_cases()
    page = page_shape(_shape(128), BF16)
    yield Case(
        "page moves", "64 pages of 32 layers, 32 KiB", "move_pages_kernel", partial(_moves, page=page),
        Work(2.0 * 64 * 32 * 32768), chosen=True,
    )  # fmt: skip

"""Builders of attention inputs in the GPU's layout, and the reference's answer to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernel_cases import Paged, paged_batch
from torch import Tensor

from octavo_kernels import AttentionExtras, AttentionShape, StepBounds
from octavo_kernels.reference.backend import ReferenceKernels
from octavo_kernels.triton.attention import PagedAttention
from octavo_kernels.triton.attention_config import Gpu
from octavo_kernels.triton.quant import page_scales, page_shape

# Two multiprocessors, so that programs of the interpreter find more than one entry to work on.
TINY_GPU = Gpu("sm_90", 2, 232448)


@dataclass
class GpuCase:
    """Pages in the GPU's layout beside the numbers they stand for, float32 in the reference's layout."""

    k_pages: Tensor
    v_pages: Tensor
    plain: Paged
    extras: AttentionExtras | None = None


def gpu_case(
    lengths: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype = torch.float32,
    page_dtype: torch.dtype | None = None,
    extras: AttentionExtras | None = None,
    seed: int = 0,
) -> GpuCase:
    """Sequences of (query tokens, all keys), as ``paged_batch`` makes them: what is no key of a sequence is NaN."""
    plain = paged_batch(lengths, shape, torch.float32, seed)
    plain.qkv = plain.qkv.to(dtype)
    page_dtype = page_dtype or dtype
    k, v = plain.k_pages.transpose(2, 3).contiguous(), plain.v_pages
    if page_dtype == torch.int8:
        (k_pages, k), (v_pages, v) = (int8_pages(x, shape) for x in (k, v))
    elif page_dtype == torch.float8_e4m3fn:
        assert extras is not None
        assert extras.k_scale is not None
        assert extras.v_scale is not None
        k_pages = (k / extras.k_scale[:, None, None]).to(page_dtype)
        v_pages = (v / extras.v_scale[:, None, None]).to(page_dtype)
        k, v = k_pages.float() * extras.k_scale[:, None, None], v_pages.float() * extras.v_scale[:, None, None]
    else:
        k_pages, v_pages = k.to(page_dtype), v.to(page_dtype)
        k, v = k_pages.float(), v_pages.float()
    return GpuCase(k_pages, v_pages, replace(plain, k_pages=k.transpose(2, 3).contiguous(), v_pages=v), extras)


def int8_pages(x: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Pages [blocks, Hk, B, D] as int8 with their scales, and what they then stand for; NaN's scale is NaN."""
    scale = x.abs().amax(-1) / 127
    numbers = torch.where(x.isnan(), 77, (x / scale[..., None]).round())
    pages = torch.empty((x.shape[0], *page_shape(shape, torch.int8)), dtype=torch.int8)
    pages[:, : numbers[0].numel()] = numbers.to(torch.int8).flatten(1)
    scales = page_scales(pages, shape)
    assert scales is not None
    scales.copy_(scale.flatten(1))
    return pages, numbers * scale[..., None]


def attend(
    case: GpuCase,
    shape: AttentionShape,
    bounds: StepBounds | None = None,
    partial_rows: int = 64,
    split_keys: int = 512,
) -> Tensor:
    """The kernels' answer; rows of no sequence hold 77."""
    qkv, batch = case.plain.qkv, replace(case.plain.batch, bounds=bounds)
    rows, seqs = qkv.shape[0], batch.query_start.shape[0] - 1
    attention = PagedAttention(
        TINY_GPU, qkv.device, max_tokens=rows, max_seqs=seqs, partial_rows=partial_rows, split_keys=split_keys
    )
    out = torch.full((rows, shape.num_heads * shape.head_dim), 77.0).to(qkv.dtype)
    attention.attention(qkv, case.k_pages, case.v_pages, batch, shape, out, case.extras)
    return out


def reference(case: GpuCase, shape: AttentionShape) -> Tensor:
    """The answer in float32, computed from the numbers that the pages stand for."""
    plain, extras = case.plain, case.extras
    out = torch.full((plain.qkv.shape[0], shape.num_heads * shape.head_dim), 77.0)
    rest = None if extras is None else AttentionExtras(sinks=extras.sinks, slopes=extras.slopes)
    ReferenceKernels().attention(plain.qkv.float(), plain.k_pages, plain.v_pages, plain.batch, shape, out, rest)
    return out

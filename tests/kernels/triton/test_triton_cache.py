"""Norm, rotary embedding, quantising and scattering in one kernel, and the number formats of pages."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels import AttentionExtras, AttentionShape
from octavo_kernels.reference.backend import ReferenceKernels
from octavo_kernels.triton.cache import rope_kv
from octavo_kernels.triton.quant import e4m3_to_float, float_to_e4m3, page_scales, page_shape, to_int8

F32, F16, BF16, E4M3, I8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
ROWS, BLOCKS = 7, 4


class Case:
    """Inputs of one call; ``run`` gives (queries, k pages, v pages) of the kernel or of the reference, in its layout."""

    def __init__(self, heads: tuple[int, int], dim: int, rot: int, block: int, norms: bool, dtype: torch.dtype) -> None:
        gen = torch.Generator().manual_seed(dim + rot)
        self.shape = AttentionShape(*heads, dim, block, dim**-0.5)
        angles = torch.rand(50, rot // 2, generator=gen) * 6 if rot else None
        self.table = None if angles is None else torch.cat([angles.cos(), angles.sin()], -1)
        self.norms = [torch.randn(dim, generator=gen).to(dtype) if norms else None for _ in range(2)]
        self.positions = torch.tensor([0, 49, 3, 4, 5, 17, 99], dtype=torch.int32)  # the last beyond the table
        self.slots = torch.tensor([0, block, 2 * block - 1, -1, 3 * block, 4 * block - 1, 5], dtype=torch.int32)
        self.qkv = torch.randn(ROWS, (heads[0] + 2 * heads[1]) * dim, generator=gen).to(dtype)
        self.width = heads[0] * dim

    def kernel(
        self, k: Tensor, v: Tensor, extras: AttentionExtras | None = None, programs: int = 8
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv.clone()
        args = (qkv, self.positions, self.table, *self.norms, 1e-6, self.slots, k, v, self.shape, extras)
        rope_kv(*args, programs=programs)
        return qkv[:, : self.width], k, v

    def reference(
        self, dtype: torch.dtype = F32, extras: AttentionExtras | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv.float()
        heads, dim, block = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size
        k = torch.full((BLOCKS, heads, dim, block), 7.0).to(dtype)
        v = torch.full((BLOCKS, heads, block, dim), 7.0).to(dtype)
        norms = [None if norm is None else norm.float() for norm in self.norms]
        ReferenceKernels().rope_kv(qkv, self.positions, self.table, *norms, 1e-6, self.slots, k, v, self.shape, extras)
        return qkv[:, : self.width], k.transpose(2, 3), v

    def pages(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (BLOCKS, *page_shape(self.shape, dtype))
        return torch.full(shape, 7.0).to(dtype), torch.full(shape, 7.0).to(dtype)


@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize(
    ("heads", "dim", "rot", "block", "norms", "dtype"),
    [
        ((4, 4), 64, 64, 16, True, F32),
        ((9, 3), 80, 20, 8, True, BF16),
        ((8, 1), 128, 0, 256, True, F16),
        ((3, 1), 96, 96, 24, False, BF16),
        ((2, 1), 256, 256, 32, False, F32),
    ],
)
def test_rope_kv(
    programs: int, heads: tuple[int, int], dim: int, rot: int, block: int, norms: bool, dtype: torch.dtype
) -> None:
    case = Case(heads, dim, rot, block, norms, dtype)
    got = case.kernel(*case.pages(dtype), programs=programs)
    bounds = {F32: (1e-5, 1e-5), F16: (2e-3, 1e-3), BF16: (1e-2, 1e-3)}[dtype]
    for mine, theirs in zip(got, case.reference(), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=bounds[0], atol=bounds[1])
    for pages in got[1:]:  # only the slots named were written
        touched = (pages != 7.0).any(dim=3).any(dim=1).flatten().nonzero().flatten().tolist()
        assert touched == sorted(s for s in case.slots.tolist() if s >= 0)


@pytest.mark.parametrize("rot", [64, 24])
def test_e4m3_pages_with_a_scale_per_head(rot: int) -> None:
    case = Case((2, 2), 64, rot, 16, True, F32)
    extras = AttentionExtras(k_scale=torch.tensor([0.01, 0.001]), v_scale=torch.tensor([0.5, 0.004]))
    _, k, v = case.kernel(*case.pages(E4M3), extras)
    _, expected_k, expected_v = case.reference(E4M3, extras)
    for mine, theirs in ((k.float(), expected_k.float()), (v.float(), expected_v.float())):
        # A number next to the middle between two codes may go either way: one step of 1 / 8 at most, and rarely.
        torch.testing.assert_close(mine, theirs, rtol=0.13, atol=2**-9)
        assert (mine != theirs).float().mean() < 0.01
        assert mine.abs().max() == 448.0  # some were too large for their scale


def test_int8_pages_carry_their_scales() -> None:
    case = Case((2, 2), 80, 20, 8, True, F32)
    case.qkv[4] = 0.0
    _, k, v = case.kernel(*case.pages(I8))
    numbers = case.shape.num_kv_heads * 8 * 80
    for pages, expected in zip((k, v), case.reference()[1:], strict=True):
        scales = page_scales(pages, case.shape)
        assert scales is not None
        whole = pages[:, :numbers].view(BLOCKS, 2, 8, 80).float()
        scale = scales.reshape(BLOCKS, 2, 8)
        for slot in (s for s in case.slots.tolist() if s >= 0):
            page, place = divmod(slot, 8)
            row, own = expected[page, :, place], scale[page, :, place, None]
            assert ((whole[page, :, place] * own - row).abs() <= own * 0.501).all()
            assert (whole[page, :, place].abs().amax(-1) == 127).all() == bool(row.any())
            assert (own > 0).all()
    untouched = page_scales(torch.full_like(k, 7), case.shape)
    after = page_scales(k, case.shape)
    assert untouched is not None
    assert after is not None
    assert torch.equal(after[2, 1:8], untouched[2, 1:8])


def test_no_tokens_are_no_launch() -> None:
    case = Case((2, 1), 64, 64, 16, False, F32)
    case.qkv = case.qkv[:0]
    queries, k, _ = case.kernel(*case.pages(F32))
    assert queries.shape == (0, 128)
    assert (k == 7.0).all()


@triton.jit
def _encode(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out_ptr + at, float_to_e4m3(tl.load(x_ptr + at)))


@triton.jit
def _decode(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out_ptr + at, e4m3_to_float(tl.load(x_ptr + at)))


@triton.jit
def _whole(x_ptr, out_ptr, scale, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out_ptr + at, to_int8(tl.load(x_ptr + at), scale))


def test_every_e4m3_code_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    out = torch.empty(256)
    _decode[(1,)](codes, out, N=256)
    expected = codes.view(E4M3).float()
    finite = ~expected.isnan()
    assert finite.sum() == 254
    assert torch.equal(out[finite], expected[finite])


def test_e4m3_is_written_as_torch_rounds_it() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2  # ties go to even
    near = torch.cat([middles * (1 - 1e-6), middles, middles * (1 + 1e-6)])
    gen = torch.Generator().manual_seed(0)
    some = torch.randn(200, generator=gen) * torch.logspace(-4, 2.6, 200)
    x = torch.cat([codes, near, some, torch.tensor([0.0, 1e-9, 2**-10, 448.0, 463.9])])
    x = torch.cat([x, -x])
    padded = torch.zeros(2048)
    padded[: len(x)] = x
    out = torch.empty(2048, dtype=torch.uint8)
    _encode[(1,)](padded, out, N=2048)
    assert torch.equal(out[: len(x)], x.clamp(-448, 448).to(E4M3).view(torch.uint8))


def test_what_is_too_large_for_e4m3_saturates() -> None:
    x = torch.tensor([465.0, 1e30, float("inf"), -float("inf"), float("nan"), 448.0, -449.0, 1.0])
    out = torch.empty(8, dtype=torch.uint8)
    _encode[(1,)](x, out, N=8)
    assert out.view(E4M3).float().tolist()[:4] == [448.0, 448.0, 448.0, -448.0]
    assert out.view(E4M3).float().abs().tolist()[4:] == [448.0, 448.0, 448.0, 1.0]


def test_whole_numbers_go_to_the_nearest() -> None:
    x = torch.tensor([0.0, 0.24, 0.26, -0.24, -0.26, 63.5, -63.5, 64.0])
    out = torch.empty(8, dtype=torch.int8)
    _whole[(1,)](x, out, 0.5, N=8)
    assert out.tolist() == [0, 0, 1, 0, -1, 127, -127, 127]

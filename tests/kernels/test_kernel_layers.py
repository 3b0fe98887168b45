"""The C kernels of norms, products, rotary embedding and copies against their torch references."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import AttentionShape
from octavo_kernels.interface import Kernels

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def filled(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 95, 97, 200])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (1, 8), (17, 33), (100, 1025), (48, 2050)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(cpu: Kernels, reference: Kernels, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * n)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k).to(dtype) / k**0.5, torch.randn(n)
    for b in (None, bias):
        out, expected = filled(rows, n), filled(rows, n)
        cpu.linear(x, cpu.pack(weight, dtype), b, out)
        reference.linear(x, reference.pack(weight, torch.float32), b, expected)
        torch.testing.assert_close(out, expected, **CLOSE)


def test_a_row_of_a_product_does_not_depend_on_the_other_rows(cpu: Kernels) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(130, 1500), torch.randn(70, 1500)
    for dtype in (torch.float32, torch.bfloat16):
        packed = cpu.pack(weight, dtype)
        whole = filled(130, 70)
        cpu.linear(x, packed, None, whole)
        for count in (1, 2, 3, 7, 64):
            part = filled(count, 70)
            cpu.linear(x[5 : 5 + count].contiguous(), packed, None, part)
            assert torch.equal(part, whole[5 : 5 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(cpu: Kernels, reference: Kernels, dtype: torch.dtype) -> None:
    weight = torch.randn(37, 24).to(dtype)
    ids = torch.tensor([0, 36, 5, 5, -1, 37], dtype=torch.int32)
    out, expected = filled(6, 24), filled(6, 24)
    cpu.embed(ids, cpu.pack(weight, dtype), out)
    reference.embed(ids, reference.pack(weight, torch.float32), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("hidden", [8, 20, 576, 1001])
def test_norms(cpu: Kernels, reference: Kernels, rows: int, hidden: int) -> None:
    x, weight, residual = torch.randn(rows, hidden), torch.randn(hidden), torch.randn(rows, hidden)
    out, expected = filled(rows, hidden), filled(rows, hidden)
    cpu.rms_norm(x, weight, 1e-5, out)
    reference.rms_norm(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, **CLOSE)
    index = torch.tensor([rows - 1, 0, 0], dtype=torch.int32)[: 3 if rows else 0]
    got, want = filled(len(index), hidden), filled(len(index), hidden)
    cpu.gather_add_rms_norm(x, residual, index, weight, 1e-5, got)
    reference.gather_add_rms_norm(x, residual, index, weight, 1e-5, want)
    torch.testing.assert_close(got, want, **CLOSE)
    mine, theirs = residual.clone(), residual.clone()
    cpu.add_rms_norm(x, mine, weight, 1e-5, out)
    reference.add_rms_norm(x, theirs, weight, 1e-5, expected)
    torch.testing.assert_close(mine, theirs, **CLOSE)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 515), (2, 1536), (4, 3)])
def test_act_and_mul(cpu: Kernels, reference: Kernels, activation: str, rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 4
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    out, expected = filled(rows, width), filled(rows, width)
    cpu.act_and_mul(gate_up, activation, out)  # type: ignore[arg-type]
    reference.act_and_mul(gate_up, activation, expected)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "rot", "block"), [((4, 4), 64, 64, 16), ((9, 3), 80, 20, 8), ((8, 1), 128, 0, 256)]
)
def test_rope_kv(
    cpu: Kernels,
    reference: Kernels,
    norms: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    rot: int,
    block: int,
) -> None:
    torch.manual_seed(dim)
    shape = AttentionShape(*heads, dim, block, dim**-0.5)
    rows, blocks = 7, 4
    angles = torch.rand(50, rot // 2) * 6 if rot else None
    table = None if angles is None else torch.cat([angles.cos(), angles.sin()], -1)
    weights = (torch.randn(dim), torch.randn(dim)) if norms else (None, None)
    positions = torch.tensor([0, 49, 3, 4, 5, 17, 99], dtype=torch.int32)
    slots = torch.tensor([0, block, 2 * block - 1, -1, 3 * block, 4 * block - 1, 5], dtype=torch.int32)
    qkv = torch.randn(rows, (heads[0] + 2 * heads[1]) * dim)
    results = []
    for kernels in (cpu, reference):
        mine = qkv.clone()
        k = torch.full((blocks, heads[1], dim, block), 7.0).to(dtype)
        v = torch.full((blocks, heads[1], block, dim), 7.0).to(dtype)
        kernels.rope_kv(mine, positions, table, *weights, 1e-6, slots, k, v, shape)
        results.append((mine, k, v))
    bounds = CLOSE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **bounds)
    # Only the slots named were written.
    touched = (results[0][1] != 7.0).any(dim=2).any(dim=1).flatten().nonzero().flatten().tolist()
    assert touched == sorted(s for s in slots.tolist() if s >= 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_pages(cpu: Kernels, reference: Kernels, dtype: torch.dtype) -> None:
    pages = torch.randn(3, 6, 2, 8, 16).to(dtype)
    source, destination = torch.tensor([0, 0, 5], dtype=torch.int32), torch.tensor([1, 3, 2], dtype=torch.int32)
    mine, theirs = pages.clone(), pages.clone()
    cpu.copy_pages(mine, source, destination)
    reference.copy_pages(theirs, source, destination)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine[:, [1, 3, 2]], pages[:, [0, 0, 5]])
    assert torch.equal(mine[:, [0, 4, 5]], pages[:, [0, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outwards", [True, False])
def test_move_pages_between_memories(cpu: Kernels, reference: Kernels, dtype: torch.dtype, outwards: bool) -> None:
    """One side by layer, the other by page, each page one piece, as the two tiers lie."""
    device = torch.randn(3, 6, 2, 8, 16).to(dtype)
    host = torch.randn(4, 2, 3, 256).to(dtype)
    first, second = torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32)
    results = []
    for kernels in (cpu, reference):
        mine, theirs = device.clone(), host.clone()
        sides = (mine.flatten(2), theirs[:, 1].transpose(0, 1))
        if outwards:
            kernels.move_pages(sides[0], first, sides[1], second)
        else:
            kernels.move_pages(sides[1], second, sides[0], first)
        results.append((mine, theirs))
    for mine, theirs in results:
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            assert torch.equal(mine[:, i].flatten(1), theirs[j, 1])
        untouched = (theirs[2], host[2]), (theirs[:, 0], host[:, 0]), (mine[:, [1, 3, 4]], device[:, [1, 3, 4]])
        assert all(torch.equal(got, old) for got, old in untouched)
        assert torch.equal(mine, device) if outwards else torch.equal(theirs, host)


def test_pages_of_another_size_are_not_moved(cpu: Kernels) -> None:
    pages, one = torch.zeros(2, 4, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.move_pages(pages, one, torch.zeros(2, 4, 8), one)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.move_pages(pages, one, torch.zeros(3, 4, 16), one)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.move_pages(pages, one, torch.zeros(2, 4, 32)[..., ::2], one)
    with pytest.raises(TypeError):
        cpu.move_pages(pages, one, pages.double(), one)


def test_a_recorded_program_replays_with_other_row_counts(cpu: Kernels) -> None:
    x, weight, norm = torch.randn(9, 40), torch.randn(24, 40), torch.randn(40)
    packed = cpu.pack(weight, torch.float32)
    normed, out = filled(9, 40), filled(9, 24)
    recording = cpu.record()
    assert recording is not None
    with recording as finish:
        cpu.rms_norm(x, norm, 1e-6, normed)
        cpu.linear(normed, packed, None, out)
    program = finish()
    assert out.isnan().all()
    program.run(4)
    expected = torch.nn.functional.rms_norm(x, (40,), norm, 1e-6) @ weight.t()
    torch.testing.assert_close(out[:4], expected[:4], rtol=1e-4, atol=1e-4)
    assert out[4:].isnan().all()
    x.copy_(torch.randn(9, 40))
    program.run(9)
    expected = torch.nn.functional.rms_norm(x, (40,), norm, 1e-6) @ weight.t()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_wrong_type_is_refused(cpu: Kernels) -> None:
    with pytest.raises(TypeError):
        cpu.rms_norm(torch.randn(2, 8).double(), torch.randn(8), 1e-6, torch.empty(2, 8))
    with pytest.raises(ValueError, match="linear"):
        cpu.linear(torch.randn(2, 9), cpu.pack(torch.randn(4, 8), torch.float32), None, torch.empty(2, 4))

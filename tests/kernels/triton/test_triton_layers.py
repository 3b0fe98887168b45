"""Norms, embedding and gated activations by Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.interface import Activation, Kernels
from octavo_kernels.triton import layers

# The exponential of a large number is meant to be infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

BOUNDS = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}
DTYPES = list(BOUNDS)


def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 64), (3, 1001), (2, 5120)])
def test_norms(reference: Kernels, rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden)
    x, residual = torch.randn(rows, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    out, expected = filled(rows, hidden, dtype=dtype), filled(rows, hidden, dtype=dtype)
    layers.rms_norm(x, weight, 1e-5, out)
    reference.rms_norm(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, **BOUNDS[dtype])
    mine, theirs = residual.clone(), residual.clone()
    layers.add_rms_norm(x, mine, weight, 1e-5, out)
    reference.add_rms_norm(x, theirs, weight, 1e-5, expected)
    torch.testing.assert_close(mine, theirs, **BOUNDS[dtype])
    torch.testing.assert_close(out, expected, **BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_gathered_rows_change_nothing_else(reference: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 48), (5, 48), (48,)))
    before = x.clone(), residual.clone()
    index = torch.tensor([4, 0, 0], dtype=torch.int32)
    out, expected = filled(3, 48, dtype=dtype), filled(3, 48, dtype=dtype)
    layers.gather_add_rms_norm(x, residual, index, weight, 1e-6, out)
    reference.gather_add_rms_norm(x, residual, index, weight, 1e-6, expected)
    torch.testing.assert_close(out, expected, **BOUNDS[dtype])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_norms_in_place_and_of_strided_rows(reference: Kernels) -> None:
    wide, weight = torch.randn(3, 100), torch.randn(40)
    before = wide.clone()
    expected = torch.empty(3, 40)
    reference.rms_norm(wide[:, 20:60], weight, 1e-6, expected)
    layers.rms_norm(wide[:, 20:60], weight, 1e-6, wide[:, 20:60])
    torch.testing.assert_close(wide[:, 20:60], expected, **BOUNDS[torch.float32])
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 60:], before[:, 60:])
    x, residual = torch.randn(2, 40), torch.randn(2, 40)
    total = x + residual
    reference.rms_norm(total, weight, 1e-6, expected[:2])
    layers.add_rms_norm(x, residual, weight, 1e-6, x)
    torch.testing.assert_close(x, expected[:2], **BOUNDS[torch.float32])
    assert torch.equal(residual, total)


def test_a_norm_of_half_precision_is_computed_in_float32() -> None:
    """The squares of these overflow float16, and their sum in bfloat16 would stop growing."""
    out = torch.empty(1, 1024, dtype=torch.float16)
    layers.rms_norm(torch.full((1, 1024), 300.0).half(), torch.ones(1024).half(), 0.0, out)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [24, 1030])
def test_embed(reference: Kernels, dtype: torch.dtype, hidden: int) -> None:
    weight = torch.randn(37, hidden).to(dtype)
    ids = torch.tensor([0, 36, 5, 5, -1, 37], dtype=torch.int32)
    out, expected = filled(6, hidden, dtype=dtype), filled(6, hidden, dtype=dtype)
    layers.embed(ids, weight, out)
    reference.embed(ids, reference.pack(weight, dtype), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 515), (2, 1536), (4, 3)])
def test_act_and_mul(reference: Kernels, activation: Activation, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    out, expected = filled(rows, width, dtype=dtype), torch.empty(rows, width, dtype=torch.float64)
    layers.act_and_mul(gate_up, activation, out)
    reference.act_and_mul(gate_up.double(), activation, expected)
    torch.testing.assert_close(out, expected.to(dtype), **BOUNDS[dtype])


def test_shapes_that_do_not_fit_are_refused() -> None:
    wide = torch.empty(1, layers.MAX_HIDDEN + 1)
    with pytest.raises(ValueError, match="hidden size"):
        layers.rms_norm(wide, wide[0], 1e-6, wide)
    with pytest.raises(ValueError, match="contiguous rows"):
        layers.rms_norm(torch.empty(4, 3).t(), torch.ones(4), 1e-6, torch.empty(3, 4))
    with pytest.raises(ValueError, match="gate and up"):
        layers.act_and_mul(torch.empty(2, 8), "silu", torch.empty(2, 5))

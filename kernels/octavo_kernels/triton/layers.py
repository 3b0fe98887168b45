"""Norms, embedding and gated activations: one pass over memory each, computed in float32 whatever the type stored.

Letters as in ``octavo_kernels.interface``: T tokens, R rows, H hidden size, I intermediate size, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import Activation

# A row lies in the registers of one program: 32,768 float32 over 16 warps are 64 a thread.
MAX_HIDDEN = 32768
# Elements of one program of the kernels that go by element: 16 bytes a thread of 4 warps at two bytes each.
SPAN = 1024


@triton.jit
def _normed(x, weight_ptr, column, inside, hidden, eps):
    """weight * x / rms(x) of a row float32[BLOCK]; places outside it hold zeros, which leave the sum alone."""
    mean_square = tl.sum(x * x, 0) / hidden
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    return weight * (x * tl.rsqrt(mean_square + eps))


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, H], rows x_stride apart
    weight_ptr,  # [H]
    out_ptr,  # [T, H], rows out_stride apart; may be x
    hidden,  # H
    x_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least H
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    out = _normed(x, weight_ptr, column, inside, hidden, eps)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # [T, H], rows x_stride apart
    residual_ptr,  # [T, H], rows residual_stride apart; becomes residual + x
    weight_ptr,  # [H]
    out_ptr,  # [T, H], rows out_stride apart; may be x
    hidden,  # H
    x_stride,
    residual_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least H
):
    """One program per row. The norm is that of the sum as stored, rounded: what a later layer will read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    residual_at = residual_ptr + row * residual_stride + column
    total = (tl.load(residual_at, inside, 0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, total, inside)
    out = _normed(total.to(tl.float32), weight_ptr, column, inside, hidden, eps)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def gather_add_rms_norm_kernel(
    x_ptr,  # [T, H], rows x_stride apart
    residual_ptr,  # [T, H], rows residual_stride apart
    index_ptr,  # int32[R], rows of x and residual
    weight_ptr,  # [H]
    out_ptr,  # [R, H], rows out_stride apart
    hidden,  # H
    x_stride,
    residual_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least H
):
    """One program per row asked for: the last norm is computed only where logits are wanted."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index_ptr + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + source * x_stride + column, inside, 0.0).to(tl.float32)
    residual = tl.load(residual_ptr + source * residual_stride + column, inside, 0.0).to(tl.float32)
    total = (x + residual).to(residual_ptr.dtype.element_ty).to(tl.float32)
    out = _normed(total, weight_ptr, column, inside, hidden, eps)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def embed_kernel(
    ids_ptr,  # int32[T]
    weight_ptr,  # [V, H], rows weight_stride apart
    out_ptr,  # [T, H], rows out_stride apart
    vocab,  # V
    hidden,  # H
    weight_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    """Programs (row, span of columns). An id outside the vocabulary gives zeros and reads nothing."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    values = tl.load(weight_ptr + token * weight_stride + column, inside & known, 0.0)
    tl.store(out_ptr + row * out_stride + column, values.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)); an overflowing exponential gives the limit, -0."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x):
    """GELU by its tanh form (Hendrycks and Gimpel, arXiv 1606.08415): x (1 + tanh(a)) / 2 = x / (1 + exp(-2a)).

    The right side loses no digits where the tanh is close to -1.
    """
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def act_and_mul_kernel(
    gate_up_ptr,  # [T, 2I] = [gate | up], rows gate_up_stride apart
    out_ptr,  # [T, I], rows out_stride apart
    width,  # I
    gate_up_stride,
    out_stride,
    GELU: tl.constexpr,  # GELU (tanh form) instead of SiLU
    BLOCK: tl.constexpr,
):
    """Programs (row, span of columns): activation(gate) * up, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_at + width, inside, 0.0).to(tl.float32)
    if GELU:
        gate = _gelu_tanh(gate)
    else:
        gate = _silu(gate)
    tl.store(out_ptr + row * out_stride + column, (gate * up).to(out_ptr.dtype.element_ty), inside)


def _row_block(hidden: int) -> tuple[int, int]:
    """The block that holds a row of ``hidden`` elements, and its warps: 16 elements a thread, two wide loads.

    Raises:
        ValueError: such a row does not fit one program.
    """
    if hidden > MAX_HIDDEN:
        raise ValueError(f"a hidden size of {hidden}; norms take at most {MAX_HIDDEN}")
    block = max(16, triton.next_power_of_2(hidden))
    return block, min(16, max(1, block // 512))


def _check_rows(*tensors: Tensor) -> None:
    """Raises ValueError: a tensor is no matrix of contiguous rows."""
    for tensor in tensors:
        if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
            raise ValueError(f"expected a matrix with contiguous rows, not {tuple(tensor.shape)} by {tensor.stride()}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See ``Kernels.rms_norm``."""
    _check_rows(x, out)
    block, warps = _row_block(x.shape[1])
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](
            x, weight, out, x.shape[1], x.stride(0), out.stride(0), eps, BLOCK=block, num_warps=warps
        )


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See ``Kernels.add_rms_norm``."""
    _check_rows(x, residual, out)
    block, warps = _row_block(x.shape[1])
    if x.shape[0]:
        strides = (x.stride(0), residual.stride(0), out.stride(0))
        add_rms_norm_kernel[(x.shape[0],)](
            x, residual, weight, out, x.shape[1], *strides, eps, BLOCK=block, num_warps=warps
        )


def gather_add_rms_norm(x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See ``Kernels.gather_add_rms_norm``."""
    _check_rows(x, residual, out)
    block, warps = _row_block(x.shape[1])
    if out.shape[0]:
        strides = (x.stride(0), residual.stride(0), out.stride(0))
        gather_add_rms_norm_kernel[(out.shape[0],)](
            x, residual, index, weight, out, x.shape[1], *strides, eps, BLOCK=block, num_warps=warps
        )


def embed(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, H] = rows ``ids`` int32[T] of ``weight`` [V, H]; zeros for ids outside it."""
    _check_rows(weight, out)
    rows, hidden = out.shape
    if rows:
        embed_kernel[(rows, triton.cdiv(hidden, SPAN))](
            ids, weight, out, weight.shape[0], hidden, weight.stride(0), out.stride(0), BLOCK=SPAN, num_warps=4
        )


def act_and_mul(gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """See ``Kernels.act_and_mul``."""
    _check_rows(gate_up, out)
    rows, width = out.shape
    if gate_up.shape != (rows, 2 * width):
        raise ValueError(f"gate and up {tuple(gate_up.shape)} for an output {tuple(out.shape)}")
    if rows:
        act_and_mul_kernel[(rows, triton.cdiv(width, SPAN))](
            *(gate_up, out, width, gate_up.stride(0), out.stride(0)),
            GELU=activation == "gelu_tanh",
            BLOCK=SPAN,
            num_warps=4,
        )

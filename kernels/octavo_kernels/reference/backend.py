"""The reference backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionExtras,
    AttentionShape,
    Candidates,
    Fp8Rows,
    Int4Rows,
    Kernels,
    LinearWeight,
    Logprobs,
    PageShapes,
    SampleRows,
    WeightRows,
)
from octavo_kernels.quantized import fp8_product, to_fp8, widen
from octavo_kernels.reference.batch import PlainInputs
from octavo_kernels.reference.sampling import candidates_of, logprobs_of, sample_row


def transposed_keys(shape: AttentionShape, dtype: torch.dtype) -> PageShapes:
    """Pages of the CPU: K [Hk, D, B], V [Hk, B, D].

    Raises:
        ValueError: ``dtype`` would need a scale per token.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"no pages of {dtype} on a CPU")
    heads, dim, block = shape.num_kv_heads, shape.head_dim, shape.block_size
    return PageShapes((heads, dim, block), (heads, block, dim))


def _to_multiples(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [tokens, Hk, D] in ``dtype``; e4m3 in multiples of ``scale`` [Hk], saturating."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    wide = x.float() if scale is None else x.float() / scale[:, None]
    return wide.clamp(-448.0, 448.0).to(dtype)


def pack_whole(kernels: Kernels, rows: WeightRows, dtype: torch.dtype) -> LinearWeight:
    """``Kernels.pack`` by way of the backend's ``new_weight`` and ``set_rows``."""
    first = rows if isinstance(rows, Tensor) else rows.scale
    weight = kernels.new_weight(rows, len(first), dtype)
    kernels.set_rows(weight, 0, rows)
    return weight


class ReferenceKernels(PlainInputs):
    """Implements ``octavo_kernels.interface.Kernels``; see there for shapes."""

    name = "reference"
    device = torch.device("cpu")

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def page_shapes(self, shape: AttentionShape, dtype: torch.dtype) -> PageShapes:
        return transposed_keys(shape, dtype)

    def start_step(self) -> None:
        pass

    def record(self) -> None:
        return None

    def can_hold(self, rows: Fp8Rows | Int4Rows) -> bool:
        return True

    def new_weight(self, rows: WeightRows, out_features: int, dtype: torch.dtype) -> LinearWeight:
        def like(part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            return torch.empty((out_features, *part.shape[1:]), dtype=dtype or part.dtype)

        if isinstance(rows, Fp8Rows):
            return LinearWeight(like(rows.values), out_features, rows.values.shape[1], like(rows.scale))
        if isinstance(rows, Int4Rows):
            columns = rows.codes.shape[1]
            return LinearWeight(like(rows.codes), out_features, columns, like(rows.scale), like(rows.zero))
        return LinearWeight(like(rows, dtype), out_features, rows.shape[1])

    def set_rows(self, weight: LinearWeight, first: int, rows: WeightRows) -> None:
        parts: tuple[Tensor, ...]
        if isinstance(rows, Fp8Rows):
            parts = (rows.values, rows.scale)
        elif isinstance(rows, Int4Rows):
            parts = (rows.codes, rows.scale, rows.zero)
        else:
            parts = (rows,)
        for whole, part in zip((weight.data, weight.scale, weight.zero), parts, strict=False):
            assert whole is not None
            whole[first : first + len(part)] = part

    def pack(self, rows: WeightRows, dtype: torch.dtype) -> LinearWeight:
        return pack_whole(self, rows, dtype)

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
        if weight.data.dtype == torch.float8_e4m3fn:
            assert weight.scale is not None
            product = fp8_product(to_fp8(x), Fp8Rows(weight.data, weight.scale))
            out.copy_(product if bias is None else product + bias)
            return
        matrix = weight.data
        if weight.scale is not None and weight.zero is not None:
            matrix = widen(Int4Rows(weight.data, weight.scale, weight.zero), torch.float32)
        out.copy_(F.linear(x.to(matrix.dtype), matrix, None if bias is None else bias.to(matrix.dtype)))

    def embed(self, ids: Tensor, weight: LinearWeight, out: Tensor) -> None:
        known = (ids >= 0) & (ids < weight.out_features)
        out.copy_(torch.where(known[:, None], weight.data[torch.where(known, ids, 0).long()], 0))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        wide = x.float()
        out.copy_(weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        residual += x
        self.rms_norm(residual, weight, eps, out)

    def gather_add_rms_norm(
        self, x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        self.rms_norm(x[index.long()] + residual[index.long()], weight, eps, out)

    def act_and_mul(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up)

    def rope_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        shape: AttentionShape,
        extras: AttentionExtras | None = None,
    ) -> None:
        extras = extras or AttentionExtras()
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        first_k, first_v = shape.num_heads, shape.num_heads + shape.num_kv_heads
        q, k, v = heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]
        if q_norm is not None:
            self.rms_norm(q, q_norm, eps, q)
        if k_norm is not None:
            self.rms_norm(k, k_norm, eps, k)
        if table is not None:
            cos, sin = table[positions.long().clamp(0, table.shape[0] - 1)][:, None, :].chunk(2, dim=-1)
            half = cos.shape[-1]
            for x in (q, k):
                a, b = x[..., :half].float(), x[..., half : 2 * half].float()
                x[..., : 2 * half] = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
        written = slots >= 0
        page, offset = slots[written].long() // shape.block_size, slots[written].long() % shape.block_size
        k_pages[page, :, :, offset] = _to_multiples(k[written], extras.k_scale, k_pages.dtype)
        v_pages[page, :, offset, :] = _to_multiples(v[written], extras.v_scale, v_pages.dtype)

    def attention(
        self,
        qkv: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        out: Tensor,
        extras: AttentionExtras | None = None,
    ) -> None:
        extras = extras or AttentionExtras()
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        for s in range(int(batch.num_seqs[0])):
            start, end, length = int(batch.query_start[s]), int(batch.query_start[s + 1]), int(batch.seq_lens[s])
            if end == start:
                continue
            first = max(0, length - (end - start) + 1 - shape.window) if shape.window else 0
            skipped = first // shape.block_size  # pages that lie wholly before every query's window
            pages = batch.block_tables[s, skipped : -(-length // shape.block_size)].long()
            keys = torch.arange(skipped * shape.block_size, length)
            k = k_pages[pages].permute(1, 2, 0, 3).flatten(2)[:, :, : len(keys)].float()  # [Hk, D, keys]
            v = v_pages[pages].permute(1, 0, 2, 3).flatten(1, 2)[:, : len(keys)].float()  # [Hk, keys, D]
            if k_pages.dtype == torch.float8_e4m3fn:
                k = k if extras.k_scale is None else k * extras.k_scale[:, None, None]
                v = v if extras.v_scale is None else v * extras.v_scale[:, None, None]
            group = shape.num_heads // shape.num_kv_heads
            q = heads[start:end, : shape.num_heads].float().transpose(0, 1)  # [Hq, queries, D]
            scores = q @ k.repeat_interleave(group, 0) * shape.scale
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            at = torch.arange(length - (end - start), length)[:, None]
            if extras.slopes is not None:
                scores += extras.slopes.float()[:, None, None] * (keys - at)
            seen = keys <= at
            if shape.window:
                seen &= keys > at - shape.window
            scores = scores.masked_fill(~seen, float("-inf"))
            if extras.sinks is not None:
                sinks = extras.sinks.float()[:, None, None].expand(-1, end - start, 1)
                weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            used = seen.any(0)
            v = torch.where(used[:, None], v, 0)  # what no query sees may hold anything
            weights = torch.where(seen, weights, 0)
            out[start:end] = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1).to(out.dtype)

    def copy_pages(self, pages: Tensor, source: Tensor, destination: Tensor) -> None:
        pages[:, destination.long()] = pages[:, source.long()]

    def move_pages(self, source_pages: Tensor, source: Tensor, destination_pages: Tensor, destination: Tensor) -> None:
        moved = source_pages[:, source.long()]
        destination_pages[:, destination.long()] = moved.view(*moved.shape[:2], *destination_pages.shape[2:])

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        drawn = [sample_row(logits[r].float(), rows, r) for r in range(logits.shape[0])]
        return (
            torch.tensor([token for token, _ in drawn], dtype=torch.int32),
            torch.tensor([status for _, status in drawn], dtype=torch.uint8),
        )

    def candidates(self, logits: Tensor, rows: SampleRows, wanted: Tensor, width: int) -> Candidates:
        return candidates_of(logits.float(), rows, wanted, width)

    def logprobs(self, logits: Tensor, target: Tensor, top_n: Tensor, width: int) -> Logprobs:
        return logprobs_of(logits.float(), target, top_n, width)

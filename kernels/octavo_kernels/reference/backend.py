"""The reference backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionShape,
    Candidates,
    LinearWeight,
    Logprobs,
    SampleRows,
)
from octavo_kernels.reference.sampling import candidates_of, logprobs_of, sample_row


class ReferenceKernels:
    """Implements ``octavo_kernels.interface.Kernels``; see there for shapes."""

    name = "reference"

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def record(self) -> None:
        return None

    def pack(self, weight: Tensor, dtype: torch.dtype) -> LinearWeight:
        return LinearWeight(weight.to(dtype).contiguous(), weight.shape[0], weight.shape[1])

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(F.linear(x.to(weight.data.dtype), weight.data, None if bias is None else bias.to(weight.data.dtype)))

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
    ) -> None:
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
        k_pages[page, :, :, offset] = k[written].to(k_pages.dtype)
        v_pages[page, :, offset, :] = v[written].to(v_pages.dtype)

    def attention(
        self,
        qkv: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        out: Tensor,
    ) -> None:
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
            group = shape.num_heads // shape.num_kv_heads
            q = heads[start:end, : shape.num_heads].float().transpose(0, 1)  # [Hq, queries, D]
            scores = q @ k.repeat_interleave(group, 0) * shape.scale
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            at = torch.arange(length - (end - start), length)[:, None]
            seen = keys <= at
            if shape.window:
                seen &= keys > at - shape.window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
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

"""Paged attention on a GPU: memory for the work list and partial sums, and the launches."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.interface import AttentionBatch, AttentionExtras, AttentionShape
from octavo_kernels.triton.attention_config import (
    SPLIT_KEYS,
    AttentionLaunch,
    Gpu,
    Tiles,
    choose_attention,
    power_of_two,
)
from octavo_kernels.triton.attention_kernel import attention_kernel
from octavo_kernels.triton.attention_reduce import attention_reduce_kernel
from octavo_kernels.triton.attention_schedule import attention_schedule_kernel
from octavo_kernels.triton.quant import page_scales, readable_pages

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 30
# Addresses are counted in chunks of 16 bytes, in 31 bits.
MAX_PAGES_BYTES = 1 << 35
INTERPRETED: bool = triton.knobs.runtime.interpret
ITEM, REDUCTION = 8, 4
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _operands(dtype: torch.dtype, page_dtype: torch.dtype) -> tl.dtype:
    """The type of matrix products' operands. All that a byte can mean is exact in float16."""
    if INTERPRETED:
        return tl.float32  # the interpreter holds bfloat16 as integers, and multiplies those
    return tl.float16 if page_dtype.itemsize == 1 else DTYPES[dtype]


class _WorkList:
    """The device's lists of one shape of attention; see ``attention_schedule_kernel``."""

    def __init__(self, entries: int, rows: int, device: torch.device) -> None:
        self.items = torch.empty((2, entries, ITEM), dtype=torch.int32, device=device)
        self.reductions = torch.empty((rows, REDUCTION), dtype=torch.int32, device=device)
        self.counts = torch.zeros(3, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class _Call:
    """What all launches of one layer's attention share; see ``PagedAttention.attention``."""

    qkv: Tensor
    k_pages: Tensor
    v_pages: Tensor
    batch: AttentionBatch
    shape: AttentionShape
    out: Tensor
    extras: AttentionExtras
    partials: tuple[Tensor, Tensor]  # weighted sums of split ranges, their largest scores and sums of weights


class PagedAttention:
    """Owns the work lists and the partial sums. Not thread-safe: one step at a time, on one stream.

    Memory is made when a shape is first seen and stays where it is, so that captured graphs can be replayed: let every
    shape run once before a capture.
    """

    def __init__(
        self,
        gpu: Gpu,
        device: torch.device,
        *,
        max_tokens: int,
        max_seqs: int,
        partial_rows: int = 4096,
        split_keys: int = SPLIT_KEYS,
    ) -> None:
        """``max_tokens`` and ``max_seqs`` bound a step; ``partial_rows`` how many (query, part) pairs split ranges have.

        Sequences beyond those are computed unsplit.
        """
        self._split_keys = split_keys
        self._gpu, self._device = gpu, device
        self._max_tokens, self._max_seqs, self._partial_rows = max_tokens, max_seqs, partial_rows
        self._lists: dict[tuple[int, ...], _WorkList] = {}
        self._partials: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # Lists that hold the step at hand; None until ``start_step`` says when steps begin.
        self._current: set[tuple[int, ...]] | None = None

    def start_step(self) -> None:
        """The batch's tensors hold another step. Whoever calls this once must call it for every step from then on.

        The work list is then made once per step instead of once per layer.
        """
        self._current = set()

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
        """As ``Kernels.attention``; pages as ``page_shape`` says.

        Raises:
            ValueError: more tokens or sequences than there is memory for, or more pages than addresses reach.
        """
        if qkv.shape[0] > self._max_tokens or batch.query_start.shape[0] - 1 > self._max_seqs:
            raise ValueError(f"{qkv.shape[0]} tokens of at most {self._max_tokens}, or too many sequences")
        if k_pages.shape[0] * k_pages.stride(0) * k_pages.itemsize > MAX_PAGES_BYTES:
            raise ValueError(
                f"a layer's {k_pages.shape[0]} pages of keys reach over more than {MAX_PAGES_BYTES >> 30} GiB"
            )
        if not qkv.shape[0]:
            return
        extras = extras or AttentionExtras()
        launch = choose_attention(shape, qkv.dtype, k_pages.dtype, batch, qkv.shape[0], self._gpu, self._split_keys)
        work = self._work_list(batch, shape, launch)
        call = _Call(qkv, k_pages, v_pages, batch, shape, out, extras, self._partial(shape))
        if launch.large is not None:
            self._launch(call, launch.large, launch.large_programs, work.items[1], work.counts[1:])
        self._launch(call, launch.small, launch.small_programs, work.items[0], work.counts)
        if launch.splits:
            self._reduce(work, call)

    def _launch(self, call: _Call, tiles: Tiles, programs: int, items: Tensor, count: Tensor) -> None:
        """All entries of one list."""
        qkv, k_pages, v_pages, shape, extras = call.qkv, call.k_pages, call.v_pages, call.shape, call.extras
        table, nvidia = call.batch.block_tables, self._gpu.nvidia
        e4m3 = k_pages.dtype == torch.float8_e4m3fn
        native = self._gpu.knows_e4m3 and not INTERPRETED
        k_scales, v_scales = page_scales(k_pages, shape), page_scales(v_pages, shape)
        attention_kernel[shape.num_kv_heads, programs](
            qkv,
            readable_pages(k_pages, native),
            readable_pages(v_pages, native),
            k_scales,
            v_scales,
            extras.k_scale if e4m3 else None,
            extras.v_scale if e4m3 else None,
            extras.sinks,
            extras.slopes,
            table,
            items,
            count,
            call.out,
            *call.partials,
            shape.scale / shape.soft_cap if shape.soft_cap else shape.scale * LOG2E,
            shape.soft_cap * LOG2E if shape.soft_cap else None,
            shape.window or None,
            qkv.stride(0),
            call.out.stride(0),
            table.stride(0),
            k_pages.stride(0),
            0 if k_scales is None else k_scales.stride(0),
            shape.num_heads,
            GROUP=shape.num_heads // shape.num_kv_heads,
            PAGE=shape.block_size,
            D=shape.head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            DTYPE=_operands(qkv.dtype, k_pages.dtype),
            PRECISION="tf32x3" if nvidia else "ieee",
            PACKED=self._packed(k_pages.dtype, tiles),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
        )

    def _packed(self, page_dtype: torch.dtype, tiles: Tiles) -> str | None:
        """How bytes of pages are widened; see ``widen``."""
        if page_dtype.itemsize > 1 or INTERPRETED or not self._gpu.nvidia:
            return None
        return "pure" if self._gpu.has_tensor_memory and tiles.block_m >= 64 else "fenced"

    def _reduce(self, work: _WorkList, call: _Call) -> None:
        shape, out = call.shape, call.out
        programs = max(1, min(out.shape[0], 8 * self._gpu.multiprocessors // shape.num_heads))
        attention_reduce_kernel[shape.num_heads, programs](
            work.reductions,
            work.counts[2:],
            *call.partials,
            out,
            out.stride(0),
            shape.num_heads,
            D=shape.head_dim,
            PARTS=16,
            num_warps=4,
        )

    def _partial(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        key = shape.num_heads, shape.head_dim
        if key not in self._partials:
            rows = (self._partial_rows, shape.num_heads)
            self._partials[key] = (
                torch.empty((*rows, shape.head_dim), dtype=torch.float32, device=self._device),
                torch.empty((*rows, 2), dtype=torch.float32, device=self._device),
            )
        return self._partials[key]

    def _work_list(self, batch: AttentionBatch, shape: AttentionShape, launch: AttentionLaunch) -> _WorkList:
        """The lists of the step at hand, made now unless an earlier layer had the same."""
        key = shape.window, *launch.cut
        if key not in self._lists:
            # Every tile, and of split ranges no more entries than there are rows of partial sums.
            entries = self._max_seqs + self._max_tokens + self._partial_rows
            self._lists[key] = _WorkList(entries, self._max_tokens, self._device)
        work = self._lists[key]
        if self._current is not None and key in self._current:
            return work
        num_seqs = batch.query_start.shape[0] - 1
        if batch.bounds is not None:
            num_seqs = min(num_seqs, batch.bounds.num_seqs)
        tile_queries, small_queries, small_split, large_split, small_n, large_n = launch.cut
        attention_schedule_kernel[(max(1, num_seqs),)](
            batch.num_seqs,
            batch.query_start,
            batch.seq_lens,
            work.items,
            work.reductions,
            work.counts,
            work.items.shape[1],
            shape.window or NO_WINDOW,
            tile_queries,
            small_queries,
            small_split,
            large_split,
            self._partial_rows,
            SMALL_N=small_n,
            LARGE_N=large_n,
            BLOCK_S=min(1024, power_of_two(max(16, self._max_seqs))),
            num_warps=1,
        )
        if self._current is not None:
            self._current.add(key)
        return work

"""The CPU backend: checks arguments, lays them out for the C kernels, runs or records them."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_kernels.cpu.build import load
from octavo_kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionExtras,
    AttentionShape,
    Candidates,
    Fp8Rows,
    Int4Rows,
    LinearWeight,
    Logprobs,
    PageShapes,
    SampleRows,
    WeightRows,
)
from octavo_kernels.reference.backend import pack_whole, transposed_keys
from octavo_kernels.reference.batch import PlainInputs

PANEL = 16
SYSTEM_PAGE = mmap.PAGESIZE
MAX_ARGS = 31
# Moves of fewer bytes run on one thread.
ALONE_BYTES = 1 << 20
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


def _bits(value: float) -> int:
    """The double as the int64 that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _check(tensor: Tensor, *dtypes: torch.dtype, contiguous: bool = True) -> int:
    """The tensor's address; it must be one of ``dtypes`` on the CPU."""
    if tensor.dtype not in dtypes or tensor.device.type != "cpu" or (contiguous and not tensor.is_contiguous()):
        raise TypeError(f"expected a contiguous CPU tensor of {dtypes}, not {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def _refuse(extras: AttentionExtras | None) -> None:
    if extras is not None:
        raise ValueError("attention on a CPU has no sinks, slopes or scales")


F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


class CpuProgram:
    """Recorded kernels: one row of int64 per kernel, its address, the number of rows, its other arguments."""

    def __init__(self, run: Callable[[npt.NDArray[np.int64]], None], ops: list[list[int]], keep: list[Tensor]) -> None:
        self._run = run
        self._keep = keep  # the buffers the addresses point into
        self._ops = np.zeros((len(ops), MAX_ARGS + 1), np.int64)
        for row, op in zip(self._ops, ops, strict=True):
            row[: len(op)] = op

    def run(self, rows: int) -> None:
        self._ops[:, 1] = rows
        self._run(self._ops)


class CpuKernels(PlainInputs):
    """Implements ``octavo_kernels.interface.Kernels`` for float32 activations; see there for shapes."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, threads: int | None = None) -> None:
        """``threads`` is by default what torch uses.

        Raises:
            BuildError: the kernels cannot be compiled here.
        """
        self._library = load()
        self._libc = ctypes.CDLL(None)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._library.oct_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        self._library.oct_run.restype = None
        self._threads = threads or torch.get_num_threads()
        self._address: dict[str, int] = {}
        self._single = np.zeros((1, MAX_ARGS + 1), np.int64)
        self._recording: tuple[list[list[int]], list[Tensor]] | None = None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return F32

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        # Huge pages spare most TLB misses of weights and scattered cache pages; a refusal by the system does no harm.
        start = -(-tensor.data_ptr() // SYSTEM_PAGE) * SYSTEM_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - start) // SYSTEM_PAGE * SYSTEM_PAGE
        if length > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._libc.madvise(start, length, mmap.MADV_HUGEPAGE)
        return tensor

    def page_shapes(self, shape: AttentionShape, dtype: torch.dtype) -> PageShapes:
        if dtype not in (F32, BF16):
            raise ValueError(f"no pages of {dtype} on a CPU")
        return transposed_keys(shape, dtype)

    def start_step(self) -> None:
        pass

    def _run_ops(self, ops: npt.NDArray[np.int64], threads: int | None = None) -> None:
        self._library.oct_run(ops.ctypes.data, ops.shape[0], ops.shape[1], threads or self._threads)

    def _emit(
        self, name: str, rows: int, *args: int, keep: tuple[Tensor | None, ...], threads: int | None = None
    ) -> None:
        address = self._address.get(name)
        if address is None:
            address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
            assert address is not None
            self._address[name] = address
        op = [address, rows, *args]
        if self._recording is not None:
            self._recording[0].append(op)
            self._recording[1].extend(tensor for tensor in keep if tensor is not None)
            return
        self._single[0, : len(op)] = op
        self._run_ops(self._single, threads)

    @contextmanager
    def record(self) -> Iterator[Callable[[], CpuProgram]]:
        ops: list[list[int]] = []
        keep: list[Tensor] = []
        self._recording = (ops, keep)
        try:
            yield lambda: CpuProgram(self._run_ops, ops, keep)
        finally:
            self._recording = None

    def can_hold(self, rows: Fp8Rows | Int4Rows) -> bool:
        return False

    def new_weight(self, rows: WeightRows, out_features: int, dtype: torch.dtype) -> LinearWeight:
        if not isinstance(rows, Tensor):
            raise TypeError("the CPU multiplies by plain weights alone")
        k, panels = rows.shape[1], -(-out_features // PANEL)
        data = self.empty((panels, k, PANEL), BF16 if dtype == BF16 else F32)
        data[-1:].zero_()  # rows beyond the last are computed with
        return LinearWeight(data.view(-1), out_features, k)

    def set_rows(self, weight: LinearWeight, first: int, rows: WeightRows) -> None:
        assert isinstance(rows, Tensor)
        n, k = rows.shape
        if k != weight.in_features or not 0 <= first <= weight.out_features - n:
            raise ValueError(f"rows {(n, k)} from {first} on, of a weight {weight.out_features, weight.in_features}")
        source = rows.contiguous() if rows.dtype in (F32, BF16) else rows.float().contiguous()
        args = (source.data_ptr(), weight.data.data_ptr(), k, int(weight.data.dtype == BF16), int(source.dtype == BF16))
        self._emit("oct_pack", n, *args, first, keep=(source, weight.data))

    def pack(self, rows: WeightRows, dtype: torch.dtype) -> LinearWeight:
        return pack_whole(self, rows, dtype)

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
        rows, k, n = x.shape[0], weight.in_features, weight.out_features
        if x.shape[1] != k or out.shape != (rows, n) or x.stride(1) != 1:
            raise ValueError(f"linear: x {tuple(x.shape)}, weight {(n, k)}, out {tuple(out.shape)}")
        addresses = (_check(x, F32, contiguous=False), x.stride(0), weight.data.data_ptr())
        offset = 0 if bias is None else _check(bias, F32)
        narrow = int(weight.data.dtype == BF16)
        self._emit(
            "oct_linear", rows, *addresses, offset, _check(out, F32), n, n, k, narrow, keep=(x, weight.data, bias, out)
        )

    def embed(self, ids: Tensor, weight: LinearWeight, out: Tensor) -> None:
        n, k = weight.out_features, weight.in_features
        args = (_check(ids, I32), weight.data.data_ptr(), _check(out, F32), k, n, k, int(weight.data.dtype == BF16))
        self._emit("oct_embed", out.shape[0], *args, keep=(ids, weight.data, out))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        h = x.shape[-1]
        args = (_check(x, F32), h, _check(weight, F32), _check(out, F32), h, h, _bits(eps))
        self._emit("oct_rms_norm", x.shape[0], *args, keep=(x, weight, out))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        h = x.shape[-1]
        args = (_check(x, F32), h, _check(weight, F32), _check(out, F32), h, h, _bits(eps), _check(residual, F32))
        self._emit("oct_add_rms_norm", x.shape[0], *args, keep=(x, weight, out, residual))

    def gather_add_rms_norm(
        self, x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        addresses = (_check(x, F32), _check(residual, F32), _check(index, I32), _check(weight, F32), _check(out, F32))
        keep = (x, residual, index, weight, out)
        self._emit("oct_gather_add_rms_norm", out.shape[0], *addresses, x.shape[-1], _bits(eps), keep=keep)

    def act_and_mul(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        args = (_check(gate_up, F32), _check(out, F32), out.shape[-1], ACTIVATIONS[activation])
        self._emit("oct_act_and_mul", out.shape[0], *args, keep=(gate_up, out))

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
        _refuse(extras)
        args = (
            _check(qkv, F32),
            qkv.shape[1],
            _check(positions, I32),
            0 if table is None else _check(table, F32),
            0 if table is None else table.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            0 if q_norm is None else _check(q_norm, F32),
            0 if k_norm is None else _check(k_norm, F32),
            _bits(eps),
            _check(slots, I32),
            _check(k_pages, F32, BF16),
            _check(v_pages, F32, BF16),
            shape.block_size,
            int(k_pages.dtype == BF16),
            1 if table is None else table.shape[0],
        )
        keep = (qkv, positions, table, q_norm, k_norm, slots, k_pages, v_pages)
        self._emit("oct_rope_kv", qkv.shape[0], *args, keep=keep)

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
        _refuse(extras)
        if shape.head_dim % 8 or shape.block_size % 8:
            raise ValueError(f"head size {shape.head_dim} and block size {shape.block_size} must be multiples of 8")
        args = (
            _check(qkv, F32),
            qkv.shape[1],
            _check(out, F32),
            out.shape[1],
            _check(k_pages, F32, BF16),
            _check(v_pages, F32, BF16),
            _check(batch.block_tables, I32),
            batch.block_tables.shape[1],
            _check(batch.query_start, I32),
            _check(batch.seq_lens, I32),
            _check(batch.num_seqs, I32),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            _bits(shape.scale),
            shape.window,
            _bits(shape.soft_cap),
            int(k_pages.dtype == BF16),
        )
        tensors = (batch.block_tables, batch.query_start, batch.seq_lens, batch.num_seqs)
        self._emit("oct_attention", qkv.shape[0], *args, keep=(qkv, out, k_pages, v_pages, *tensors))

    def copy_pages(self, pages: Tensor, source: Tensor, destination: Tensor) -> None:
        self.move_pages(pages, source, pages, destination)

    def move_pages(self, source_pages: Tensor, source: Tensor, destination_pages: Tensor, destination: Tensor) -> None:
        layers, size = source_pages.shape[0], source_pages.element_size()
        page = source_pages.shape[2:].numel()
        sides: list[int] = []
        for pages in (source_pages, destination_pages):
            if pages.shape[0] != layers or pages.shape[2:].numel() != page or not pages[0, 0].is_contiguous():
                raise ValueError(f"pages {tuple(source_pages.shape)} do not fit pages {tuple(destination_pages.shape)}")
            address = _check(pages, source_pages.dtype, contiguous=False)
            sides += (address, pages.stride(0) * size, pages.stride(1) * size)
        keep = (source_pages, source, destination_pages, destination)
        indices = (_check(source, I32), _check(destination, I32))
        # Waking another thread takes longer than a page or two.
        threads = 1 if len(source) * layers * page * size < ALONE_BYTES else None
        self._emit("oct_move_pages", len(source), *indices, layers, page * size, *sides, keep=keep, threads=threads)

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        count = logits.shape[0]
        token = torch.empty(count, dtype=I32)
        status = torch.empty(count, dtype=torch.uint8)
        args = self._sampling_args(logits, rows)
        self._emit("oct_sample", count, *args, token.data_ptr(), status.data_ptr(), keep=())
        return token, status

    def candidates(self, logits: Tensor, rows: SampleRows, wanted: Tensor, width: int) -> Candidates:
        count = logits.shape[0]
        result = Candidates(
            torch.empty((count, width), dtype=I32),
            torch.empty((count, width)),
            torch.empty(count, dtype=I32),
            torch.empty(count, dtype=torch.uint8),
        )
        outputs = (result.ids, result.logprobs, result.found, result.status)
        args = (*self._sampling_args(logits, rows), _check(wanted, I32), width)
        self._emit("oct_candidates", count, *args, *(x.data_ptr() for x in outputs), keep=())
        return result

    @staticmethod
    def _sampling_args(logits: Tensor, rows: SampleRows) -> tuple[int, ...]:
        """What every kernel that looks at ``SampleRows`` takes first."""
        floats = (rows.temperature, rows.top_p, rows.min_p, rows.presence, rows.frequency, rows.repetition)
        temperature, top_p, min_p, presence, frequency, repetition = (_check(x, F32) for x in floats)
        return (
            *(_check(logits, F32), logits.shape[1], temperature, _check(rows.top_k, I32), top_p, min_p),
            *(presence, frequency, repetition, _check(rows.seed, torch.int64), _check(rows.position, I32)),
            *(_check(rows.tokens, I32), rows.tokens.shape[1], _check(rows.token_row, I32)),
            *(_check(rows.token_count, I32), _check(rows.output_start, I32)),
            *(_check(rows.bias_start, I32), _check(rows.bias_ids, I32), _check(rows.bias_values, F32)),
            *(_check(rows.banned_start, I32), _check(rows.banned_ids, I32)),
        )

    def logprobs(self, logits: Tensor, target: Tensor, top_n: Tensor, width: int) -> Logprobs:
        count, vocab = logits.shape
        result = Logprobs(
            torch.empty(count),
            torch.empty(count, dtype=I32),
            torch.empty((count, width), dtype=I32),
            torch.empty((count, width)),
        )
        outputs = (result.logprob, result.rank, result.top_ids, result.top_logprobs)
        inputs = (_check(logits, F32), vocab, _check(target, I32), _check(top_n, I32))
        self._emit("oct_logprobs", count, *inputs, *(x.data_ptr() for x in outputs), width, keep=())
        return result

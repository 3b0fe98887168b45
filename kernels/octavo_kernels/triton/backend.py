"""The GPU backend: matrix products by torch's libraries, everything else by the kernels of this folder."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
import triton
from torch import Tensor

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
    StepRows,
    WeightRows,
)
from octavo_kernels.reference.backend import pack_whole
from octavo_kernels.triton import batch as batch_inputs
from octavo_kernels.triton import cache, layers, sampling, weights
from octavo_kernels.triton import pages as page_moves
from octavo_kernels.triton.attention import PagedAttention
from octavo_kernels.triton.attention_config import Gpu
from octavo_kernels.triton.quant import page_shape

ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)
PAGES = (*ACTIVATIONS, torch.float8_e4m3fn, torch.int8)
# What the interpreter pretends to be: a device so small that programs find more than one piece of work.
PRETENDED = Gpu("sm_90", 2, 232448)


# Programs of one warp that a multiprocessor should have to choose from.
WARPS = 16


class UnsupportedDeviceError(ValueError):
    """Triton cannot run kernels on this device."""


def describe_gpu(device: torch.device) -> Gpu:
    """The device as the launch rules see it.

    Raises:
        UnsupportedDeviceError: it is no GPU, and Triton's interpreter is off.
    """
    if device.type == "cuda" and not triton.knobs.runtime.interpret:
        driver = triton.runtime.driver.active
        index = torch.cuda.current_device() if device.index is None else device.index
        properties, target = driver.utils.get_device_properties(index), driver.get_current_target()
        arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
        return Gpu(arch, properties["multiprocessor_count"], properties["max_shared_mem"])
    if not triton.knobs.runtime.interpret:
        raise UnsupportedDeviceError(
            f"Triton's kernels run on {device} by its interpreter alone: set TRITON_INTERPRET=1"
        )
    return PRETENDED


class TritonKernels:
    """Implements ``octavo_kernels.interface.Kernels`` on one GPU; see there for shapes.

    All work goes to the current stream and nothing waits for it. All tensors lie on the device, which must be the current
    one. Captured graphs may hold any of this once it has run before: kernels are compiled when first used, and
    attention makes its memory then.

    Products are torch's: they give a row the same bits whatever runs beside it only while the library chooses the same
    kernel for the number of rows. Everything else is independent of batch-mates.
    """

    name = "triton"

    def __init__(self, device: torch.device, *, max_tokens: int, max_seqs: int) -> None:
        """``max_tokens`` and ``max_seqs`` bound a step.

        Raises:
            UnsupportedDeviceError: no kernels run there.
        """
        self.device = device
        self._gpu = gpu = describe_gpu(device)
        self._attention = PagedAttention(gpu, device, max_tokens=max_tokens, max_seqs=max_seqs)
        self._programs = WARPS * gpu.multiprocessors

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype if weight_dtype in ACTIVATIONS else torch.bfloat16

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def page_shapes(self, shape: AttentionShape, dtype: torch.dtype) -> PageShapes:
        if dtype not in PAGES:
            raise ValueError(f"no pages of {dtype} on a GPU; there are {', '.join(map(str, PAGES))}")
        return PageShapes(page_shape(shape, dtype), page_shape(shape, dtype))

    def start_step(self) -> None:
        self._attention.start_step()

    def record(self) -> None:
        return None

    def write_rows(self, table: Tensor, segments: Tensor, words: Tensor, longest: int) -> None:
        batch_inputs.write_rows(table, segments, words, longest)

    def put_tokens(self, table: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
        batch_inputs.put_tokens(table, rows, columns, tokens)

    def prepare_inputs(
        self, rows: StepRows, block_size: int, ids: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor
    ) -> None:
        batch_inputs.prepare_inputs(rows, block_size, ids, positions, slots, block_tables)

    def can_hold(self, rows: Fp8Rows | Int4Rows) -> bool:
        return weights.can_hold(rows)

    def new_weight(self, rows: WeightRows, out_features: int, dtype: torch.dtype) -> LinearWeight:
        return weights.new_weight(rows, out_features, dtype, self.device)

    def set_rows(self, weight: LinearWeight, first: int, rows: WeightRows) -> None:
        weights.set_rows(weight, first, rows)

    def pack(self, rows: WeightRows, dtype: torch.dtype) -> LinearWeight:
        return pack_whole(self, rows, dtype)

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
        weights.linear(x, weight, bias, out, self._gpu)

    def embed(self, ids: Tensor, weight: LinearWeight, out: Tensor) -> None:
        layers.embed(ids, weight.data, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        layers.rms_norm(x, weight, eps, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        layers.add_rms_norm(x, residual, weight, eps, out)

    def gather_add_rms_norm(
        self, x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        layers.gather_add_rms_norm(x, residual, index, weight, eps, out)

    def act_and_mul(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        layers.act_and_mul(gate_up, activation, out)

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
        norms = (q_norm, k_norm, eps)
        cache.rope_kv(qkv, positions, table, *norms, slots, k_pages, v_pages, shape, extras, programs=self._programs)

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
        self._attention.attention(qkv, k_pages, v_pages, batch, shape, out, extras)

    def copy_pages(self, pages: Tensor, source: Tensor, destination: Tensor) -> None:
        page_moves.copy_pages(pages, source, destination)

    def move_pages(self, source_pages: Tensor, source: Tensor, destination_pages: Tensor, destination: Tensor) -> None:
        page_moves.move_pages(source_pages, source, destination_pages, destination)

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        return sampling.sample(logits, rows)

    def candidates(self, logits: Tensor, rows: SampleRows, wanted: Tensor, width: int) -> Candidates:
        return sampling.candidates(logits, rows, wanted, width)

    def logprobs(self, logits: Tensor, target: Tensor, top_n: Tensor, width: int) -> Logprobs:
        return sampling.logprobs(logits, target, top_n, width)

"""Weights into the backend's layout, part by part, each straight into its place of the fused matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from octavo_executor.checkpoint import Checkpoint
from octavo_executor.spec import ModelError, ModelSpec
from octavo_kernels import Kernels, LinearWeight, WeightRows
from octavo_kernels.quantized import E4M3, to_fp8, widen

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Which types are used where. ``weights`` is how plain ones are stored; sums are always float32.

    ``quantization`` "fp8": matrices that come plain are rounded to e4m3, all but the embedding and the output head.
    """

    activations: torch.dtype
    weights: torch.dtype
    kv: torch.dtype
    quantization: Literal["fp8"] | None = None


def choose_dtypes(requested: str, checkpoint: str, kernels: Kernels, *, quantized: bool = False) -> DtypePlan:
    """Types for ``--dtype`` with a checkpoint of that type; ``quantized``: most of it is not of that type, in truth.

    On a GPU auto is the checkpoint's own type. On a CPU it computes in float32: without AVX512-BF16 or AMX, products of
    bfloat16 are slower than those of float32, and with them the activations' rounding would still change results.
    Weights that come as bfloat16 stay so where the backend widens them as it reads: the numbers are the same and only half
    the bytes move.

    Raises:
        ModelError: there is no such type, or float16 on a CPU, which has no backend for it.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    name = checkpoint if requested == "auto" else requested
    if kernels.name == "triton":
        if name not in DTYPES:
            raise ModelError(f"weights of type {name} are not supported: choose one with --dtype")
        return DtypePlan(DTYPES[name], DTYPES[name], DTYPES[name])
    if requested in ("float16", "half"):
        raise ModelError("--dtype float16 needs a GPU; the CPU has float32 and bfloat16")
    if requested == "bfloat16":
        return DtypePlan(kernels.activation_dtype(bf16), bf16, bf16)
    narrow = requested == "auto" and checkpoint == "bfloat16" and not quantized
    return DtypePlan(f32, bf16 if narrow and kernels.activation_dtype(bf16) == f32 else f32, f32)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norm weights [H] or [D]; ``qkv`` [(Hq + 2 Hk) D, H]; ``gate_up`` [2I, H]; biases [outputs] or None."""

    input_norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: LinearWeight
    gate_up_bias: Tensor | None
    down: LinearWeight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights. ``head`` is ``embedding`` itself where they are tied.

    ``page_scales`` float32[layers, Hk] (of keys, of values) are the checkpoint's for a cache in fp8.
    """

    embedding: LinearWeight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: LinearWeight
    page_scales: tuple[Tensor, Tensor] | None = None


class _Reader:
    """Reads matrices and vectors under their Hugging Face names."""

    def __init__(self, spec: ModelSpec, source: Checkpoint, kernels: Kernels, dtypes: DtypePlan) -> None:
        self._spec, self._source, self._kernels, self._dtypes = spec, source, kernels, dtypes
        # Matrices that come in fewer bits than they are stored in.
        self.widened = 0

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.take(name, size).to(self._kernels.device, self._dtypes.activations).contiguous()

    def plain(self, name: str, rows: int, columns: int) -> LinearWeight:
        return self._kernels.pack(self._source.take(name, rows, columns), self._dtypes.weights)

    def head(self, rows: int, columns: int) -> LinearWeight:
        """The output head. A quantised one is widened: products in e4m3 come in bfloat16, too coarse for logits."""
        piece = self._source.rows("lm_head", rows, columns, self._spec.quantization)
        if not isinstance(piece, Tensor):
            self.widened += 1
            piece = widen(piece, self._dtypes.weights)
        return self._kernels.pack(piece, self._dtypes.weights)

    def matrix(self, columns: int, *parts: tuple[str, int]) -> LinearWeight:
        """Matrices with the same inputs, one above the other."""
        pieces = [self._piece(name, rows, columns) for name, rows in parts]
        if not all(isinstance(piece, Tensor) or self._kernels.can_hold(piece) for piece in pieces) or (
            len({type(piece) for piece in pieces}) > 1
        ):
            self.widened += sum(not isinstance(piece, Tensor) for piece in pieces)
            pieces = [widen(piece, self._dtypes.weights) for piece in pieces]
        weight = self._kernels.new_weight(pieces[0], sum(rows for _, rows in parts), self._dtypes.weights)
        first = 0
        for piece, (_, rows) in zip(pieces, parts, strict=True):
            self._kernels.set_rows(weight, first, piece)
            first += rows
        return weight

    def _piece(self, name: str, rows: int, columns: int) -> WeightRows:
        piece = self._source.rows(name, rows, columns, self._spec.quantization)
        if self._dtypes.quantization == "fp8" and isinstance(piece, Tensor):
            rounded = to_fp8(piece.to(self._kernels.device))
            return rounded if self._kernels.can_hold(rounded) else piece
        return piece

    def bias(self, wanted: bool, *parts: tuple[str, int]) -> Tensor | None:
        if not wanted:
            return None
        whole = torch.empty(sum(rows for _, rows in parts), dtype=self._dtypes.activations, device=self._kernels.device)
        first = 0
        for name, rows in parts:
            whole[first : first + rows].copy_(self._source.take(f"{name}.bias", rows))
            first += rows
        return whole

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{index}."
        hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = ((attention + "q_proj", queries), (attention + "k_proj", keys), (attention + "v_proj", keys))
        output = (attention + "o_proj", hidden)
        gate_up = ((mlp + "gate_proj", inner), (mlp + "up_proj", inner))
        down = (mlp + "down_proj", hidden)
        return LayerWeights(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=self.matrix(hidden, *qkv),
            qkv_bias=self.bias(spec.qkv_bias, *qkv),
            q_norm=self.vector(attention + "q_norm.weight", dim) if spec.qk_norm else None,
            k_norm=self.vector(attention + "k_norm.weight", dim) if spec.qk_norm else None,
            output=self.matrix(queries, output),
            output_bias=self.bias(spec.output_bias, output),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self.matrix(hidden, *gate_up),
            gate_up_bias=self.bias(spec.mlp_bias, *gate_up),
            down=self.matrix(inner, down),
            down_bias=self.bias(spec.mlp_bias, down),
        )

    def page_scales(self) -> tuple[Tensor, Tensor] | None:
        """What keys and values are divided by for a cache in fp8, where every layer comes with both."""
        spec, source = self._spec, self._source
        both = []
        for name in ("k_scale", "v_scale"):
            names = [f"model.layers.{i}.self_attn.{name}" for i in range(spec.num_layers)]
            if self._dtypes.kv != E4M3 or not all(name in source for name in names):
                return None
            read = [source.scales(name, spec.num_kv_heads) for name in names]
            both.append(torch.stack(read).to(self._kernels.device))
        return both[0], both[1]


def load_weights(
    folder: Path, spec: ModelSpec, kernels: Kernels, dtypes: DtypePlan, progress: Progress | None = None
) -> ModelWeights:
    """Read and pack all weights of ``folder``; ``progress`` is told the fraction done.

    Raises:
        ModelError: a tensor is missing, superfluous or of the wrong shape, or a file cannot be read.
    """
    report = progress or (lambda _: None)
    with ExitStack() as stack, torch.inference_mode():
        source = Checkpoint(folder, stack, kernels.device)
        reader = _Reader(spec, source, kernels, dtypes)
        vocab, hidden = spec.vocab_size, spec.hidden_size
        embedding = reader.plain("model.embed_tokens.weight", vocab, hidden)
        report(1 / (spec.num_layers + 2))

        def layers() -> Iterator[LayerWeights]:
            for i in range(spec.num_layers):
                yield reader.layer(i)
                report((i + 2) / (spec.num_layers + 2))

        read = tuple(layers())
        norm = reader.vector("model.norm.weight", hidden)
        head = embedding if spec.tied_embeddings else reader.head(vocab, hidden)
        page_scales = reader.page_scales()
        source.finish(lambda name: _is_superfluous(name, spec, source))
        if widened := reader.widened + source.unfolded:
            logger.warning(
                "%d quantised matrices are stored as %s: they have an act-order, a scale per block, or sizes or a type "
                "that the %s kernels do not multiply by, or are the output head",
                widened,
                str(dtypes.weights).removeprefix("torch."),
                kernels.name,
            )
        report(1.0)
        return ModelWeights(embedding, read, norm, head, page_scales)


def _is_superfluous(name: str, spec: ModelSpec, source: Checkpoint) -> bool:
    """What some writers store although it follows from the rest, or has no effect: rotary frequencies, a tied head; with
    quantised matrices biases of zeros, and scales of a cache that is not quantised here."""
    if "rotary_emb" in name or (spec.tied_embeddings and name == "lm_head.weight"):
        return True
    if spec.quantization is None:
        return False
    return name.endswith((".k_scale", ".v_scale")) or (name.endswith(".bias") and source.is_zero(name))

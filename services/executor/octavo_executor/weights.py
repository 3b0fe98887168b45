"""Weights from safetensors, by memory map, into the backend's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo_executor.spec import ModelError, ModelSpec, weight_files
from octavo_kernels import Kernels, LinearWeight

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Which types are used where. ``weights`` is how they are stored; sums are always float32."""

    activations: torch.dtype
    weights: torch.dtype
    kv: torch.dtype


def choose_dtypes(requested: str, checkpoint: str, kernels: Kernels) -> DtypePlan:
    """Types for ``--dtype``: auto, float32 or bfloat16, on a CPU.

    auto computes in float32: without AVX512-BF16 or AMX, products of bfloat16 are slower than those of float32, and
    with them the activations' rounding would still change results. Weights that come as bfloat16 stay so where the
    backend widens them as it reads: the numbers are the same and only half the bytes move.

    Raises:
        ModelError: float16, which no CPU backend has.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    if requested == "float16":
        raise ModelError("--dtype float16 needs a GPU; the CPU has float32 and bfloat16")
    if requested == "bfloat16":
        return DtypePlan(kernels.activation_dtype(bf16), bf16, bf16)
    narrow = requested == "auto" and checkpoint == "bfloat16" and kernels.activation_dtype(bf16) == f32
    return DtypePlan(f32, bf16 if narrow else f32, f32)


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
    """All weights. ``head`` is ``embedding`` itself where they are tied."""

    embedding: LinearWeight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: LinearWeight


class Checkpoint:
    """The tensors of a folder by name. They stay on disk until read; every one must be used."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Raises ModelError: a file is missing or not safetensors."""
        self._files = {}
        self._unused: set[str] = set()
        for path in weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = opened
                self._unused.add(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called ``name``.

        Raises:
            ModelError: it is missing or has another shape.
        """
        if name not in self._files:
            raise ModelError(f"the checkpoint lacks {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {shape}")
        self._unused.discard(name)
        return tensor

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raises ModelError: tensors are left that the model has no place for."""
        extra = sorted(name for name in self._unused if not ignored(name))
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            raise ModelError(f"the checkpoint has tensors this model has no place for: {', '.join(extra[:5])}{more}")


class _LayerReader:
    """Reads one layer's tensors under their Hugging Face names."""

    def __init__(self, spec: ModelSpec, source: Checkpoint, kernels: Kernels, dtypes: DtypePlan, layer: int) -> None:
        self._spec, self._source, self._kernels, self._dtypes = spec, source, kernels, dtypes
        self._prefix = f"model.layers.{layer}."

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.take(self._prefix + name, size).to(self._dtypes.activations).contiguous()

    def matrix(self, columns: int, *parts: tuple[str, int]) -> LinearWeight:
        """Matrices with the same inputs, one above the other."""
        read = [self._source.take(f"{self._prefix}{name}.weight", rows, columns) for name, rows in parts]
        return self._kernels.pack(read[0] if len(read) == 1 else torch.cat(read), self._dtypes.weights)

    def bias(self, wanted: bool, *parts: tuple[str, int]) -> Tensor | None:
        return torch.cat([self.vector(f"{name}.bias", rows) for name, rows in parts]) if wanted else None

    def read(self) -> LayerWeights:
        spec = self._spec
        hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim
        qkv = (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
        output = ("self_attn.o_proj", hidden)
        gate_up = (("mlp.gate_proj", inner), ("mlp.up_proj", inner))
        down = ("mlp.down_proj", hidden)
        return LayerWeights(
            input_norm=self.vector("input_layernorm.weight", hidden),
            qkv=self.matrix(hidden, *qkv),
            qkv_bias=self.bias(spec.qkv_bias, *qkv),
            q_norm=self.vector("self_attn.q_norm.weight", dim) if spec.qk_norm else None,
            k_norm=self.vector("self_attn.k_norm.weight", dim) if spec.qk_norm else None,
            output=self.matrix(queries, output),
            output_bias=self.bias(spec.output_bias, output),
            mlp_norm=self.vector("post_attention_layernorm.weight", hidden),
            gate_up=self.matrix(hidden, *gate_up),
            gate_up_bias=self.bias(spec.mlp_bias, *gate_up),
            down=self.matrix(inner, down),
            down_bias=self.bias(spec.mlp_bias, down),
        )


def load_weights(
    folder: Path, spec: ModelSpec, kernels: Kernels, dtypes: DtypePlan, progress: Progress | None = None
) -> ModelWeights:
    """Read and pack all weights of ``folder``; ``progress`` is told the fraction done.

    Raises:
        ModelError: a tensor is missing, superfluous or of the wrong shape, or a file cannot be read.
    """
    report = progress or (lambda _: None)
    with ExitStack() as stack, torch.inference_mode():
        source = Checkpoint(folder, stack)
        vocab, hidden = spec.vocab_size, spec.hidden_size
        embedding = kernels.pack(source.take("model.embed_tokens.weight", vocab, hidden), dtypes.weights)
        report(1 / (spec.num_layers + 2))

        def layers() -> Iterator[LayerWeights]:
            for i in range(spec.num_layers):
                yield _LayerReader(spec, source, kernels, dtypes, i).read()
                report((i + 2) / (spec.num_layers + 2))

        read = tuple(layers())
        norm = source.take("model.norm.weight", hidden).to(dtypes.activations).contiguous()
        if spec.tied_embeddings:
            head = embedding
        else:
            head = kernels.pack(source.take("lm_head.weight", vocab, hidden), dtypes.weights)
        # Some writers store what follows from the rest: rotary frequencies, a tied head.
        source.finish(lambda name: "rotary_emb" in name or (spec.tied_embeddings and name == "lm_head.weight"))
        report(1.0)
        return ModelWeights(embedding, read, norm, head)

"""The tensors that hold all pages, and how many pages there can be."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_executor.spec import ModelSpec
from octavo_kernels import AttentionExtras, AttentionShape, Kernels
from octavo_shared.errors import SettingError

DEFAULT_CPU_BYTES = 4 << 30
CPU_SHARE = 0.4

# Types of pages by their names in ``--kv-cache-dtype``; "auto" is the model's own.
PAGE_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def attention_shape(spec: ModelSpec, block_size: int, layer: int = 0) -> AttentionShape:
    """What is fixed about a layer's attention. Layers differ in their windows alone."""
    return AttentionShape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        block_size,
        spec.attention_scale,
        spec.windows[layer],
        spec.attention_soft_cap,
    )


def choose_page_dtype(name: str, plain: torch.dtype, spec: ModelSpec, block_size: int, kernels: Kernels) -> torch.dtype:
    """The type of pages for ``--kv-cache-dtype`` ``name``; for "auto" what the checkpoint was made for, where the backend has
    such pages, else ``plain``.

    Raises:
        SettingError: there is no such type, or the backend has no pages of it.
    """
    if name == "auto":
        fp8 = spec.quantization is not None and spec.quantization.fp8_cache
        with suppress(SettingError):
            return choose_page_dtype("fp8", plain, spec, block_size, kernels) if fp8 else plain
        return plain
    if name not in PAGE_DTYPES:
        raise SettingError(f"--kv-cache-dtype {name}: there are auto, {', '.join(PAGE_DTYPES)}")
    try:
        kernels.page_shapes(attention_shape(spec, block_size), PAGE_DTYPES[name])
    except ValueError as error:
        raise SettingError(f"--kv-cache-dtype {name}: {error}") from error
    return PAGE_DTYPES[name]


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype, kernels: Kernels) -> int:
    """Bytes of one page over all layers, keys and values, scales within the page included."""
    pages = kernels.page_shapes(attention_shape(spec, block_size), dtype)
    return spec.num_layers * dtype.itemsize * (torch.Size(pages.k).numel() + torch.Size(pages.v).numel())


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What decides the pool's size. Sizes in bytes, lengths in tokens; None where the user gave nothing."""

    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    available_bytes: int
    num_blocks: int | None = None
    memory_bytes: int | None = None


def plan_num_blocks(request: PoolRequest) -> int:
    """Number of pages: as ordered, or what the bytes ordered hold, or a bounded share of free memory.

    The share is 40 % but at most 4 GiB, and never more than ``max_num_seqs`` sequences of full length could fill.

    Raises:
        SettingError: the pool would not hold one sequence of ``max_model_len``.
    """
    per_sequence = -(-request.max_model_len // request.block_size)
    if request.num_blocks is not None:
        blocks, name = request.num_blocks, "--num-gpu-blocks-override"
    elif request.memory_bytes is not None:
        blocks, name = request.memory_bytes // request.block_bytes, "--kv-cache-memory-bytes"
    else:
        bytes_ = min(int(request.available_bytes * CPU_SHARE), DEFAULT_CPU_BYTES)
        blocks = min(bytes_ // request.block_bytes, per_sequence * request.max_num_seqs)
        name = "free memory"
    if blocks < per_sequence:
        raise SettingError(
            f"{name} gives a KV cache of {blocks} blocks ({blocks * request.block_size} tokens), too few for one sequence "
            f"of --max-model-len {request.max_model_len}: enlarge --kv-cache-memory-bytes or lower --max-model-len"
        )
    return blocks


def plan_num_host_blocks(gib: float, block_bytes: int, available_bytes: int) -> int:
    """Number of host pages that ``gib`` GiB hold; 0 for 0.

    Raises:
        SettingError: that is less than a page, or more than the ``available_bytes`` of memory.
    """
    if not gib:
        return 0
    bytes_ = int(gib * 2**30)
    if bytes_ < block_bytes:
        raise SettingError(f"--kv-offloading-size {gib:g} holds no block: one takes {block_bytes / 2**30:.6f} GiB")
    if bytes_ > available_bytes:
        raise SettingError(
            f"--kv-offloading-size {gib:g}: that is more than the {available_bytes / 2**30:.1f} GiB of memory that are free"
        )
    return bytes_ // block_bytes


class KvCache:
    """Owns the pages: ``k`` and ``v`` [layers, blocks, ...], a page laid out as ``Kernels.page_shapes`` says.

    The memory is ``Kernels.empty``'s, which gives it in huge pages where the system has them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """``scales`` float32[layers, Hk] (of keys, of values) are what numbers in fp8 pages are multiples of; 1 without."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        pages = kernels.page_shapes(attention_shape(spec, block_size), dtype)
        # Untouched pages cost no memory on a CPU: the system backs them when they are first written.
        self.k: Tensor = kernels.empty((spec.num_layers, num_blocks, *pages.k), dtype)
        self.v: Tensor = kernels.empty((spec.num_layers, num_blocks, *pages.v), dtype)
        self._scales = scales

    def extras(self, layer: int) -> AttentionExtras | None:
        """What attention has to know of a layer's pages besides their shape."""
        if self._scales is None:
            return None
        return AttentionExtras(k_scale=self._scales[0][layer], v_scale=self._scales[1][layer])

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.k.nbytes + self.v.nbytes

    def copy_pages(self, kernels: Kernels, source: Tensor, destination: Tensor) -> None:
        """Copy pages ``source`` int32[m] onto ``destination`` int32[m] in every layer."""
        kernels.copy_pages(self.k, source, destination)
        kernels.copy_pages(self.v, source, destination)

"""How much memory everything gets, decided before it is taken. Pure functions of sizes in bytes and tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo_executor.kv_cache import PoolRequest, plan_num_blocks
from octavo_executor.spec import ModelSpec
from octavo_shared.errors import SettingError

logger = logging.getLogger(__name__)

GIB = 2**30
# Of captured graphs, per layer of a graph: the driver's own memory for some ten launches. An estimate, and a generous one.
GRAPH_LAYER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU's memory after the weights are loaded and a step of the largest size has been tried.

    ``used_bytes`` is what everybody holds, other processes too; ``step_bytes`` what a step takes on top, ``graph_bytes``
    what graphs will. ``utilization`` is the share of all of it that may be used.
    """

    total_bytes: int
    used_bytes: int
    step_bytes: int
    graph_bytes: int
    utilization: float


def gpu_pool_bytes(use: GpuUse) -> int:
    """What is left for pages.

    Raises:
        SettingError: nothing is.
    """
    allowed = int(use.utilization * use.total_bytes)
    left = allowed - use.used_bytes - use.step_bytes - use.graph_bytes
    if left <= 0:
        raise SettingError(
            f"--gpu-memory-utilization {use.utilization:g}: of the {allowed / GIB:.2f} GiB this allows, "
            f"{use.used_bytes / GIB:.2f} are in use (weights, and other processes), a step takes "
            f"{use.step_bytes / GIB:.2f} and graphs {use.graph_bytes / GIB:.2f}: nothing is left for the KV cache. "
            "Raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return left


def plan_gpu_blocks(request: PoolRequest, use: GpuUse) -> int:
    """Number of pages on a GPU: as ordered, or what the bytes ordered hold, or what is left of the memory allowed.

    ``request.available_bytes`` is not looked at.

    Raises:
        SettingError: they would not hold one sequence of ``max_model_len``, or not fit at all.
    """
    if request.num_blocks is None and request.memory_bytes is None:
        request = replace(request, memory_bytes=gpu_pool_bytes(use))
        name = "--gpu-memory-utilization"
    else:
        name = "--num-gpu-blocks-override" if request.num_blocks is not None else "--kv-cache-memory-bytes"
    blocks = request.num_blocks or (request.memory_bytes or 0) // request.block_bytes
    free = use.total_bytes - use.used_bytes - use.step_bytes - use.graph_bytes
    if blocks * request.block_bytes > free:
        raise SettingError(
            f"{name}: a KV cache of {blocks * request.block_bytes / GIB:.2f} GiB does not fit into the "
            f"{max(free, 0) / GIB:.2f} GiB that the GPU has left"
        )
    needed = -(-request.max_model_len // request.block_size)
    if blocks < needed:
        raise SettingError(
            f"{name} gives a KV cache of {blocks} blocks ({blocks * request.block_size} tokens), too few for one sequence "
            f"of --max-model-len {request.max_model_len}: lower --max-model-len, or give the cache more memory"
        )
    return blocks


def plan_pool(request: PoolRequest, use: GpuUse | None, *, fixed_length: bool) -> tuple[int, int]:
    """(number of blocks, model length). A length nobody asked for (not ``fixed_length``) shrinks to what the pool holds.

    Raises:
        SettingError: as ``plan_gpu_blocks`` (with ``use``, on a GPU) or ``plan_num_blocks``.
    """
    plan: Callable[[PoolRequest], int] = plan_num_blocks if use is None else lambda given: plan_gpu_blocks(given, use)
    try:
        return plan(request), request.max_model_len
    except SettingError:
        if fixed_length:
            raise
    # As many blocks as before, asked for in the name of more sequences, each of them short enough.
    most = request.max_num_seqs * -(-request.max_model_len // request.block_size)
    num_blocks = plan(replace(request, max_model_len=1, max_num_seqs=most))
    shorter = min(request.max_model_len, num_blocks * request.block_size)
    logger.warning(
        "the KV cache holds %d tokens: the model length is lowered from %d to that", shorter, request.max_model_len
    )
    return num_blocks, shorter


def graph_bytes(sizes: Sequence[int], num_layers: int) -> int:
    """What graphs for batches of these sizes are reckoned to take."""
    return len(sizes) * num_layers * GRAPH_LAYER_BYTES


def step_widths(spec: ModelSpec) -> int:
    """Elements that one token takes in the buffers of a step."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    return 3 * spec.hidden_size + heads * spec.head_dim + 3 * spec.intermediate_size


@dataclass(frozen=True, slots=True)
class HostUse:
    """What an executor on a CPU is about to take."""

    pool_bytes: int
    tier_bytes: int
    step_bytes: int
    tables_bytes: int


def check_host(use: HostUse, total_bytes: int, available_bytes: int) -> None:
    """Refuse sizes for which the system would end this process, or others, half-way.

    Raises:
        SettingError: names what is too large.
    """
    if use.pool_bytes > total_bytes:
        raise SettingError(
            f"--num-gpu-blocks-override or --kv-cache-memory-bytes: a KV cache of {use.pool_bytes / GIB:.1f} GiB is more than "
            f"this machine's {total_bytes / GIB:.1f} GiB of memory"
        )
    if use.pool_bytes + use.tier_bytes > total_bytes:
        raise SettingError(
            f"--kv-offloading-size: a host tier of {use.tier_bytes / GIB:.1f} GiB beside a KV cache of "
            f"{use.pool_bytes / GIB:.1f} GiB is more than this machine's {total_bytes / GIB:.1f} GiB of memory"
        )
    if use.step_bytes + use.tables_bytes > available_bytes:
        raise SettingError(
            f"--max-num-batched-tokens or --max-num-seqs: the buffers of a step would take "
            f"{(use.step_bytes + use.tables_bytes) / GIB:.1f} GiB, more than the {available_bytes / GIB:.1f} GiB that are free"
        )

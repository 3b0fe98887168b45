"""How memory is shared out, as tables of sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo_executor.kv_cache import PoolRequest
from octavo_executor.memory import GpuUse, gpu_pool_bytes, graph_bytes, plan_gpu_blocks, plan_pool
from octavo_shared.settings import SettingError

GIB = 2**30
# 8 billion weights in bfloat16 on an H200; a block of 16 tokens of 32 layers with 8 heads of 128.
LLAMA_8B = GpuUse(total_bytes=140 * GIB, used_bytes=17 * GIB, step_bytes=2 * GIB, graph_bytes=GIB // 4, utilization=0.9)
BLOCK = 2 * 32 * 8 * 128 * 16 * 2
REQUEST = PoolRequest(BLOCK, 16, 8192, 256, available_bytes=0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, int(0.9 * 140 * GIB) - int(19.25 * GIB)),
        ({"utilization": 0.5}, int(50.75 * GIB)),
        ({"used_bytes": 40 * GIB}, int(0.9 * 140 * GIB) - int(42.25 * GIB)),  # another process is there too
        ({"step_bytes": 0, "graph_bytes": 0}, int(0.9 * 140 * GIB) - 17 * GIB),
        ({"utilization": 1.0}, int(120.75 * GIB)),
    ],
)
def test_what_is_left_for_pages(change: dict[str, float], expected: int) -> None:
    assert gpu_pool_bytes(replace(LLAMA_8B, **change)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ordered", "use", "blocks"),
    [
        ({}, {}, (int(0.9 * 140 * GIB) - int(19.25 * GIB)) // BLOCK),
        ({"memory_bytes": 10 * GIB}, {}, 10 * GIB // BLOCK),
        ({"memory_bytes": 10 * GIB, "num_blocks": 600}, {}, 600),
        # What is ordered may go beyond the share, though not beyond the memory.
        ({"memory_bytes": 120 * GIB}, {}, 120 * GIB // BLOCK),
        ({"num_blocks": 512}, {"utilization": 0.01}, 512),
    ],
)
def test_blocks_on_a_gpu(ordered: dict[str, int], use: dict[str, float], blocks: int) -> None:
    assert plan_gpu_blocks(replace(REQUEST, **ordered), replace(LLAMA_8B, **use)) == blocks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ordered", "use", "message"),
    [
        (
            {},
            {"utilization": 0.1},
            r"--gpu-memory-utilization 0.1: of the 14.00 GiB .* 17.00 are in use .* nothing is left",
        ),
        (
            {},
            {"utilization": 0.138},
            "--gpu-memory-utilization gives .* too few for one sequence of --max-model-len 8192",
        ),
        ({"num_blocks": 511}, {}, "--num-gpu-blocks-override gives a KV cache of 511 blocks"),
        ({"memory_bytes": GIB - 1}, {}, "--kv-cache-memory-bytes gives a KV cache of 511 blocks"),
        (
            {"memory_bytes": 121 * GIB},
            {},
            "--kv-cache-memory-bytes: a KV cache of 121.00 GiB does not fit into the 120.75",
        ),
        ({"num_blocks": 10**6}, {}, "--num-gpu-blocks-override: a KV cache of .* does not fit"),
    ],
)
def test_what_does_not_go_names_the_setting(ordered: dict[str, int], use: dict[str, float], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan_gpu_blocks(replace(REQUEST, **ordered), replace(LLAMA_8B, **use))  # type: ignore[arg-type]


def test_a_length_nobody_asked_for_shrinks() -> None:
    small, long = replace(LLAMA_8B, utilization=0.138), replace(REQUEST, max_model_len=131072)
    blocks = gpu_pool_bytes(small) // BLOCK
    assert plan_pool(long, small, fixed_length=False) == (blocks, blocks * 16)
    with pytest.raises(SettingError, match="--max-model-len 131072"):
        plan_pool(long, small, fixed_length=True)
    assert plan_pool(REQUEST, LLAMA_8B, fixed_length=True)[1] == 8192
    on_host = replace(REQUEST, available_bytes=10 * GIB, max_model_len=10**6)
    assert plan_pool(on_host, None, fixed_length=False) == (4 * GIB // BLOCK, 4 * GIB // BLOCK * 16)


def test_graphs_are_reckoned_by_layer() -> None:
    assert graph_bytes((1, 2, 4), 32) == 3 * 32 * 64 * 1024
    assert graph_bytes((), 32) == 0

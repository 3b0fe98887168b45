"""Pages as each backend lays them out, in every type that it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo_executor.kv_cache import KvCache, block_bytes, choose_page_dtype
from octavo_executor.quantization import QuantizationSpec
from octavo_executor.spec import ModelSpec, spec_from_config
from octavo_kernels import choose_kernels
from octavo_shared.settings import SettingError

BLOCK, BLOCKS = 8, 3
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("reference", E4M3),
        ("triton", torch.bfloat16),
        ("triton", E4M3),
        ("triton", torch.int8),
    ],
)
def test_a_page_takes_the_bytes_it_is_said_to(spec: ModelSpec, backend: str, dtype: torch.dtype) -> None:
    kernels = choose_kernels(backend, head_dim=16, block_size=BLOCK, max_tokens=8, max_seqs=2)
    cache = KvCache(spec, BLOCKS, BLOCK, dtype, kernels)
    numbers = 2 * 2 * 2 * BLOCK * 16
    scales = 2 * 2 * 2 * BLOCK * 4 if dtype == torch.int8 else 0
    assert block_bytes(spec, BLOCK, dtype, kernels) == numbers * dtype.itemsize + scales
    assert cache.nbytes == BLOCKS * block_bytes(spec, BLOCK, dtype, kernels)
    assert cache.extras(0) is None


def test_types_by_name(spec: ModelSpec) -> None:
    triton = choose_kernels("triton", head_dim=16, block_size=BLOCK, max_tokens=8, max_seqs=2)
    cpu = choose_kernels("cpu", head_dim=16, block_size=BLOCK)
    names = {"auto": torch.bfloat16, "fp8": E4M3, "fp8_e4m3": E4M3, "int8": torch.int8}
    assert {name: choose_page_dtype(name, torch.bfloat16, spec, BLOCK, triton) for name in names} == names
    made_for_fp8 = replace(spec, quantization=QuantizationSpec("fp8", fp8_cache=True))
    assert choose_page_dtype("auto", torch.bfloat16, made_for_fp8, BLOCK, triton) == E4M3
    assert choose_page_dtype("int8", torch.bfloat16, made_for_fp8, BLOCK, triton) == torch.int8
    assert choose_page_dtype("auto", torch.bfloat16, made_for_fp8, BLOCK, cpu) == torch.bfloat16
    for name, why in (("fp8_e5m2", "there are auto, fp8"), ("fp8", "no pages of .* on a CPU"), ("int8", "on a CPU")):
        with pytest.raises(SettingError, match=f"--kv-cache-dtype {name}: .*{why}"):
            choose_page_dtype(name, torch.bfloat16, spec, BLOCK, cpu)

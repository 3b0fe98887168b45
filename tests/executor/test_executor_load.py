"""From settings to a model: devices, types and what is said when they do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, SIZES, save_quantized_model
from tiny_models import save_tiny_model

from octavo_executor.load import choose_device, choose_types, load_model
from octavo_executor.spec import ModelSpec, spec_from_config
from octavo_kernels import choose_kernels
from octavo_shared.settings import ExecutorSettings, SettingError, load_settings

E4M3 = torch.float8_e4m3fn


def settings(**flags: Any) -> ExecutorSettings:
    return load_settings(ExecutorSettings, **flags)


def spec(quantization: dict[str, Any] | None = None, dtype: str = "bfloat16") -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 131,
            "max_position_embeddings": 64,
            "torch_dtype": dtype,
            "quantization_config": quantization,
            **SIZES,
        }
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_without_a_gpu(tmp_path: Path) -> None:
    assert choose_device("auto").host_memory
    assert choose_device("cpu").host_memory
    save_tiny_model("llama", tmp_path)
    with pytest.raises(SettingError, match="--device cuda: there is no GPU"):
        load_model(settings(model=str(tmp_path), device="cuda"), "e")


@pytest.mark.parametrize(
    ("backend", "flags", "expected"),
    [
        ("triton", {}, (torch.bfloat16, torch.bfloat16, torch.bfloat16, None)),
        ("triton", {"dtype": "half"}, (torch.float16, torch.float16, torch.float16, None)),
        ("triton", {"quantization": "fp8"}, (torch.bfloat16, torch.bfloat16, torch.bfloat16, "fp8")),
        ("triton", {"kv_cache_dtype": "fp8"}, (torch.bfloat16, torch.bfloat16, E4M3, None)),
        ("triton", {"kv_cache_dtype": "int8"}, (torch.bfloat16, torch.bfloat16, torch.int8, None)),
        ("cpu", {}, (torch.float32, torch.bfloat16, torch.float32, None)),
    ],
)
def test_types(backend: str, flags: dict[str, Any], expected: tuple[Any, ...]) -> None:
    kernels = choose_kernels(backend, head_dim=16, block_size=16, max_tokens=8, max_seqs=2)
    plan = choose_types(settings(**flags), spec(), kernels, 16)
    assert (plan.activations, plan.weights, plan.kv, plan.quantization) == expected


@pytest.mark.parametrize(
    ("quantization", "flags", "message"),
    [
        (None, {"quantization": "awq"}, "--quantization awq: the checkpoint is not quantised"),
        (None, {"quantization": "fp8"}, "--quantization fp8 needs a GPU"),
        ("awq", {"quantization": "fp8"}, "--quantization fp8: the checkpoint is quantised already, by awq"),
        ("awq", {"quantization": "gptq"}, "--quantization gptq: the checkpoint is quantised already, by awq"),
        (None, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: no pages of"),
    ],
)
def test_types_that_do_not_go(quantization: str | None, flags: dict[str, Any], message: str) -> None:
    kernels = choose_kernels("cpu", head_dim=16, block_size=16)
    config = FORMATS[quantization][0] if quantization else None
    with pytest.raises(SettingError, match=message):
        choose_types(settings(**flags), spec(config), kernels, 16)


@pytest.mark.parametrize(
    ("name", "given"), [("awq", "awq"), ("packed", "compressed-tensors"), ("fp8-tensor", "fp8"), ("fp8-channel", "fp8")]
)
def test_a_quantisation_may_be_named(name: str, given: str) -> None:
    kernels = choose_kernels("cpu", head_dim=16, block_size=16)
    plan = choose_types(settings(quantization=given), spec(FORMATS[name][0]), kernels, 16)
    assert (plan.weights, plan.quantization) == (torch.float32, None)


def test_a_quantised_checkpoint_is_loaded_and_its_cache_is_its_own(tmp_path: Path) -> None:
    save_quantized_model("gptq", tmp_path)
    flags = {"model": str(tmp_path), "num_gpu_blocks_override": 20, "num_threads": 1, "device": "cpu"}
    first, second = (load_model(settings(**flags, dtype=dtype), "e").info for dtype in ("auto", "bfloat16"))
    assert (first.kv_dtype, second.kv_dtype) == ("float32", "bfloat16")
    assert first.max_num_batched_tokens == 2048
    assert first.fingerprint != second.fingerprint


def test_lists_of_sizes() -> None:
    assert settings(cuda_graph_sizes="1,2, 8").cuda_graph_sizes == [1, 2, 8]
    assert settings(cuda_graph_sizes=["1,2", "4"]).cuda_graph_sizes == [1, 2, 4]
    with pytest.raises(SettingError, match="--cuda-graph-sizes"):
        settings(cuda_graph_sizes="0")
    with pytest.raises(SettingError, match="--dtype"):
        settings(dtype="int4")

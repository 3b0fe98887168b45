"""Reading specs, weights and pool sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from octavo_executor.kv_cache import PoolRequest, block_bytes, plan_num_blocks
from octavo_executor.serve import load_model
from octavo_executor.spec import (
    ModelError,
    RopeSpec,
    UnsupportedModelError,
    model_fingerprint,
    read_spec,
    spec_from_config,
)
from octavo_executor.weights import choose_dtypes, load_weights
from octavo_kernels import choose_kernels
from octavo_shared.settings import ExecutorSettings, SettingError, load_settings

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def test_defaults_of_a_plain_llama() -> None:
    spec = spec_from_config(BASE)
    assert (spec.num_kv_heads, spec.head_dim, spec.windows) == (4, 16, (0, 0, 0, 0))
    assert spec.rope == RopeSpec(16, 10000.0)
    assert spec.attention_scale == 0.25
    assert not spec.tied_embeddings


def test_eos_ids_come_from_both_files() -> None:
    assert spec_from_config({**BASE, "eos_token_id": [5, 2]}, {"eos_token_id": [2, 7]}).eos_token_ids == (5, 2, 7)
    assert spec_from_config({**BASE, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_older_and_newer_rotary_entries_mean_the_same(entries: dict[str, Any]) -> None:
    assert spec_from_config({**BASE, **entries}).rope == RopeSpec(16, 5e5, "linear", 2.0)


def test_partial_rotary() -> None:
    rope = spec_from_config({**BASE, "partial_rotary_factor": 0.5}).rope
    assert rope is not None
    assert rope.dim == 8


def test_windows() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"]}
    assert spec_from_config({**mistral, "sliding_window": 7}).windows == (7,) * 4
    assert spec_from_config({**mistral, "sliding_window": None}).windows == (0,) * 4
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 7, "max_window_layers": 3}
    assert spec_from_config(qwen).windows == (0,) * 4
    assert spec_from_config({**qwen, "use_sliding_window": True}).windows == (0, 0, 0, 7)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec_from_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (7, 0, 7, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "GPTQ with 3 bits"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config({**BASE, **change})


def test_broken_configs_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocab_size"):
        spec_from_config({key: value for key, value in BASE.items() if key != "vocab_size"})
    with pytest.raises(ModelError, match="3 key/value heads"):
        spec_from_config({**BASE, "num_key_value_heads": 3})
    with pytest.raises(ModelError, match="does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_spec(tmp_path)
    for change in ({"hidden_size": "wide"}, {"num_attention_heads": None}, {"rope_parameters": 5}, {"vocab_size": []}):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **change}))
        with pytest.raises(ModelError, match="makes no sense"):
            read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_fingerprint(tmp_path, "float32")


def test_the_spec_needs_no_torch() -> None:
    code = "import sys, octavo_executor.spec; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_fingerprints_tell_fine_tunes_apart(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    before = model_fingerprint(tmp_path, "float32")
    assert model_fingerprint(tmp_path, "float32") == before
    assert model_fingerprint(tmp_path, "bfloat16") != before
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    tensors = {name: tensor * 1.001 for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert model_fingerprint(tmp_path, "float32") != before


def load(folder: Path) -> list[float]:
    spec = read_spec(folder)
    kernels = choose_kernels("cpu", head_dim=spec.head_dim, block_size=16)
    seen: list[float] = []
    load_weights(folder, spec, kernels, choose_dtypes("float32", "float32", kernels), seen.append)
    return seen


def test_progress_rises_to_one(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    seen = load(tmp_path)
    assert seen == sorted(seen)
    assert len(seen) == 5
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.9.extra": torch.ones(2)}), "no place for: model.layers.9.extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"model\.norm\.weight has shape \(7,\)"),
    ],
)
def test_wrong_checkpoints_are_explained(tmp_path: Path, change: Any, message: str) -> None:
    save_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)


def test_auto_dtype() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    cpu, reference = (choose_kernels(name, head_dim=64, block_size=16) for name in ("cpu", "reference"))
    for kernels, checkpoint, weights in (
        (cpu, "float32", f32),
        (cpu, "float16", f32),
        (cpu, "bfloat16", bf16),
        (reference, "bfloat16", f32),
    ):
        plan = choose_dtypes("auto", checkpoint, kernels)
        assert (plan.activations, plan.weights, plan.kv) == (f32, weights, f32)
    assert choose_dtypes("bfloat16", "float32", cpu).kv == bf16
    assert choose_dtypes("float32", "bfloat16", cpu).weights == f32
    with pytest.raises(ModelError, match="--dtype float16"):
        choose_dtypes("float16", "float16", cpu)


def test_pool_sizes() -> None:
    spec = spec_from_config(BASE)
    kernels = choose_kernels("cpu", head_dim=spec.head_dim, block_size=16)
    size = block_bytes(spec, 16, torch.float32, kernels)
    assert size == 2 * 4 * 4 * 16 * 16 * 4
    request = PoolRequest(size, 16, 512, 8, available_bytes=10**9)
    assert plan_num_blocks(request) == 8 * 32
    assert plan_num_blocks(replace(request, max_num_seqs=10**6)) == int(10**9 * 0.4) // size
    assert plan_num_blocks(replace(request, max_num_seqs=10**9, available_bytes=10**12)) == (4 << 30) // size
    assert plan_num_blocks(replace(request, memory_bytes=size * 40 + 1)) == 40
    assert plan_num_blocks(replace(request, memory_bytes=size * 40, num_blocks=33)) == 33
    for change, name in (
        ({"num_blocks": 31}, "--num-gpu-blocks-override"),
        ({"memory_bytes": size * 31}, "--kv-cache-memory-bytes"),
        ({"available_bytes": size}, "free memory"),
    ):
        with pytest.raises(SettingError, match=name):
            plan_num_blocks(replace(request, **change))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"max_num_seqs": 1 << 30}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 1 << 40}, "--max-num-batched-tokens"),
        ({"num_gpu_blocks_override": 1 << 40}, "--num-gpu-blocks-override"),
    ],
)
def test_sizes_beyond_the_machine_are_refused(tmp_path: Path, flags: dict[str, int], named: str) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(SettingError, match=named):
        load_model(load_settings(ExecutorSettings, model=str(tmp_path), **flags), "e")


def test_waiting_threads_soon_sleep_unless_told_otherwise() -> None:
    code = "import octavo_executor, os; print(os.environ['GOMP_SPINCOUNT'])"
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == expected

"""Quantised checkpoints: layouts against words put together by hand, whole models against transformers' own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, LINEARS, round_activations, save_quantized_model
from safetensors.torch import load_file, save_file
from tiny_models import Driver, expected_logits, random_tokens, relative_error, save_tiny_model

from octavo_executor.checkpoint import AWQ_PLACES, PLACES, unpack
from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.quantization import QuantizationSpec, UnsupportedQuantizationError, read_quantization
from octavo_executor.spec import ModelError, read_spec
from octavo_executor.weights import DtypePlan, ModelWeights, choose_dtypes, load_weights
from octavo_kernels import Kernels, choose_kernels

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
WIDENED = {"gptq-act-order", "packed-act-order", "fp8-block"}


def kernels_of(backend: str) -> Kernels:
    return choose_kernels(backend, head_dim=16, block_size=8, threads=2, max_tokens=64, max_seqs=4)


def loaded(folder: Path, backend: str, dtype: str = "float32", **options: Any) -> ModelWeights:
    spec, kernels = read_spec(folder), kernels_of(backend)
    dtypes = choose_dtypes(dtype, spec.checkpoint_dtype, kernels, quantized=spec.quantization is not None)
    plan = DtypePlan(dtypes.activations, dtypes.weights, dtypes.kv, **options)
    return load_weights(folder, spec, kernels, plan)


def test_words_of_eight_codes() -> None:
    """From documentation: the word 0x76543210 holds 0 to 7 in order; AWQ reads columns 0 2 4 6 1 3 5 7 from it."""
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert unpack(words, PLACES).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, *[15] * 8]]
    assert unpack(words, AWQ_PLACES).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7, *[15] * 8]]
    negative = torch.tensor([[-0x80000000]], dtype=torch.int32)
    assert unpack(negative, PLACES).tolist() == [[0, 0, 0, 0, 0, 0, 0, 8]]


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_quantised_model_is_transformers_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Widened at load on the CPU: nothing is rounded but by the checkpoint."""
    theirs = save_quantized_model(name, tmp_path)
    tokens = random_tokens(20, 3)
    driver = Driver(tmp_path, "cpu", 16)
    got = torch.cat([driver.step([("a", tokens[:13])])[0], driver.step([("a", tokens[13:])])[0]])
    assert relative_error(got, expected_logits(theirs, tokens)) < 1e-4


@pytest.mark.parametrize("name", list(FORMATS))
def test_backends_that_can_keep_the_bits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save_quantized_model(name, tmp_path)
    tokens = random_tokens(9, 4)
    with caplog.at_level(logging.WARNING):
        driver = Driver(tmp_path, "reference", 16)
        weights = loaded(tmp_path, "triton")
    warned = [record.message for record in caplog.records if "quantised matrices" in record.message]
    assert bool(warned) == (name in WIDENED)
    if warned:
        assert warned[0].startswith("14 quantised matrices are stored as float32")
    if name in ("fp8-tensor", "fp8-channel"):
        round_activations(theirs)
    assert relative_error(driver.step([("a", tokens)])[0], expected_logits(theirs, tokens)) < 1e-3
    for weight in (weights.layers[1].qkv, weights.layers[1].down):
        plain = weight.out_features * weight.in_features * 4
        share = 1.0 if name in WIDENED else 0.3 if name.startswith("fp8") else 0.2
        assert plain * share / 2 < weight.nbytes <= plain * share


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8-channel"])
def test_by_the_gpu_kernels(name: str, tmp_path: Path) -> None:
    """The tiny model end to end by Triton's interpreter."""
    pytest.importorskip("triton")
    theirs = save_quantized_model(name, tmp_path)
    spec, kernels = read_spec(tmp_path), kernels_of("triton")
    dtypes = choose_dtypes("auto", spec.checkpoint_dtype, kernels, quantized=True)
    assert dtypes.activations == torch.float32  # the checkpoint's own
    driver = Driver(tmp_path, "triton", 8)
    tokens = random_tokens(6, 5)
    if name == "fp8-channel":
        round_activations(theirs)
    error = relative_error(driver.step([("a", tokens)])[0], expected_logits(theirs, tokens))
    # The product of two e4m3 comes rounded to bfloat16, and then activations round to another e4m3 here and there.
    assert error < (0.3 if name == "fp8-channel" else 1e-4)


def test_some_layers_may_be_plain(tmp_path: Path) -> None:
    theirs = save_quantized_model("gptq", tmp_path, skip=("layers.1.", "layers.0.self_attn.k_proj"))
    tokens = random_tokens(9, 6)
    weights = loaded(tmp_path, "reference")
    assert weights.layers[0].qkv.scale is None  # of three parts one is plain
    assert weights.layers[0].down.scale is not None
    assert weights.layers[1].down.scale is None
    got = Driver(tmp_path, "reference", 16).step([("a", tokens)])[0]
    assert relative_error(got, expected_logits(theirs, tokens)) < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8-channel"])
def test_a_quantised_output_head_is_widened(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, tokens = save_quantized_model(name, tmp_path, head=True), random_tokens(9, 8)
    with caplog.at_level(logging.WARNING):
        driver = Driver(tmp_path, "reference", 16)
    assert "1 quantised matrices" in caplog.text
    if name == "fp8-channel":
        round_activations(theirs)
    assert relative_error(driver.step([("a", tokens)])[0], expected_logits(theirs, tokens)) < 1e-3


def test_plain_weights_rounded_to_fp8_at_load(tmp_path: Path) -> None:
    theirs = save_tiny_model("llama", tmp_path)
    tokens, spec, kernels = random_tokens(9, 7), read_spec(tmp_path), kernels_of("reference")
    weights = loaded(tmp_path, "reference", quantization="fp8")
    assert weights.layers[0].qkv.data.dtype == torch.float8_e4m3fn
    assert weights.head.data.dtype == weights.embedding.data.dtype == torch.float32
    driver = Driver(tmp_path, "reference", 8)
    plan = DtypePlan(torch.float32, torch.float32, torch.float32)
    cache = KvCache(spec, driver.cache.num_blocks, 8, torch.float32, kernels)
    limits = {"max_model_len": 256, "max_tokens": 256, "max_seqs": 16, "max_logits": 256}
    driver.cache, driver.model = cache, Transformer(spec, weights, kernels, cache, plan, **limits)
    for name, parameter in theirs.named_parameters():
        if name.removesuffix(".weight").rpartition(".")[2] in LINEARS:
            scale = parameter.data.abs().amax(1, keepdim=True) / 448
            parameter.data = (parameter.data / scale).to(torch.float8_e4m3fn).float() * scale
    round_activations(theirs)
    assert relative_error(driver.step([("a", tokens)])[0], expected_logits(theirs, tokens)) < 1e-3


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (None, None),
        ({}, None),
        (FORMATS["awq"][0], QuantizationSpec("awq", "awq", 32)),
        (FORMATS["gptq"][0], QuantizationSpec("gptq", "gptq", 32, 1)),
        (FORMATS["gptq-v2"][0], QuantizationSpec("gptq", "gptq", 32, 0)),
        (FORMATS["gptq-channel"][0], QuantizationSpec("gptq", "gptq", 0, 1)),
        (FORMATS["packed"][0], QuantizationSpec("packed", "compressed-tensors", 32)),
        (FORMATS["fp8-tensor"][0], QuantizationSpec("fp8", "fp8")),
        (FORMATS["fp8-block"][0], QuantizationSpec("fp8", "fp8", block=(32, 64))),
        (FORMATS["fp8-channel"][0], QuantizationSpec("fp8", "compressed-tensors")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, QuantizationSpec("awq", "awq", 128)),
        (
            {**FORMATS["fp8-channel"][0], "kv_cache_scheme": KV_SCHEME},
            QuantizationSpec("fp8", "compressed-tensors", fp8_cache=True),
        ),
        (
            {**FORMATS["packed"][0], "kv_cache_scheme": {**KV_SCHEME, "dynamic": True}},
            QuantizationSpec("packed", "compressed-tensors", 32),
        ),
        (
            {**FORMATS["packed"][0], "kv_cache_scheme": {**KV_SCHEME, "type": "int"}},
            QuantizationSpec("packed", "compressed-tensors", 32),
        ),
    ],
)
def test_what_config_json_says(config: dict[str, Any] | None, spec: QuantizationSpec | None) -> None:
    assert read_quantization(config) == spec


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"load_in_4bit": True}, "none named"),
        ({**FORMATS["gptq"][0], "bits": 8}, "8 bits"),
        ({**FORMATS["gptq"][0], "checkpoint_format": "marlin"}, "marlin"),
        ({**FORMATS["gptq"][0], "dynamic": {"-:.*": {}}}, "dynamic"),
        ({**FORMATS["awq"][0], "version": "gemv"}, "gemv"),
        ({**FORMATS["awq"][0], "bits": 8}, "8 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({**FORMATS["packed"][0], "transform_config": {"R1": {}}}, "transforms"),
        ({**FORMATS["packed"][0], "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({**FORMATS["packed"][0], "format": "marlin-24"}, "marlin-24"),
        ({**FORMATS["packed"][0], "config_groups": {}}, "0 schemes"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {
            "a": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}}, "int8 per channel"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "a": {"weights": FORMATS["packed"][0]["config_groups"]["group_0"]["weights"],
                  "input_activations": {"num_bits": 8}}}}, "quantised activations"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_what_is(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedQuantizationError, match=f"{named}.* is not supported; supported are AWQ"):
        read_quantization(config)


def test_a_refusal_reaches_whoever_starts_it(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(ModelError, match="the method quip is not supported"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", lambda t, n: t.update({f"{n}.g_idx": t[f"{n}.g_idx"] + 5}), "names groups that are not there"),
        ("gptq", lambda t, n: t.pop(f"{n}.qzeros"), "lacks .*qzeros"),
        ("gptq", lambda t, n: t.update({f"{n}.bias": torch.ones(64)}), "no place for: .*bias"),
        ("awq", lambda t, n: t.update({f"{n}.scales": t[f"{n}.scales"].int()}), "scales holds torch.int32"),
        ("packed", lambda t, n: t.update({f"{n}.weight_shape": torch.tensor([8, 8])}), r"has shape \(8, 8\)"),
        ("fp8-channel", lambda t, n: t.update({f"{n}.weight_scale": torch.ones(3)}), r"weight_scale has shape \(3,\)"),
        ("fp8-block", lambda t, n: t.update({f"{n}.weight_scale_inv": torch.ones(3, 3)}), "weight_scale_inv has shape"),
    ],
)
def test_wrong_tensors_are_explained(name: str, change: Any, message: str, tmp_path: Path) -> None:
    save_quantized_model(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, "model.layers.1.self_attn.o_proj")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, "cpu")


def test_scales_of_a_cache_in_fp8(tmp_path: Path) -> None:
    """One number for all heads, or one of each; only used where pages are in fp8."""
    save_quantized_model("fp8-channel", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor(0.5 + i)
        tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor([0.25, 2.0])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec, kernels = read_spec(tmp_path), kernels_of("reference")
    plain, narrow = (
        load_weights(tmp_path, spec, kernels, DtypePlan(torch.float32, torch.float32, kv)).page_scales
        for kv in (torch.float32, torch.float8_e4m3fn)
    )
    assert plain is None
    assert narrow is not None
    assert [scales.tolist() for scales in narrow] == [[[0.5, 0.5], [1.5, 1.5]], [[0.25, 2.0], [0.25, 2.0]]]


def test_fp8_weights_without_a_word_in_config_json_are_refused(tmp_path: Path) -> None:
    save_quantized_model("fp8-channel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"holds torch\.float8_e4m3fn"):
        loaded(tmp_path, "cpu")


def test_types_on_a_gpu() -> None:
    kernels = kernels_of("triton")
    for requested, checkpoint, expected in (
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("auto", "float32", torch.float32),
        ("half", "bfloat16", torch.float16),
        ("float16", "float32", torch.float16),
        ("float", "bfloat16", torch.float32),
    ):
        plan = choose_dtypes(requested, checkpoint, kernels)
        assert (plan.activations, plan.weights, plan.kv) == (expected,) * 3
    with pytest.raises(ModelError, match="--dtype"):
        choose_dtypes("auto", "float8", kernels)
    cpu = kernels_of("cpu")
    assert choose_dtypes("auto", "bfloat16", cpu, quantized=True).weights == torch.float32

"""Which quantised checkpoints are understood, read from ``quantization_config`` of ``config.json``. Needs no torch.

The formats are those of AutoAWQ and GPTQModel (4 bits), of llm-compressor ("compressed-tensors": 4 bits and fp8), and of
fp8 checkpoints in Hugging Face's own layout. What else there is is refused before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Layout = Literal["awq", "gptq", "packed", "fp8"]
KNOWN = (
    "AWQ (gemm) and GPTQ in 4 bits, compressed-tensors with weights in 4 bits (pack-quantized) or fp8 (float-quantized), "
    "and fp8"
)


class UnsupportedQuantizationError(ValueError):
    """The checkpoint is quantised in a way that is not understood."""


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How quantised matrices of a checkpoint are stored; which ones are is seen by their tensors. ``method`` is its name.

    ``group_size`` inputs share a scale (0: all of them). ``zero_offset`` is added to GPTQ's stored zeros. ``block``
    outputs by inputs share a scale in fp8, with (0, 0) each output, or the whole matrix, has one. ``fp8_cache``: keys and values
    were meant to be kept in fp8, with the checkpoint's scales.
    """

    layout: Layout
    method: str = ""
    group_size: int = 0
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)
    fp8_cache: bool = False


def _refuse(what: str) -> UnsupportedQuantizationError:
    return UnsupportedQuantizationError(f"quantization_config: {what} is not supported; supported are {KNOWN}")


def _group(config: dict[str, Any], name: str = "group_size") -> int:
    size = int(config.get(name) or -1)
    return max(size, 0)


def _block(given: Any) -> tuple[int, int]:
    if not given:
        return 0, 0
    rows, columns = (int(size) for size in given)
    return rows, columns


def _awq(config: dict[str, Any]) -> QuantizationSpec:
    bits = config.get("bits", config.get("w_bit", 4))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not config.get("zero_point", True):
        raise _refuse(f"AWQ with {bits} bits, version {version}, zero_point {config.get('zero_point', True)}")
    return QuantizationSpec("awq", group_size=_group(config) or _group(config, "q_group_size"))


def _gptq(config: dict[str, Any]) -> QuantizationSpec:
    bits, kind = config.get("bits"), str(config.get("checkpoint_format") or "gptq")
    if bits != 4 or kind not in ("gptq", "gptq_v2"):
        raise _refuse(f"GPTQ with {bits} bits in the format {kind}")
    if config.get("dynamic"):
        raise _refuse("GPTQ with rules per module (dynamic)")
    # The older format stores zeros less one.
    return QuantizationSpec("gptq", group_size=_group(config), zero_offset=1 if kind == "gptq" else 0)


def _fp8(config: dict[str, Any]) -> QuantizationSpec:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refuse(f"fp8 of the type {config['fmt']}")
    return QuantizationSpec("fp8", block=_block(config.get("weight_block_size")))


def _is_fp8_cache(scheme: dict[str, Any]) -> bool:
    """Whether a ``kv_cache_scheme`` is what fp8 pages hold: static scales per tensor or head, none for zero."""
    kind = scheme.get("num_bits"), scheme.get("type"), scheme.get("symmetric", True)
    return (
        kind == (8, "float", True) and not scheme.get("dynamic") and scheme.get("strategy") in ("tensor", "attn_head")
    )


def _compressed_tensors(config: dict[str, Any]) -> QuantizationSpec:
    return replace(_compressed_weights(config), fp8_cache=_is_fp8_cache(config.get("kv_cache_scheme") or {}))


def _compressed_weights(config: dict[str, Any]) -> QuantizationSpec:
    kind = str(config.get("format"))
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if config.get("transform_config") or sparsity != "dense":
        raise _refuse("compressed-tensors with transforms or sparsity")
    schemes = [group.get("weights") for group in (config.get("config_groups") or {}).values()]
    schemes = [scheme for scheme in schemes if scheme]
    found = {(s.get("num_bits"), s.get("type"), s.get("strategy"), s.get("group_size")) for s in schemes}
    if len(found) != 1:
        raise _refuse(f"compressed-tensors with {len(found)} schemes of weights")
    scheme = schemes[0]
    bits, type_, strategy = scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy")
    if (bits, type_) == (4, "int") and kind == "pack-quantized" and strategy in ("group", "channel"):
        if any((group.get("input_activations") or {}).get("num_bits") for group in config["config_groups"].values()):
            raise _refuse("compressed-tensors with 4-bit weights and quantised activations")
        return QuantizationSpec("packed", group_size=_group(scheme))
    if (bits, type_) == (8, "float") and kind in ("float-quantized", "naive-quantized"):
        if strategy in ("tensor", "channel"):
            return QuantizationSpec("fp8")
        if strategy == "block":
            return QuantizationSpec("fp8", block=_block(scheme.get("block_structure")))
    raise _refuse(f"compressed-tensors of the format {kind} with weights {type_}{bits} per {strategy}")


METHODS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}


def read_quantization(config: dict[str, Any] | None) -> QuantizationSpec | None:
    """What ``quantization_config`` describes; None without one.

    Raises:
        UnsupportedQuantizationError: it is not understood; the message says what is.
    """
    if not config:
        return None
    method = str(config.get("quant_method") or "(none named)").lower()
    if method not in METHODS:
        raise _refuse(f"the method {method}")
    return replace(METHODS[method](config), method=method)

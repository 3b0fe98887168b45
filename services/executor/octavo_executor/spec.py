"""What a model is, read from its Hugging Face folder. Needs neither torch nor transformers.

One transformer serves every family here; a family is a rule for reading ``config.json``, not a class of its own.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo_executor.quantization import QuantizationSpec, UnsupportedQuantizationError, read_quantization

Config = dict[str, Any]


class ModelError(ValueError):
    """The folder does not hold a model that can be served; the message says what is wrong with it."""


class UnsupportedModelError(ModelError):
    """The model is of a kind that is not implemented; the message lists what is."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. ``dim`` of each head's entries turn, the first half of them with the second.

    ``kind`` "linear" divides all frequencies by ``factor``; "llama3" only low ones, smoothly between the two bounds
    (wavelengths against ``original_max_positions``).
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in elements; ``windows`` has one entry per layer, 0 for full attention.

    ``positions`` "learned" and ``norm`` "layer" name what GPT-2 needs; no family read here has them yet.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int, ...]
    rope: RopeSpec | None
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    quantization: QuantizationSpec | None = None


ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def _llama(config: Config) -> Config:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Config) -> Config:
    return {"windows": _windows(config, int(config.get("sliding_window") or 0), first=0)}


def _qwen2(config: Config) -> Config:
    return {"qkv_bias": True, "windows": _qwen_windows(config)}


def _qwen3(config: Config) -> Config:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "windows": _qwen_windows(config)}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _windows(config: Config, window: int, first: int) -> tuple[int, ...]:
    """Per-layer windows: as ``layer_types`` says, else from layer ``first`` on."""
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if not kinds or not window:
        return tuple(window if i >= first else 0 for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layer_types {sorted(set(kinds))} for {layers} layers are not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _qwen_windows(config: Config) -> tuple[int, ...]:
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    return _windows(config, window, first=int(config.get("max_window_layers", 0)))


def _rope(config: Config, head_dim: int) -> RopeSpec:
    """Read both the newer ``rope_parameters`` and the older ``rope_theta`` with ``rope_scaling``."""
    given: Config = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    share = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    dim = int(head_dim * share)
    if kind == "default":
        return RopeSpec(dim, theta)
    if kind == "linear":
        return RopeSpec(dim, theta, "linear", float(given["factor"]))
    if kind == "llama3":
        return RopeSpec(
            dim,
            theta,
            "llama3",
            float(given["factor"]),
            float(given["low_freq_factor"]),
            float(given["high_freq_factor"]),
            int(given.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        )
    raise UnsupportedModelError(f"rotary scaling {kind!r} is not supported; default, linear and llama3 are")


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(x) for x in value] if isinstance(value, list) else [int(value)]


def _read_json(path: Path) -> Config:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def spec_from_config(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """The model that ``config.json`` (and ``generation_config.json``, for end-of-sequence ids) describes.

    Raises:
        UnsupportedModelError: the architecture, rotary scaling or activation is not implemented.
        ModelError: an entry is missing or makes no sense.
    """
    names = config.get("architectures") or ["(none named)"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise UnsupportedModelError(f"architecture {names[0]} is not supported; these are: {', '.join(FAMILIES)}")
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
    try:
        quantization = read_quantization(config.get("quantization_config") or config.get("compression_config"))
    except UnsupportedQuantizationError as error:
        raise UnsupportedModelError(str(error)) from error
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        eos = [*_ids(config.get("eos_token_id")), *_ids((generation_config or {}).get("eos_token_id"))]
        fields: Config = {
            "architecture": names[0],
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": head_dim,
            "max_positions": int(config["max_position_embeddings"]),
            "windows": (0,) * layers,
            "rope": _rope(config, head_dim),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "eos_token_ids": tuple(dict.fromkeys(eos)),
            "checkpoint_dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            "activation": ACTIVATIONS[activation],
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "attention_scale": head_dim**-0.5,
            "quantization": quantization,
        }
        spec = ModelSpec(**{**fields, **family(config)})
    except KeyError as error:
        raise ModelError(f"config.json lacks {error}") from error
    except TypeError as error:
        raise ModelError(f"config.json makes no sense: {error}") from error
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key/value heads")
    return spec


def read_spec(folder: Path) -> ModelSpec:
    """The model in a Hugging Face folder.

    Raises:
        ModelError: as ``spec_from_config``, or a file cannot be read.
    """
    generation = folder / "generation_config.json"
    config = _read_json(folder / "config.json")
    try:
        return spec_from_config(config, _read_json(generation) if generation.exists() else None)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{folder / 'config.json'} makes no sense: {type(error).__name__}: {error}") from error


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: those its index names, else the single one.

    Raises:
        ModelError: there are none, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ModelError(f"{folder} lacks {', '.join(missing) or 'weights'} (weights must be safetensors)")
    return tuple(folder / name for name in names)


def model_fingerprint(folder: Path, kv_dtype: str) -> str:
    """Names what cached keys and values depend on: configuration, weights and the type they are stored as.

    Of each weight file the header, the size and 64 evenly spread pieces of 4 KiB are hashed: cheap for any size, and
    different for fine-tunes of one base.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = _read_json(folder / "config.json")
    digest.update(json.dumps(config, sort_keys=True).encode())
    digest.update(kv_dtype.encode())
    for path in weight_files(folder):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_bytes = struct.unpack("<Q", file.read(8))[0]
                digest.update(struct.pack("<QQ", size, header_bytes) + file.read(min(header_bytes, 1 << 26)))
                for i in range(64):
                    file.seek(max(0, size - 4096) * i // 63)
                    digest.update(file.read(4096))
        except (OSError, struct.error) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()

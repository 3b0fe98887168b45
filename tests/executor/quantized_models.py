"""Quantised checkpoints of tiny models, packed number by number as the formats' descriptions say.

Nothing here is shared with the code under test: words are put together by Python integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from torch import Tensor

Tensors = dict[str, Tensor]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# AWQ puts column order[i] of eight at bits 4 i and following (Lin et al., arXiv 2306.00978, and its published kernels).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


def word(nibbles: list[int]) -> int:
    """int32 with nibble i at bits 4 i and following."""
    value = sum((nibble & 15) << (4 * i) for i, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def words_across(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32[n, m / 8] of codes [n, m], eight neighbours of a row in a word."""
    rows = [[[row[8 * j + i] for i in order] for j in range(len(row) // 8)] for row in codes.tolist()]
    return torch.tensor([[word(eight) for eight in row] for row in rows], dtype=torch.int32)


def words_down(codes: Tensor) -> Tensor:
    """int32[n / 8, m] of codes [n, m], eight neighbours of a column in a word."""
    return words_across(codes.t()).t().contiguous()


def less(words: Tensor, amount: int) -> Tensor:
    """The words less ``amount``, in 32 bits."""
    values = [[(value - amount) & 0xFFFFFFFF for value in row] for row in words.tolist()]
    return torch.tensor([[v - (1 << 32) if v >> 31 else v for v in row] for row in values], dtype=torch.int32)


def rounded(matrix: Tensor, group: Tensor, groups: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k], scales float16[n, G] and zeros [n, G] for a matrix [n, k] whose input i belongs to ``group[i]``."""
    codes = torch.zeros(matrix.shape, dtype=torch.int64)
    scales, zeros = torch.zeros(len(matrix), groups, dtype=torch.float16), torch.zeros(len(matrix), groups).long()
    for g in range(groups):
        part = matrix[:, group == g]
        if symmetric:
            scale, zero = (part.abs().amax(1) / 7.5).half(), torch.full((len(matrix),), 8)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / 15).half()
            zero = (-low / scale.float()).round().clamp(0, 15).long()
            zero[::5] = 0  # as a quantiser may find it
        scales[:, g], zeros[:, g] = scale, zero
        codes[:, group == g] = (part / scale.float()[:, None]).round().long().add(zero[:, None]).clamp(0, 15)
    return codes, scales, zeros


def plain(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    """The matrix that they stand for."""
    return (codes - zeros[:, group]).double().mul(scales.double()[:, group]).float()


def awq(name: str, matrix: Tensor, group: Tensor, groups: int) -> tuple[Tensors, Tensor]:
    codes, scales, zeros = rounded(matrix, group, groups, symmetric=False)
    stored = {
        f"{name}.qweight": words_across(codes.t(), AWQ_ORDER),
        f"{name}.qzeros": words_across(zeros.t(), AWQ_ORDER),
        f"{name}.scales": scales.t().contiguous(),
    }
    return stored, plain(codes, scales, zeros, group)


def gptq(offset: int) -> Callable[[str, Tensor, Tensor, int], tuple[Tensors, Tensor]]:
    """With zeros stored less ``offset``, 1 in the older format, 0 in "gptq_v2"; taken from the words, not from each zero."""

    def pack(name: str, matrix: Tensor, group: Tensor, groups: int) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = rounded(matrix, group, groups, symmetric=False)
        stored = {
            f"{name}.qweight": words_down(codes.t()),
            f"{name}.qzeros": less(words_across(zeros.t()), offset * 0x11111111),
            f"{name}.scales": scales.t().contiguous(),
            f"{name}.g_idx": group.int(),
            f"{name}.bias": torch.zeros(len(matrix), dtype=torch.float16),
        }
        return stored, plain(codes, scales, zeros, group)

    return pack


def packed(symmetric: bool) -> Callable[[str, Tensor, Tensor, int], tuple[Tensors, Tensor]]:
    """As compressed-tensors: numbers from -8 to 7, stored plus 8, eight inputs in a word; zeros eight outputs."""

    def pack(name: str, matrix: Tensor, group: Tensor, groups: int) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = rounded(matrix, group, groups, symmetric)
        stored = {
            f"{name}.weight_packed": words_across(codes),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            stored[f"{name}.weight_zero_point"] = words_down(zeros)
        if not torch.equal(group, torch.arange(len(group)) // (len(group) // groups)):
            stored[f"{name}.weight_g_idx"] = group.int()
        return stored, plain(codes, scales, zeros, group)

    return pack


def fp8(kind: str, block: tuple[int, int] = (0, 0)) -> Callable[[str, Tensor, Tensor, int], tuple[Tensors, Tensor]]:
    """e4m3 with a scale of the whole ("tensor", with static activations beside it), per "channel", or per "block"."""

    def pack(name: str, matrix: Tensor, group: Tensor, groups: int) -> tuple[Tensors, Tensor]:
        n, k = matrix.shape
        if kind == "tensor":
            scale = matrix.abs().max() / 448
            spread = scale.expand(n, k)
        elif kind == "channel":
            scale = matrix.abs().amax(1, keepdim=True) / 448
            spread = scale.expand(n, k)
        else:
            down, across = -(-n // block[0]), -(-k // block[1])
            scale, spread = torch.zeros(down, across), torch.zeros(n, k)
            for i in range(down):
                for j in range(across):
                    at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                    scale[i, j] = matrix[at].abs().max() / 448
                    spread[at] = scale[i, j]
        values = (matrix / spread).to(torch.float8_e4m3fn)
        stored = {f"{name}.weight": values, f"{name}.weight_scale" + ("_inv" if kind == "block" else ""): scale}
        if kind == "tensor":
            stored[f"{name}.input_scale"] = torch.tensor(0.5)
        return stored, values.float() * spread

    return pack


def compressed(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
# Name: what goes into config.json, how a matrix is stored, whether inputs are out of order.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor, Tensor, int], tuple[Tensors, Tensor]], bool]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq, False),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq(1), False),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        gptq(0),
        False,
    ),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, gptq(1), True),
    "gptq-channel": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, gptq(1), False),
    "packed": (compressed("pack-quantized", INT4), packed(True), False),
    "packed-zeros": (compressed("pack-quantized", {**INT4, "symmetric": False}), packed(False), False),
    "packed-act-order": (compressed("pack-quantized", {**INT4, "actorder": "group"}), packed(True), True),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor"), False),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [32, 64]}, fp8("block", (32, 64)), False),
    "fp8-channel": (compressed("float-quantized", {**FP8, "strategy": "channel"}), fp8("channel"), False),
}


def save_quantized_model(name: str, folder: Path, *, skip: tuple[str, ...] = (), head: bool = False) -> Any:
    """A tiny Llama with biases, its linear layers stored as FORMATS[name] says; transformers' own with the same numbers.

    Layers whose name contains one of ``skip`` stay plain; with ``head`` there is a quantised output head too.
    """
    more = {"tie_word_embeddings": False, "vocab_size": 136} if head else {}
    model = save_tiny_model("llama", folder, **SIZES, **more)
    config, store, shuffled = FORMATS[name]
    tensors = load_file(folder / "model.safetensors")
    own = model.state_dict()
    generator = torch.Generator().manual_seed(1)
    for full in list(tensors):
        layer = full.removesuffix(".weight")
        if layer.rpartition(".")[2] not in (*LINEARS, "lm_head") or any(part in full for part in skip):
            continue
        matrix = tensors.pop(full)
        size = config.get("group_size", 32)
        groups = 1 if size == -1 else matrix.shape[1] // size
        group = torch.arange(matrix.shape[1]) // (matrix.shape[1] // groups)
        if shuffled:
            group = group[torch.randperm(len(group), generator=generator)]
        stored, numbers = store(layer, matrix, group, groups)
        tensors.update(stored)
        own[full].copy_(numbers)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    return model


def round_activations(model: Any) -> None:
    """From now on inputs of its linear layers are rounded to e4m3, in multiples of each token's largest / 448."""

    def rounded_input(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 448
        return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale,)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.register_forward_pre_hook(rounded_input)

"""Tiny random models of every family, saved by Hugging Face transformers, and a bare driver of our transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.spec import read_spec
from octavo_executor.weights import choose_dtypes, load_weights
from octavo_kernels import choose_kernels

COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied-biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 11}),
    "mistral-full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-window": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
}


def save_tiny_model(name: str, folder: Path, **changes: Any) -> Any:
    """Create the model with random weights, save it, return transformers' own (eager attention, float32)."""
    kind, config_kind, options = FAMILIES[name]
    size = {key: value for key, value in COMMON.items() if key != "head_dim" or config_kind is not Qwen2Config}
    if config_kind is Qwen2Config:
        size["hidden_size"] = 96  # its head size is hidden / heads
    torch.manual_seed(sum(map(ord, name)))
    config = config_kind(**{**size, **options, **changes}, attn_implementation="eager")
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones, biases as zeros: make them count
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return model


class Driver:
    """Our transformer with a page table per sequence, filled in whatever chunks the test likes."""

    def __init__(self, folder: Path, backend: str, block_size: int, dtype: str = "float32") -> None:
        spec = read_spec(folder)
        kernels = choose_kernels(backend, head_dim=spec.head_dim, block_size=block_size, threads=2)
        dtypes = choose_dtypes(dtype, spec.checkpoint_dtype, kernels)
        self.cache = KvCache(spec, 400 // block_size + 16, block_size, dtypes.kv, kernels)
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))
        self.model = Transformer(
            spec,
            load_weights(folder, spec, kernels, dtypes),
            kernels,
            self.cache,
            dtypes,
            max_model_len=256,
            max_tokens=256,
            max_seqs=16,
            max_logits=256,
        )
        self._free = torch.randperm(self.cache.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, rows: list[tuple[str, list[int]]]) -> list[Tensor]:
        """Compute the given next tokens of each sequence in one batch; logits [tokens, V] of each."""
        inputs, block = self.model.inputs, self.cache.block_size
        at = 0
        for s, (name, tokens) in enumerate(rows):
            table, done = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            while len(table) * block < done + len(tokens):
                table.append(self._free.pop())
            inputs.np_query_start[s : s + 2] = at, at + len(tokens)
            inputs.np_seq_lens[s] = done + len(tokens)
            inputs.np_block_tables[s] = 2**30
            inputs.np_block_tables[s, : len(table)] = table
            for i, token in enumerate(tokens):
                position = done + i
                inputs.np_ids[at], inputs.np_positions[at] = token, position
                inputs.np_slots[at] = table[position // block] * block + position % block
                at += 1
            self.lengths[name] = done + len(tokens)
        inputs.np_num_seqs[0] = len(rows)
        inputs.np_logits_index[:at] = range(at)
        self.model.forward(at)
        logits = self.model.logits(at).clone()
        return list(logits.split([len(tokens) for _, tokens in rows]))


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def expected_logits(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits [tokens, V] of one sequence."""
    return model(torch.tensor([tokens])).logits[0].float()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference against the largest logit of the row."""
    return float(((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max())

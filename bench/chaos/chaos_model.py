"""A tiny random model with a tokenizer of its own: real files, and nothing in them worth waiting for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
MAX_POSITIONS = 512
_TEXT = (
    "the cat sat on the mat and the dog ate the hat that a rat had put on the old oak table by the river, "
    "while rain fell on the roof, and no one could tell when it would end; so they went on and on, one after the other, "
    "until the last of them had told all there was to tell of it in the long night before the day they called the first"
)
_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a two-layer Llama with random float32 weights and a byte-level BPE tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file(_weights(vocab_size, seed), folder / "model.safetensors")
    return folder


def _weights(vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    def norm() -> torch.Tensor:
        return 1.0 + random(HIDDEN, scale=0.2)

    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN, scale=1.0),
        "lm_head.weight": random(vocab_size, HIDDEN, scale=0.4),
        "model.norm.weight": norm(),
    }
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        weights[own + "input_layernorm.weight"] = norm()
        weights[own + "post_attention_layernorm.weight"] = norm()
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            weights[f"{own}{name}.weight"] = random(rows, columns, scale=0.25)
    return weights

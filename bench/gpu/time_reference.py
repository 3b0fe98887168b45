"""The same requests through transformers' generate (SDPA, one static batch) and through core and runner, in one process run.

Also whether both compute the same: the greedy tokens of a model with the same weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from models import QWEN3_06B, Engine, answers, build, config_of, even_workload, warm
from stage import Stage, Table

COLUMNS = ["engine", "requests", "inputs", "outputs", "seconds", "tokens_per_s", "ratio", "same_tokens"]


def their_model(stage: Stage, engine: Engine) -> Any:
    """transformers' model of the same shape with the engine's own weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = config_of(stage, QWEN3_06B)
    known = {name: value for name, value in config.items() if name not in ("architectures", "model_type", "dtype")}
    # transformers 4 takes the one, 5 the other.
    known["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    dtype = engine.weights.norm.dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(stage.device):
            model = Qwen3ForCausalLM(Qwen3Config(**known, attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(before)
    spec = engine.spec
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": engine.weights.embedding.data,
        "lm_head.weight": engine.weights.head.data,
        "model.norm.weight": engine.weights.norm,
    }
    for i, layer in enumerate(engine.weights.layers):
        q, k, v = layer.qkv.data.split([queries, keys, keys])
        gate, up = layer.gate_up.data.chunk(2)
        names = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output.data,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.data,
        }
        found.update(
            {f"model.layers.{i}.{name}.weight": tensor for name, tensor in names.items() if tensor is not None}
        )
    model.load_state_dict(found, strict=True)
    return model.eval()


def generate(stage: Stage, model: Any, prompts: torch.Tensor, outputs: int) -> tuple[torch.Tensor, float]:
    """Greedy tokens [requests, outputs], and the seconds."""
    stage.wait()
    begun = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=outputs,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    stage.wait()
    return tokens[:, prompts.shape[1] :], time.perf_counter() - begun


def run(stage: Stage, path: Path) -> int:
    """The section."""
    table = Table(path, COLUMNS)
    engine = build(stage, QWEN3_06B, graphs=True)
    warm(engine, stage)
    count, inputs, outputs = stage.pick((64, 256, 128), (2, 9, 2))
    records = even_workload(count, inputs, outputs, engine.spec.vocab_size)
    load, mine = answers(engine, records)
    try:
        model = their_model(stage, engine)
    except ImportError as error:
        print(f"no reference: {error}", flush=True)
        return 0
    prompts = stage.put([record.prompt.tolist() for record in records])
    generate(stage, model, prompts[:, :8], 4)
    theirs, seconds = generate(stage, model, prompts, outputs)
    same = sum(theirs[i].tolist() == mine[i] for i in range(count))
    first = sum(int(theirs[i, 0]) == mine[i][0] for i in range(count))
    common = {"requests": count, "inputs": inputs, "outputs": outputs}
    table.add(engine="transformers", **common, seconds=seconds, tokens_per_s=count * outputs / seconds, ratio=1.0)
    table.add(
        engine="octavo",
        **common,
        seconds=load.seconds,
        tokens_per_s=load.tokens_per_s,
        ratio=load.tokens_per_s / (count * outputs / seconds),
        same_tokens=f"{first} of {count} first ones, {same} of {count} answers",
    )
    # Roundings of bfloat16 turn greedy choices between near equals; most first tokens must agree nevertheless.
    return 0 if first >= stage.pick(0.6, 1.0) * count else 1

"""A decode step on the CPU against what its matrix products alone cost, and against Hugging Face transformers.

The model has SmolLM2-135M's shape and random weights. In every round each contender runs once, so that a noisy machine
disturbs them alike; the figures are each one's best round. Usage: ``python bench/kernels_cpu.py [--rounds N]``.
"""

from __future__ import annotations

# isort: off
import octavo_executor  # noqa: F401 - before torch: it sets how long waiting threads spin

# isort: on
import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.spec import read_spec
from octavo_executor.weights import ModelWeights, choose_dtypes, load_weights
from octavo_kernels import Kernels, Program, choose_kernels

CONTEXT = 160
BLOCK = 16
MAX_BATCH = 32
NEW_TOKENS = 4


def make_model(folder: Path) -> Any:
    """transformers' model with random weights, saved to ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def fill_decode_step(model: Transformer, batch: int) -> None:
    """Inputs of one decode step of ``batch`` sequences with CONTEXT tokens each, on scattered pages."""
    inputs, pages = model.inputs, -(-CONTEXT // BLOCK)
    tables = np.random.default_rng(0).permutation(MAX_BATCH * pages).reshape(MAX_BATCH, pages)[:batch]
    inputs.np_num_seqs[0] = batch
    inputs.np_query_start[: batch + 1] = np.arange(batch + 1)
    inputs.np_seq_lens[:batch] = CONTEXT
    inputs.np_block_tables[:batch, :pages] = tables
    inputs.np_ids[:batch] = np.arange(batch) + 100
    inputs.np_positions[:batch] = CONTEXT - 1
    inputs.np_slots[:batch] = tables[:, -1] * BLOCK + (CONTEXT - 1) % BLOCK
    inputs.np_logits_index[:batch] = np.arange(batch)


def products_only(kernels: Kernels, weights: ModelWeights, rows: int) -> Program:
    """A program of the step's matrix products and nothing else."""
    recording = kernels.record()
    assert recording is not None
    every = [w for layer in weights.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    with recording as finish:
        for weight in (*every, weights.head):
            kernels.linear(torch.randn(rows, weight.in_features), weight, None, torch.empty(rows, weight.out_features))
    return finish()


def torch_products(model: Any) -> Callable[[int], None]:
    """The same products by ``torch.nn.functional.linear`` on fused weights."""
    fused: list[Tensor] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        fused.append(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        fused.append(attention.o_proj.weight)
        fused.append(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        fused.append(mlp.down_proj.weight)
    fused.append(model.lm_head.weight)
    inputs = {width: torch.randn(MAX_BATCH, width) for width in {weight.shape[1] for weight in fused}}

    def run(rows: int) -> None:
        for weight in fused:
            F.linear(inputs[weight.shape[1]][:rows], weight)

    return run


def transformers_step_s(model: Any, batch: int) -> float:
    """Seconds of one decode step of ``generate``: several steps less the prefill and the first."""
    prompt = torch.randint(3, 49152, (batch, CONTEXT - NEW_TOKENS))
    times = []
    for count in (1, 1 + NEW_TOKENS):
        start = time.perf_counter()
        model.generate(prompt, do_sample=False, min_new_tokens=count, max_new_tokens=count)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / NEW_TOKENS


def timed(work: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print one line per batch size, and all figures as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_model(Path(folder))
        spec = read_spec(Path(folder))
        kernels = choose_kernels("cpu", head_dim=spec.head_dim, block_size=BLOCK, threads=args.threads)
        dtypes = choose_dtypes("float32", spec.checkpoint_dtype, kernels)
        weights = load_weights(Path(folder), spec, kernels, dtypes)
    cache = KvCache(spec, MAX_BATCH * -(-CONTEXT // BLOCK), BLOCK, dtypes.kv, kernels)
    cache.k.normal_()
    cache.v.normal_()
    limits = {"max_model_len": 256, "max_tokens": MAX_BATCH, "max_seqs": MAX_BATCH, "max_logits": MAX_BATCH}
    model = Transformer(spec, weights, kernels, cache, dtypes, **limits)
    ours, by_torch = products_only(kernels, weights, MAX_BATCH), torch_products(theirs)
    report = []
    with torch.inference_mode():
        for batch in (1, 8, 32):
            fill_decode_step(model, batch)
            contenders: dict[str, Callable[[], object]] = {
                "step": lambda n=batch: (model.forward(n), model.logits(n)),  # type: ignore[misc]
                "products": lambda n=batch: ours.run(n),  # type: ignore[misc]
                "torch_products": lambda n=batch: by_torch(n),  # type: ignore[misc]
            }
            best = dict.fromkeys(contenders, float("inf"))
            for _ in range(args.rounds):
                for name, work in contenders.items():
                    best[name] = min(best[name], timed(work))
            if not args.no_transformers:
                best["transformers"] = min(transformers_step_s(theirs, batch) for _ in range(3))
            report.append({"batch": batch, **{f"{name}_ms": round(s * 1e3, 2) for name, s in best.items()}})
            ratios = "  ".join(f"{best['step'] / best[name]:.2f} x {name}" for name in best if name != "step")
            print(f"batch {batch:2d}: step {best['step'] * 1e3:.1f} ms  {ratios}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

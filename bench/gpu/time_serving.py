"""Output tokens per second of whole models with random weights: core and runner in one process, graphs on and off."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from models import LLAMA3_8B, QWEN3_06B, build, nano_vllm_workload, serve, warm
from stage import Stage, Table

COLUMNS = [
    *("model", "graphs", "requests", "input_tokens", "output_tokens", "seconds", "tokens_per_s", "steps"),
    *("decode_rows", "decode_step_ms", "host_ms"),
]


def run_model(stage: Stage, path: Path, name: str, config: Mapping[str, Any], order: tuple[bool, ...]) -> int:
    """One model with nano-vllm's workload."""
    table = Table(path, COLUMNS)
    kernels = weights = None
    for graphs in order:
        engine = build(stage, config, graphs=graphs, kernels=kernels, weights=weights)
        kernels, weights = engine.kernels, engine.weights
        warm(engine, stage)
        records = nano_vllm_workload(*stage.pick((256, 1024, 100, 10000), (2, 4, 3, 90)))
        load = serve(engine, records)
        wanted = sum(record.sampling.max_tokens for record in records)
        if load.output_tokens != wanted:
            raise AssertionError(f"{load.output_tokens} tokens came, {wanted} were asked for")
        rows, step_s, host_s = load.typical()
        table.add(
            model=name,
            graphs="on" if graphs else "off",
            requests=len(records),
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            seconds=load.seconds,
            tokens_per_s=load.tokens_per_s,
            steps=load.steps,
            decode_rows=rows,
            decode_step_ms=1e3 * step_s,
            host_ms=1e3 * host_s,
        )
        del engine
        gc.collect()
        if stage.mode == "gpu":
            torch.cuda.empty_cache()
    return 0


def run(stage: Stage, path: Path) -> int:
    """The section of the small model."""
    return run_model(stage, path, "Qwen3-0.6B", QWEN3_06B, (True, False))


def run_large(stage: Stage, path: Path) -> int:
    """The section of the larger one."""
    return run_model(stage, path, "Llama-3-8B", LLAMA3_8B, (True, False))

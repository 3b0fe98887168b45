"""Norms, embedding, activations, adapters, sampling and log-probabilities: all bound by memory, so registers are the question."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from octavo_kernels.interface import Activation, SampleRows
from octavo_kernels.triton import layers, lora, sampling
from octavo_kernels.triton.aot.case import Case
from octavo_kernels.triton.aot.estimate import Work
from octavo_kernels.triton.attention_config import Gpu

META = torch.device("meta")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16"}
TOKENS, HIDDEN, INTERMEDIATE, VOCAB = 2048, 4096, 14336, 128256
ROWS, ADAPTERS, RANK = 64, 16, 16


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=META)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _norm(gpu: Gpu, kind: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual, weight = (_matrix(TOKENS, hidden, dtype) for _ in range(3))
    if kind == "rms_norm_kernel":
        layers.rms_norm(x, weight[0], 1e-6, x)
    elif kind == "add_rms_norm_kernel":
        layers.add_rms_norm(x, residual, weight[0], 1e-6, x)
    else:
        layers.gather_add_rms_norm(x, residual, _ints(ROWS), weight[0], 1e-6, _matrix(ROWS, hidden, dtype))


def _activation(gpu: Gpu, activation: Activation, dtype: torch.dtype) -> None:
    layers.act_and_mul(_matrix(TOKENS, 2 * INTERMEDIATE, dtype), activation, _matrix(TOKENS, INTERMEDIATE, dtype))


def _embed(gpu: Gpu, dtype: torch.dtype) -> None:
    layers.embed(_ints(TOKENS), _matrix(VOCAB, HIDDEN, dtype), _matrix(TOKENS, HIDDEN, dtype))


def _layer_cases() -> Iterator[Case]:
    for dtype in (BF16, F16, F32):
        name, size = NAMES[dtype], dtype.itemsize
        for title, kernel, passes, rows in (
            ("RMS norm", "rms_norm_kernel", 2, TOKENS),
            ("add, RMS norm", "add_rms_norm_kernel", 4, TOKENS),
            ("gather, add, RMS norm", "gather_add_rms_norm_kernel", 3, ROWS),
        ):
            for hidden in (HIDDEN, 16384) if kernel == "add_rms_norm_kernel" else (HIDDEN,):
                launch = partial(_norm, kind=kernel, dtype=dtype, hidden=hidden)
                work = Work(float(passes * rows * hidden * size))
                chosen = dtype == BF16 and hidden == HIDDEN
                yield Case(title, f"{name}, {rows} x {hidden}", kernel, launch, work, chosen=chosen)
        gated: tuple[tuple[str, Activation], ...] = (("SwiGLU", "silu"), ("GeGLU", "gelu_tanh"))
        for title, activation in gated:
            launch = partial(_activation, activation=activation, dtype=dtype)
            work = Work(3.0 * TOKENS * INTERMEDIATE * size)
            yield Case(title, f"{name}, {TOKENS} x {INTERMEDIATE}", "act_and_mul_kernel", launch, work)
        work = Work(2.0 * TOKENS * HIDDEN * size)
        yield Case("embedding", f"{name}, {TOKENS} x {HIDDEN}", "embed_kernel", partial(_embed, dtype=dtype), work)


def _lora(gpu: Gpu, dtype: torch.dtype) -> None:
    tiles = lora.LoraTiles(_ints(ADAPTERS, lora.TOKENS), _ints(ADAPTERS))
    down = torch.empty((ADAPTERS, RANK, HIDDEN), dtype=dtype, device=META)
    up = torch.empty((ADAPTERS, HIDDEN, RANK), dtype=dtype, device=META)
    scale = torch.empty(ADAPTERS, dtype=F32, device=META)
    lora.add_lora(_matrix(ROWS, HIDDEN, dtype), down, up, scale, tiles, _matrix(ROWS, HIDDEN, dtype))


def _lora_cases() -> Iterator[Case]:
    for dtype in (BF16, F16, F32):
        variant = f"{NAMES[dtype]}, {ADAPTERS} of rank {RANK}, {ROWS} x {HIDDEN}"
        work = Work((ADAPTERS * RANK + ROWS) * HIDDEN * dtype.itemsize, 2.0 * ROWS * RANK * HIDDEN)
        for title, kernel in (("LoRA, shrink", "shrink_kernel"), ("LoRA, expand", "expand_kernel")):
            yield Case(title, variant, kernel, partial(_lora, dtype=dtype), work, chosen=dtype == BF16)


def _rows() -> SampleRows:
    def floats() -> Tensor:
        return torch.empty(ROWS, dtype=F32, device=META)

    return SampleRows(
        *(floats(), _ints(ROWS), floats(), floats(), floats(), floats(), floats()),
        *(torch.empty(ROWS, dtype=torch.int64, device=META), _ints(ROWS), _ints(ROWS, 4096), _ints(ROWS)),
        *(_ints(ROWS), _ints(ROWS), _ints(ROWS + 1), _ints(0), torch.empty(0, dtype=F32, device=META)),
        *(_ints(ROWS + 1), _ints(0)),
    )


def _sample(gpu: Gpu) -> None:
    sampling.sample(_matrix(ROWS, VOCAB, F32), _rows())


def _candidates(gpu: Gpu) -> None:
    sampling.candidates(_matrix(ROWS, VOCAB, F32), _rows(), _ints(ROWS), 16)


def _logprobs(gpu: Gpu) -> None:
    sampling.logprobs(_matrix(ROWS, VOCAB, F32), _ints(ROWS), _ints(ROWS), 20)


def _sampling_cases() -> Iterator[Case]:
    variant, logits = f"{ROWS} x {VOCAB}", 4.0 * ROWS * VOCAB
    for title, kernel, moved in (
        ("sampling, clear counts", "clear_counts_kernel", logits),
        ("sampling, count tokens", "count_tokens_kernel", 4.0 * ROWS * 4096),
        ("sampling, process", "process_kernel", 3 * logits),
        ("sampling, survey", "survey_kernel", logits),
        ("sampling, collect", "collect_kernel", logits),
        ("sampling, draw", "draw_kernel", 0.0),
    ):
        yield Case(title, variant, kernel, _sample, Work(moved), chosen=kernel == "process_kernel")
    yield Case("candidates, list", variant, "list_kernel", _candidates, Work(0.0))
    yield Case("log-probabilities, tops", variant, "tops_kernel", _logprobs, Work(logits))


def layer_cases() -> Iterator[Case]:
    """All of this file."""
    yield from _layer_cases()
    yield from _lora_cases()
    yield from _sampling_cases()

"""Beam search through core and runner, on shared pages: the hypotheses of Hugging Face transformers, token for token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.in_process import InProcess
from octavo_executor.serve import load_model
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.engine import core_config
from octavo_shared.ids import RequestId
from octavo_shared.records import EarlyStopping, RequestRecord, SamplingParams
from octavo_shared.settings import ExecutorSettings, SchedulerSettings, load_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import save_tiny_model

VOCAB = 131
MODES = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}
# Two searches whose best hypotheses score closer than this differ by rounding.
TIE = 1e-4


def theirs(
    model: Any, prompt: np.ndarray, sampling: SamplingParams, eos: int | None
) -> tuple[list[list[int]], list[float]]:
    """The hypotheses transformers returns, best first, without padding; and their scores."""
    width = sampling.beam_width
    with torch.no_grad():
        out = model.generate(
            torch.tensor(prompt[None], dtype=torch.long),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=sampling.length_penalty,
            early_stopping=MODES[sampling.early_stopping],
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos or 0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for sequence in out.sequences[:, len(prompt) :].tolist():
        found.append(sequence[: sequence.index(eos) + 1] if eos is not None and eos in sequence else sequence)
    return found, out.sequences_scores.tolist()


def stack_for(folder: Path, *, blocks: int, block_size: int, **more: Any) -> InProcess:
    executor = load_settings(
        ExecutorSettings,
        model=str(folder),
        block_size=block_size,
        max_num_seqs=24,
        num_gpu_blocks_override=blocks,
        dtype="float32",
        **more,
    )
    loaded = load_model(executor, "test")
    config = core_config(loaded.info, load_settings(SchedulerSettings, model=str(folder)))
    return InProcess(Scheduler(config), loaded.runner, check=True)


def compare(
    stack: InProcess, model: Any, prompts: list[np.ndarray], sampling: SamplingParams, eos: int | None
) -> tuple[int, int]:
    """All prompts in one batch; (hypotheses compared, those that differ by rounding)."""
    records = [
        RequestRecord(RequestId("test", i), 0, prompt, sampling, n=sampling.beam_width)
        for i, prompt in enumerate(prompts)
    ]
    choices = stack.run(records)
    compared = ties = 0
    for serial, prompt in enumerate(prompts):
        expected, scores = theirs(model, prompt, sampling, eos)
        for place, (tokens, score) in enumerate(zip(expected, scores, strict=True)):
            fold = choices[serial, place]
            assert fold.end
            compared += 1
            if fold.tokens == tokens:
                continue
            # Another place in the ranking, or another decision on the way: only if the scores are as good as equal.
            with torch.no_grad():
                own = torch.tensor([[*prompt.tolist(), *fold.tokens]])
                logprobs = model(own).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = float(logprobs[range(len(fold.tokens)), fold.tokens].sum())
            got = total / len(fold.tokens) ** sampling.length_penalty
            assert abs(got - score) < TIE * max(1.0, abs(score)), (
                f"prompt {serial}, hypothesis {place}: {got}, not {score}"
            )
            ties += 1
    stack.core.check_integrity()
    assert stack.core.pool.num_used == 0
    return compared, ties


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny_model("llama", folder)


def tiny_prompts(count: int = 12) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 20)
    return [
        np.concatenate([shared[: 20 * (i % 2)], rng.integers(3, VOCAB, 1 + i)]).astype(np.int32) for i in range(count)
    ]


@pytest.mark.parametrize("mode", list(EarlyStopping))
@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("pool", ["ample", "tight"])
def test_tiny_model(tiny: tuple[Path, Any], width: int, mode: EarlyStopping, pool: str) -> None:
    """Small blocks, so that every search copies pages all the time; a tight pool, so that beams are preempted."""
    folder, model = tiny
    blocks = 400 if pool == "ample" else 34
    stack = stack_for(folder, blocks=blocks, block_size=8, max_model_len=64, num_threads=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=14, beam_width=width, early_stopping=mode)
    eos = stack.core.config.eos_token_ids
    compared, ties = compare(stack, model, tiny_prompts(), sampling, eos[0] if eos else None)
    assert compared == 12 * width
    assert ties <= compared // 10
    assert (stack.core.stats.preemptions > 0) == (pool == "tight")

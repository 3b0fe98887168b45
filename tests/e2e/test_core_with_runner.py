"""The scheduler's core drives the real runner: whatever it decides, the numbers stay those of Hugging Face transformers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from careless import Careless

from octavo.in_process import InProcess
from octavo_executor.serve import load_model
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.engine import core_config
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord, SamplingParams
from octavo_shared.settings import ExecutorSettings, SchedulerSettings, load_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import FAMILIES, save_tiny_model

VOCAB = 131
MAX_MODEL_LEN = 128
OUTPUTS = 10
SHARED = np.random.default_rng(7).integers(3, VOCAB, 40).astype(np.int32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True, logprobs=VOCAB)


def prompts() -> list[np.ndarray]:
    """Mixed lengths around the edges of blocks; every other one starts with the same 40 tokens."""
    rng = np.random.default_rng(1)
    tails = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 60, 70)]
    return [np.concatenate([SHARED, tail]) if i % 2 else tail for i, tail in enumerate(tails)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and transformers' own model of a family, made once."""

    @cache
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, save_tiny_model(family, folder)

    return make


@torch.no_grad()
def expected_logprobs(model: Any, tokens: list[int], outputs: int) -> torch.Tensor:
    """transformers' log-probabilities [outputs, V] of the last ``outputs`` tokens of a sequence."""
    logits = model(torch.tensor([tokens])).logits[0, -outputs - 1 : -1].double()
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("budget", [16, 64, 2048])
@pytest.mark.parametrize("pool", ["ample", "ample-uncached", "tight"])
def test_logits_are_those_of_transformers(models: Any, family: str, block_size: int, budget: int, pool: str) -> None:
    folder, theirs = models(family)
    blocks = MAX_MODEL_LEN // block_size + 1 if pool == "tight" else 2048 // block_size
    executor = load_settings(
        ExecutorSettings,
        model=str(folder),
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=12,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=blocks,
        num_threads=1,
    )
    loaded = load_model(executor, "test")
    scheduler = load_settings(SchedulerSettings, model=str(folder), enable_prefix_caching=pool != "ample-uncached")
    stack = InProcess(Scheduler(core_config(loaded.info, scheduler)), loaded.runner, check=True)
    if pool == "tight":
        # It takes in whom it will have to let go.
        stack.core.forecast = Careless()
    # In two waves, so that the second finds what the first has computed.
    everything = prompts()
    records = [RequestRecord(RequestId("test", i), 0, prompt, GREEDY) for i, prompt in enumerate(everything)]
    stack.run(records[:6])
    folds = stack.run(records[6:])
    worst = 0.0
    for serial, prompt in enumerate(everything):
        fold = folds[serial, 0]
        assert len(fold.tokens) == OUTPUTS
        expected = expected_logprobs(theirs, prompt.tolist() + fold.tokens, OUTPUTS)
        got = torch.full((OUTPUTS, VOCAB), torch.nan, dtype=torch.float64)
        for position, entry in enumerate(fold.logprobs):
            for token, value in entry.top:
                got[position, token] = value
            assert abs(entry.logprob - expected[position, fold.tokens[position]]) < 1e-4 * abs(expected[position]).max()
        worst = max(worst, float(((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max()))
        assert fold.tokens == expected.argmax(-1).tolist()
    assert worst < 1e-4, worst
    stats = stack.core.stats
    assert (stats.preemptions > 0) == (pool == "tight")
    if pool != "tight":
        assert (stats.prefix_hits > 0) == (pool == "ample")
    assert stack.core.pool.num_used == 0

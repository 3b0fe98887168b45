"""The choices of a request, forked from one prefill: what as many requests of their own would give, in less memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process_stack import Model, make_request

from octavo_scheduler.core.events import Preempted
from octavo_shared.fold import ChoiceFold
from octavo_shared.records import RequestRecord, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import save_tiny_model

VOCAB = 131
BLOCK = 8
CHOICES = 8
OUTPUTS = 30
SEED = 2**64 - 3
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=SEED, max_tokens=OUTPUTS, ignore_eos=True, logprobs=3)
# Choices end at different times.
ENDING = replace(DRAWN, ignore_eos=False, stop_token_ids=tuple(range(40, 50)), min_tokens=2, frequency_penalty=0.5)
# On and next to the borders of blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK + 5)


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCAB, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_model("qwen3", made)
    return made


def load(folder: Path, blocks: int) -> Model:
    return Model.load(
        folder, num_gpu_blocks_override=blocks, block_size=BLOCK, max_model_len=80, max_num_seqs=40, dtype="float32"
    )


@pytest.fixture(scope="module")
def ample(folder: Path) -> Model:
    return load(folder, 600)


@pytest.fixture(scope="module")
def tight(folder: Path) -> Model:
    """Room for one long sequence and a bit: eight that start together push each other out all the time."""
    return load(folder, 12)


def outcome(fold: ChoiceFold) -> tuple[object, ...]:
    return (fold.tokens, fold.end, fold.stop_token)


def check_logprobs(fold: ChoiceFold, alone: ChoiceFold) -> None:
    assert len(fold.logprobs) == len(alone.logprobs) == len(fold.tokens)
    got, expected = ([entry.logprob for entry in one.logprobs] for one in (fold, alone))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    for one, other in zip(fold.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose([v for _, v in one.top], [v for _, v in other.top], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def separate(ample: Model) -> dict[str, dict[tuple[int, int], ChoiceFold]]:
    """By kind of sampling, then (prompt, choice): what requests of their own give, one after the other."""
    found: dict[str, dict[tuple[int, int], ChoiceFold]] = {}
    for name, sampling in (("drawn", DRAWN), ("ending", ENDING)):
        stack = ample.stack(enable_prefix_caching=False)
        for i, prompt in enumerate(prompts()):
            for choice in range(CHOICES):
                serial = 100 * i + choice
                alone = make_request(serial, prompt, replace(sampling, seed=(SEED + choice) % 2**64))
                found.setdefault(name, {})[i, choice] = stack.run([alone])[serial, 0]
    return found


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("pool", ["ample", "tight"])
@pytest.mark.parametrize("kind", ["drawn", "ending"])
def test_eight_choices_are_eight_requests(
    request: pytest.FixtureRequest,
    separate: dict[str, dict[tuple[int, int], ChoiceFold]],
    kind: str,
    pool: str,
    caching: bool,
) -> None:
    model: Model = request.getfixturevalue(pool)
    stack = model.stack(enable_prefix_caching=caching, rash=pool == "tight")
    sampling = DRAWN if kind == "drawn" else ENDING
    everything = prompts()
    choices = stack.run([of_eight(i, prompt, sampling) for i, prompt in enumerate(everything)])
    for name, alone in separate[kind].items():
        assert outcome(choices[name]) == outcome(alone), f"prompt of {len(everything[name[0]])}, choice {name[1]}"
        check_logprobs(choices[name], alone)
    lengths = {len(fold.tokens) for fold in separate[kind].values()}
    assert (len(lengths) > 3) == (kind == "ending")
    assert stack.watch.copied > 0
    forked = [one for one in stack.process.events if isinstance(one, Preempted) and one.sequence.choice]
    assert bool(forked) == (pool == "tight")


def of_eight(serial: int, prompt: np.ndarray, sampling: SamplingParams) -> RequestRecord:
    return make_request(serial, prompt, sampling, n=CHOICES)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """It has the default size of blocks."""
    folder = tmp_path_factory.mktemp("long")
    save_tiny_model("qwen3", folder, max_position_embeddings=1024)
    return Model.load(folder, num_gpu_blocks_override=200, max_model_len=600, max_num_seqs=16, dtype="float32")


@pytest.mark.parametrize("length", [499, 500, 512])
def test_eight_choices_hold_hardly_more_than_one(long_model: Model, length: int) -> None:
    """A prompt of about 500 tokens, 16 tokens per block: eight choices share all of it but the block they write into."""
    prompt = np.random.default_rng(5).integers(3, VOCAB, length)
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=10, ignore_eos=True)
    most = {}
    outputs = {}
    for n in (1, CHOICES):
        stack = long_model.stack()
        choices = stack.run([make_request(n, prompt, sampling, n=n)])
        outputs[n] = [choices[n, i].tokens for i in range(n)]
        most[n] = max(stack.watch.used)
    assert outputs[CHOICES][0] == outputs[1][0]
    assert len(set(map(tuple, outputs[CHOICES]))) == CHOICES
    # 9 of the 10 outputs are written, and none of the prompts leaves room for as many before the next border ...
    shared, own = length // 16, -(-(length + 9) // 16) - length // 16
    assert most[1] == shared + own
    # ... so what is not shared are the one or two blocks that they write into.
    assert most[CHOICES] == shared + CHOICES * own
    assert own <= 2

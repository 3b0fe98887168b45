"""Beam search through core and runner, on shared pages: the hypotheses of Hugging Face transformers, token for token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from beam_reference import Reference, Tally
from in_process_stack import Model, make_request
from tokenizers import Tokenizer

from octavo_shared.records import EarlyStopping, RequestRecord, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import save_tiny_model

VOCAB = 131
WIDTHS = (2, 4, 6)
PENALTIES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, Reference(save_tiny_model("llama", folder), eos=2)


@pytest.fixture(scope="module")
def tiny_models(tiny: tuple[Path, Reference]) -> dict[str, Model]:
    """Small blocks, so that every search copies pages all the time; a tight pool, so that beams are preempted."""
    return {
        name: Model.load(
            tiny[0], num_gpu_blocks_override=blocks, block_size=8, max_model_len=64, max_num_seqs=24, dtype="float32"
        )
        for name, blocks in (("ample", 400), ("tight", 34))
    }


def tiny_prompts(count: int = 12) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 20)
    return [
        np.concatenate([shared[: 20 * (i % 2)], rng.integers(3, VOCAB, 1 + i)]).astype(np.int32) for i in range(count)
    ]


@pytest.mark.parametrize("mode", list(EarlyStopping))
@pytest.mark.parametrize("width", WIDTHS)
def test_tiny_model(
    tiny: tuple[Path, Reference], tiny_models: dict[str, Model], width: int, mode: EarlyStopping
) -> None:
    """All at once, with room and without: nothing that shares, copies or is preempted changes a decision."""
    prompts, serials = tiny_prompts(), list(range(12))
    for pool, model in tiny_models.items():
        stack, tally = model.stack(), Tally()
        for penalty in PENALTIES:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=14, beam_width=width, early_stopping=mode, length_penalty=penalty
            )
            serials = [serial + 100 for serial in serials]
            stack.run([searching(serial, prompt, sampling) for serial, prompt in zip(serials, prompts, strict=True)])
            tiny[1].compare(serials, prompts, sampling, stack.process.fold.choices, tally)
        assert tally.compared == 3 * 12 * width
        assert tally.ties <= tally.compared // 20
        assert tally.ended > 0
        assert (stack.core.stats.preemptions > 0) == (pool == "tight")


def searching(serial: int, prompt: np.ndarray, sampling: SamplingParams) -> RequestRecord:
    """All hypotheses of a search are wanted."""
    return make_request(serial, prompt, sampling, n=sampling.beam_width)


# --- the default model ------------------------------------------------------------------------------------------------


def question(text: str) -> str:
    """In the model's chat format, so that answers end."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


TEXTS = (
    "The capital of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    "The three primary colours are red,",
    "Q: What is the boiling point of water?\nA:",
    "In 1969, humans first",
    "Das Wetter ist heute",
    "The mitochondria is the",
    "import numpy as np\n\nx = np.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, "
    "it was the age of foolishness, it was the epoch of belief, it was",
    question("Say yes or no: is water wet?"),
    question("What is 2 + 2? One number only."),
    question("Name a colour, one word."),
    question("Hi"),
    question("Reply with OK."),
    question("Is the sky blue? Answer yes or no."),
    question("What is the capital of Italy? One word."),
    question("Bye!"),
    question("Translate 'cat' into French, one word."),
)


@pytest.fixture(scope="module")
def default_model(model_folder: Path) -> Model:
    return Model.load(
        model_folder, num_gpu_blocks_override=1500, max_model_len=64, max_num_seqs=256, dtype="float32", num_threads=2
    )


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    found = [np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32) for text in TEXTS]
    assert (len(found), min(map(len, found)), max(map(len, found))) == (20, 3, 38)
    return found


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Iterator[Reference]:
    from transformers import AutoModelForCausalLM

    # Two threads that wait for each other on a busy machine are slower than one.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval(), eos=2)
    torch.set_num_threads(before)


def compare_all(model: Model, reference: Reference, prompts: list[np.ndarray], apart: int) -> Tally:
    """Every width with every penalty, each for every ``apart``-th prompt; all searches of ours run beside each other."""
    cells = [(width, penalty) for width in WIDTHS for penalty in PENALTIES]
    jobs = []
    for cell, (width, penalty) in enumerate(cells):
        sampling = SamplingParams(temperature=0.0, max_tokens=12, beam_width=width, length_penalty=penalty)
        chosen = range(cell % apart, len(prompts), apart)
        jobs.append(([cell * 100 + i for i in chosen], [prompts[i] for i in chosen], sampling))
    choices = model.stack().run(
        [
            searching(serial, prompt, sampling)
            for serials, own, sampling in jobs
            for serial, prompt in zip(serials, own, strict=True)
        ]
    )
    tally = Tally()
    for serials, own, sampling in jobs:
        reference.compare(serials, own, sampling, choices, tally)
    return tally


def test_default_model(default_model: Model, reference: Reference, prompts: list[np.ndarray]) -> None:
    """Each of the 20 prompts with at least one width and penalty, and each width with each penalty."""
    tally = compare_all(default_model, reference, prompts, apart=9)
    assert tally.compared == sum(width * len(range(cell, 20, 9)) for cell, width in enumerate(np.repeat(WIDTHS, 3)))
    assert tally.ties <= 2
    assert tally.ended > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_default_model_in_full(default_model: Model, reference: Reference, prompts: list[np.ndarray]) -> None:
    """20 prompts with every width and every penalty."""
    tally = compare_all(default_model, reference, prompts, apart=1)
    print(f"{tally.compared} hypotheses compared, {tally.ties} differ by rounding, {tally.ended} ended by themselves")
    assert tally.compared == 20 * 3 * sum(WIDTHS)
    assert tally.ties <= tally.compared // 100
    assert tally.ended > 50

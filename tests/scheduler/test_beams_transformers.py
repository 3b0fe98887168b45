"""Beam search against Hugging Face transformers' own, decision by decision and text by text.

Two ways. *Replayed*: every log-probability that transformers' search saw is put before ours, step by step; then tokens and
scores must be the very same. *On its own*: ours asks the model itself, whole sequences at a time where transformers uses its
cache; then rounding may turn a decision whose totals lie closer together than ``TIE``, and such cases are counted apart.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.default_model import DEFAULT_MODEL
from octavo.gguf_store import is_complete, models_dir
from octavo_scheduler.core.beams import BeamRules, BeamSearch, Candidates
from octavo_shared.ids import Attempt
from octavo_shared.records import EarlyStopping, EndReason

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import save_tiny_model

TIE = 1e-5
VOCAB = 23
# Padding is no token that is ever drawn, so that it can be told from an output.
PAD = VOCAB
MODES = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}
WIDTHS, PENALTIES = (2, 4, 6), (0.5, 1.0, 2.0, -0.7, 0.0)


@dataclass(frozen=True)
class Outcome:
    """The best hypotheses in order, and their scores as ranked."""

    tokens: list[list[int]]
    ranks: list[float]


def theirs(model: Any, prompt: list[int], rules: BeamRules) -> tuple[Outcome, list[torch.Tensor]]:
    """What transformers finds, and the log-probabilities of each step, float32[width, vocab]."""
    eos = sorted(rules.stop_ids)
    model.generation_config.eos_token_id = eos or None
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=rules.width,
            num_return_sequences=rules.n,
            length_penalty=rules.length_penalty,
            early_stopping=MODES[rules.early_stopping],
            max_new_tokens=rules.max_output_tokens,
            min_new_tokens=rules.min_tokens or None,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=PAD if model.config.vocab_size == VOCAB else 0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = []
    for sequence in out.sequences[:, len(prompt) :].tolist():
        ends = [at + 1 for at, token in enumerate(sequence) if token in rules.stop_ids]
        tokens.append(sequence[: ends[0]] if ends else sequence)
    return Outcome(tokens, out.sequences_scores.tolist()), list(out.scores)


def best(logprobs: torch.Tensor, count: int) -> Candidates:
    """The likeliest of one row, as an executor reports them."""
    values, tokens = torch.topk(logprobs, min(count, len(logprobs)))
    return Candidates(tokens.numpy().astype(np.int32), values.numpy())


def outcome(search: BeamSearch) -> Outcome:
    rules, kept = search.rules, search.state.kept[: search.rules.n]
    for one in kept:
        by_stop = one.tokens[-1] in rules.stop_ids
        assert one.end is (EndReason.STOP if by_stop else EndReason.LENGTH)
        assert by_stop or len(one.tokens) == rules.max_output_tokens
    return Outcome([list(one.tokens) for one in kept], [rules.rank(one.score, len(one.tokens)) for one in kept])


def replayed(rules: BeamRules, steps: list[torch.Tensor]) -> Outcome:
    search = BeamSearch(rules, 1, Attempt(1, 1))
    for step in steps:
        assert not search.is_over, "transformers went on"
        search.advance([best(step[row], rules.candidates_needed) for row in range(len(search.live))])
    assert search.is_over, "transformers was done"
    return outcome(search)


def on_its_own(model: Any, prompt: list[int], rules: BeamRules) -> tuple[Outcome, float]:
    """What ours finds by asking the model, and how close two totals were that a decision lay between."""
    search, closest = BeamSearch(rules, 1, Attempt(1, 1)), float("inf")
    while not search.is_over:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(one.tokens) for one in search.live])).logits[:, -1].float()
        logprobs = torch.log_softmax(logits, -1)
        if search.state.position < rules.min_tokens:
            logprobs[:, sorted(rules.stop_ids)] = -torch.inf
        totals = logprobs + torch.tensor([one.score for one in search.live])[:, None]
        first = torch.topk(totals.flatten(), min(2 * rules.width + 1, totals.numel())).values
        closest = min(closest, float((first[:-1] - first[1:]).min()))
        search.advance([best(row, rules.candidates_needed) for row in logprobs])
    found = outcome(search)
    ranks = sorted(rules.rank(one.score, len(one.tokens)) for one in search.state.kept)
    return found, min([closest, *(after - before for before, after in itertools.pairwise(ranks))])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Others need the processor too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama of few tokens, so that each of them comes often."""
    return save_tiny_model(
        "llama",
        tmp_path_factory.mktemp("beams"),
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def cases(eos: frozenset[int], min_tokens: int = 0, rounds: int = 1) -> Iterator[tuple[list[int], BeamRules]]:
    rng = np.random.default_rng(sum(eos) + 1)
    every = itertools.product(range(rounds), WIDTHS, PENALTIES, EarlyStopping)
    for index, (_, width, penalty, mode) in enumerate(every):
        prompt = rng.integers(0, VOCAB, 1 + index % 7).tolist()
        yield (
            prompt,
            BeamRules(
                width=width,
                n=1 + index % width,
                max_output_tokens=[1, 2, 9, 14][index % 4],
                length_penalty=penalty,
                early_stopping=mode,
                stop_ids=eos,
                min_tokens=min_tokens,
            ),
        )


# From a rare end to one nearly everywhere; the last set has more of them than there are beams.
STOP_IDS = [frozenset[int](), *map(frozenset, ({2}, {17}, {19}, {3, 17}, {1, 7, 8, 20}, set(range(1, 20, 2))))]
STOP_NAMES = ["none", "2", "17", "19", "two", "four", "ten"]


@pytest.mark.parametrize("eos", STOP_IDS, ids=STOP_NAMES)
def test_replayed_decisions_are_the_same(tiny: Any, eos: frozenset[int]) -> None:
    ended_early = 0
    for prompt, rules in cases(eos, rounds=3):
        expected, steps = theirs(tiny, prompt, rules)
        assert replayed(rules, steps) == expected, rules
        ended_early += len(steps) < rules.max_output_tokens
    assert (ended_early > 2) == bool(eos), "the cases are to see both ends"


@pytest.mark.parametrize("min_tokens", [1, 3])
def test_replayed_decisions_are_the_same_with_min_tokens(tiny: Any, min_tokens: int) -> None:
    for prompt, rules in cases(frozenset({5, 11}), min_tokens):
        if rules.max_output_tokens > min_tokens:
            expected, steps = theirs(tiny, prompt, rules)
            assert replayed(rules, steps) == expected, rules


def compare(model: Any, runs: Iterator[tuple[list[int], BeamRules]]) -> tuple[int, int]:
    """How many cases there were, and how many differed by a tie; any other difference fails."""
    count, ties = 0, 0
    for prompt, rules in runs:
        count += 1
        expected, _ = theirs(model, prompt, rules)
        found, closest = on_its_own(model, prompt, rules)
        if found.tokens != expected.tokens:
            assert closest < TIE, f"{rules}: {found} is not {expected}, and nothing was closer than {closest}"
            ties += 1
        else:
            assert found.ranks == pytest.approx(expected.ranks, abs=1e-4)
    return count, ties


@pytest.mark.parametrize("eos", STOP_IDS, ids=STOP_NAMES)
def test_on_its_own_it_finds_the_same(tiny: Any, eos: frozenset[int]) -> None:
    count, ties = compare(tiny, cases(eos))
    assert ties <= count // 10


@pytest.mark.slow  # core and runner together find transformers' hypotheses on it in every run: test_beam_equality.py
@pytest.mark.skipif(not is_complete(models_dir() / DEFAULT_MODEL), reason="the default model has not been fetched")
def test_on_the_default_model_it_finds_the_same() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = models_dir() / DEFAULT_MODEL
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["The capital of France is", "def add(a, b):\n", "Question: What is 2 + 2? Answer:", "Once upon a time"]
    ends = frozenset([*tokenizer.encode(".").ids, 2])

    def runs() -> Iterator[tuple[list[int], BeamRules]]:
        for index, (width, penalty) in enumerate(itertools.product(WIDTHS, PENALTIES[:3])):
            yield (
                tokenizer.encode(texts[index % len(texts)], add_special_tokens=False).ids,
                BeamRules(
                    width=width,
                    n=width,
                    max_output_tokens=7,
                    length_penalty=penalty,
                    early_stopping=list(EarlyStopping)[(index + index // 3) % 3],
                    stop_ids=ends,
                ),
            )

    count, ties = compare(model, runs())
    assert (count, ties <= 1) == (9, True)

"""Beam search as Hugging Face transformers does it, and what it takes to compare with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from in_process_stack import Choices

from octavo_shared.records import EarlyStopping, SamplingParams

MODES = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}
# Two searches whose hypotheses score closer than this differ by rounding.
TIE = 1e-4


@dataclass(frozen=True)
class Hypothesis:
    """Output tokens, the one that ended it included, and the score it is ranked by."""

    tokens: list[int]
    score: float


@dataclass
class Tally:
    """Hypotheses compared; of those, how many differ by rounding, and how many ended by themselves."""

    compared: int = 0
    ties: int = 0
    ended: int = 0


class Reference:
    """transformers' own model and search."""

    def __init__(self, model: Any, eos: int) -> None:
        self.model = model
        self.eos = eos

    @torch.no_grad()
    def search(self, prompts: list[np.ndarray], sampling: SamplingParams) -> list[list[Hypothesis]]:
        """All hypotheses of each prompt, best first. One batch, padded on the left."""
        width, longest = sampling.beam_width, max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.eos)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        out = self.model.generate(
            ids,
            attention_mask=mask,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=sampling.length_penalty,
            early_stopping=MODES[sampling.early_stopping],
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=self.eos,
            pad_token_id=self.eos,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = []
        for tokens, score in zip(out.sequences[:, longest:].tolist(), out.sequences_scores.tolist(), strict=True):
            end = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
            found.append(Hypothesis(tokens[:end], score))
        return [found[i : i + width] for i in range(0, len(found), width)]

    @torch.no_grad()
    def score(self, prompt: np.ndarray, tokens: list[int], length_penalty: float) -> float:
        """What it thinks of an output."""
        logits = self.model(torch.tensor([[*prompt.tolist(), *tokens]])).logits[0, len(prompt) - 1 : -1]
        total = logits.log_softmax(-1)[range(len(tokens)), tokens].sum()
        return float(total) / len(tokens) ** length_penalty

    def compare(
        self, serials: list[int], prompts: list[np.ndarray], sampling: SamplingParams, choices: Choices, tally: Tally
    ) -> None:
        """Are the choices of requests ``serials`` the hypotheses of this search, in its order?

        Where one differs, another decision was made somewhere, or two are in another order: that may only be if its score
        is as good as equal.
        """
        for serial, prompt, expected in zip(serials, prompts, self.search(prompts, sampling), strict=True):
            outputs = [choices[serial, place].tokens for place in range(len(expected))]
            assert len(set(map(tuple, outputs))) == len(outputs), f"request {serial} has a hypothesis twice"
            for place, (wanted, got) in enumerate(zip(expected, outputs, strict=True)):
                tally.compared += 1
                tally.ended += wanted.tokens[-1] == self.eos
                if got != wanted.tokens:
                    tally.ties += 1
                    score = self.score(prompt, got, sampling.length_penalty)
                    assert abs(score - wanted.score) < TIE * max(1.0, abs(wanted.score)), (
                        f"request {serial}, hypothesis {place}: {got} ({score}), not {wanted}"
                    )

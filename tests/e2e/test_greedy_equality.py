"""Greedy output of the default model, batched through all processes, equals Hugging Face transformers token for token."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from e2e_stack import Stack
from tokenizers import Tokenizer

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    "The three primary colours are red,",
    "Q: What is the boiling point of water?\nA:",
    "In 1969, humans first",
    "Das Wetter ist heute",
    "The mitochondria is the",
    "import numpy as np\n\nx = np.",
)
OUTPUTS = 24
# Two tokens closer than this are a tie that rounding may decide either way.
TIE = 1e-4


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """50 prompts of 2 to 262 tokens, more of them short: the long ones repeat and mix the texts."""
    return [
        tokenizer.encode(
            " ".join(TEXTS[(i + j) % len(TEXTS)] for j in range(5 + i // 2)), add_special_tokens=False
        ).ids[: 2 + i * i * 260 // 49**2]
        for i in range(50)
    ]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.mark.timeout(900)
def test_50_prompts_batched_together(start_stack: Callable[..., Stack], model_folder: Path, reference: Any) -> None:
    flags = ("--max-queue-wait", "0", "--dtype", "float32", "--return-tokens-as-token-ids")
    stack = start_stack("--served-model-name", "m", *flags)
    batch = prompts(Tokenizer.from_file(str(model_folder / "tokenizer.json")))
    assert (min(map(len, batch)), max(map(len, batch))) == (2, 262)

    def ask(prompt: list[int]) -> list[int]:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": OUTPUTS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        return [int(name.removeprefix("token_id:")) for name in answer["choices"][0]["logprobs"]["tokens"]]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        outputs = list(pool.map(ask, batch))
    stack.wait_idle()
    stack.stop()
    ties = 0
    for prompt, output in zip(batch, outputs, strict=True):
        assert len(output) == OUTPUTS
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output]), logits_to_keep=OUTPUTS + 1).logits[0, :-1]
        best = logits.argmax(-1)
        for position in range(OUTPUTS):
            if int(best[position]) != output[position]:
                gap = float(logits[position, best[position]] - logits[position, output[position]])
                assert gap < TIE, f"prompt of {len(prompt)} tokens, output {position}: off by {gap}"
                ties += 1
    assert ties <= 2, f"{ties} ties are more than rounding explains"

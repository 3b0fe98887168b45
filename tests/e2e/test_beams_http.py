"""Beam search through all processes: transformers' hypotheses, streamed or whole, beside others, and whoever dies."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from beam_reference import TIE, Hypothesis, Reference
from e2e_stack import RawStream, Stack
from tokenizers import Tokenizer

from octavo_shared.records import SamplingParams

WIDTH, RETURNED, OUTPUTS = 5, 3, 10
SEARCH = {
    "use_beam_search": True,
    "best_of": WIDTH,
    "n": RETURNED,
    "max_tokens": OUTPUTS,
    "length_penalty": 0.5,
    "logprobs": 0,
    "return_tokens_as_token_ids": True,
}
# Answers to the second and third end by themselves.
TEXTS = (
    "It was the best of times, it was",
    "<|im_start|>user\nSay yes or no: is water wet?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nReply with OK.<|im_end|>\n<|im_start|>assistant\n",
)


def complete(stack: Stack, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for piece in json.loads(line.removeprefix("data: "))["choices"]:
                whole = choices.setdefault(piece["index"], {"text": "", "tokens": [], "logprobs": [], "pieces": 0})
                assert "finish_reason" not in whole, "something follows the end"
                whole["text"] += piece["text"]
                whole["pieces"] += bool(piece["text"])
                if piece["logprobs"]:
                    whole["tokens"] += piece["logprobs"]["tokens"]
                    whole["logprobs"] += piece["logprobs"]["token_logprobs"]
                if piece["finish_reason"]:
                    whole["finish_reason"] = piece["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def token_ids(names: list[str]) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in names]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(model_folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, tuple[Reference, list[Hypothesis]]]]:
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference = Reference(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval(), eos=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, beam_width=WIDTH, length_penalty=0.5)
    prompts = [np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]
    yield {
        text: (reference, found[:RETURNED])
        for text, found in zip(TEXTS, reference.search(prompts, sampling), strict=True)
    }
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def default_stack(start_stack: Callable[..., Stack]) -> Iterator[Stack]:
    stack = start_stack("--dtype", "float32", "--max-model-len", "512", "--served-model-name", "m")
    yield stack
    stack.stop()


def check(answer: list[dict[str, Any]], text: str, tokenizer: Tokenizer, expected: Any) -> None:
    """The choices (tokens, logprobs, text, finish_reason) are the hypotheses of transformers."""
    reference, hypotheses = expected[text]
    assert len(answer) == RETURNED
    for choice, wanted in zip(answer, hypotheses, strict=True):
        tokens = token_ids(choice["tokens"])
        score = sum(choice["logprobs"]) / len(tokens) ** 0.5
        assert abs(score - wanted.score) < TIE * abs(wanted.score)
        if tokens != wanted.tokens:
            prompt = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
            own = reference.score(prompt, tokens, 0.5)
            assert abs(own - wanted.score) < TIE * abs(wanted.score), "it is no tie"
        assert choice["text"] == tokenizer.decode(tokens)
        assert choice["finish_reason"] == ("stop" if tokens[-1] == 2 else "length")


def whole(stack: Stack, text: str, **more: Any) -> list[dict[str, Any]]:
    answer = complete(stack, prompt=text, **SEARCH, **more)
    assert answer["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in answer["choices"])
    return [
        {
            "text": choice["text"],
            "tokens": choice["logprobs"]["tokens"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def test_alone_and_beside_ordinary_traffic(default_stack: Stack, tokenizer: Tokenizer, expected: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    ordinary = [f"{i} green bottles, standing on the" for i in range(6)]
    before = [complete(default_stack, prompt=text, **greedy)["choices"][0]["text"] for text in ordinary]
    for text in TEXTS:
        check(whole(default_stack, text), text, tokenizer, expected)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        beside = [pool.submit(complete, default_stack, prompt=text, **greedy) for text in ordinary]
        searches = [pool.submit(whole, default_stack, text) for text in TEXTS]
        streams = [pool.submit(stream, default_stack, prompt=text, **SEARCH) for text in TEXTS]
        for text, search, streamed in zip(TEXTS, searches, streams, strict=True):
            check(search.result(), text, tokenizer, expected)
            check(streamed.result(), text, tokenizer, expected)
        assert [one.result()["choices"][0]["text"] for one in beside] == before
    default_stack.wait_idle()


def test_stop_strings_cut_hypotheses(default_stack: Stack) -> None:
    """Wherever the string stands, in one hypothesis or in what all have in common."""
    uncut = [choice["text"] for choice in whole(default_stack, TEXTS[0])]
    assert len(set(uncut)) == RETURNED
    words = {word for text in uncut for word in text.split() if len(word) > 2}
    in_all = {word for word in words if all(word in text for text in uncut)}
    assert in_all
    assert words - in_all
    for word in [*sorted(in_all)[:3], *sorted(words - in_all)[:3]]:
        for answer in (
            whole(default_stack, TEXTS[0], stop=[word]),
            stream(default_stack, prompt=TEXTS[0], stop=[word], **SEARCH),
        ):
            assert [choice["text"] for choice in answer] == [text.partition(word)[0] for text in uncut]
            assert [choice["finish_reason"] for choice in answer] == [
                "stop" if word in text else "length" for text in uncut
            ]
    default_stack.wait_idle()


@pytest.fixture(scope="module")
def small(start_small: Callable[..., Stack]) -> Iterator[Stack]:
    stack = start_small("--max-model-len", "1024", "--max-num-seqs", "16")
    yield stack
    stack.stop()


LONG = {"prompt": list(range(100, 150)), "use_beam_search": True, "best_of": 4, "n": 2, "ignore_eos": True}


def wait_for_search(stack: Stack, blocks: int = 9) -> None:
    """Until its beams have grown to so many blocks: four of them hold at most 7 when they begin."""
    deadline = time.monotonic() + 20
    while httpx.get(f"{stack.url}/v1/kv?limit=0").json()["totals"]["active_blocks"] < blocks:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("streaming", [True, False])
def test_a_disconnect_in_the_middle_frees_everything(small: Stack, streaming: bool) -> None:
    aborted = small.metric("vllm:request_success_total", finished_reason="abort")
    request = RawStream(small, {**LONG, "model": "m", "max_tokens": 900, "stream": streaming})
    wait_for_search(small)
    request.cut()
    small.wait_idle()
    assert small.metric("vllm:request_success_total", finished_reason="abort") > aborted


@pytest.mark.parametrize("streaming", [True, False])
def test_an_executor_that_dies_in_the_middle(small: Stack, streaming: bool) -> None:
    body = {**LONG, "max_tokens": 200}
    undisturbed = [choice["text"] for choice in complete(small, **body)["choices"]]
    assert len(set(undisturbed)) == LONG["n"]
    lines = len(small.lines)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(stream if streaming else lambda *a, **b: complete(*a, **b)["choices"], small, **body)
        wait_for_search(small)
        small.kill("executor")
        assert not asking.done(), "it died in the middle"
        answer = asking.result()
    small.wait_for("is ready again", start=lines)
    assert [choice["text"] for choice in answer] == undisturbed
    small.wait_idle()

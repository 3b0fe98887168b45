"""Log-probabilities in every shape, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_stage import EOS, Reply, Stage, logprobs_of

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.records import EndReason

HELLO = "Hello there 🦙"


@pytest.fixture
def ids(stage: Stage, tokenizer: ModelTokenizer) -> list[int]:
    """What the engine answers: a text with a character of several tokens, then the end."""
    tokens = [*tokenizer.encode([HELLO], add_special_tokens=False)[0], EOS]
    stage.engine.reply = lambda record, choice: Reply(tokens, EndReason.STOP, EOS, sizes=(2,))
    return tokens


def streamed_completion(stage: Stage, **body: Any) -> dict[str, list[Any]]:
    """The log-probabilities of all chunks of a stream, put together."""
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in stage.stream("/v1/completions", **body):
        for choice in json.loads(event)["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined[name] += values
    return joined


def test_completion_logprobs(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    body = {"prompt": "x", "logprobs": 2}
    answer = stage.post("/v1/completions", **body).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(ids) == answer["usage"]["completion_tokens"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in ids]
    assert logprobs["tokens"][0] == "Hello"
    assert logprobs["tokens"][-1] == "<|im_end|>"
    assert logprobs["token_logprobs"] == [logprobs_of(token, 0).logprob for token in ids]
    expected = {tokenizer.token_text(ids[0] + place): logprobs_of(ids[0], 0).logprob - place for place in range(2)}
    assert logprobs["top_logprobs"][0] == expected
    offsets = [0]
    for name in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(name))
    assert logprobs["text_offset"] == offsets
    assert streamed_completion(stage, **body) == logprobs


def test_the_drawn_token_is_always_among_the_alternatives(
    stage: Stage, tokenizer: ModelTokenizer, ids: list[int]
) -> None:
    tops = stage.post("/v1/completions", prompt="x", logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(top) for top in tops] == [[tokenizer.token_text(token)] for token in ids]


def test_minus_infinity_becomes_a_number(stage: Stage) -> None:
    stage.engine.reply = lambda record, choice: Reply([70, 71], values=[float("-inf"), -20000.0])
    logprobs = stage.post("/v1/completions", prompt="x", logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0, -9999.0]
    assert all(value == -9999.0 for top in logprobs["top_logprobs"] for value in top.values())


def test_echo_with_logprobs_covers_the_prompt(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    body = {"prompt": "one two", "logprobs": 1, "echo": True}
    answer = stage.post("/v1/completions", **body).json()["choices"][0]
    prompt = tokenizer.encode(["one two"], add_special_tokens=True)[0]
    assert stage.engine.records[-1].sampling.prompt_logprobs == 1
    logprobs = answer["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in [*prompt, *ids]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert answer["text"] == "one two" + HELLO
    assert streamed_completion(stage, **body) == logprobs


def test_echo_with_logprobs_alone_scores_a_prompt(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    body = {"prompt": "one two", "logprobs": 1, "echo": True, "max_tokens": 0}
    answer = stage.post("/v1/completions", **body).json()
    prompt = tokenizer.encode(["one two"], add_special_tokens=True)[0]
    choice = answer["choices"][0]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in prompt]
    assert choice["logprobs"]["token_logprobs"] == [None, logprobs_of(prompt[1], 0).logprob]
    assert answer["usage"]["completion_tokens"] == 0
    assert streamed_completion(stage, **body) == choice["logprobs"]


def test_chat_logprobs(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    content = stage.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [tokenizer.token_text(token) for token in ids]
    # The bytes of all tokens are the text, even where a token alone is no text.
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == HELLO
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(ids)
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
    streamed: list[Any] = []
    for event in stage.stream("/v1/chat/completions", **body):
        for choice in json.loads(event)["choices"]:
            streamed += (choice["logprobs"] or {"content": []})["content"]
    assert streamed == content


def test_chat_logprobs_without_alternatives(stage: Stage, ids: list[int]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    content = stage.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_prompt_logprobs(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    choice = stage.post("/v1/completions", prompt="one two", prompt_logprobs=1).json()["choices"][0]
    prompt = tokenizer.encode(["one two"], add_special_tokens=True)[0]
    second = prompt[1]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(second): {
                "logprob": logprobs_of(second, 0).logprob,
                "rank": 1,
                "decoded_token": tokenizer.token_text(second),
            }
        },
    ]
    messages = [{"role": "user", "content": "hi"}]
    answer = stage.post("/v1/chat/completions", messages=messages, prompt_logprobs=0).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_tokens_can_be_named_by_id(stage: Stage, ids: list[int]) -> None:
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = stage.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]


def test_logprobs_stop_with_a_stop_string(stage: Stage, tokenizer: ModelTokenizer, ids: list[int]) -> None:
    body = {"prompt": "x", "logprobs": 1, "stop": " there"}
    answer = stage.post("/v1/completions", **body).json()
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["Hello", " there"]
    assert answer["usage"]["completion_tokens"] == 2
    assert streamed_completion(stage, **body) == answer["choices"][0]["logprobs"]

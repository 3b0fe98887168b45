"""Answers of the two main routes: shapes, streams, n, several prompts, echo, usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import httpx
import openai
import pytest
from gateway_stage import EOS, MAX_MODEL_LEN, Reply, Stage

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.records import EndReason, RequestRecord


def says(tokenizer: ModelTokenizer, text: str, *, eos: bool = True) -> Reply:
    ids = tokenizer.encode([text], add_special_tokens=False)[0]
    return Reply([*ids, EOS], EndReason.STOP, EOS) if eos else Reply(ids)


def test_completion_has_the_shape_clients_know(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: replace(says(tokenizer, " Paris, of course."), cached_tokens=4)
    answer = stage.post("/v1/completions", prompt="The capital of France is", max_tokens=32).json()
    record = stage.engine.records[-1]
    assert answer.pop("created") > 0
    assert answer == {
        "id": f"cmpl-{record.id}",
        "object": "text_completion",
        "model": stage.settings.model_name,
        "choices": [
            {
                "index": 0,
                "text": " Paris, of course.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
    }


def test_chat_renders_the_models_template(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, "Hi!")
    messages = [{"role": "user", "content": "Hello"}]
    answer = stage.post("/v1/chat/completions", messages=messages, model=stage.settings.model_name).json()
    record = stage.engine.records[-1]
    text = tokenizer.decode(record.prompt.tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert record.sampling.max_tokens == MAX_MODEL_LEN - len(record.prompt)
    assert answer["object"] == "chat.completion"
    assert answer["id"] == f"chatcmpl-{record.id}"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_completion_stream_frames(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, "one two", eos=False)
    chunks = [json.loads(event) for event in stage.stream("/v1/completions", prompt="x", max_tokens=2)]
    # How many chunks there are is a matter of timing: one carries all that is new.
    *before, last = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert last == "length"
    assert not any(before)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_begins_with_the_role_and_ends_with_usage(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, "one two")
    chunks = [
        json.loads(event)
        for event in stage.stream(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "count"}],
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "one two"
    last = chunks[-2]["choices"][0]
    # The last words may come with the end, or before it.
    assert last.pop("delta") in ({}, {"content": " two"}, {"content": "one two"})
    assert last == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    prompt = len(stage.engine.records[-1].prompt)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}


def test_continuous_usage_counts_up(stage: Stage) -> None:
    chunks = [
        json.loads(event)
        for event in stage.stream(
            "/v1/completions",
            prompt=[5, 6, 7],
            max_tokens=4,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)


def test_cached_prompt_tokens_are_told_where_the_flag_says_so(
    make_stage: Callable[..., AbstractContextManager[Stage]],
) -> None:
    """Of each prompt those that its first choice found."""

    def reply(record: RequestRecord, choice: int) -> Reply:
        return Reply([9, 9], cached_tokens=len(record.prompt) - 1 if choice == 0 else 100)

    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = {"prompt": [[5, 6, 7], [8] * 33], "n": 2, "max_tokens": 2, "temperature": 1.0}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with make_stage(enable_prompt_tokens_details=True) as stage:
        stage.engine.reply = reply
        whole = stage.post("/v1/completions", **prompts).json()["usage"]
        assert whole == {
            "prompt_tokens": 36,
            "completion_tokens": 8,
            "total_tokens": 44,
            "prompt_tokens_details": {"cached_tokens": 34},
        }
        chunks = [json.loads(event) for event in stage.stream("/v1/completions", stream_options=options, **prompts)]
        assert chunks[-1]["usage"] == whole
        assert {chunk["choices"][0]["index"] for chunk in chunks[:-1]} == {0, 1, 2, 3}
        for chunk in chunks[:-1]:
            details = {"cached_tokens": 2 if chunk["choices"][0]["index"] < 2 else 32}
            assert chunk["usage"]["prompt_tokens_details"] == details
        usage = stage.post("/v1/chat/completions", **chat).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 1}
        stream = [json.loads(event) for event in stage.stream("/v1/chat/completions", stream_options=options, **chat)]
        assert all(chunk["usage"]["prompt_tokens_details"] == usage["prompt_tokens_details"] for chunk in stream)
        stage.engine.reply = lambda record, choice: Reply([9])
        usage = stage.post("/v1/completions", prompt="x", max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_prompts_of_all_four_kinds(stage: Stage, tokenizer: ModelTokenizer) -> None:
    hello, bye = (tokenizer.encode([text], add_special_tokens=True)[0] for text in ("hello there", "bye"))
    for prompt, expected in (
        ("hello there", [hello]),
        (["hello there", "bye"], [hello, bye]),
        (hello, [hello]),
        ([hello, bye], [hello, bye]),
    ):
        stage.engine.records.clear()
        answer = stage.post("/v1/completions", prompt=prompt, max_tokens=1, n=2, temperature=1.0).json()
        assert [record.prompt.tolist() for record in stage.engine.records] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["completion_tokens"] == 2 * len(expected)


def test_choice_index_is_prompt_times_n_plus_choice(stage: Stage, tokenizer: ModelTokenizer) -> None:
    def reply(record: RequestRecord, choice: int) -> Reply:
        return says(tokenizer, f"p{record.prompt[0]}c{choice}")

    stage.engine.reply = reply
    body = {"prompt": [[10], [11], [12]], "n": 3, "max_tokens": 20}
    whole = stage.post("/v1/completions", **body).json()
    expected = [f"p{10 + place}c{choice}" for place in range(3) for choice in range(3)]
    assert [choice["text"] for choice in whole["choices"]] == expected
    texts = dict.fromkeys(range(9), "")
    for event in stage.stream("/v1/completions", **body):
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == expected


def test_echo_puts_the_prompt_in_front(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, " there")
    whole = stage.post("/v1/completions", prompt="Hello", echo=True).json()
    assert whole["choices"][0]["text"] == "Hello there"
    events = [json.loads(event) for event in stage.stream("/v1/completions", prompt="Hello", echo=True)]
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello there"
    ids = tokenizer.encode(["Hello"], add_special_tokens=True)[0]
    assert stage.post("/v1/completions", prompt=ids, echo=True).json()["choices"][0]["text"] == "Hello there"


def test_echo_without_output_gives_the_prompt_back(stage: Stage) -> None:
    for stream in (False, True):
        body = {"prompt": "Hello there", "echo": True, "max_tokens": 0}
        if stream:
            chunks = [json.loads(event) for event in stage.stream("/v1/completions", **body)]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            finish = chunks[-1]["choices"][0]["finish_reason"]
        else:
            answer = stage.post("/v1/completions", **body).json()
            text, finish = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
            assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
        assert (text, finish) == ("Hello there", "length")


def test_sampling_parameters_arrive_as_sent(stage: Stage) -> None:
    stage.post(
        "/v1/completions",
        prompt="x",
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": 3, "6": -200},
        seed=-1,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7, 8],
        priority=-3,
        cache_salt="salt",
        user="someone",
        n=2,
    )
    record = stage.engine.records[-1]
    sampling = record.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert sampling.logit_bias == ((5, 3.0), (6, -100.0))
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == ((1 << 64) - 1, 9, 2)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (7, 8)
    assert (record.priority, record.cache_salt, record.n) == (-3, "salt", 2)


def test_greedy_turns_the_rest_off_and_small_temperatures_are_raised(stage: Stage) -> None:
    stage.post("/v1/completions", prompt="x", temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    sampling = stage.engine.records[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    stage.post("/v1/completions", prompt="x", temperature=0.001)
    assert stage.engine.records[-1].sampling.temperature == 0.01


def test_seeds_are_minted_and_differ(stage: Stage) -> None:
    for _ in range(2):
        stage.post("/v1/completions", prompt=["x", "y"], max_tokens=1)
    seeds = [record.sampling.seed for record in stage.engine.records]
    assert len(set(seeds)) == 4


def test_max_tokens_defaults_and_bounds(stage: Stage) -> None:
    stage.post("/v1/completions", prompt="x")
    assert stage.engine.records[-1].sampling.max_tokens == 16
    almost = [5] * (MAX_MODEL_LEN - 3)
    assert stage.post("/v1/completions", prompt=almost).status_code == 200
    assert stage.engine.records[-1].sampling.max_tokens == 3
    messages = [{"role": "user", "content": "x"}]
    stage.post("/v1/chat/completions", messages=messages, max_tokens=5, max_completion_tokens=4)
    assert stage.engine.records[-1].sampling.max_tokens == 4


def test_openai_client_sync(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, "naïve café 🦙🎉 漢字")
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        assert client.models.retrieve(model).id == model
        whole = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "naïve café 🦙🎉 漢字"
        text = ""
        for chunk in client.completions.create(model=model, prompt="hi", max_tokens=64, stream=True):
            text += chunk.choices[0].text
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="nobody", prompt="hi")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 2\], got 3.0."):
            client.completions.create(model=model, prompt="hi", temperature=3)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_client_async(stage: Stage, tokenizer: ModelTokenizer, path: str) -> None:
    import asyncio

    stage.engine.reply = lambda record, choice: says(tokenizer, f"answer {choice}")

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                text = ""
                if path.endswith("chat/completions"):
                    stream = await client.chat.completions.create(
                        model="", messages=[{"role": "user", "content": "hi"}], stream=True
                    )
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                else:
                    async for part in await client.completions.create(model="", prompt="hi", stream=True):
                        text += part.choices[0].text
                return text

            assert await asyncio.gather(*(one() for _ in range(32))) == ["answer 0"] * 32

    asyncio.run(main())


def test_service_routes(stage: Stage, tokenizer: ModelTokenizer) -> None:
    health = stage.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert stage.client.get("/version").json()["version"]
    card = stage.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (stage.settings.model_name, MAX_MODEL_LEN)
    text = "Hello wörld 🦙 12"
    tokens = stage.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["tokens"] == tokenizer.encode([text], add_special_tokens=True)[0]
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    assert stage.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    chat = stage.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert "<|im_start|>assistant\n" in stage.post("/detokenize", tokens=chat["tokens"]).json()["prompt"]


def test_openapi_schema_names_bodies_and_answers(stage: Stage) -> None:
    schema = stage.client.get("/openapi.json").json()
    route = schema["paths"]["/v1/chat/completions"]["post"]
    body = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body == "#/components/schemas/ChatCompletionRequest"
    assert "messages" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert set(route["responses"]) >= {"200", "400", "401", "404", "413", "503"}
    assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    # Every reference leads somewhere.
    names = {part.split('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert names <= set(schema["components"]["schemas"])


def test_request_id_is_echoed_and_cors_allowed(stage: Stage) -> None:
    answer = stage.client.get("/health", headers={"X-Request-Id": "mine", "Origin": "http://example.org"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert stage.client.get("/health").headers["x-request-id"]
    preflight = httpx.options(
        f"{stage.url}/v1/completions",
        headers={"Origin": "http://example.org", "Access-Control-Request-Method": "POST"},
    )
    assert preflight.status_code == 200


def test_duplicated_client_ids_are_only_labels(stage: Stage) -> None:
    answers = [
        stage.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "same"}) for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert answers[0].json()["id"] != answers[1].json()["id"]


def test_content_parts_become_text(stage: Stage, tokenizer: ModelTokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    stage.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
    text = tokenizer.decode(stage.engine.records[-1].prompt.tolist(), skip_special_tokens=False)
    assert "<|im_start|>user\none\ntwo<|im_end|>" in text


def test_the_last_message_can_be_continued(stage: Stage, tokenizer: ModelTokenizer) -> None:
    stage.engine.reply = lambda record, choice: says(tokenizer, " upon a time")
    answer = stage.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "tell"}, {"role": "assistant", "content": "Once"}],
        add_generation_prompt=False,
        continue_final_message=True,
        echo=True,
    ).json()
    text = tokenizer.decode(stage.engine.records[-1].prompt.tolist(), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nOnce")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Once upon a time"}

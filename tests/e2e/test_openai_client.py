"""Stock OpenAI clients against the real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from e2e_stack import RawStream, Stack
from service_set import wait_until

from octavo_shared.ids import RequestId

PROMPT = "The capital of France is"


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    stack.wait_idle()


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def test_chat_streams_what_it_answers_at_once(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "Say héllo in five languages, with emoji."}]
    arguments = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0.9, "seed": 3}
    whole = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_async_client_and_real_sense(stack: Stack, model: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120) as client:
            answer = await client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
            return answer.choices[0].text

    assert "Paris" in asyncio.run(ask())


def test_n_choices_share_the_prompt_and_differ(stack: Stack, client: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time in a land far away there lived, quite alone, " * 4
    cached = stack.metric("vllm:prompt_tokens_cached_total")
    arguments = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 1.0}
    answer = client.completions.create(**arguments, n=4, seed=11)  # type: ignore[call-overload]
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    stack.wait_idle()
    # Three were forked: none of their prompts' tokens was computed.
    assert stack.metric("vllm:prompt_tokens_cached_total") - cached == 3 * answer.usage.prompt_tokens
    alone = [client.completions.create(**arguments, seed=11 + i).choices[0].text for i in range(4)]  # type: ignore[call-overload]
    assert texts == alone


def test_64_mixed_requests_at_once(stack: Stack, client: openai.OpenAI, model: str) -> None:
    def one(i: int) -> tuple[int, str]:
        if i % 3 == 0:
            stream = client.completions.create(
                model=model, prompt=f"{i} green bottles " * (1 + i), max_tokens=8 + i % 9, stream=True, seed=i
            )
            return i, "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        if i % 3 == 1:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": f"What is {i} + {i}?"}], max_tokens=10, temperature=0
            )
            return i, answer.choices[0].message.content or ""
        prompts = [[i + 10, i + 20, i + 30], [i + 40] * (i + 1)]
        return i, "".join(
            c.text for c in client.completions.create(model=model, prompt=prompts, max_tokens=5, logprobs=2).choices
        )

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = dict(pool.map(one, range(64)))
    assert len(together) == 64
    stack.wait_idle()
    for i in (0, 3, 7, 30, 63):
        if i % 3 == 0:
            assert one(i)[1] == together[i], "batch-mates must not change a seeded answer"


def test_a_duplicated_client_id_is_only_a_label(stack: Stack, model: str) -> None:
    def ask(_: int) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{stack.url}/v1/completions", json=body, headers={"X-Request-Id": "same"}, timeout=60)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


def test_the_limit_to_the_token(start_small: Callable[..., Stack]) -> None:
    limit = 300
    short = start_small("--max-model-len", str(limit))
    with openai.OpenAI(base_url=f"{short.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        assert httpx.get(f"{short.url}/v1/models").json()["data"][0]["max_model_len"] == limit
        fits = client.completions.create(model="m", prompt=[5] * (limit - 1), max_tokens=1)
        assert fits.usage is not None
        assert (fits.usage.prompt_tokens, fits.choices[0].finish_reason) == (limit - 1, "length")
        for tokens in (limit, limit + 1):
            with pytest.raises(openai.BadRequestError) as refusal:
                client.completions.create(model="m", prompt=[5] * tokens, max_tokens=1)
            assert f"maximum context length is {limit} tokens" in str(refusal.value)
            assert refusal.value.code == "context_length_exceeded"
    short.wait_idle()
    short.stop()


def test_a_27_mb_body_is_refused_and_health_stays_quick(stack: Stack) -> None:
    slowest: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        with httpx.Client() as http:
            while not stop.is_set():
                start = time.monotonic()
                assert http.get(f"{stack.url}/health").status_code == 200
                slowest.append(time.monotonic() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    body = json.dumps({"model": "m", "prompt": "x" * (27 << 20)}).encode()
    answer = httpx.post(f"{stack.url}/v1/completions", content=body, timeout=60)
    stop.set()
    watcher.join()
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]
    assert slowest


def holders(stack: Stack) -> set[str]:
    """The requests that hold blocks of the KV cache."""
    page = httpx.get(f"{stack.url}/v1/kv", params={"limit": 16384}, timeout=20).raise_for_status().json()
    return {owner.partition("/")[0] for owners in page["columns"]["owners"] for owner in owners}


def test_a_disconnect_in_any_phase_frees_everything(start_stack: Callable[..., Stack]) -> None:
    stack = start_stack("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--served-model-name", "small")
    body = {"model": "small", "stream": True, "ignore_eos": True, "max_tokens": 2000}
    decoding = [RawStream(stack, {**body, "prompt": [7 + i] * 20}) for i in range(2)]
    for stream in decoding:
        stream.read_events(3)
    queued = RawStream(stack, {**body, "prompt": [3] * 30})
    stack.wait_for_metric("vllm:num_requests_waiting", 1)
    queued.cut()
    stack.wait_for_metric("vllm:num_requests_waiting", 0)
    assert stack.metric("vllm:num_requests_running") == 2
    decoding[0].cut()
    # Metrics are told every five seconds while there is work; who holds memory is told at once.
    wait_until(lambda: len(holders(stack)) == 1)
    # 6,000 tokens at 63 a step: cut in the middle of the prefill.
    prefilling = RawStream(stack, {**body, "prompt": list(range(100, 6100)), "max_tokens": 5})
    wait_until(lambda: len(holders(stack)) == 2)
    prefilling.cut()
    wait_until(lambda: len(holders(stack)) == 1)
    decoding[1].cut()
    stack.wait_idle()
    assert stack.metric("vllm:request_success_total", finished_reason="abort") == 4
    stack.stop()


def test_request_ids_are_minted_by_us(stack: Stack, model: str) -> None:
    def ask() -> RequestId:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        headers = {"X-Request-Id": "mine-1"}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        return RequestId.parse(answer["id"].removeprefix("cmpl-"))

    first, second = ask(), ask()
    assert first.log == second.log != "mine"
    assert second.serial > first.serial


def test_the_metrics_add_up(start_small: Callable[..., Stack]) -> None:
    """vLLM's own check of its metrics, with its numbers: 10 completions of 10 tokens each."""
    stack = start_small("--max-model-len", "256")
    prompts = [[100 + i] * (5 + i) for i in range(10)]
    for prompt in prompts:
        body = {"model": "m", "prompt": prompt, "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).raise_for_status()
    stack.wait_idle()
    total = sum(map(len, prompts))
    stack.wait_for_metric("vllm:iteration_tokens_total_sum", total + 100)
    expected = {
        "vllm:time_to_first_token_seconds_count": 10,
        "vllm:inter_token_latency_seconds_count": 90,
        "vllm:prompt_tokens_total": total,
        "vllm:generation_tokens_total": 100,
        "vllm:request_success_total": 10,
        "vllm:request_queue_time_seconds_count": 10,
        "vllm:request_prefill_time_seconds_count": 10,
        "vllm:request_decode_time_seconds_count": 10,
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: stack.metric(name) for name in expected} == expected
    stack.stop()

"""What is refused, how, and before what: the table of bad input, keys, limits, overload."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Reply,
    Stage,
    default_reply,
    eventually,
    open_stage,
    read_events,
)
from log_server import LogServer

from octavo_gateway import body as body_module
from octavo_gateway import http_protocol
from octavo_gateway.model_assets import load_assets
from octavo_shared.records import EndReason, Problem
from octavo_shared.settings import GatewaySettings, SettingError, load_settings

MakeStage = Callable[..., AbstractContextManager[Stage]]
USER = [{"role": "user", "content": "hi"}]

# (fields, message, param)
RANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.5}, "temperature must be non-negative, got -0.5.", "temperature"),
    ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5.", "temperature"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0.", "top_p"),
    ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5.", "top_p"),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2.", "top_k"),
    ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1.", "min_p"),
    ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1.", "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1.", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], got -2.1.", "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0.", "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty must be in [1e-30, 1e+30], got 1e-300.", "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty must be in [1e-30, 1e+30], got 1e+300.", "repetition_penalty"),
    ({"repetition_penalty": "nan"}, "repetition_penalty must be greater than zero, got nan.", "repetition_penalty"),
    ({"stop": ["x"] * 257}, "stop may have at most 256 strings, got 257.", "stop"),
    ({"logit_bias": {" 5": 1}}, "logit_bias keys must be token ids, got ' 5'.", "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias keys must be token ids, got '05'.", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias keys must be token ids, got '{'9' * 40}'.", "logit_bias"),
    ({"logit_bias": {"5": "nan"}}, "logit_bias of token 5 must be a number, got nan.", "logit_bias"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0.", "max_tokens"),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1.", "max_tokens"),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1.", "min_tokens"),
    (
        {"min_tokens": 5, "max_tokens": 4},
        "min_tokens must be less than or equal to max_tokens=4, got 5.",
        "min_tokens",
    ),
    ({"stop": [""]}, "stop cannot contain an empty string.", "stop"),
    (
        {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`.",
        "stream_options",
    ),
    (
        {"prompt_logprobs": 1, "stream": True},
        "`prompt_logprobs` are not available when `stream=True`.",
        "prompt_logprobs",
    ),
    (
        {"prompt_logprobs": 21},
        "Requested prompt logprobs of 21, which is greater than max allowed: 20",
        "prompt_logprobs",
    ),
    ({"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"),
    ({"logit_bias": {"x": 1}}, "logit_bias keys must be token ids, got 'x'.", "logit_bias"),
    (
        {"logit_bias": {str(VOCAB_SIZE): 1}},
        f"Token id {VOCAB_SIZE} in logit_bias is out of vocabulary",
        "logit_bias",
    ),
    ({"stop_token_ids": [-1]}, "Token id -1 in stop_token_ids is out of vocabulary", "stop_token_ids"),
    ({"guided_json": {}}, "`guided_json` is not supported yet.", "guided_json"),
]

COMPLETION_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20", "logprobs"),
    ({"logprobs": -1}, "`logprobs` must be a positive value.", "logprobs"),
    ({"suffix": "end"}, "suffix is not currently supported", "suffix"),
    ({"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ({"prompt": []}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ({"prompt": [""]}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ({"prompt": [[]]}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ({"prompt": None}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ({"prompt": [VOCAB_SIZE]}, f"Token id {VOCAB_SIZE} is out of vocabulary", "prompt"),
    ({"prompt": [[1], [-1]]}, "Token id -1 is out of vocabulary", "prompt"),
    ({"prompt": [[1]] * 1025}, "A request may have at most 1024 prompts, got 1025.", "prompt"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    (
        {"logprobs": True, "top_logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20",
        "logprobs",
    ),
    ({"top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"),
    ({"top_logprobs": -2, "logprobs": True}, "`top_logprobs` must be a positive value.", "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "Tool calling is not supported yet.", "tools"),
    ({"tool_choice": "auto"}, "Tool calling is not supported yet.", "tool_choice"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format of type 'json_object' is not supported yet.",
        "response_format",
    ),
    ({"messages": []}, "messages must not be empty.", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "Content of type 'image_url' is not supported by this model.",
        "messages.0.content",
    ),
    ({"chat_template": "{{ 1 }}"}, "This server does not accept chat templates from requests.", "chat_template"),
    (
        {"continue_final_message": True},
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(("fields", "message", "param"), RANGES + COMPLETION_ONLY)
def test_bad_completions(stage: Stage, fields: dict[str, Any], message: str, param: str) -> None:
    error = stage.error("/v1/completions", 400, **({"prompt": "x"} | fields))
    assert error == {"message": message, "type": "BadRequestError", "param": param, "code": None}
    assert not stage.engine.records


@pytest.mark.parametrize(("fields", "message", "param"), RANGES + CHAT_ONLY)
def test_bad_chats(stage: Stage, fields: dict[str, Any], message: str, param: str) -> None:
    error = stage.error("/v1/chat/completions", 400, **({"messages": USER} | fields))
    assert error == {"message": message, "type": "BadRequestError", "param": param, "code": None}
    assert not stage.engine.records


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_unknown_model(stage: Stage, path: str) -> None:
    error = stage.error(path, 404, model="x", prompt="x", messages=USER)
    assert error == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": USER, "max_tokens": "many"}, "max_tokens"),
        ({"messages": USER, "temperature": []}, "temperature"),
        ({"messages": USER, "seed": 1 << 70}, "seed"),
        ({}, "messages"),
    ],
)
def test_schema_errors_are_400(stage: Stage, body: dict[str, Any], param: str) -> None:
    error = stage.error("/v1/chat/completions", 400, **body)
    assert error["type"] == "Bad Request"
    assert error["param"] == param
    assert error["message"].startswith("1 validation error:")


def test_bodies_that_are_not_json_are_400(stage: Stage) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[1]", b"NaN"):
        answer = stage.client.post("/v1/completions", content=content)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "Bad Request"


def test_context_overflow_text_and_the_token_under_it(stage: Stage) -> None:
    prompt = [5] * 200
    error = stage.error("/v1/completions", 400, prompt=prompt, max_tokens=57)
    assert error == {
        "message": (
            "This model's maximum context length is 256 tokens. However, you requested 57 output tokens and your prompt "
            "contains 200 input tokens, for a total of 257 tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens. (parameter=input_tokens, value=200)"
        ),
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": "context_length_exceeded",
    }
    assert stage.post("/v1/completions", prompt=prompt, max_tokens=56).status_code == 200
    assert stage.post("/v1/completions", prompt=[5] * (MAX_MODEL_LEN - 1)).status_code == 200
    error = stage.error("/v1/completions", 400, prompt=[5] * MAX_MODEL_LEN)
    assert error["code"] == "context_length_exceeded"


def test_hopelessly_long_text_is_refused_without_tokenising(stage: Stage) -> None:
    error = stage.error("/v1/completions", 400, prompt="word " * 100_000)
    assert "your prompt contains at least 256 input tokens, for a total of at least 257 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_endless_messages_are_refused_without_rendering(stage: Stage) -> None:
    error = stage.error("/v1/chat/completions", 400, messages=USER * 300)
    assert "at least 256 input tokens" in error["message"]


@pytest.mark.parametrize(
    "prompt", [[1, "x"], ["x", 1], [[1], "x"], [[1, "x"]], 5, {"a": 1}, [None], [1.5], [[[1]]]], ids=repr
)
def test_prompts_of_no_kind_are_schema_errors(stage: Stage, prompt: Any) -> None:
    error = stage.error("/v1/completions", 400, prompt=prompt)
    assert error["type"] == "Bad Request"
    assert error["message"].startswith("1 validation error:")
    assert error["param"].startswith("prompt")


def test_what_the_pool_cannot_hold_is_refused(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.limits = replace(stage.engine.limits, pool_tokens=64)
        eventually(lambda: stage.server.gateway.limits.latest.pool_tokens == 64, "limits arrive")
        error = stage.error("/v1/completions", 400, prompt=[5] * 40, max_tokens=25)
        assert error["code"] == "context_length_exceeded"
        assert "room for 64 in all" in error["message"]
        assert stage.post("/v1/completions", prompt=[5] * 40, max_tokens=24).status_code == 200
        stage.post("/v1/chat/completions", messages=USER)
        record = stage.engine.records[-1]
        assert record.sampling.max_tokens == 64 - len(record.prompt)


def test_unknown_routes_and_methods_have_the_same_shape(stage: Stage) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        answer = stage.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_keys(make_stage: MakeStage) -> None:
    with make_stage(api_key=["one", "two"]) as stage:
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "one"},
            {"Authorization": "Basic one"},
        ):
            answer = stage.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 401
            assert answer.json() == {
                "error": {
                    "message": "Unauthorized",
                    "type": "AuthenticationError",
                    "param": None,
                    "code": "invalid_api_key",
                }
            }
            assert answer.headers["x-request-id"]
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert stage.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
        for path in ("/health", "/health/ready", "/metrics", "/version"):
            assert stage.client.get(path).status_code == 200
        assert stage.post("/tokenize", prompt="x").status_code == 200
        assert stage.client.get("/v1/models").status_code == 401
        assert stage.client.get("/v1/nowhere").status_code == 401
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert stage.client.options("/v1/completions", headers=preflight).status_code == 200


def test_vllm_error_codes(make_stage: MakeStage) -> None:
    with make_stage(error_code_style="vllm") as stage:
        assert stage.error("/v1/completions", 404, model="x", prompt="x")["code"] == 404
        assert stage.error("/v1/completions", 400, prompt="x", n=0)["code"] == 400


def test_not_ready_is_503_with_a_reason(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.limits = replace(stage.engine.limits, ready=False, reason="No executor is attached.")
        ready = eventually(
            lambda: (answer := stage.client.get("/health/ready")).status_code == 503 and answer, "readiness falls"
        )
        assert ready.json()["error"]["message"] == "No executor is attached."
        assert stage.client.get("/health").status_code == 200
        answer = stage.post("/v1/completions", prompt="x")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        # What is wrong in itself is said even so.
        assert stage.post("/v1/completions", prompt="x", n=0).status_code == 400


def test_a_silent_scheduler_makes_the_gateway_unready(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.publishing = False
        eventually(lambda: stage.client.get("/health/ready").status_code == 503, "readiness falls")
        assert "silent" in stage.client.get("/health/ready").json()["error"]["message"]


def test_a_refusal_before_the_first_token_keeps_its_status(stage: Stage) -> None:
    problem = Problem("The request can never fit.", 400, "BadRequestError", "context_length_exceeded", "input_tokens")
    stage.engine.reply = lambda record, choice: Reply([], EndReason.ERROR, problem=problem, fence=True)
    for stream in (False, True):
        error = stage.error("/v1/completions", 400, prompt="x", stream=stream)
        assert error == {
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }


def test_an_error_mid_stream_is_an_event_then_done(stage: Stage) -> None:
    problem = Problem("The executor is gone.", 500)
    stage.engine.reply = lambda record, choice: Reply([70, 71, 72], EndReason.ERROR, problem=problem, fence=True)
    answer = stage.post("/v1/chat/completions", messages=USER, stream=True)
    assert answer.status_code == 200
    events = read_events(answer.text)
    assert events[-1].data == "[DONE]"
    error = json.loads(events[-2].data)["error"]
    assert error == {
        "message": "The executor is gone.",
        "type": "InternalServerError",
        "param": None,
        "code": None,
    }
    whole = stage.error("/v1/chat/completions", 500, messages=USER)
    assert whole["message"] == "The executor is gone."


def test_one_failed_choice_ends_the_others(stage: Stage) -> None:
    gate = threading.Event()

    def reply(record: Any, choice: int) -> Reply:
        if choice == 1:
            return Reply([], EndReason.ERROR, problem=Problem("broken", 500), fence=True)
        return Reply([70] * 100, gate=gate, before_gate=2)

    stage.engine.reply = reply
    assert stage.error("/v1/completions", 500, prompt="x", n=2, max_tokens=100)["message"] == "broken"
    eventually(lambda: stage.engine.aborts, "the other choice is aborted")
    assert stage.engine.aborts[0].reason == "error"
    eventually(lambda: stage.engine.live == 0, "all ends")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (EndReason.STOP, "stop"),
        (EndReason.LENGTH, "length"),
        (EndReason.ABORT, "abort"),
        (EndReason.TIMEOUT, "timeout"),
    ],
)
def test_ends_become_finish_reasons(stage: Stage, end: EndReason, reason: str) -> None:
    token = EOS if end is EndReason.STOP else 70
    stage.engine.reply = lambda record, choice: Reply([70, token], end, EOS)
    choice = stage.post("/v1/completions", prompt="x").json()["choices"][0]
    assert choice["finish_reason"] == reason


def test_large_bodies_are_refused_while_health_answers(stage: Stage) -> None:
    host, port = "127.0.0.1", stage.server.port
    # Declared: refused before a byte of the body has been sent.
    with socket.create_connection((host, port), timeout=20) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 27000000\r\n\r\n")
        head = link.recv(65536)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in head
    # In chunks: refused as soon as the limit is passed.
    answers: list[httpx.Response] = []

    def send() -> None:
        chunks = (b"x" * (1 << 20) for _ in range(27))
        answers.append(httpx.post(f"{stage.url}/v1/completions", content=chunks, timeout=60))

    sender = threading.Thread(target=send)
    sender.start()
    checks = 0
    while sender.is_alive():
        assert stage.client.get("/health").status_code == 200
        checks += 1
        time.sleep(0.002)
    sender.join()
    assert checks
    assert answers[0].status_code == 413
    whole = httpx.post(f"{stage.url}/v1/completions", content=b"x" * 27_000_000, timeout=60)
    assert whole.status_code == 413


def test_a_broken_tokenizer_is_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a":')
    with pytest.raises(SettingError, match=r"--model .*tokenizer\.json is no tokenizer"):
        load_assets(load_settings(GatewaySettings, model=str(tmp_path)))


def test_clients_that_never_come_to_the_point_are_hung_up_on(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(body_module, "BODY_SILENCE_S", 0.3)
    answer = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with make_stage() as stage:

        def told(*parts: bytes) -> bytes:
            """What the server says until it hangs up."""
            with socket.create_connection(("127.0.0.1", stage.server.port), timeout=20) as link:
                heard = b""
                for part in parts:
                    link.sendall(part)
                    if part is answer:
                        heard += link.recv(65536)
                while more := link.recv(65536):
                    heard += more
                return heard

        # Silent; half a head; half a head, or mere line breaks, after a request that was answered.
        assert told() == b""
        assert told(b"POST /v1/compl") == b""
        assert told(answer, b"GET /hea").count(b"HTTP/1.1 200") == 1
        assert told(answer, b"\r\n").count(b"HTTP/1.1 200") == 1
        assert told(post).startswith(b"HTTP/1.1 408 ")
        # A head without end.
        with socket.create_connection(("127.0.0.1", stage.server.port), timeout=20) as link:
            with contextlib.suppress(OSError):
                link.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (http_protocol.MAX_HEAD_BYTES + (1 << 20)))
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(64).startswith(b"HTTP/1.1 400")
        # An answer that takes longer than the head may is no reason.
        gate = threading.Event()
        stage.engine.reply = lambda record, choice: replace(default_reply(record, choice), gate=gate)
        threading.Timer(1.0, gate.set).start()
        assert stage.post("/v1/completions", prompt="x", max_tokens=5).status_code == 200


def test_a_body_at_the_limit_is_read(make_stage: MakeStage) -> None:
    with make_stage(max_request_body_bytes=1000) as stage:
        body = json.dumps({"prompt": "x", "user": ""}).encode()
        body = body.replace(b'"user": ""', b'"user": "' + b"u" * (1000 - len(body)) + b'"')
        assert len(body) == 1000
        assert stage.client.post("/v1/completions", content=body).status_code == 200
        assert stage.client.post("/v1/completions", content=body + b" ").status_code == 413


@pytest.mark.usefixtures("tokenizer")
def test_redis_gone_is_503(tmp_path: Path) -> None:
    own = LogServer(tmp_path).start()
    with open_stage(own.url, "lonely") as stage:
        own.stop()
        answer = eventually(
            lambda: (reply := stage.post("/v1/completions", prompt="x")).status_code == 503 and reply, "Redis is missed"
        )
        assert "Redis" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert stage.client.get("/health").status_code == 200
        assert stage.client.get("/metrics").status_code == 200
        eventually(lambda: stage.client.get("/health/ready").status_code == 503, "readiness falls")

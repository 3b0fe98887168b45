"""Clients that reconnect: here, at another gateway, after the end; and requests that come twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from gateway_stage import EOS, Reply, SseEvent, Stage, eventually, read_events, second_gateway
from test_gateway_log import log_length, samples, with_streams

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.records import EndReason, RequestRecord

MakeStage = Callable[..., AbstractContextManager[Stage]]
RESUMABLE = {"X-Octavo-Resumable": "1"}
TEXT = "Grüße! The quick brown fox 🦊 jumps over the lazy dog; naïve café 東京. STOP and go on"


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return tokenizer.encode([TEXT], add_special_tokens=False)[0]


def stream_id(events: list[SseEvent]) -> str:
    return str(json.loads(events[0].data)["id"])


def stream(stage: Stage, path: str, headers: dict[str, str] | None = None, **body: Any) -> list[SseEvent]:
    answer = stage.client.post(path, json={"stream": True, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def again(stage: Stage, name: str, last: str = "") -> httpx.Response:
    return stage.client.get(f"/v1/streams/{name}", headers={"Last-Event-ID": last} if last else {})


def rest(stage: Stage, name: str, last: str = "") -> list[SseEvent]:
    answer = again(stage, name, last)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def told(events: list[SseEvent]) -> dict[int, tuple[str, list[str], Any, int]]:
    """Per choice: its text, the names of its tokens, how it ended, and how often a role was named."""
    choices: dict[int, tuple[str, list[str], Any, int]] = {}
    for event in events:
        if event.data == "[DONE]":
            continue
        for choice in json.loads(event.data)["choices"]:
            text, names, end, roles = choices.get(choice["index"], ("", [], None, 0))
            delta = choice.get("delta") or {}
            text += choice.get("text", "") or delta.get("content", "") or ""
            logprobs = choice.get("logprobs") or {}
            names = [*names, *logprobs.get("tokens", [one["token"] for one in logprobs.get("content", ())])]
            if (reason := choice["finish_reason"]) is not None:
                assert end is None
                end = (reason, choice["stop_reason"])
            choices[choice["index"]] = (text, names, end, roles + ("role" in delta))
    return choices


def usages(events: list[SseEvent]) -> list[Any]:
    found = [json.loads(event.data).get("usage") for event in events if event.data != "[DONE]"]
    return [usage for usage in found if usage]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 2, "n": 2}),
    (
        "/v1/completions",
        {"prompt": "echo me", "echo": True, "stop": ["STOP"], "stream_options": {"include_usage": True}},
    ),
    ("/v1/completions", {"prompt": [[5], [6, 7]], "n": 2, "stop": ["fox", "🦊"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}},
    ),
]


@pytest.mark.parametrize(("path", "body"), VARIANTS)
def test_from_any_event_on_the_rest_is_what_was_missing(
    make_stage: MakeStage, ids: list[int], path: str, body: dict[str, Any]
) -> None:
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply([*ids[choice:], EOS], EndReason.STOP, EOS, sizes=(1, 3, 1, 2))
        whole = stream(stage, path, max_tokens=100, seed=1, **body)
        name = stream_id(whole)
        expected = told(whole)
        assert all(event.id for event in whole)
        assert len({event.id for event in whole}) == len(whole)
        for gateway in (stage, other):
            # From the beginning it is the very same, cut into pieces another way.
            replayed = rest(gateway, name)
            assert told(replayed) == expected
            assert usages(replayed) == usages(whole)
            for place, event in enumerate(whole[:-1]):
                more = rest(gateway, name, event.id)
                assert told([*whole[: place + 1], *more]) == expected, event
                assert usages([*whole[: place + 1], *more]) == usages(whole)
                assert more[-1].data == "[DONE]"
            assert again(gateway, name, whole[-1].id).status_code == 204
        assert len(stage.engine.records) == (
            2 if isinstance(body.get("prompt"), list) and body["prompt"][0] == [5] else 1
        )


def test_pieces_of_a_resumed_stream_can_be_resumed(make_stage: MakeStage, ids: list[int]) -> None:
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(ids)
        whole = stream(stage, "/v1/completions", prompt="x", max_tokens=len(ids))
        seen, last = whole[:1], whole[0].id
        gate = threading.Event()
        gate.set()
        for gateway in (other, stage, other):
            more = rest(gateway, stream_id(whole), last)
            last = more[0].id
            seen.append(more[0])
            if more[0].data == "[DONE]" or len(more) == 1:
                break
        final = rest(stage, stream_id(whole), last) if seen[-1].data != "[DONE]" and not last.endswith("done") else []
        assert told([*seen, *final]) == told(whole)


@pytest.fixture
def two(make_stage: MakeStage, ids: list[int]) -> Iterator[tuple[Stage, Stage, threading.Event]]:
    """Two gateways, and an engine that stops after five tokens until it may go on."""
    gate = threading.Event()
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=5)
        yield stage, other, gate
        gate.set()


def begin(
    stage: Stage, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any
) -> list[SseEvent]:
    """Read the first events of a stream, then hang up."""
    with stage.client.stream("POST", path, json={"stream": True, **body}, headers=headers or RESUMABLE) as answer:
        text = ""
        for part in answer.iter_text():
            text += part
            if text.endswith("\n\n"):
                return read_events(text)
    raise AssertionError("it ended early")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("by_post", [False, True])
def test_a_client_that_hangs_up_and_comes_back_misses_nothing(
    two: tuple[Stage, Stage, threading.Event], ids: list[int], elsewhere: bool, by_post: bool
) -> None:
    stage, other, gate = two
    body = {"prompt": [1, 2, 3], "max_tokens": len(ids)}
    seen = begin(stage, **body)
    eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
    gateway = other if elsewhere else stage
    threading.Timer(0.2, gate.set).start()
    if by_post:
        more = stream(gateway, "/v1/completions", {"Last-Event-ID": seen[-1].id}, **body)
    else:
        more = rest(gateway, stream_id(seen), seen[-1].id)
    ((text, _, end, _),) = told([*seen, *more]).values()
    assert (text, end) == (TEXT, ("length", None))
    assert not stage.engine.aborts
    assert len(stage.engine.records) == 1
    stage.check()
    eventually(lambda: log_length(stage) == 0, "the log is emptied")


def test_a_client_may_come_back_before_its_old_connection_is_known_to_be_dead(
    two: tuple[Stage, Stage, threading.Event], ids: list[int]
) -> None:
    stage, other, gate = two
    stage.engine.step_s = 0.05
    threading.Timer(0.5, gate.set).start()
    with stage.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": len(ids), "stream": True}
    ) as answer:
        # Kept: the connection is closed with the iterator.
        reading = answer.iter_text()
        text = next(reading)
        events = read_events(text[: text.rindex("\n\n") + 2])
        with other.client.stream(
            "GET", f"/v1/streams/{stream_id(events)}", headers={"Last-Event-ID": events[-1].id}
        ) as second:
            parts = second.iter_text()
            # Only now does the old one go: its leaving is not the last.
            answer.close()
            eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
            text = "".join(parts)
    ((whole, _, end, _),) = told([*events, *read_events(text)]).values()
    assert (whole, end) == (TEXT, ("length", None))
    assert not stage.engine.aborts


def test_nobody_comes_back_and_the_request_ends(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage(stream_resume_ttl=0.3) as stage:
        stage.engine.reply = lambda record, choice: Reply([70] * 50, gate=gate, before_gate=5)
        begin(stage, prompt="x", max_tokens=50)
        eventually(lambda: stage.engine.aborts, "the abort arrives")
        assert stage.engine.aborts[0].reason == "disconnect"
        eventually(lambda: stage.engine.live == 0, "nothing lives on")
        # What is left of it runs out by itself.
        eventually(lambda: not left_keys(stage), "nothing is kept")


def test_plain_clients_have_the_time_that_is_set(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage(disconnect_grace=60) as stage:
        stage.engine.reply = lambda record, choice: Reply([70] * 9, gate=gate, before_gate=5)
        seen = begin(stage, headers={"X-Nothing": "1"}, prompt="x", max_tokens=9)
        eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
        gate.set()
        assert told([*seen, *rest(stage, stream_id(seen), seen[-1].id)])[0][2] == ("length", None)
        assert not stage.engine.aborts


def left_keys(stage: Stage) -> list[str]:
    """Names of requests and idempotency keys in Redis."""

    async def look(streams: Any) -> list[str]:
        names = [key.decode() for key in await streams.client.keys("octavo:{" + stage.settings.model_name + "}:*")]
        return [name for name in names if ":request:" in name or ":idempotency:" in name]

    return with_streams(stage, look)


def test_what_is_kept_is_kept_for_its_time_only(make_stage: MakeStage) -> None:
    with make_stage(stream_resume_ttl=4) as stage:
        body = {"prompt": [1, 2], "max_tokens": 4}
        first = stage.client.post("/v1/completions", json=body, headers={"Idempotency-Key": "k"})
        name = first.json()["id"]
        assert again(stage, name).json() == first.json()
        assert len(left_keys(stage)) == 2
        eventually(lambda: not left_keys(stage), "they have run out")
        answer = again(stage, name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")
        # The key is free again.
        fresh = stage.client.post("/v1/completions", json=body, headers={"Idempotency-Key": "k"})
        assert fresh.json()["id"] != name


def test_nothing_is_kept_where_nothing_is_to_be(make_stage: MakeStage) -> None:
    with make_stage(stream_resume_ttl=0) as stage:
        name = stage.post("/v1/completions", prompt="x").json()["id"]
        eventually(lambda: not left_keys(stage), "nothing is left")
        assert again(stage, name).status_code == 404


def test_streams_belong_to_their_tenant(make_stage: MakeStage) -> None:
    with make_stage(api_key=["one", "two"]) as stage:
        stage.client.headers["Authorization"] = "Bearer one"
        events = stream(stage, "/v1/completions", prompt="x", max_tokens=3)
        name = stream_id(events)
        assert rest(stage, name, events[0].id)[-1].data == "[DONE]"
        stage.client.headers["Authorization"] = "Bearer two"
        assert again(stage, name).status_code == 404
        assert again(stage, name, events[0].id).status_code == 404
        by_post = stage.client.post("/v1/completions", json={}, headers={"Last-Event-ID": events[0].id})
        assert by_post.status_code == 404
        stage.client.headers["Authorization"] = "Bearer three"
        assert again(stage, name).status_code == 401


def test_what_cannot_be_resumed_is_said(stage: Stage) -> None:
    events = stream(stage, "/v1/completions", prompt=["a", "b"], max_tokens=2)
    name = stream_id(events)
    for wrong in ("x", "nothing-0", "cmpl-", "abc-1"):
        assert again(stage, wrong).status_code == 404
    # The second prompt's request is no stream of its own.
    log, serial = name.removeprefix("cmpl-").split("-")
    assert again(stage, f"{log}-{int(serial, 16) + 1:x}").status_code == 404
    for bad in ("17", "garbage/1", f"{log}-1/x"):
        answer = again(stage, name, bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
        answer = stage.client.post("/v1/completions", json={"prompt": "x"}, headers={"Last-Event-ID": bad})
        assert answer.status_code == 400
    other = stream(stage, "/v1/completions", prompt="c", max_tokens=1)
    assert again(stage, name, other[0].id).status_code == 400


def test_a_position_nobody_has_reached_ends_with_the_stream(stage: Stage) -> None:
    events = stream(stage, "/v1/completions", prompt="x", max_tokens=3)
    ahead = events[0].id.rpartition("/")[0] + "/400"
    assert rest(stage, stream_id(events), ahead)[-1].data == "[DONE]"


# --- the same request twice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_the_same_request_twice_is_one(make_stage: MakeStage, ids: list[int], streaming: bool) -> None:
    key = {"Idempotency-Key": "once"}
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(ids)
        body = {"prompt": "x", "max_tokens": len(ids), "stream": streaming}
        answers = [one.client.post("/v1/completions", json=body, headers=key).text for one in (stage, other, stage)]
        if streaming:
            assert len({stream_id(read_events(answer)) for answer in answers}) == 1
            assert [told(read_events(answer))[0][0] for answer in answers] == [TEXT] * 3
        else:
            assert len(set(answers)) == 1
        assert len(stage.engine.records) == 1
        # Written another way, asking for the same.
        spaced = json.dumps(dict(reversed(body.items())), indent=3)
        assert stage.client.post("/v1/completions", content=spaced, headers=key).status_code == 200
        for change in ({"max_tokens": 3}, {"prompt": "y"}, {"stream": not streaming}):
            answer = other.client.post("/v1/completions", json={**body, **change}, headers=key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert stage.client.post("/v1/chat/completions", json=chat, headers=key).status_code == 422
        assert len(stage.engine.records) == 1


def test_two_at_once_are_one_and_both_get_it(two: tuple[Stage, Stage, threading.Event], ids: list[int]) -> None:
    stage, other, gate = two
    answers: list[httpx.Response] = []

    def ask(one: Stage) -> None:
        body = {"prompt": "x", "max_tokens": len(ids)}
        answers.append(httpx.post(f"{one.url}/v1/completions", json=body, headers={"Idempotency-Key": "k"}, timeout=30))

    threads = [threading.Thread(target=ask, args=(one,)) for one in (stage, other, stage, other)]
    for thread in threads:
        thread.start()

    def waiting() -> bool:
        return (
            sum(one.server.gateway.reader.live + one.server.gateway.foreign_logs.live > 0 for one in (stage, other))
            == 2
        )

    eventually(waiting, "both gateways have clients")
    gate.set()
    for thread in threads:
        thread.join(30)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert len(stage.engine.records) == 1


def test_a_broken_line_is_no_reason_to_begin_again(two: tuple[Stage, Stage, threading.Event], ids: list[int]) -> None:
    stage, other, gate = two
    key, body = {"Idempotency-Key": "k"}, {"prompt": "x", "max_tokens": len(ids)}
    with pytest.raises(httpx.ReadTimeout):
        stage.client.post("/v1/completions", json=body, headers=key, timeout=0.5)
    eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
    gate.set()
    answer = other.client.post("/v1/completions", json=body, headers=key)
    assert answer.json()["choices"][0]["text"] == TEXT
    assert len(stage.engine.records) == 1
    assert not stage.engine.aborts


def test_keys_are_the_tenants_own(make_stage: MakeStage) -> None:
    with make_stage(api_key=["one", "two"]) as stage:
        names = set()
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k"}
            names.add(stage.client.post("/v1/completions", json={"prompt": key}, headers=headers).json()["id"])
        assert len(names) == 2
        answer = stage.client.post(
            "/v1/completions",
            json={"prompt": "x"},
            headers={"Authorization": "Bearer one", "Idempotency-Key": "k" * 256},
        )
        assert answer.status_code == 400


def test_what_is_resumed_is_counted_once(make_stage: MakeStage, ids: list[int]) -> None:
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply(ids)
        events = stream(stage, "/v1/completions", prompt=[1, 2], max_tokens=len(ids))
        before = samples(stage)
        rest(stage, stream_id(events), events[len(events) // 2].id)
        after = samples(stage)
        assert after["vllm:prompt_tokens_total"] == before["vllm:prompt_tokens_total"]


def test_a_failed_request_fails_again(stage: Stage) -> None:
    def reply(record: RequestRecord, choice: int) -> Reply:
        return Reply([70, 71], EndReason.ERROR)

    stage.engine.reply = reply
    key = {"Idempotency-Key": "failed"}
    first = stage.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}, headers=key)
    assert first.status_code == 500
    second = stage.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}, headers=key)
    assert (second.status_code, second.json()) == (500, first.json())

"""Several clients of one answer: who leaves takes nothing from the others, and what is made for all is counted once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from gateway_stage import Reply, Stage, eventually, read_events, second_gateway
from test_gateway_log import samples
from test_gateway_rates import ask, bearer, record, write
from test_gateway_resume import begin, stream_id, told

MakeStage = Callable[..., AbstractContextManager[Stage]]
TOKENS = list(range(70, 90))
BODY = {"prompt": [1, 2], "max_tokens": len(TOKENS)}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("first_leaves", [False, True])
def test_who_leaves_takes_nothing_from_the_others(make_stage: MakeStage, elsewhere: bool, first_leaves: bool) -> None:
    gate = threading.Event()
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        seen = begin(stage, **BODY) if elsewhere else []
        gateway = other if elsewhere else stage
        if elsewhere:
            first = gateway.client.stream(
                "GET", f"/v1/streams/{stream_id(seen)}", headers={"Last-Event-ID": seen[-1].id}
            )
        else:
            first = gateway.client.stream("POST", "/v1/completions", json={**BODY, "stream": True})
        with first as one:
            parts = one.iter_text()
            if not elsewhere:
                text = next(parts)
                seen = read_events(text[: text.rindex("\n\n") + 2])
            with gateway.client.stream(
                "GET", f"/v1/streams/{stream_id(seen)}", headers={"Last-Event-ID": seen[-1].id}
            ) as two:
                reader = gateway.server.gateway.foreign_logs if elsewhere else gateway.server.gateway.reader
                eventually(lambda: len(reader.watchers) == 2, "both follow")
                goes, stays = (one, iter(two.iter_text())) if first_leaves else (two, parts)
                goes.close()
                eventually(lambda: len(reader.watchers) == 1, "the gateway has noticed")
                gate.set()
                more = read_events("".join(stays))
        assert told([*seen, *more])[0][2] == ("length", None)
        assert not stage.engine.aborts
        # Nor is any to come once the time to come back is over.
        assert not gateway.server.gateway.aborts._timers


def test_the_last_to_leave_ends_it(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        reader = stage.server.gateway.reader
        with stage.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as one:
            # Kept: the connection is closed with the iterator.
            reading = one.iter_text()
            text = next(reading)
            name = stream_id(read_events(text[: text.rindex("\n\n") + 2]))
            with stage.client.stream("GET", f"/v1/streams/{name}") as two:
                next(two.iter_text())
            eventually(lambda: len(reader.watchers) == 1, "the gateway has noticed")
            assert not stage.engine.aborts
        eventually(lambda: stage.engine.aborts, "the abort arrives")
        eventually(lambda: stage.engine.live == 0, "nothing lives on")


def test_copies_are_not_counted(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        key = {"Idempotency-Key": "k"}
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{stage.url}/v1/completions", json=BODY, headers=key, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(stage.server.gateway.reader.watchers) == 5, "all wait")
        gate.set()
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 5
        name = str(answers[0].json()["id"])
        assert stage.client.get(f"/v1/streams/{name}").json() == answers[0].json()
        found = samples(stage)
        assert found["vllm:generation_tokens_total"] == len(TOKENS)
        assert found["vllm:request_generation_tokens_count"] == found["vllm:request_params_n_count"] == 1
        assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 1
        assert found['vllm:request_success_total{finished_reason="length"}'] == 1


def test_what_is_followed_elsewhere_is_paid_for(make_stage: MakeStage, tmp_path: Path) -> None:
    """Whoever hangs up gets back what was not made; not if it is made for somebody at another gateway."""
    path = write(tmp_path / "keys.toml", record("k", tokens_per_minute=60))
    gate = threading.Event()
    many = {"prompt": [5] * 10, "max_tokens": 200, "stream": True}
    with make_stage(api_key_file=path) as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply([70] * 200, gate=gate, before_gate=5)
        with stage.client.stream("POST", "/v1/completions", json=many, headers=bearer("k")) as one:
            reading = one.iter_text()
            text = next(reading)
            name = stream_id(read_events(text[: text.rindex("\n\n") + 2]))
            with other.client.stream("GET", f"/v1/streams/{name}", headers=bearer("k")) as two:
                follows = two.iter_text()
                text = next(follows)
                one.close()
                eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
                gate.set()
                text += "".join(follows)
        assert told(read_events(text))[0][2] == ("length", None)
        for gateway in (stage, other):
            eventually(lambda gateway=gateway: not gateway.server.gateway.rates._settling, "it is settled")  # type: ignore[misc]
        assert ask(other, "k").status_code == 429

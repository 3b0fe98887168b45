"""Several clients of one answer: who leaves takes nothing from the others, and what is made for all is counted once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import Reply, Stage, eventually, read_events, second_gateway
from test_gateway_log import samples, with_streams
from test_gateway_rates import ask, bearer, record, write
from test_gateway_resume import RESUMABLE, begin, stream_id, told

from octavo_gateway.rates import Charge
from octavo_gateway.resume import stream_of
from octavo_shared.streams import Streams

MakeStage = Callable[..., AbstractContextManager[Stage]]
TOKENS = list(range(70, 90))
BODY = {"prompt": [1, 2], "max_tokens": len(TOKENS)}


@dataclass(frozen=True)
class Reader:
    """A client that follows a stream at a gateway."""

    gateway: Stage
    answer: httpx.Response
    parts: Iterator[str]
    name: str

    @property
    def incarnation(self) -> str:
        return self.gateway.server.gateway.reader.incarnation


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


def gateways(stage: Stage, name: str) -> set[str]:
    """Whose clients follow a stream."""

    async def look(streams: Streams) -> set[str]:
        return set((await streams.followers([stream_of(name)]))[0].gateways)

    return with_streams(stage, look)


@contextmanager
def two_follow(stage: Stage, other: Stage, **headers: str) -> Iterator[tuple[Reader, Reader]]:
    """The same stream at two gateways, from its beginning. Nothing is read of the second one yet."""
    body = {**BODY, "stream": True}
    with stage.client.stream("POST", "/v1/completions", json=body, headers=headers) as one:
        parts = one.iter_text()
        text = next(parts)
        name = stream_id(read_events(text[: text.rindex("\n\n") + 2]))
        with other.client.stream("GET", f"/v1/streams/{name}") as two:
            assert two.status_code == 200
            yield Reader(stage, one, chain([text], parts), name), Reader(other, two, two.iter_text(), name)


@pytest.mark.parametrize("headers", [{}, RESUMABLE], ids=["plain", "resumable"])
@pytest.mark.parametrize("first_leaves", [False, True])
def test_who_leaves_one_gateway_takes_nothing_from_those_at_another(
    make_stage: MakeStage, headers: dict[str, str], first_leaves: bool
) -> None:
    gate = threading.Event()
    with make_stage(stream_resume_ttl=0.3) as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        with two_follow(stage, other, **headers) as readers:
            goes, stays = readers if first_leaves else readers[::-1]
            assert gateways(stage, goes.name) == {goes.incarnation, stays.incarnation}
            goes.answer.close()
            eventually(lambda: gateways(stage, goes.name) == {stays.incarnation}, "its gateway has said so")
            gate.set()
            assert told(read_events("".join(stays.parts)))[0][2] == ("length", None)
        assert not stage.engine.aborts


@pytest.mark.parametrize("headers", [{}, RESUMABLE], ids=["plain", "resumable"])
@pytest.mark.parametrize("first_leaves", [False, True])
def test_the_last_to_leave_of_all_gateways_ends_it(
    make_stage: MakeStage, headers: dict[str, str], first_leaves: bool
) -> None:
    gate = threading.Event()
    with make_stage(stream_resume_ttl=0.3) as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        with two_follow(stage, other, **headers) as readers:
            for reader in readers if first_leaves else readers[::-1]:
                assert not stage.engine.aborts
                reader.answer.close()
                eventually(lambda: reader.incarnation not in gateways(stage, reader.name), "it is said")  # noqa: B023
        eventually(lambda: stage.engine.live == 0, "nothing lives on")
        assert [abort.reason for abort in stage.engine.aborts] == ["disconnect"]


def test_a_gateway_that_stops_does_not_end_what_is_followed_elsewhere(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        with two_follow(stage, other) as (stays, goes):
            with ThreadPoolExecutor(1) as pool:
                rest = pool.submit(lambda: "".join(goes.parts))
                other.loop.call_soon_threadsafe(other.server.gateway.dismiss)
                # Its client is told that more is to come.
                assert "[DONE]" not in rest.result(30)
            gate.set()
            assert told(read_events("".join(stays.parts)))[0][2] == ("length", None)
        assert not stage.engine.aborts


def test_who_could_not_come_follows_nothing(make_stage: MakeStage) -> None:
    """It may have been heard that somebody comes, though the answer to that was not."""
    gate = threading.Event()
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        streams = other.server.gateway.streams
        follow = streams.follow

        async def unheard(*args: Any, **more: Any) -> int:
            await follow(*args, **more)
            raise ConnectionError("the line breaks")

        with two_follow(stage, other) as (one, two):
            two.answer.close()
            eventually(lambda: gateways(stage, one.name) == {one.incarnation}, "the other one has left")
            streams.follow = unheard  # type: ignore[method-assign]
            assert other.client.get(f"/v1/streams/{one.name}").status_code == 503
            eventually(lambda: gateways(stage, one.name) == {one.incarnation}, "it is as if it had not come")
            assert not other.server.gateway.foreign_logs.live
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


def test_a_copy_counts_from_when_the_first_client_is_gone(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        with two_follow(stage, stage) as (first, copy):
            text = ""
            while not text.endswith("\n\n") or not read_events(text)[-1].id.endswith("/5"):
                text += next(copy.parts)
            eventually(lambda: samples(stage)["vllm:generation_tokens_total"] == 5, "the first one has had them too")
            first.answer.close()
            eventually(lambda: len(stage.server.gateway.reader.watchers) == 1, "the gateway has noticed")
            gate.set()
            text += "".join(copy.parts)
        assert told(read_events(text))[0][2] == ("length", None)
        found = samples(stage)
        assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"] == len(TOKENS)
        assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 1
        assert found["vllm:request_params_n_count"] == 1
        assert found['vllm:request_success_total{finished_reason="length"}'] == 1
        assert found['vllm:request_success_total{finished_reason="abort"}'] == 0


@pytest.mark.parametrize("first_leaves", [False, True])
@pytest.mark.parametrize("headers", [{}, RESUMABLE], ids=["plain", "resumable"])
def test_what_two_follow_is_paid_for_once(
    make_stage: MakeStage, tmp_path: Path, first_leaves: bool, headers: dict[str, str]
) -> None:
    """By whoever has asked for it, once it is over and known what it took."""
    path = write(tmp_path / "keys.toml", record("k", tokens_per_minute=10_000))
    gate = threading.Event()
    settled: list[tuple[Stage, int]] = []
    with make_stage(api_key_file=path) as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        for gateway in (stage, other):
            gateway.client.headers.update(bearer("k"))
            watch_settling(gateway, settled)
        with two_follow(stage, other, **headers) as (first, second):
            if first_leaves:
                first.answer.close()
                eventually(lambda: stage.server.gateway.reader.live == 0, "the gateway has noticed")
                assert not settled
            gate.set()
            assert told(read_events("".join(second.parts)))[0][2] == ("length", None)
            if not first_leaves:
                "".join(first.parts)
        eventually(lambda: settled, "it is settled")
        stage.check()
    assert settled == [(stage, 2 + len(TOKENS))]


def test_of_what_nobody_follows_what_was_made_is_paid_for(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", tokens_per_minute=10_000))
    gate = threading.Event()
    settled: list[tuple[Stage, int]] = []
    with make_stage(api_key_file=path, stream_resume_ttl=0.3) as stage:
        stage.engine.reply = lambda record, choice: Reply(TOKENS, gate=gate, before_gate=5)
        stage.client.headers.update(bearer("k"))
        watch_settling(stage, settled)
        body = {"prompt": [[1, 2], [3]], "max_tokens": len(TOKENS), "stream": True}
        with stage.client.stream("POST", "/v1/completions", json=body, headers=RESUMABLE) as answer:
            # Kept: the connection is closed with the iterator.
            reading = answer.iter_text()
            next(reading)
            eventually(lambda: samples(stage)["vllm:generation_tokens_total"] == 10, "both have begun")
        eventually(lambda: settled, "it is settled")
    assert settled == [(stage, 3 + 10)]


def watch_settling(gateway: Stage, settled: list[tuple[Stage, int]]) -> None:
    rates = gateway.server.gateway.rates
    settle = rates.settle

    def watched(charge: Charge, tokens: int, **more: bool) -> None:
        settled.append((gateway, tokens))
        settle(charge, tokens, **more)

    rates.settle = watched  # type: ignore[method-assign]


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

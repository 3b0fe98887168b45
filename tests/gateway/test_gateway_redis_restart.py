"""Redis goes away and comes back, having forgotten some or all of what it was told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from gateway_stage import TERM, Engine, Reply, Stage, eventually, open_stage, read_events, second_gateway
from log_server import LogServer
from test_gateway_beams import Search
from test_gateway_log import log_length
from test_gateway_resume import TEXT, told

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.entries import encode_fences, encode_tokens
from octavo_shared.fold import FenceEvent
from octavo_shared.fold_beams import BeamEnd
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason
from octavo_shared.streams import Streams

BODY = {"prompt": "x", "max_tokens": 60, "stream": True}


def server(folder: Path, appendonly: str) -> LogServer:
    """With ``appendonly`` it comes back with what it knew."""
    return LogServer(folder, "--appendonly", appendonly, "--appendfsync", "always").start()


@pytest.fixture(params=["no", "yes"])
def forgets(request: pytest.FixtureRequest) -> bool:
    return request.param == "no"


@pytest.fixture
def redis(tmp_path: Path, forgets: bool) -> Iterator[LogServer]:
    redis = server(tmp_path, "no" if forgets else "yes")
    yield redis
    redis.stop()


@contextmanager
def reading(stage: Stage) -> Iterator[tuple[list[str], threading.Thread]]:
    """A client that reads a stream in a thread, and what it has read."""
    parts: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{stage.url}/v1/completions", json=BODY, timeout=60) as answer:
            parts.extend(answer.iter_text())

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: "".join(parts).count("data:") >= 2, "it has begun")
    yield parts, thread
    thread.join(30)
    assert not thread.is_alive()


def test_streams_stay_open_and_go_on(redis: LogServer, forgets: bool, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()
    with open_stage(redis.url, "m", drain_timeout_s=0) as stage:
        stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
        with reading(stage) as (parts, thread):
            redis.stop()
            eventually(lambda: stage.client.get("/health/ready").status_code == 503, "it says that it is not ready")
            refused = stage.post("/v1/completions", prompt="x")
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert stage.client.get("/health").status_code == 200
            redis.start()
            with Engine(redis.url, "m", takes_over=True) as engine:
                engine.reply = lambda record, choice: Reply(ids)
                thread.join(30)
                # Only what was lost is appended again.
                assert [record.readmitted for record in engine.records] == [forgets]
                ((text, _, end, _),) = told(read_events("".join(parts))).values()
                assert (text, end) == (TEXT, ("length", None))
                # And what comes now is served as ever.
                eventually(lambda: stage.client.get("/health/ready").status_code == 200, "it is ready")
                assert stage.post("/v1/completions", prompt="y", max_tokens=3).status_code == 200


def test_what_was_sent_and_comes_back_otherwise_is_an_error(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    redis = server(tmp_path, "yes")
    known = tmp_path / "log.sock"
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()

    async def fence(url: str, log: str) -> None:
        streams = Streams.connect(url, "m")
        await streams.delete_log(log)
        await streams.append_log(log, encode_fences([FenceEvent(1, 0, Attempt(TERM, 2))]))
        await streams.close()

    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage:
            stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
            with reading(stage) as (parts, _):
                redis.stop()
                # The log is lost, and a scheduler that is faster than the gateway finds nothing of it.
                elsewhere = redis.start(tmp_path / "elsewhere.sock").url
                asyncio.run(fence(elsewhere, stage.server.gateway.reader.incarnation))
                redis.stop()
                redis.start(known)
                with Engine(redis.url, "m", takes_over=True, attempt=2) as engine:
                    engine.reply = lambda record, choice: Reply([70] * 30)
                    eventually(lambda: "[DONE]" in "".join(parts), "it ends")
            events = read_events("".join(parts))
            assert sum("could not be restored" in event.data for event in events) == 1
            assert events[-1].data == "[DONE]"
    finally:
        redis.stop()


def test_what_was_sent_is_remembered_while_redis_forgets_again_and_again(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    """The second restart comes when the log holds less than the client has been sent: nothing may replace what that was."""
    redis = server(tmp_path, "yes")
    known = tmp_path / "log.sock"
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()

    async def forget(url: str, log: str, attempt: int, tokens: list[int]) -> None:
        """The log is lost, and another attempt has begun anew before the gateway can say what it knows."""
        streams = Streams.connect(url, "m")
        await streams.delete_log(log)
        await streams.append_log(log, encode_fences([FenceEvent(1, 0, Attempt(TERM, attempt))]))
        if tokens:
            row = OutputRow(RequestId(log, 1), 0, attempt, 0, tuple(tokens))
            await streams.append_log(log, encode_tokens([row], term=TERM, executor="e", epoch=1, step=1))
        await streams.close()

    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage:
            reader = stage.server.gateway.reader
            stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
            with reading(stage) as (parts, _):
                eventually(lambda: len(reader._fold.get(1, 0).tokens) == 7, "all of it has come")
                for attempt, tokens in ((2, ids[:3]), (3, [])):
                    redis.stop()
                    elsewhere = redis.start(tmp_path / "elsewhere.sock").url
                    asyncio.run(forget(elsewhere, reader.incarnation, attempt, tokens))
                    redis.stop()
                    redis.start(known)
                    attempts = Attempt(TERM, attempt)
                    eventually(lambda a=attempts: reader._fold.get(1, 0).attempt == a, "the gateway has read on")
                with Engine(redis.url, "m", takes_over=True, attempt=3) as engine:
                    engine.reply = lambda record, choice: Reply([*ids[:3], *[70] * 30])
                    eventually(lambda: "[DONE]" in "".join(parts), "it ends")
            events = read_events("".join(parts))
            assert sum("could not be restored" in event.data for event in events) == 1
    finally:
        redis.stop()


def test_a_beam_search_that_is_lost_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is certain of it is not enough to go on: a search whose choices have tokens never begins anew."""
    redis = server(tmp_path, "no")
    body = {"prompt": [5, 6, 7], "use_beam_search": True, "n": 2, "best_of": 2, "max_tokens": 8, "stream": True}
    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage:
            stage.engine.reply = lambda record, choice: Reply([0], gate=threading.Event())
            reader = stage.server.gateway.reader
            streamed = threading.Thread(target=lambda: stage.post("/v1/completions", **body))
            streamed.start()
            record = eventually(lambda: stage.engine.records, "it is admitted")[0]
            search = Search(stage, redis.url, record)
            search.step(0, [(0, 11), (0, 12)])
            search.step(1, [(0, 13), (0, 14)])
            eventually(lambda: 1 in reader._fold.beams, "the gateway knows of it")
            eventually(lambda: reader._fold.beams[1].position == 2, "and of both steps")
            old, before = reader._fold, reader._fold.beams[1]
            assert reader._fold.get(1, 0).tokens == [11]
            redis.stop()
            redis.start()
            eventually(lambda: reader._fold is not old, "the gateway begins anew")
            eventually(lambda: reader._fold.beams.get(1) == before, "the log knows all of it again")
            search.step(
                2, [], BeamEnd(0, 2, -1.0, EndReason.STOP), BeamEnd(1, 15, -2.0, EndReason.LENGTH), end=EndReason.LENGTH
            )
            streamed.join(20)
            assert not streamed.is_alive()
    finally:
        redis.stop()


@pytest.mark.parametrize("all_is_lost", [False, True])
def test_an_abort_that_is_lost_is_said_again(tmp_path: Path, tokenizer: ModelTokenizer, all_is_lost: bool) -> None:
    """It had been acted on, and nothing was left of it anywhere; then Redis forgets that. Or the request as well."""
    redis = server(tmp_path, "yes")
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()
    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage:
            reader = stage.server.gateway.reader
            stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
            eventually(lambda: stage.client.get("/health/ready").status_code == 200, "it is ready")
            before = redis.append_only_file.stat().st_size
            stage.engine.acknowledging = not all_is_lost
            with stage.client.stream("POST", "/v1/completions", json=BODY) as answer:
                # Kept: the connection is closed with the iterator.
                parts = answer.iter_text()
                next(parts)
                eventually(lambda: len(reader._fold.get(1, 0).tokens) == 7, "it has got so far")
                begun = redis.append_only_file.stat().st_size
            eventually(lambda: stage.engine.aborts, "it is given up")
            eventually(lambda: all_is_lost or not reader._parted, "it is over, and forgotten")
            redis.stop(kill=True)
            assert b":aborts" in redis.forget(before if all_is_lost else begun)
            redis.start()
            with Engine(redis.url, "m", takes_over=True) as engine:
                # Who takes over goes on with it.
                engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
                eventually(lambda: engine.aborts, "the abort is said again")
                assert (engine.aborts[0].request_id.serial, engine.aborts[0].reason) == (1, "disconnect")
                eventually(lambda: not engine.live, "the request is over once more")
                assert [record.readmitted for record in engine.records] == [all_is_lost]
                eventually(lambda: log_length(stage) == 0, "nothing is left of it")
                assert stage.post("/v1/completions", prompt="y", max_tokens=3).status_code == 200
            stage.check()
    finally:
        redis.stop()


async def gateways(stage: Stage) -> Mapping[str, int]:
    """That follow the first request of a gateway."""
    streams = Streams.connect(stage.settings.redis_url, "m")
    try:
        return (await streams.followers([RequestId(stage.server.gateway.reader.incarnation, 1)]))[0].gateways
    finally:
        await streams.close()


def test_who_is_waited_for_is_not_forgotten(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    """Nobody of that gateway follows the request when Redis forgets who did; the others may leave before it is over."""
    redis = server(tmp_path, "yes")
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()
    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage, second_gateway(stage) as other:
            stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
            headers = {"X-Octavo-Resumable": "1"}
            with stage.client.stream("POST", "/v1/completions", json=BODY, headers=headers) as first:
                parts = first.iter_text()
                (event, *_) = read_events(next(parts).rpartition("\n\n")[0] + "\n\n")
                known = redis.append_only_file.stat().st_size
                path, headers = f"/v1/streams/{json.loads(event.data)['id']}", {"Last-Event-ID": event.id}
                with other.client.stream("GET", path, headers=headers) as second:
                    assert second.status_code == 200
                eventually(lambda: not other.server.gateway.foreign_logs.live, "the other one has noticed")
                before = asyncio.run(gateways(stage))
                assert before.keys() == {one.server.gateway.reader.incarnation for one in (stage, other)}
                redis.stop(kill=True)
                redis.forget(known)
                redis.start()
                eventually(lambda: asyncio.run(gateways(stage)) == before, "it has said so again")
    finally:
        redis.stop()


def test_who_follows_elsewhere_is_not_forgotten(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    """Else the first one's leaving would end it."""
    redis = server(tmp_path, "no")
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    gate = threading.Event()

    try:
        with open_stage(redis.url, "m", drain_timeout_s=0) as stage, second_gateway(stage) as other:
            stage.engine.reply = lambda record, choice: Reply(ids, gate=gate, before_gate=7)
            with reading(stage) as (parts, _):
                (event, *_) = read_events("".join(parts).rpartition("\n\n")[0] + "\n\n")
                name = json.loads(event.data)["id"]
                headers = {"Last-Event-ID": event.id}
                with other.client.stream("GET", f"/v1/streams/{name}", headers=headers, timeout=60) as answer:
                    assert answer.status_code == 200
                    before = asyncio.run(gateways(stage))
                    assert before.keys() == {one.server.gateway.reader.incarnation for one in (stage, other)}
                    redis.stop()
                    redis.start()
                    eventually(lambda: asyncio.run(gateways(stage)) == before, "it has said so again")
                    with Engine(redis.url, "m", takes_over=True) as engine:
                        engine.reply = lambda record, choice: Reply(ids)
                        assert "[DONE]" in answer.read().decode()
    finally:
        redis.stop()

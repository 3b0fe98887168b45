"""What the gateway does with its log: aborts, trimming, leases, leaving; and what it counts."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import httpx
import pytest
from gateway_stage import EOS, MODEL_FOLDER, TERM, Engine, Reply, Stage, eventually

from octavo_gateway import log_reader
from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.fold import LogFold
from octavo_shared.records import EndReason, RequestRecord
from octavo_shared.streams import Streams

T = TypeVar("T")
MakeStage = Callable[..., AbstractContextManager[Stage]]


def with_streams(stage: Stage, work: Callable[[Streams], Awaitable[T]]) -> T:
    """Look into Redis beside the gateway."""

    async def main() -> T:
        streams = Streams.connect(stage.settings.redis_url, stage.settings.model_name)
        try:
            return await work(streams)
        finally:
            await streams.close()

    return asyncio.run(main())


def log_length(stage: Stage) -> int:
    name = stage.server.gateway.reader.incarnation
    return with_streams(stage, lambda streams: streams.client.xlen(streams.keys.log(name)))


# --- disconnects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_in_any_phase(stage: Stage, before: int, stream: bool) -> None:
    gate = threading.Event()
    stage.engine.reply = lambda record, choice: Reply([70] * 50, gate=gate, before_gate=before)
    body = {"prompt": "x", "max_tokens": 50, "stream": stream, "n": 2}

    def leave() -> None:
        # Neither a queued nor a non-streaming request has sent its header yet.
        if before and stream:
            with httpx.stream("POST", f"{stage.url}/v1/completions", json=body) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{stage.url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.3))

    leave()
    eventually(lambda: stage.engine.aborts, "the abort arrives")
    abort = stage.engine.aborts[0]
    assert (abort.request_id, abort.choice, abort.reason) == (stage.engine.records[-1].id, -1, "disconnect")
    eventually(lambda: stage.engine.live == 0, "nothing lives on")
    eventually(lambda: stage.server.gateway.reader.live == 0, "nobody waits")


def test_the_header_waits_for_the_first_event(stage: Stage) -> None:
    gate = threading.Event()
    stage.engine.reply = lambda record, choice: Reply([70] * 3, gate=gate)
    threading.Timer(0.3, gate.set).start()
    with stage.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert gate.is_set()
        assert answer.read().endswith(b"data: [DONE]\n\n")


# --- trimming ---------------------------------------------------------------------------------------------------------


def test_a_quiet_log_is_emptied_once_everything_is_acknowledged(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        for _ in range(5):
            stage.post("/v1/completions", prompt="x", max_tokens=10)
        eventually(lambda: log_length(stage) == 0, "the log is emptied")
        reader = stage.server.gateway.reader
        eventually(lambda: not reader._parted and not reader._fold.choices, "everything is forgotten")
        assert stage.post("/v1/completions", prompt="x", max_tokens=10).status_code == 200


def test_what_is_not_acknowledged_stays_in_the_snapshot(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.acknowledging = False
        stage.post("/v1/completions", prompt=[9, 8, 7], max_tokens=10)
        name = stage.server.gateway.reader.incarnation
        eventually(lambda: log_length(stage) == 1, "a snapshot stands for the log")
        page = with_streams(stage, lambda streams: streams.read_log(name, "0-0"))
        choice = LogFold().apply_all(page.events).get(1, 0)
        assert choice.tokens == [7, 8, 9, 7, 8, 9, 7, 8, 9, 7]
        assert choice.end is EndReason.LENGTH
        stage.engine.acknowledging = True
        # The next request makes the log move, and with it goes what is acknowledged by now.
        stage.post("/v1/completions", prompt="x", max_tokens=1)
        eventually(lambda: log_length(stage) == 0, "the log is emptied")


def test_trimming_under_load_loses_nothing(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "TRIM_PAGES", 3)
    with make_stage() as stage:
        prompts = [[10 + place, 500 + place] for place in range(20)]

        async def main() -> list[dict[str, Any]]:
            async with httpx.AsyncClient(base_url=stage.url, timeout=60) as client:
                answers = await asyncio.gather(
                    *(
                        client.post("/v1/completions", json={"prompt": p, "max_tokens": 200, "logprobs": 0})
                        for p in prompts
                    )
                )
                return [answer.json() for answer in answers]

        tokenizer = stage.server.gateway.assets.tokenizer
        for prompt, answer in zip(prompts, asyncio.run(main()), strict=True):
            assert answer["usage"]["completion_tokens"] == 200
            assert answer["choices"][0]["text"] == tokenizer.decode(prompt[::-1] * 100, skip_special_tokens=True)
        added = with_streams(
            stage,
            lambda streams: streams.client.xinfo_stream(streams.keys.log(stage.server.gateway.reader.incarnation)),
        )
        # More went through the log than ever stood in it at the end.
        assert added["entries-added"] > 200
        eventually(lambda: log_length(stage) == 0, "the log is emptied")


def test_a_log_that_is_never_quiet_stays_short(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "TRIM_PAGES", 20)
    with make_stage() as stage:
        stage.engine.step_s = 0.001

        def client(number: int) -> None:
            for _ in range(12):
                assert stage.post("/v1/completions", prompt=[number + 5], max_tokens=60).status_code == 200

        clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
        for thread in clients:
            thread.start()
        longest = 0
        while any(thread.is_alive() for thread in clients):
            longest = max(longest, log_length(stage))

        async def added(streams: Streams) -> int:
            info = await streams.client.xinfo_stream(streams.keys.log(stage.server.gateway.reader.incarnation))
            return int(info["entries-added"])

        assert with_streams(stage, added) > 700
        assert longest < 250
        stage.check()


def test_events_of_forgotten_requests_and_broken_entries_do_no_harm(make_stage: MakeStage) -> None:
    from octavo_shared.entries import encode_fences
    from octavo_shared.fold import FenceEvent
    from octavo_shared.ids import Attempt

    with make_stage() as stage:
        reader = stage.server.gateway.reader
        fence = encode_fences([FenceEvent(999, 0, Attempt(TERM, 1), EndReason.ABORT)])

        async def write(streams: Streams) -> None:
            await streams.append_log(reader.incarnation, fence)
            await streams.append_log(reader.incarnation, b"\xff\xff\xff")

        with_streams(stage, write)
        eventually(lambda: reader.malformed_entries == 1, "the broken entry is counted")
        assert not reader._fold.choices
        assert stage.post("/v1/completions", prompt="x", max_tokens=3).status_code == 200


def test_a_request_that_redis_forgot_fails_instead_of_hanging(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply([70] * 9, gate=gate, before_gate=2)
        name = stage.server.gateway.reader.incarnation

        async def forget(streams: Streams) -> None:
            await streams.client.delete(streams.keys.log(name), streams.keys.request(stage.engine.records[0].id))

        with stage.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            with_streams(stage, forget)
            text = answer.read().decode()
        assert '"message":"The request was lost."' in text
        assert text.endswith("data: [DONE]\n\n")
        gate.set()


def test_a_storm_leaves_nothing_behind(make_stage: MakeStage) -> None:
    rng = random.Random(5)
    with make_stage() as stage:
        stage.engine.step_s = 0.001

        async def one(client: httpx.AsyncClient, number: int) -> None:
            stream = rng.random() < 0.6
            body: dict[str, Any] = {
                "prompt": [[number + 3, place + 1] for place in range(rng.choice([1, 1, 3]))],
                "max_tokens": rng.randint(1, 60),
                "n": rng.choice([1, 1, 4]),
                "stream": stream,
                "logprobs": rng.choice([None, 2]),
                "stop": rng.choice([None, "never seen", "e"]),
                "echo": rng.random() < 0.2,
            }
            patience_s = rng.choice([None, None, 0.001, 0.02, 0.1])
            await asyncio.sleep(rng.random() / 5)
            try:
                async with asyncio.timeout(patience_s):
                    if not stream:
                        answer = await client.post("/v1/completions", json=body)
                        assert answer.status_code == 200
                        assert len(answer.json()["choices"]) == body["n"] * len(body["prompt"])
                        return
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        assert answer.status_code == 200
                        text = (await answer.aread()).decode()
                    assert text.endswith("data: [DONE]\n\n")
                    ends = re.findall('"finish_reason":"(length|stop)"', text)
                    assert len(ends) == body["n"] * len(body["prompt"])
            except TimeoutError:
                # Its patience is over: it leaves.
                pass

        async def main() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=stage.url, timeout=60, limits=limits) as client:
                await asyncio.gather(*(one(client, number) for number in range(64)))

        asyncio.run(main())
        reader = stage.server.gateway.reader
        eventually(lambda: stage.engine.live == 0 and reader.live == 0, "everything ends")
        stage.check()
        eventually(lambda: log_length(stage) == 0 and not reader._choices, "everything is forgotten")
        found = samples(stage)
        ended = sum(value for name, value in found.items() if name.startswith("vllm:request_success_total"))
        assert ended == found["vllm:request_generation_tokens_count"]
        assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"]


# --- lease and leaving ------------------------------------------------------------------------------------------------


def test_the_lease_is_kept_and_everything_goes_at_the_end(make_stage: MakeStage) -> None:
    with make_stage(gateway_lease_s=0.6) as stage:
        reader = stage.server.gateway.reader

        async def ttl(streams: Streams) -> tuple[int, bytes | None]:
            key = streams.keys.gateway(reader.incarnation)
            return await streams.client.pttl(key), await streams.client.get(key)

        for _ in range(3):
            threading.Event().wait(0.4)
            left, holder = with_streams(stage, ttl)
            assert 0 < left <= 600
            assert holder == reader.incarnation.encode()
        stage.post("/v1/completions", prompt="x")
        # The engine stays for the gateway's leave-taking.
        stage.server.should_exit = True

        async def leftovers(streams: Streams) -> int:
            return await streams.client.exists(
                streams.keys.gateway(reader.incarnation), streams.keys.log(reader.incarnation)
            )

        eventually(lambda: with_streams(stage, leftovers) == 0, "lease and log are gone")


def test_stopping_ends_live_streams_with_abort(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply([70] * 50, gate=gate, before_gate=2)
        with stage.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True}
        ) as answer:
            parts = answer.iter_text()
            text = next(parts)
            stage.server.should_exit = True
            text += "".join(parts)
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert stage.engine.aborts[0].reason == "shutdown"


def test_the_process_says_where_it_listens_and_leaves_cleanly(redis_url: str, tokenizer: ModelTokenizer) -> None:
    command = [sys.executable, "-m", "octavo_gateway", "--model", str(MODEL_FOLDER), "--served-model-name", "alone"]
    process = subprocess.Popen([*command, "--redis-url", redis_url, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if found := re.search(r"listening on (http://127\.0\.0\.1:\d+)", line):
                url = found[1]
                break
        with Engine(redis_url, "alone"), httpx.Client(base_url=url) as client:
            eventually(lambda: client.get("/health/ready").status_code == 200, "it is ready")
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_wrong_settings_are_named() -> None:
    command = [sys.executable, "-m", "octavo_gateway", "--port", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--port (OCTAVO_PORT)" in done.stderr
    command = [sys.executable, "-m", "octavo_gateway", "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--model (OCTAVO_MODEL)" in done.stderr


# --- metrics ----------------------------------------------------------------------------------------------------------


def samples(stage: Stage) -> dict[str, float]:
    """Sample lines of /metrics by name and labels, without the labels every one has."""
    values = {}
    for line in stage.client.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine="0",?|model_name="[^"]*",?)', "", name).replace(",}", "}").replace("{}", "")
            values[name] = float(value)
    return values


def test_metrics_add_up(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        for _ in range(10):
            assert stage.post("/v1/completions", prompt=[5, 6, 7], max_tokens=10).status_code == 200
        found = samples(stage)
        assert found["vllm:time_to_first_token_seconds_count"] == 10
        assert found["vllm:inter_token_latency_seconds_count"] == 90
        assert found["vllm:generation_tokens_total"] == 100
        assert found["vllm:prompt_tokens_total"] == 30
        assert found['vllm:request_success_total{finished_reason="length"}'] == 10
        assert found['vllm:request_success_total{finished_reason="stop"}'] == 0
        assert found["vllm:request_prompt_tokens_sum"] == 30
        assert found["vllm:request_generation_tokens_sum"] == 100
        assert found["vllm:request_max_num_generation_tokens_sum"] == 100
        assert found["vllm:request_params_max_tokens_sum"] == 100
        assert found["vllm:request_params_n_count"] == 10
        assert found["vllm:e2e_request_latency_seconds_count"] == 10
        assert found["vllm:request_time_per_output_token_seconds_count"] == 10
        assert found['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 10
        # What the scheduler publishes stands beside.
        assert found["vllm:num_requests_running"] == 0


def test_metrics_of_streams_stops_and_disconnects(make_stage: MakeStage) -> None:
    gate = threading.Event()

    def reply(record: RequestRecord, choice: int) -> Reply:
        if record.sampling.max_tokens == 50:
            return Reply([70] * 50, gate=gate, before_gate=3)
        return Reply([70, 71, EOS], EndReason.STOP, EOS, sizes=(3,))

    with make_stage() as stage:
        stage.engine.reply = reply
        stage.stream("/v1/completions", prompt=[5, 6], n=2)
        with pytest.raises(httpx.ReadTimeout):
            stage.client.post("/v1/completions", json={"prompt": [5], "max_tokens": 50}, timeout=0.4)
        eventually(
            lambda: samples(stage)['vllm:request_success_total{finished_reason="abort"}'] == 1, "the abort is counted"
        )
        found = samples(stage)
        assert found['vllm:request_success_total{finished_reason="stop"}'] == 2
        assert found["vllm:generation_tokens_total"] == 2 * 3 + 3
        assert found["vllm:time_to_first_token_seconds_count"] == 3
        assert found["vllm:inter_token_latency_seconds_count"] == 3 * 2
        assert found["vllm:prompt_tokens_total"] == 3
        assert found["vllm:request_prompt_tokens_count"] == 2


def test_buckets_are_vllms(stage: Stage) -> None:
    text = stage.client.get("/metrics").text

    def bounds(name: str) -> list[float]:
        return [float(bound) for bound in re.findall(rf'^vllm:{name}_bucket{{.*le="([^"]+)"', text, re.M)]

    assert bounds("time_to_first_token_seconds")[:5] == [0.001, 0.005, 0.01, 0.02, 0.04]
    assert bounds("inter_token_latency_seconds")[-2:] == [80.0, float("inf")]
    assert bounds("e2e_request_latency_seconds")[:3] == [0.3, 0.5, 0.8]
    assert bounds("request_prompt_tokens")[:6] == [1, 2, 5, 10, 20, 50]
    assert bounds("request_params_n") == [1, 2, 5, 10, 20, float("inf")]

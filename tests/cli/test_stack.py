"""`octavo serve` as its user meets it: ready line, first request, crashes, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from octavo.embedded_redis import EmbeddedRedis
from octavo.instance import InstanceDir

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 240.0


class Served:
    """An `octavo serve` process and everything it said."""

    def __init__(self, model: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OCTAVO_NUM_THREADS": "1"},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: object, lines: list[str]) -> None:
        for line in pipe:  # type: ignore[attr-defined]
            lines.append(line.rstrip("\n"))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "\n".join(self.err[-40:])
            assert self.process.poll() is None, "\n".join(self.err[-40:])
            time.sleep(0.02)

    def until_ready(self) -> Served:
        self.until(lambda: len(self.out) >= 2)
        return self

    def said(self, words: str) -> bool:
        return self.times(words) > 0

    def times(self, words: str) -> int:
        return sum(words in line for line in list(self.err))

    def child(self, name: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children():
            # Redis and Valkey replace their command line by a title of their own.
            if f"octavo_{name}" in process.cmdline() or (name == "redis" and process.name().endswith("-server")):
                return process
        raise LookupError(name)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def complete(self, prompt: str = "One two three") -> str:
        body = json.dumps({"model": self.model_name(), "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def model_name(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(_TIMEOUT_S)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*words: object) -> Served:
        started.append(Served(*words))  # type: ignore[arg-type]
        return started[-1].until_ready()

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def test_a_life(serve: Callable[..., Served], tiny_folder: Path, home: Path) -> None:
    """Ready, asked, each of its children killed in turn, and ended: it goes on as before and leaves nothing behind."""
    served = serve(tiny_folder)
    assert re.fullmatch(
        rf"Octavo is ready: {tiny_folder.name} on http://127.0.0.1:{served.port} \([\d.]+ s\)\. .*", served.out[0]
    )
    assert served.out[1].startswith(f"curl -N http://127.0.0.1:{served.port}/v1/chat/completions ")
    before = served.complete()
    assert served.complete() == before
    assert len(list((home / "run").iterdir())) == 1
    for name in ("gateway", "executor", "scheduler", "redis"):
        attached = served.times(" attached: ")
        served.child(name).kill()
        served.until(lambda name=name: served.said(f"{name} | was ended by SIGKILL; restarting it in"))
        served.until(lambda name=name: served.said(f"{name} | is ready again"))
        if name != "gateway":
            # Until then the gateway may speak of the time before.
            served.until(lambda before=attached: served.times(" attached: ") > before)
        served.until(lambda: served.status("/health/ready") == 200)
        assert served.complete() == before, name
    children = served.children()
    assert len(children) >= 4
    assert served.stop(signal.SIGTERM) == 0
    assert all(_gone(child) for child in children)
    assert list((home / "run").iterdir()) == []
    assert len(served.out) == 2
    assert not any("Traceback" in line for line in served.err), "\n".join(served.err)


@pytest.mark.usefixtures("built_kernels")
def test_nothing_outlives_a_killed_server(serve: Callable[..., Served], tiny_folder: Path, home: Path) -> None:
    served = serve(tiny_folder)
    children = served.children()
    served.stop(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not all(_gone(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.02)
    (left,) = (home / "run").iterdir()
    # The next one to start takes it away.
    instance = InstanceDir()
    assert not left.exists()
    instance.remove()


@pytest.mark.usefixtures("built_kernels")
def test_an_external_log_server_is_used(serve: Callable[..., Served], tiny_folder: Path, home: Path) -> None:
    instance = InstanceDir()
    redis = EmbeddedRedis(instance, tcp=True)
    redis.start()
    try:
        served = serve(tiny_folder, "--redis-url", redis.url, "--served-model-name", "first", "second")
        with pytest.raises(LookupError):
            served.child("redis")
        assert served.model_name() == "first"
        assert served.complete()
        assert served.stop(signal.SIGINT) == 0
        assert redis.ping()
    finally:
        redis.stop()
        instance.remove()


@pytest.mark.usefixtures("built_kernels")
def test_the_readmes_first_requests(default_folder: Path, serve: Callable[..., Served]) -> None:
    served = serve(default_folder)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace(":8000", f":{served.port}")
    bash = re.findall(r"^```bash\n(curl .*?)^```", readme, re.MULTILINE | re.DOTALL)
    python = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert (len(bash), len(python)) == (1, 1)
    for command in (bash[0], served.out[1]):
        answer = _output(["bash", "-c", command])
        assert answer.startswith("id: ")
        assert answer.endswith("data: [DONE]\n\n")
    assert len(_output([sys.executable, "-c", python[0]])) > 10
    assert served.stop() == 0

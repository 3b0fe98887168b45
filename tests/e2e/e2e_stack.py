"""The real thing: `octavo serve` as a user starts it, on the default model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

READY_TIMEOUT_S = 240.0


class Stack:
    """A running `octavo serve`. Everything it printed is in ``lines``."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "octavo", "serve", *flags, "--port", "0"]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"ready: .* on (https?://\S+) ")[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, timeout_s: float = READY_TIMEOUT_S, start: int = 0) -> re.Match[str]:
        """Wait until a printed line matches."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines[start:]):
                if match := re.search(pattern, line):
                    return match
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"{pattern!r} was not printed; the output was:\n" + "\n".join(self.lines[-50:]))

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the label sets that match."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        total, found = 0.0, False
        for line in text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total, found = total + float(match[2]), True
        assert found, f"no metric {name} {labels}"
        return total

    def wait_for_metric(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        """Wait until a metric has this value."""
        deadline = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until nothing runs, nothing waits, and no block is referenced.

        What is told is a moment old, from before a request perhaps, so it has to stay so for longer than that.
        """
        deadline = time.monotonic() + timeout_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
        idle = 0
        while idle < 5:
            idle = 0 if any(self.metric(name) for name in names) else idle + 1
            assert time.monotonic() < deadline, {name: self.metric(name) for name in names}
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it as a user would; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, service: str) -> None:
        """End one service at once, as a crash would."""
        found = [p for p in psutil.Process(self.process.pid).children() if f"octavo_{service}" in " ".join(p.cmdline())]
        assert len(found) == 1, f"{len(found)} processes are the {service}"
        found[0].kill()


class RawStream:
    """A streaming request over a bare socket, which can be cut at any moment."""

    def __init__(self, stack: Stack, body: dict[str, object]) -> None:
        parts = urlsplit(stack.url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self.socket.sendall(head.encode() + payload)

    def read_events(self, count: int) -> None:
        data = b""
        while data.count(b"data: ") < count:
            part = self.socket.recv(65536)
            assert part, "closed early"
            data += part

    def cut(self) -> None:
        self.socket.close()

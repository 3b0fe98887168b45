"""The real thing: `octavo serve` as a user starts it, on the default model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

READY_TIMEOUT_S = 120.0


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
        self.url = self.wait_for(r"ready: .* on (http://\S+) ")[1]

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

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until nothing runs, nothing waits, and no block is referenced."""
        deadline = time.monotonic() + timeout_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
        while any(self.metric(name) for name in names):
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

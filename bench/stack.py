"""A running `octavo serve` for benchmarks, and what it says of itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """`octavo serve` on a free port; yields its base URL."""
    command = [sys.executable, "-m", "octavo", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    drain = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"is ready: .* on (http://\S+) ", line):
                drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        if drain is not None:
            drain.wait()


def step_seconds(url: str) -> dict[str, tuple[float, int]]:
    """Per phase of a step: seconds spent and steps counted, since the server started."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^octavo:step_seconds_(sum|count)\{.*phase="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    values = {(kind, phase): float(value) for kind, phase, value in found}
    return {phase: (values["sum", phase], int(values["count", phase])) for kind, phase in values if kind == "sum"}

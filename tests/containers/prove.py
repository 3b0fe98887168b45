#!/usr/bin/env python3
"""Runs every command of docs/containers.md against a real Docker Engine, and checks what each of them promises.

    python3 tests/containers/prove.py

Not part of `make test`: it needs a Docker Engine with Compose 2, the images that the Dockerfiles and compose.yaml start
from, and a converted model. It works in a Compose project and with image tags of its own and leaves neither behind.
Compose's variables are obeyed: OCTAVO_MODEL_DIR, OCTAVO_PORT and so on, and COMPOSE_FILE for settings that belong to
one machine, such as where pip finds its packages. Only the standard library is used.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = "octavo-check"
TAG = "check"
CHANGED_TAG = "check-changed"
SERVICES = ("gateway", "scheduler", "executor")
WAIT_S = 180.0
# Long enough to be killed in the middle.
LONG_TOKENS = 400


class CheckError(Exception):
    """Something is not as the page says."""


def check(true: bool, message: str) -> None:
    if not true:
        raise CheckError(message)


def output(*command: str, cwd: Path = ROOT) -> str:
    """A command's stdout. Raises CheckError if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def page_commands() -> list[str]:
    """Every command of the page's shell blocks, in order, continuation lines joined."""
    text = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def run_shown(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the page as a shell would, only at the port chosen here."""
    return subprocess.run(
        command.replace("127.0.0.1:8000", f"127.0.0.1:{port()}"),
        shell=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def port() -> int:
    return int(os.environ.get("OCTAVO_PORT", "8000"))


def model_name() -> str:
    return os.environ.get("OCTAVO_SERVED_MODEL_NAME", "SmolLM2-135M-Instruct")


# --- what each command promises ---


def after_build(_: str) -> None:
    for service in SERVICES:
        image = f"octavo-{service}:{TAG}"
        size = int(output("docker", "image", "inspect", "--format", "{{.Size}}", image))
        user = output("docker", "image", "inspect", "--format", "{{.Config.User}}", image)
        check(user not in ("", "0", "root"), f"{image} runs as root")
        has_torch = subprocess.run(
            ["docker", "run", "--rm", "--entrypoint", "python3", image, "-c", "import torch"],
            capture_output=True,
            check=False,
        )
        check((has_torch.returncode == 0) == (service == "executor"), f"{image}: torch is where it should not be")
        say(f"{image}: {size / 1e6:.0f} MB, user {user}, torch: {service == 'executor'}")
    check_layers()


def check_layers() -> None:
    """A change of code replaces one layer of each image, the last: nothing is installed again."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "octavo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".?*", "__pycache__", "tests", "bench", "docs"))
        shutil.copy(ROOT / ".dockerignore", copy)
        changed = copy / "shared" / "octavo_shared" / "ids.py"
        changed.write_text(changed.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
        environment = {**os.environ, "OCTAVO_TAG": CHANGED_TAG}
        done = subprocess.run(
            ["docker", "compose", "build"], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        check(done.returncode == 0, done.stderr[-2000:])
    for service in SERVICES:
        before, after = (layers(f"octavo-{service}:{tag}") for tag in (TAG, CHANGED_TAG))
        check(len(before) == len(after), f"{service}: other layers")
        check(before[:-1] == after[:-1], f"{service}: a change of code replaces more than the last layer")
        check(before[-1] != after[-1], f"{service}: the change of code is not in the image")
    say("a change of code replaces the last layer of each image and no other")


def layers(image: str) -> list[str]:
    found: list[str] = json.loads(output("docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    return found


def after_up(shown: str) -> None:
    check(get("/health/ready") == 200, "not ready although Compose says that all is healthy")
    count = len(containers("executor"))
    check(count == (2 if "executor=2" in shown else 1), f"{count} executors")
    log = output("docker", "compose", "logs", "--no-log-prefix", "scheduler")
    names = set(re.findall(r"executor (\S+) attached", log))
    check(len(names) == count, f"{count} executors, attached under these names: {sorted(names)}")
    say(f"ready, with {count} executor(s) attached as {', '.join(sorted(names))}")


def after_curl(printed: str) -> None:
    text = "".join(delta for delta, _ in events(printed.splitlines()))
    check("data: [DONE]" in printed and text.strip() != "", f"no streamed answer: {printed[-500:]}")
    say(f"streamed: {text.strip()!r}")


def interrupt_a_stream(command: str) -> None:
    """Run a command that takes a part away in the middle of an answer: the answer goes on to its last token."""
    service = re.split(r"\s+", command)[3]
    (container,) = containers(service)
    undisturbed = LongStream()
    undisturbed.finish()
    stream = LongStream()
    stream.wait_for(20)
    kills = " exec " in command
    done = run_shown(command)
    # What kills everything in its container dies too: its exit status means nothing.
    check(kills or done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-3000:]}")
    check(stream.finish_reason is None, "the answer ended before it could be interrupted")
    stream.finish()
    say(f"the stream paused for {stream.longest_pause_s:.1f} s")
    restarts = int(output("docker", "inspect", "--format", "{{.RestartCount}}", container))
    check(restarts == int(kills), f"Docker restarted {service} {restarts} times")
    check(stream.finish_reason == "length", f"the answer ended by {stream.finish_reason}")
    check(stream.completion_tokens == LONG_TOKENS, f"{stream.completion_tokens} tokens instead of {LONG_TOKENS}")
    check(undisturbed.text == stream.text, "the answer differs from one that was not interrupted")
    say(f"the answer has all its {LONG_TOKENS} tokens and the text of one that was not interrupted")


def after_down(_: str) -> None:
    left = {
        kind: output("docker", *words, "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        for kind, words in (
            ("containers", ("ps", "--all")),
            ("volumes", ("volume", "ls")),
            ("networks", ("network", "ls")),
        )
    }
    check(not any(left.values()), f"left behind: {left}")
    say("no container, volume or network is left")


# In the page's order. A command that begins like none of these fails the check.
CHECKS: tuple[tuple[str, Callable[[str], None]], ...] = (
    ("docker compose build", after_build),
    ("docker compose up ", after_up),
    ("curl ", after_curl),
    ("docker compose ps", lambda printed: check("healthy" in printed, printed)),
    ("docker compose down ", after_down),
)
INTERRUPTIONS = ("docker compose exec ", "docker compose restart ")


# --- talking to the service ---


class LongStream:
    """A chat answer of ``LONG_TOKENS`` tokens, the likeliest each time, read in a thread of its own."""

    def __init__(self) -> None:
        self.count = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.longest_pause_s = 0.0  # between two events
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.count < count:
            check(self._thread.is_alive(), f"the stream ended after {self.count} events: {self._error}")
            check(time.monotonic() < deadline, f"{self.count} events after {WAIT_S} s")
            time.sleep(0.01)

    def finish(self) -> None:
        self._thread.join(WAIT_S)
        check(not self._thread.is_alive(), f"no end after {WAIT_S} s")
        check(self._error is None, f"the stream broke: {self._error}")

    def _read(self) -> None:
        body = {
            "model": model_name(),
            "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port(), timeout=WAIT_S)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            check(response.status == 200, f"status {response.status}: {response.read(500)!r}")
            seen_s = time.monotonic()
            for delta, event in events(raw.decode() for raw in response):
                self.text += delta
                self.count += 1
                now_s = time.monotonic()
                self.longest_pause_s, seen_s = max(self.longest_pause_s, now_s - seen_s), now_s
                for choice in event["choices"]:
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                if event.get("usage"):
                    self.completion_tokens = event["usage"]["completion_tokens"]
        except Exception as error:
            self._error = error


def events(lines: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(text added, event) of each server-sent event."""
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            check("error" not in event, f"the stream carries an error: {line}")
            yield "".join(choice["delta"].get("content") or "" for choice in event["choices"]), event


def get(path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port(), timeout=10)
    connection.request("GET", path)
    return connection.getresponse().status


def containers(service: str) -> list[str]:
    return output("docker", "compose", "ps", "--quiet", service).split()


# --- the whole of it ---


def say(text: str) -> None:
    print(f"    {text}", flush=True)


def engine_problem() -> str:
    """Why this cannot run here; empty if it can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command, missing in (
        (["docker", "version"], "no Docker Engine answers"),
        (["docker", "compose", "version"], "Docker has no Compose"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{missing}: {done.stderr.strip()[-300:]}"
    return ""


def prove() -> None:
    for command in page_commands():
        print(f"$ {command}", flush=True)
        began_s = time.monotonic()
        if command.startswith(INTERRUPTIONS):
            interrupt_a_stream(command)
            continue
        expect = next((function for start, function in CHECKS if command.startswith(start)), None)
        check(expect is not None, "nothing here checks this command")
        done = run_shown(command)
        check(done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-3000:]}")
        say(f"{time.monotonic() - began_s:.1f} s")
        assert expect is not None
        expect(command if command.startswith("docker compose up") else done.stdout)


def clean_up() -> None:
    """What a failed run may have left, and the images."""
    subprocess.run(["docker", "compose", "down", "--volumes"], cwd=ROOT, capture_output=True, check=False)
    images = [f"octavo-{service}:{tag}" for service in SERVICES for tag in (TAG, CHANGED_TAG)]
    subprocess.run(["docker", "image", "rm", *images], capture_output=True, check=False)


def main() -> int:
    problem = engine_problem()
    if problem:
        print(f"This check needs a Docker Engine with Compose 2, and {problem}", file=sys.stderr)
        return 2
    os.environ |= {"COMPOSE_PROJECT_NAME": PROJECT, "OCTAVO_TAG": TAG}
    try:
        prove()
    except CheckError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        logs = ["docker", "compose", "logs", "--tail", "40"]
        print(subprocess.run(logs, cwd=ROOT, capture_output=True, text=True, check=False).stdout, file=sys.stderr)
        return 1
    finally:
        clean_up()
    print("All as the page says.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

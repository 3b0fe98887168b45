"""Gateways that are killed, told to stop and left alone under live streams, with real clients: nothing is lost or repeated."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import READY_TIMEOUT_S
from log_server import log_server
from resuming_client import Reading
from service_set import find_free_port

MODEL_FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "96", "--num-threads", "1")

# A minute each on a small machine.
pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "max_tokens": 300, "seed": 7, "ignore_eos": True}


def wait_until(question: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "it did not happen in time"
        # Other processes are asked, which do not say when it has happened.
        time.sleep(0.05)


class Cluster:
    """Scheduler, executor and two gateways on one Redis, each a process of its own. What they print is in ``folder``."""

    def __init__(self, model: Path, redis_url: str, folder: Path, *flags: str) -> None:
        names = {"REDIS_URL": redis_url, "SERVED_MODEL_NAME": "m", "SCHEDULER_ADDRESS": f"unix:{folder}/scheduler.sock"}
        self._environment = os.environ | {f"OCTAVO_{name}": value for name, value in names.items()}
        self._model, self._flags = model, flags
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ports = [find_free_port(), find_free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self._start("scheduler")
        self._start("executor", "--executor-name", "only", *MODEL_FLAGS)
        self.gateways = [self.start_gateway(index) for index in range(2)]
        wait_until(lambda: all(map(is_ready, self.urls)), READY_TIMEOUT_S)

    def _start(self, service: str, *flags: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{service}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", "octavo", service, "--model", str(self._model), *flags]
        self.processes.append(subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT))
        return self.processes[-1]

    def start_gateway(self, index: int) -> subprocess.Popen[bytes]:
        return self._start("gateway", "--port", str(self.ports[index]), "--gateway-lease-s", "1", *self._flags)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def metric(self, name: str) -> float:
        for url in self.urls:
            try:
                text = httpx.get(f"{url}/metrics", timeout=10).text
            except httpx.TransportError:
                continue
            found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
            assert found, name
            return sum(map(float, found))
        raise AssertionError("no gateway lives")

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
        return not any(self.metric(name) for name in names)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def start_cluster(small_model: Any, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with log_server(tmp_path) as redis_url, contextlib.ExitStack() as stack:

        def start(*flags: str) -> Cluster:
            cluster = Cluster(small_model.folder, redis_url, tmp_path, *flags)
            stack.callback(cluster.close)
            return cluster

        yield start


def bodies() -> list[dict[str, Any]]:
    return [
        BODY,
        {**BODY, "n": 3},
        {**BODY, "prompt": ["One", "Two two"], "stream_options": {"include_usage": True}},
        {**BODY, "max_tokens": 40, "stop": [" a", "e "], "ignore_eos": False},
    ]


def test_a_gateway_that_is_killed_loses_and_repeats_nothing(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    first, second = cluster.urls
    expected = []
    for body in bodies():
        undisturbed = Reading(body)
        undisturbed.read(second)
        assert undisturbed.done
        expected.append((undisturbed.text, undisturbed.ends, undisturbed.usage))
    readings = [Reading(body) for body in bodies() * 2]
    with concurrent.futures.ThreadPoolExecutor(len(readings)) as pool:
        running = [pool.submit(reading.read, first) for reading in readings]
        wait_until(lambda: all(reading.last for reading in readings))
        cluster.gateways[0].send_signal(signal.SIGKILL)
        for future in running:
            future.result(60)
        assert any(not reading.done for reading in readings)
        for future in [pool.submit(reading.read_on, [second]) for reading in readings]:
            future.result(120)
    for reading, wanted in zip(readings, expected * 2, strict=True):
        assert (reading.text, reading.ends, reading.usage) == wanted
    wait_until(cluster.is_idle)
    # Over, and still there for whoever asks.
    whole = Reading(BODY)
    whole.last = readings[0].last.partition("/")[0] + "/-"
    whole.read(second)
    assert (whole.text, whole.ends) == expected[0][:2]


def test_nobody_comes_back_to_a_dead_gateways_requests_and_they_end(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    long = {**BODY, "max_tokens": 480, "n": 4}
    reading = Reading(long, headers={})
    thread = threading.Thread(target=reading.read, args=(cluster.urls[0],))
    thread.start()
    wait_until(lambda: bool(reading.last))
    cluster.gateways[0].kill()
    thread.join(30)
    wait_until(cluster.is_idle)
    if not reading.done:
        wait_until(lambda: "deleting the log of gateway" in scheduler_log(cluster), timeout_s=30)
    assert "Traceback" not in scheduler_log(cluster)


def test_who_follows_at_another_gateway_keeps_the_stream(start_cluster: Callable[..., Cluster]) -> None:
    """Plain clients, who have no time to come back: whoever leaves, and whichever gateway dies, the others go on to the end."""
    cluster = start_cluster()
    first, second = cluster.urls
    body = {**BODY, "max_tokens": 480, "n": 4}
    undisturbed = Reading(body)
    undisturbed.read(second)
    one, two, three = (Reading(body, headers={}) for _ in range(3))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(one.read, first)]
        wait_until(lambda: bool(one.last))
        beginning = one.last.partition("/")[0] + "/-"
        # Comes last, and leaves.
        two.last = beginning
        two.read(second, events=3)
        three.last = beginning
        running.append(pool.submit(three.read, second))
        wait_until(lambda: three.last != beginning)
        assert not one.done, "nobody was left behind"
        cluster.gateways[0].kill()
        for future in running:
            future.result(120)
    assert not two.done
    assert three.statuses == [200]
    assert (three.text, three.ends) == (undisturbed.text, undisturbed.ends)
    wait_until(cluster.is_idle)


def test_when_all_have_left_or_died_the_request_ends(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    first, second = cluster.urls
    # Longer than it takes to find out that a gateway is gone.
    body = {**BODY, "prompt": ["One", "Two", "Three", "Four", "Five", "Six"], "max_tokens": 480, "n": 8}
    one, two = Reading(body, headers={}), Reading(body, headers={})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        begun = pool.submit(one.read, first)
        wait_until(lambda: bool(one.last))
        two.last = one.last.partition("/")[0] + "/-"
        # The first one's gateway dies; of the other gateway's clients one leaves in the middle.
        two.read(second, events=3)
        cluster.gateways[0].kill()
        begun.result(60)
    assert not one.done
    assert not two.done
    wait_until(lambda: "nobody has reconnected to request" in scheduler_log(cluster))
    wait_until(cluster.is_idle)


def scheduler_log(cluster: Cluster) -> str:
    return "".join(path.read_text() for path in cluster.folder.glob("scheduler-*.log"))


def test_a_gateway_that_stops_hands_over(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster("--drain-timeout-s", "0.3")
    first, second = cluster.urls
    body = {**BODY, "max_tokens": 480, "n": 4}
    undisturbed = Reading(body)
    undisturbed.read(second)
    resumable, plain = Reading(body), Reading(body, headers={})
    threads = [threading.Thread(target=one.read, args=(first,)) for one in (resumable, plain)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(resumable.last and plain.last))
    cluster.gateways[0].terminate()
    for thread in threads:
        thread.join(60)
    assert cluster.gateways[0].wait(30) == 0
    # The plain one has had its end, and the other can go on.
    assert plain.done
    assert set(plain.ends.values()) <= {"abort", "length"}
    resumable.read_on([second])
    assert (resumable.text, resumable.ends) == (undisturbed.text, undisturbed.ends)
    wait_until(cluster.is_idle)


def test_gateways_are_replaced_one_after_the_other_and_no_request_fails(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    stop = threading.Event()
    failures: list[str] = []
    answered: list[str] = []

    def client(number: int) -> None:
        while not stop.is_set():
            reading = Reading({**BODY, "max_tokens": 30, "seed": number})
            try:
                reading.read_on(cluster.urls, limit_s=40)
                answered.append(reading.text[0])
            except AssertionError as error:
                failures.append(str(error))

    clients = [threading.Thread(target=client, args=(number % 2,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for index, url in enumerate(cluster.urls):
        count = len(answered)
        wait_until(lambda: len(answered) > count + 4)  # noqa: B023
        cluster.gateways[index].terminate()
        assert cluster.gateways[index].wait(30) == 0
        cluster.gateways[index] = cluster.start_gateway(index)
        wait_until(lambda: is_ready(url))  # noqa: B023
    stop.set()
    for thread in clients:
        thread.join(60)
    assert not failures
    assert len(set(answered)) == 2
    wait_until(cluster.is_idle)

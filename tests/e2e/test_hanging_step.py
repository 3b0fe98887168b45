"""A step that never ends while heartbeats go on: clients are told in time, and the request goes on elsewhere."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import READY_TIMEOUT_S
from service_set import Answer, Services, ask, wait_until

WRAPPER = Path(__file__).with_name("paced_executor.py")
BODY = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def start(services: Services, name: str, hang: Path, pace: str = "0.01,0,0") -> subprocess.Popen[bytes]:
    small = {"MAX_MODEL_LEN": 512, "NUM_GPU_BLOCKS_OVERRIDE": 96, "NUM_THREADS": 1, "MODEL": services.model}
    small |= {"SCHEDULER_ADDRESS": services.addresses[0], "EXECUTOR_NAME": name}
    environment = services.environment | {f"OCTAVO_{key}": str(value) for key, value in small.items()}
    environment |= {"PACE": pace, "HANG": str(hang)}
    log = (services.folder / f"executor-{len(services.processes)}.log").open("wb")
    process = subprocess.Popen([sys.executable, str(WRAPPER)], env=environment, stdout=log, stderr=subprocess.STDOUT)
    services.processes.append(process)
    return process


@contextmanager
def hanging(services: Services, hang: Path) -> Iterator[list[Answer]]:
    """A request whose first step hangs as long as the file is there; gateways have heard of it. Its answer will be there in the end."""
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(ask(services.url, BODY)))
    hang.touch()
    began_s = time.monotonic()
    client.start()
    wait_until(lambda: not services.ready(), 30, "the gateway to say that nothing goes on")
    print(f"noticed after {time.monotonic() - began_s:.1f} s")
    refusal = httpx.get(f"{services.url}/health/ready")
    assert refusal.status_code == 503
    assert refusal.json()["error"]["message"] == "no executor makes progress"
    # Heartbeats come, so it is not the lease that runs out; and it is not waited for the watchdog either.
    assert services.said("scheduler", "left: gets nowhere") == 0
    yield answers
    client.join(60)
    assert len(answers) == 1


def test_a_first_step_that_hangs_is_noticed_and_its_request_goes_on(
    small_model: Any, redis_url: str, tmp_path: Path, free_port: int
) -> None:
    hang, elsewhere = tmp_path / "hang", tmp_path / "never"
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler(0, "--step-timeout-s", "8")
        first = start(services, "first", hang)
        wait_until(services.ready, READY_TIMEOUT_S)
        with hanging(services, hang) as answers:
            wait_until(lambda: services.said("scheduler", "gets nowhere: its step has lasted") == 1, 30, "the watchdog")
            # It hears that it is given up, and makes room for another process of its name.
            assert first.wait(30) == 70
            assert services.said("executor", "giving up") == 1
            start(services, "first", elsewhere)
        alone = ask(services.url, BODY)
        assert answers[0].text == alone.text
        assert answers[0].ends == alone.ends
        wait_until(services.ready, 30)
        metrics = httpx.get(f"{services.url}/metrics").text
        assert 'octavo:executors_let_go_total{engine="0",model_name="m",reason="stalled"} 1.0' in metrics
    finally:
        services.close()


def test_a_later_step_that_hangs_for_a_while_is_noticed_and_goes_on(
    small_model: Any, redis_url: str, tmp_path: Path, free_port: int
) -> None:
    hang = tmp_path / "hang"
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler()
        start(services, "first", hang)
        wait_until(services.ready, READY_TIMEOUT_S)
        # As many as it takes to learn what steps take.
        alone = [ask(services.url, BODY) for _ in range(6)][-1]
        with hanging(services, hang) as answers:
            hang.unlink()
        assert answers[0].text == alone.text
        wait_until(services.ready, 30)
        assert services.said("scheduler", "gets nowhere") == 0
    finally:
        services.close()


def test_a_first_step_that_is_long_is_not_taken_for_one(
    small_model: Any, redis_url: str, tmp_path: Path, free_port: int
) -> None:
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler()
        # A prompt of 400 tokens takes 6 s, more than twice as long as a step may take of which less is expected.
        start(services, "slow", tmp_path / "never", "0.01,0.015,0")
        wait_until(services.ready, READY_TIMEOUT_S)
        answers: list[Answer] = []
        body = {**BODY, "prompt": list(range(3, 403)), "max_tokens": 2}
        client = threading.Thread(target=lambda: answers.append(ask(services.url, body)))
        client.start()
        unready = 0
        while client.is_alive():
            unready += not services.ready()
            client.join(0.1)
        assert unready == 0
        assert answers[0].ends == {0: "length"}
    finally:
        services.close()

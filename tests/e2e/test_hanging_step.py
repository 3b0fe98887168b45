"""A step that never ends while heartbeats go on: clients are told in time, and the request goes on elsewhere."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import READY_TIMEOUT_S
from service_set import Answer, Services, ask, wait_until

WRAPPER = Path(__file__).with_name("paced_executor.py")
BODY = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def start(services: Services, name: str, hang: Path) -> subprocess.Popen[bytes]:
    small = {"MAX_MODEL_LEN": 512, "NUM_GPU_BLOCKS_OVERRIDE": 96, "NUM_THREADS": 1, "MODEL": services.model}
    small |= {"SCHEDULER_ADDRESS": services.addresses[0], "EXECUTOR_NAME": name}
    environment = services.environment | {f"OCTAVO_{key}": str(value) for key, value in small.items()}
    environment |= {"PACE": "0.01,0,0", "HANG": str(hang)}
    log = (services.folder / f"executor-{len(services.processes)}.log").open("wb")
    process = subprocess.Popen([sys.executable, str(WRAPPER)], env=environment, stdout=log, stderr=subprocess.STDOUT)
    services.processes.append(process)
    return process


def test_a_hanging_step_is_noticed_and_its_request_goes_on(
    small_model: Any, redis_url: str, tmp_path: Path, free_port: int
) -> None:
    hang, elsewhere = tmp_path / "hang", tmp_path / "never"
    services = Services(small_model.folder, redis_url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler(0, "--step-timeout-s", "8")
        first = start(services, "first", hang)
        wait_until(services.ready, READY_TIMEOUT_S)
        # What steps take has to be known, or a first one may last for a minute.
        alone = [ask(services.url, BODY) for _ in range(6)][-1]
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(ask(services.url, BODY)))
        hang.touch()
        began_s = time.monotonic()
        client.start()
        wait_until(lambda: not services.ready(), 30, "the gateway to say that nothing goes on")
        noticed_s = time.monotonic() - began_s
        refusal = httpx.get(f"{services.url}/health/ready")
        assert refusal.status_code == 503
        assert refusal.json()["error"]["message"] == "no executor makes progress"
        # Heartbeats come, so it is not the lease that runs out; and it is not waited for the watchdog either.
        assert services.said("scheduler", "executor first left: gets nowhere") == 0
        wait_until(lambda: services.said("scheduler", "gets nowhere: its step has lasted") == 1, 30, "the watchdog")
        # It hears that it is given up, and makes room for another process of its name.
        assert first.wait(30) == 70
        assert services.said("executor", "giving up") == 1
        start(services, "first", elsewhere)
        client.join(60)
        assert answers[0].text == alone.text
        assert answers[0].ends == alone.ends
        wait_until(services.ready, 30)
        metrics = httpx.get(f"{services.url}/metrics").text
        assert 'octavo:executors_let_go_total{engine="0",model_name="m",reason="stalled"} 1.0' in metrics
        print(f"noticed after {noticed_s:.1f} s")
    finally:
        services.close()

"""Executors die, freeze, leave and come back while requests of every kind are answered; clients see nothing of it."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_stack import READY_TIMEOUT_S
from service_set import Answer, Process, Services, ask, wait_until

PROMPT = "It was the best of times, it was"
# One request of every kind that has state to lose.
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 160},
    "seeded": {"seed": 7, "temperature": 1.0, "max_tokens": 160},
    "choices": {"n": 3, "seed": 11, "temperature": 0.8, "top_p": 0.9, "max_tokens": 120, "logprobs": 2},
    "beams": {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 60, "logprobs": 0},
    "penalties": {
        "seed": 3,
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "max_tokens": 160,
    },
}


@pytest.fixture(scope="module")
def services(
    small_model: Any, module_redis: str, tmp_path_factory: pytest.TempPathFactory, module_port: int
) -> Iterator[Services]:
    services = Services(small_model.folder, module_redis, tmp_path_factory.mktemp("services"), module_port)
    try:
        services.gateway()
        services.scheduler(0, "--executor-lease-s", "2")
        services.executor("one")
        wait_until(services.ready, READY_TIMEOUT_S)
        yield services
    finally:
        services.close()


@pytest.fixture(scope="module")
def bodies(services: Services) -> dict[str, dict[str, Any]]:
    """All with the prompt; one of them is cut by a stop string that its text is known to contain."""
    common = {"prompt": PROMPT, "ignore_eos": True}
    bodies = {name: {**common, **body} for name, body in BODIES.items()}
    text = ask(services.url, bodies["greedy"]).text[0]
    bodies["stopped"] = {**bodies["greedy"], "stop": [text[len(text) // 2 :][:12]]}
    return bodies


@pytest.fixture(scope="module")
def undisturbed(services: Services, bodies: dict[str, dict[str, Any]]) -> dict[str, Answer]:
    answers = {name: ask(services.url, body) for name, body in bodies.items()}
    assert answers["stopped"].ends == {0: "stop"}
    assert set(answers["choices"].ends) == {0, 1, 2}
    return answers


class Crowd:
    """All kinds of requests, several times at once, while something is done to the services."""

    def __init__(self, services: Services, bodies: dict[str, dict[str, Any]], rounds: int = 2) -> None:
        self._services = services
        self._pool = concurrent.futures.ThreadPoolExecutor(16)
        names = list(bodies) * rounds
        self._answers = [(name, self._pool.submit(ask, services.url, bodies[name])) for name in names]

    def expect(self, undisturbed: dict[str, Answer]) -> None:
        for name, answer in self._answers:
            assert answer.result(180) == undisturbed[name], name
        self._pool.shutdown()
        assert_idle(self._services)


def metric(services: Services, name: str) -> float:
    import httpx

    text = httpx.get(f"{services.url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


def assert_idle(services: Services) -> None:
    """Nothing runs, waits or holds a block; nothing is pending."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
    wait_until(lambda: not any(metric(services, name) for name in names), 30, "being idle")


def test_an_executor_that_is_killed(services: Services, bodies: Any, undisturbed: dict[str, Answer]) -> None:
    crowd = Crowd(services, bodies)
    time.sleep(0.4)
    victim = executors(services)[-1]
    victim.kill()
    services.executor("one")
    crowd.expect(undisturbed)


def executors(services: Services) -> list[Process]:
    return [p for p in services.processes if "executor" in p.args and p.poll() is None]


def test_an_executor_that_freezes_and_wakes_as_a_zombie(
    services: Services, bodies: Any, undisturbed: dict[str, Answer]
) -> None:
    services.executor("two")
    wait_until(lambda: services.attached("two"), READY_TIMEOUT_S)
    frozen = executors(services)[0]
    crowd = Crowd(services, bodies)
    time.sleep(0.3)
    frozen.send_signal(signal.SIGSTOP)
    wait_until(lambda: services.said("scheduler", "has been silent for") >= 1, 20, "the end of its lease")
    frozen.send_signal(signal.SIGCONT)
    crowd.expect(undisturbed)
    wait_until(lambda: services.attached("one", 3), 20, "its return")


def test_the_only_executor_freezes_and_readiness_says_so(
    services: Services, bodies: Any, undisturbed: dict[str, Answer]
) -> None:
    for extra in executors(services)[1:]:
        extra.terminate()
        assert extra.wait(30) == 0
    (only,) = executors(services)
    wait_until(services.ready)
    crowd = Crowd(services, bodies, rounds=1)
    time.sleep(0.3)
    only.send_signal(signal.SIGSTOP)
    wait_until(lambda: not services.ready(), 20, "unreadiness")
    time.sleep(2.5)
    only.send_signal(signal.SIGCONT)
    crowd.expect(undisturbed)
    wait_until(services.ready)


def test_an_executor_that_is_told_to_stop_hands_back_what_it_has(
    services: Services, bodies: Any, undisturbed: dict[str, Answer]
) -> None:
    (old,) = executors(services)
    services.executor("three")
    wait_until(lambda: services.attached("three"), READY_TIMEOUT_S)
    crowd = Crowd(services, bodies)
    time.sleep(0.3)
    lost = services.said("scheduler", "left: ")
    old.terminate()
    assert old.wait(30) == 0
    assert services.said("scheduler", "executor one is relieved") == 1
    assert services.said("scheduler", "left: ") == lost, "it was let go, not lost"
    crowd.expect(undisturbed)

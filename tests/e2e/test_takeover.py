"""Schedulers die, freeze and are replaced while requests of every kind are answered; the cache stays warm."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from crowd import Crowd, Reference, metric
from e2e_stack import READY_TIMEOUT_S
from service_set import Process, Services, wait_until

LEASE_S = 2.0


class Pair:
    """Two schedulers, one of which stands by."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.active = self._start(0)
        wait_until(lambda: services.said("scheduler", "listening on") == 1, READY_TIMEOUT_S)
        self.standby = self._start(1)
        wait_until(lambda: services.said("scheduler", "standing by") == 1, READY_TIMEOUT_S)
        self._free = 0
        self._terms = 1

    def _start(self, number: int) -> Process:
        return self._services.scheduler(number, "--scheduler-lease-s", str(LEASE_S))

    def replace_active(self) -> None:
        """The active one is gone: the standby becomes active, and then a new one stands by, which could else be faster."""
        wait_until(lambda: self._services.said("scheduler", "scheduler term ") > self._terms, 30, "the takeover")
        self._terms = self._services.said("scheduler", "scheduler term ")
        self.active, self.standby = self.standby, self._start(self._free)
        self._free = 1 - self._free


@pytest.fixture(scope="module")
def services(
    small_model: Any, module_redis: str, tmp_path_factory: pytest.TempPathFactory, module_port: int
) -> Iterator[Services]:
    services = Services(
        small_model.folder, module_redis, tmp_path_factory.mktemp("services"), module_port, schedulers=2
    )
    try:
        services.gateway("--enable-prompt-tokens-details")
        services.executor("one")
        yield services
    finally:
        services.close()


@pytest.fixture(scope="module")
def pair(services: Services) -> Pair:
    pair = Pair(services)
    wait_until(services.ready, READY_TIMEOUT_S)
    return pair


@pytest.fixture(scope="module")
def reference(services: Services, pair: Pair) -> Reference:
    return Reference(services)


def cached_tokens(services: Services, prompt: list[int]) -> int:
    body = {"model": "m", "prompt": prompt, "max_tokens": 20, "temperature": 0}
    usage = httpx.post(f"{services.url}/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_scheduler_that_is_killed(services: Services, pair: Pair, reference: Reference) -> None:
    crowd = Crowd(services, reference, rounds=1)
    crowd.wait_until_under_way()
    pair.active.kill()
    pair.replace_active()
    crowd.expect_undisturbed()
    assert services.said("scheduler", "cached blocks are taken over") == 1
    assert metric(services, "octavo:adopted_blocks_total") > 0


def test_the_cache_outlives_its_scheduler(services: Services, pair: Pair) -> None:
    prompts = [[100 * i + j % 90 for j in range(320)] for i in range(1, 4)]
    assert [cached_tokens(services, prompt) for prompt in prompts] == [0, 0, 0]
    warm = [cached_tokens(services, prompt) for prompt in prompts]
    before = services.said("scheduler", "executor one attached")
    pair.active.kill()
    pair.replace_active()
    wait_until(lambda: services.said("scheduler", "executor one attached") > before, 30, "the takeover")
    recovered = [cached_tokens(services, prompt) for prompt in prompts]
    print(f"cached prompt tokens: {warm} before, {recovered} after the takeover")
    assert recovered == warm
    assert min(warm) >= 300


def test_a_scheduler_that_hands_over(services: Services, pair: Pair, reference: Reference) -> None:
    crowd = Crowd(services, reference)
    crowd.wait_until_under_way()
    pair.active.terminate()
    # Who asks meanwhile is not refused.
    while pair.active.poll() is None or not crowd.is_answered:
        answer = httpx.post(
            f"{services.url}/v1/completions", json={"model": "m", "prompt": "Hi", "max_tokens": 3}, timeout=60
        )
        assert answer.status_code == 200, answer.text
    assert pair.active.wait(30) == 0
    pair.replace_active()
    crowd.expect_undisturbed()


def test_a_scheduler_that_freezes_is_replaced_and_wakes_as_standby(
    services: Services, pair: Pair, reference: Reference
) -> None:
    crowd = Crowd(services, reference)
    crowd.wait_until_under_way()
    terms, waiting = services.said("scheduler", "listening on"), services.said("scheduler", "standing by")
    pair.active.send_signal(signal.SIGSTOP)
    wait_until(lambda: services.said("scheduler", "listening on") > terms, 30, "the takeover")
    pair.active.send_signal(signal.SIGCONT)
    crowd.expect_undisturbed()
    wait_until(lambda: services.said("scheduler", "standing by") > waiting, 30, "standing by")
    assert services.said("scheduler", "term over") >= 1

"""Executors die, freeze, leave and come back while requests of every kind are answered; clients see nothing of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from crowd import Crowd, Reference
from e2e_stack import READY_TIMEOUT_S
from service_set import Process, Services, wait_until


@pytest.fixture(scope="module")
def services(
    small_model: Any, module_redis: str, tmp_path_factory: pytest.TempPathFactory, module_port: int
) -> Iterator[Services]:
    services = Services(small_model.folder, module_redis, tmp_path_factory.mktemp("services"), module_port)
    try:
        services.one_of_each("--executor-lease-s", "2")
        yield services
    finally:
        services.close()


@pytest.fixture(scope="module")
def reference(services: Services) -> Reference:
    return Reference(services)


def executors(services: Services) -> list[Process]:
    return [process for process in services.processes if "executor" in process.args and process.poll() is None]


def test_an_executor_that_is_killed(services: Services, reference: Reference) -> None:
    crowd = Crowd(services, reference)
    crowd.wait_until_under_way()
    victim = executors(services)[-1]
    victim.kill()
    services.executor("one")
    crowd.expect_undisturbed()


def test_an_executor_that_freezes_and_wakes_as_a_zombie(services: Services, reference: Reference) -> None:
    services.executor("two")
    wait_until(lambda: services.attached("two"), READY_TIMEOUT_S)
    frozen = executors(services)[0]
    crowd = Crowd(services, reference)
    crowd.wait_until_under_way()
    frozen.send_signal(signal.SIGSTOP)
    wait_until(lambda: services.said("scheduler", "has been silent for") >= 1, 20, "the end of its lease")
    frozen.send_signal(signal.SIGCONT)
    crowd.expect_undisturbed()
    wait_until(lambda: services.attached("one", 3), 20, "its return")


def test_the_only_executor_freezes_and_readiness_says_so(services: Services, reference: Reference) -> None:
    for extra in executors(services)[1:]:
        extra.terminate()
        assert extra.wait(30) == 0
    (only,) = executors(services)
    wait_until(services.ready)
    crowd = Crowd(services, reference, rounds=1)
    crowd.wait_until_under_way()
    silent = services.said("scheduler", "has been silent for")
    only.send_signal(signal.SIGSTOP)
    wait_until(lambda: not services.ready(), 20, "unreadiness")
    wait_until(lambda: services.said("scheduler", "has been silent for") > silent, 20, "the end of its lease")
    only.send_signal(signal.SIGCONT)
    crowd.expect_undisturbed()
    wait_until(services.ready)


def test_an_executor_that_is_told_to_stop_hands_back_what_it_has(services: Services, reference: Reference) -> None:
    (old,) = executors(services)
    services.executor("three")
    wait_until(lambda: services.attached("three"), READY_TIMEOUT_S)
    crowd = Crowd(services, reference)
    crowd.wait_until_under_way()
    lost = services.said("scheduler", "left: ")
    old.terminate()
    assert old.wait(30) == 0
    assert services.said("scheduler", "executor one is relieved") == 1
    assert services.said("scheduler", "left: ") == lost, "it was let go, not lost"
    crowd.expect_undisturbed()

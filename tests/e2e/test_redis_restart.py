"""Redis is killed under load and comes back: services wait for it, and streams go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crowd import Crowd, Reference
from e2e_stack import READY_TIMEOUT_S
from service_set import Services, redis_server, wait_until


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
def test_redis_is_killed_and_comes_back(small_model: Any, tmp_path: Path, free_port: int, appendfsync: str) -> None:
    (data := tmp_path / "redis").mkdir()
    flags = ("--appendonly", "yes", "--appendfsync", appendfsync)
    redis, url = redis_server(data, 0, *flags)
    services = Services(small_model.folder, url, tmp_path, free_port)
    try:
        services.gateway()
        services.scheduler(0, "--scheduler-lease-s", "3")
        services.executor("one")
        wait_until(services.ready, READY_TIMEOUT_S)
        reference = Reference(services)
        # Away until that is noticed, then for longer than the lease.
        for service, notices in (
            ("gateway", "cannot be read, trying again"),
            ("scheduler", "the lease was not renewed"),
        ):
            crowd = Crowd(services, reference, rounds=1)
            # Whoever asks while Redis is away is refused.
            crowd.wait_until_begun()
            noticed = services.said(service, notices)
            redis.kill()
            redis.wait(10)
            wait_until(lambda s=service, n=notices, before=noticed: services.said(s, n) > before, 30, notices)
            (data / "redis.sock").unlink(missing_ok=True)
            redis, _ = redis_server(data, 0, *flags)
            crowd.expect_undisturbed()
            wait_until(services.ready)
        assert services.said("scheduler", "Redis was restarted") >= 1
        assert all(process.poll() is None for process in services.processes), "nobody had to be started again"
    finally:
        services.close()
        redis.kill()
        redis.wait(10)

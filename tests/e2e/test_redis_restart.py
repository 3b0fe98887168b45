"""Redis is killed under load and comes back: services wait for it, and streams go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crowd import Crowd, Reference
from log_server import LogServer, debians_redis
from service_set import outliving, wait_until


def test_redis_is_killed_and_comes_back(small_model: Any, tmp_path: Path, free_port: int) -> None:
    """First for longer than it takes to notice, when all was on disk; then for longer than the lease, when it may not be."""
    (data := tmp_path / "redis").mkdir()
    redis = LogServer(data, "--appendonly", "yes", "--appendfsync", "always", binary=debians_redis()).start()
    with outliving(redis, small_model.folder, tmp_path, free_port) as services:
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
            redis.stop(kill=True)
            wait_until(lambda s=service, n=notices, before=noticed: services.said(s, n) > before, 30, notices)
            redis.flags = ("--appendonly", "yes", "--appendfsync", "everysec")
            redis.start()
            crowd.expect_undisturbed()
            wait_until(services.ready)

"""Connections to Redis that behave as those who speak to it expect."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

# Of one process. Hundreds of requests may begin or end in the same moment; this many are on their way at once.
MAX_CONNECTIONS = 64


def connect(url: str) -> redis.asyncio.Redis:
    """A client of its own for ``url``; nothing is sent yet."""
    # The handshake for maintenance notifications (a hosted-Redis feature) swallows cancellations.
    quiet = MaintNotificationsConfig(enabled=False)
    # A connection over a unix socket refuses this option outright.
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    pool = _PatientPool.from_url(url, max_connections=MAX_CONNECTIONS, maint_notifications_config=quiet, **keepalive)
    return redis.asyncio.Redis.from_pool(pool)


class _FailsAsConnection:
    """Mixed into a connection class: a transport that has been closed meanwhile is a lost connection like any other.

    uvloop raises RuntimeError then, which nobody who speaks to Redis reckons with.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error


class _PatientPool(redis.asyncio.BlockingConnectionPool):
    """Connections for whoever comes first. When all are busy one waits; the plain pool raises as if Redis were away."""

    def __init__(self, *, connection_class: type[AbstractConnection] = redis.asyncio.Connection, **kwargs: Any) -> None:
        kind = type(connection_class.__name__, (_FailsAsConnection, connection_class), {})
        super().__init__(connection_class=kind, **kwargs)

    async def release(self, connection: AbstractConnection) -> None:
        # A release that is cancelled half-way would never give the connection back.
        await asyncio.shield(super().release(connection))

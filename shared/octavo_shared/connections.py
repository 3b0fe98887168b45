"""Connections to Redis that behave as those who speak to it expect."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
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
    return _Client.from_pool(pool)


def connect_blocking(url: str, timeout_s: float) -> redis.Redis:
    """A client for code that has threads instead of an event loop; no operation takes longer than ``timeout_s``."""
    return _BlockingClient.from_url(url, socket_timeout=timeout_s)


class _Discreet:
    """Mixed into a pipeline class: its errors do not show the command, which may hold what clients have said."""

    def annotate_exception(self, exception: Exception, number: int, command: Any) -> None:
        """An error's message is Redis' own."""


class _Pipeline(_Discreet, redis.asyncio.client.Pipeline):  # type: ignore[misc]
    pass


class _BlockingPipeline(_Discreet, redis.client.Pipeline):
    pass


class _Client(redis.asyncio.Redis):
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _BlockingClient(redis.Redis):
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _BlockingPipeline:
        return _BlockingPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class OtherLifeError(RedisConnectionError):
    """Redis has been restarted, and may have forgotten what it was told last."""


def stay_in(client: redis.asyncio.Redis, run_id: str) -> None:
    """From now on a client of ``connect`` speaks to this life of Redis (its run id) only; "" = to any.

    A restart breaks every connection, so it is enough to ask when one is made. In another life every operation raises
    OtherLifeError: nothing that was decided before the restart is said after it unawares.
    """
    assert isinstance(client.connection_pool, _PatientPool)
    client.connection_pool.life.run_id = run_id


@dataclass(slots=True)
class _Life:
    """Of the Redis that a pool's connections may be made to; "" = any."""

    run_id: str = ""


class _Checked:
    """Mixed into a connection class."""

    def __init__(self, *, life: _Life, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._life = life

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        known = self.is_connected  # type: ignore[attr-defined]
        await super().connect_check_health(*args, **kwargs)  # type: ignore[misc]
        if known or not self._life.run_id:
            return
        try:
            await self.send_packed_command(self.pack_command("INFO", "server"), check_health=False)  # type: ignore[attr-defined]
            if self._life.run_id.encode() not in await self.read_response():  # type: ignore[attr-defined]
                raise OtherLifeError("Redis has been restarted")
        except RedisError:
            await self.disconnect()  # type: ignore[attr-defined]
            raise

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """A transport that has been closed meanwhile is a lost connection like any other.

        uvloop raises RuntimeError then, which nobody who speaks to Redis reckons with. And a task that is cancelled while it
        sends is cancelled: the client sends within ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that
        comes when it has just been done (bugs.python.org/issue42130).
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
        if task.cancelling() > cancelled:
            # Nobody will read the answer.
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise asyncio.CancelledError


class _PatientPool(redis.asyncio.BlockingConnectionPool):
    """Connections for whoever comes first. When all are busy one waits; the plain pool raises as if Redis were away."""

    def __init__(self, *, connection_class: type[AbstractConnection] = redis.asyncio.Connection, **kwargs: Any) -> None:
        kind = type(connection_class.__name__, (_Checked, connection_class), {})
        self.life = _Life()
        super().__init__(connection_class=kind, life=self.life, **kwargs)

    async def release(self, connection: AbstractConnection) -> None:
        # A release that is cancelled half-way would never give the connection back.
        await asyncio.shield(super().release(connection))

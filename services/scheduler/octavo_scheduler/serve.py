"""A scheduler's life: take the lease, take over what is pending, listen, read, publish, and hand everything back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine
from typing import Any

import uvloop
from redis.exceptions import RedisError

from octavo_scheduler.attach import start_server
from octavo_scheduler.control import Control
from octavo_scheduler.intake import Intake
from octavo_scheduler.metrics import SchedulerMetrics
from octavo_scheduler.observe import Observer
from octavo_scheduler.orphans import OrphanWatch
from octavo_scheduler.service import RETRY_S, SchedulerService
from octavo_shared.control import ControlChannel
from octavo_shared.ids import mint_incarnation
from octavo_shared.settings import SchedulerSettings
from octavo_shared.streams import Streams
from octavo_shared.telemetry import Tracing, setup_logging
from octavo_shared.tls import server_credentials

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0
# An exposition costs milliseconds of a core that the forward pass could use, and is scraped every 5 s at most.
PUBLISH_METRICS_S = 5.0
# When requests have just ended, say so sooner.
PUBLISH_IDLE_S = 0.1


class LeaseLostError(RuntimeError):
    """Another scheduler may hold the lease: this one must stop."""


class SchedulerProcess:
    """Everything one scheduler process owns."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises SettingError when the certificates cannot be used."""
        self.settings = settings
        self._credentials = server_credentials(settings)
        self.incarnation = mint_incarnation()
        self.streams = Streams.connect(settings.redis_url, settings.model_name)
        self.tracing = Tracing("scheduler", settings.otlp_traces_endpoint, self.incarnation)
        self.service: SchedulerService | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set.

        Raises:
            LeaseLostError: the lease could not be kept.
        """
        term = await self._take_lease()
        metrics = SchedulerMetrics(self.settings.model_name)
        observer = Observer(self.tracing, metrics)
        service = SchedulerService(self.settings, self.streams, observer, metrics, term, self.incarnation)
        self.service = service
        await self.streams.create_group()
        await service.take_over(await self.streams.claim_pending(self.incarnation))
        server, port = await start_server(service, self.settings.scheduler_address, self._credentials)
        logger.info("term %d, listening on %s (port %d)", term, self.settings.scheduler_address, port)
        intake = Intake(service, self.streams, self.incarnation)
        try:
            await _until_first(
                intake.requests(),
                intake.aborts(),
                OrphanWatch(service, self.streams).run(),
                Control(service, ControlChannel(self.streams)).run(),
                self._publish(service),
                self._keep_lease(term),
                stop.wait(),
            )
        finally:
            await server.stop(grace=0.5)
        with contextlib.suppress(RedisError, OSError):
            await self.streams.client.delete(self.streams.keys.limits)
            await self.streams.client.hdel(self.streams.keys.metrics, "scheduler")
            await self.streams.release_lease(self.streams.keys.lease, self.incarnation)
        self.tracing.shutdown()
        await self.streams.close()

    async def _take_lease(self) -> int:
        """Wait for the lease, then take a term greater than all before."""
        said = False
        while True:
            try:
                if await self.streams.take_lease(
                    self.streams.keys.lease, self.incarnation, self.settings.scheduler_lease_s
                ):
                    return await self.streams.next_term()
                reason = "another scheduler holds the lease"
            except (RedisError, OSError) as error:
                reason = f"the log is out of reach ({error})"
            if not said:
                logger.info("waiting: %s", reason)
                said = True
            await asyncio.sleep(RETRY_S)

    async def _keep_lease(self, term: int) -> None:
        loop = asyncio.get_running_loop()
        ttl_s = self.settings.scheduler_lease_s
        kept_at = loop.time()
        while True:
            await asyncio.sleep(ttl_s / 4)
            asked_at = loop.time()
            try:
                kept = await self.streams.renew_lease(self.streams.keys.lease, self.incarnation, ttl_s)
            except (RedisError, OSError):
                kept = False
            if kept:
                kept_at = asked_at
            elif not await self._retake(ttl_s, term) and loop.time() - kept_at > ttl_s:
                raise LeaseLostError(f"the lease was not renewed for {ttl_s} s")

    async def _retake(self, ttl_s: float, term: int) -> bool:
        """The lease ran out unnoticed: take it again, unless somebody else has held it meanwhile."""
        keys = self.streams.keys
        with contextlib.suppress(RedisError, OSError):
            if await self.streams.take_lease(keys.lease, self.incarnation, ttl_s):
                if int(await self.streams.client.get(keys.term) or 0) == term:
                    return True
                raise LeaseLostError("another scheduler has held the lease meanwhile")
        return False

    async def _publish(self, service: SchedulerService) -> None:
        """Limits every second, metrics every few, and both soon after the last request ended."""
        was_busy = False
        limits_due_s = metrics_due_s = 0.0
        while True:
            now_s = time.monotonic()
            fell_idle = was_busy and not service.busy
            was_busy = service.busy
            if fell_idle:
                service.check_integrity()
            with contextlib.suppress(RedisError, OSError):
                if fell_idle or now_s >= limits_due_s:
                    limits_due_s = now_s + PUBLISH_S
                    await self.streams.publish_limits(service.limits())
                if fell_idle or now_s >= metrics_due_s:
                    metrics_due_s = now_s + PUBLISH_METRICS_S
                    await self.streams.publish_metrics("scheduler", service.exposition())
            await asyncio.sleep(PUBLISH_IDLE_S)


async def _until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines side by side until one ends; its error is raised, the others are cancelled."""
    running = {asyncio.create_task(item) for item in work}
    try:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        # Once is not enough: a cancellation that meets the end of a Redis call can get lost in its timeout handling.
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)


def run(settings: SchedulerSettings) -> int:
    """Run a scheduler until SIGINT or SIGTERM; returns the exit status.

    Raises:
        SettingError: the certificates cannot be used.
    """
    setup_logging("scheduler", settings.log_level)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await SchedulerProcess(settings).run(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except LeaseLostError as error:
        logger.error("%s; stopping", error)
        return 1
    return 0

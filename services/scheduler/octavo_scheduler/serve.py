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
from octavo_scheduler.background import RETRY_S
from octavo_scheduler.control import Control
from octavo_scheduler.intake import Intake
from octavo_scheduler.metrics import SchedulerMetrics
from octavo_scheduler.observe import Observer
from octavo_scheduler.orphans import OrphanWatch
from octavo_scheduler.service import SchedulerService
from octavo_scheduler.watchdog import Watchdog
from octavo_shared.connections import OtherLifeError
from octavo_shared.control import ControlChannel
from octavo_shared.ids import mint_incarnation
from octavo_shared.settings import SchedulerSettings
from octavo_shared.streams import Streams
from octavo_shared.telemetry import Tracing, setup_logging
from octavo_shared.tls import server_credentials

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0
# While requests are owed something: gateways decide by it who may still come.
PUBLISH_BUSY_S = 0.25
# Saying it takes at most one part in so many of the time: with thousands of sequences that is more seldom.
PUBLISH_SHARE = 50
# An exposition costs milliseconds of a core that the forward pass could use, and is scraped every 5 s at most.
PUBLISH_METRICS_S = 5.0
# When requests have just ended, say so sooner.
PUBLISH_IDLE_S = 0.1


# A scheduler that has just taken over says nothing of executors that are not there: they are on their way.
SETTLE_S = 3.0
# After Redis has been restarted, how long gateways and executors have to say again what it may have lost.
RESEND_S = 2.0
WATCH_LOG_S = 0.5


class ReignOverError(RuntimeError):
    """This process is to begin anew, as after a takeover; the message says why."""

    def __init__(self, reason: str, at_least: int = 0) -> None:
        """``at_least``: the next term must be greater than that."""
        super().__init__(reason)
        self.at_least = at_least


class SchedulerProcess:
    """Everything one scheduler process owns: it waits for the lease, reigns while it has it, and waits again."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises SettingError when the certificates cannot be used."""
        self.settings = settings
        self._credentials = server_credentials(settings)
        self.incarnation = mint_incarnation()
        self.streams = Streams.connect(settings.redis_url, settings.model_name)
        self.tracing = Tracing("scheduler", settings.otlp_traces_endpoint, self.incarnation)
        self.metrics = SchedulerMetrics(settings.model_name)
        self.service: SchedulerService | None = None
        # Which life of Redis the last reign has seen.
        self._run_id = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve, or stand by, until ``stop`` is set; then hand over."""
        at_least = 0
        while not stop.is_set():
            try:
                if await self._take_lease(stop):
                    await self._reign(stop, at_least)
            except ReignOverError as over:
                logger.warning("term over: %s", over)
                at_least = max(at_least, over.at_least)
            except (RedisError, OSError) as error:
                logger.warning("the log is out of reach (%s); trying again", error)
                await asyncio.sleep(RETRY_S)
            finally:
                self.streams.stay_in("")
        with contextlib.suppress(RedisError, OSError):
            # What is published stays for a moment: a standby that takes over says the same, and gateways go on admitting.
            await self.streams.let_published_expire("scheduler")
            await self.streams.release_lease(self.streams.keys.lease, self.incarnation)
        self.tracing.shutdown()
        await self.streams.close()

    async def _reign(self, stop: asyncio.Event, at_least: int) -> None:
        """Take a term and what is pending, and serve until ``stop`` is set.

        Raises:
            ReignOverError: the lease could not be kept, or something happened after which all must be read again.
        """
        run_id = await self.streams.run_id()
        self.streams.stay_in(run_id)
        before, self._run_id = self._run_id or await self._life_of_what_waits(), run_id
        if before not in ("", run_id):
            # The lease may run out meanwhile: it is taken anew.
            await asyncio.sleep(RESEND_S)
            return
        term = await self.streams.next_term(at_least)
        observer = Observer(self.tracing, self.metrics)
        service = SchedulerService(self.settings, self.streams, observer, self.metrics, term, self.incarnation)
        self.service = service
        server = None
        try:
            await self.streams.create_group()
            service.pending.old_until = await self.streams.newest_request()
            await service.pending.take_over(await self.streams.claim_pending(self.incarnation))
            server, port = await start_server(service, self.settings.scheduler_address, self._credentials)
            logger.info("term %d, listening on %s (port %d)", term, self.settings.scheduler_address, port)
            intake = Intake(service, self.streams, self.incarnation)
            await _until_first(
                intake.requests(),
                intake.aborts(),
                OrphanWatch(service, self.streams).run(),
                Control(service, ControlChannel(self.streams)).run(),
                Watchdog(service, self.settings.executor_lease_s, self.settings.step_timeout_s).run(),
                self._publish(service),
                self._keep_lease(term),
                self._watch_log(),
                self._heed_rank(service),
                stop.wait(),
            )
        finally:
            # First nothing more is said, then executors are let go: they dial whoever comes next.
            await service.shut_down()
            if server is not None:
                await server.stop(grace=None)

    async def _life_of_what_waits(self) -> str:
        """For who has not reigned yet: in which life of Redis others did, if they have left anything undone."""
        return await self.streams.last_life() if await self.streams.num_requests() else ""

    async def _take_lease(self, stop: asyncio.Event) -> bool:
        """Wait for the lease; False when told to stop first."""
        said = False
        while not stop.is_set():
            try:
                if await self.streams.take_lease(
                    self.streams.keys.lease, self.incarnation, self.settings.scheduler_lease_s
                ):
                    return True
                reason = "standing by: another scheduler holds the lease"
            except (RedisError, OSError) as error:
                reason = f"waiting: the log is out of reach ({error})"
            if not said:
                logger.info("%s", reason)
                said = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await stop.wait()
        return False

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
                raise ReignOverError(f"the lease was not renewed for {ttl_s} s")

    async def _retake(self, ttl_s: float, term: int) -> bool:
        """The lease ran out unnoticed: take it again, unless somebody else has held it meanwhile."""
        keys = self.streams.keys
        with contextlib.suppress(RedisError, OSError):
            if await self.streams.take_lease(keys.lease, self.incarnation, ttl_s):
                if int(await self.streams.client.get(keys.term) or 0) == term:
                    return True
                raise ReignOverError("another scheduler has held the lease meanwhile")
        return False

    async def _watch_log(self) -> None:
        """A changed run id is a takeover (rule L9): Redis may have lost what was said last."""
        while True:
            await asyncio.sleep(WATCH_LOG_S)
            try:
                await self.streams.run_id()
            except OtherLifeError as error:
                raise ReignOverError("Redis was restarted and may have lost what was said last") from error
            except (RedisError, OSError):
                continue

    @staticmethod
    async def _heed_rank(service: SchedulerService) -> None:
        """A term that others have seen before is none (rule L2)."""
        seen = await service.outranked
        raise ReignOverError(f"term {seen} has been seen, this is term {service.term}", seen)

    async def _publish(self, service: SchedulerService) -> None:
        """Limits every second, more often while there is work, metrics every few, and both soon after the last request ended."""
        was_busy = False
        began_s = time.monotonic()
        limits_said_s = metrics_due_s = limits_took_s = 0.0
        while True:
            now_s = time.monotonic()
            fell_idle = was_busy and not service.busy
            was_busy = service.busy
            if fell_idle:
                service.check_integrity()
            with contextlib.suppress(RedisError, OSError):
                pause_s = max(PUBLISH_BUSY_S, PUBLISH_SHARE * limits_took_s) if service.busy else PUBLISH_S
                if fell_idle or now_s - limits_said_s >= min(pause_s, PUBLISH_S):
                    limits_said_s = now_s
                    limits = service.limits()
                    limits_took_s = time.monotonic() - now_s
                    if limits.ready or now_s - began_s > SETTLE_S or await self.streams.read_limits() is None:
                        await self.streams.publish_limits(limits)
                if fell_idle or now_s >= metrics_due_s:
                    metrics_due_s = now_s + PUBLISH_METRICS_S
                    await self.streams.publish_metrics("scheduler", service.exposition())
            await asyncio.sleep(PUBLISH_IDLE_S)


async def _until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines side by side until one ends; its error is raised, the others are cancelled."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Once is not enough: a cancellation that meets the end of a Redis call can get lost in its timeout handling.
        running = {task for task in tasks if not task.done()}
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        # Several may fail for one reason, at once or while they are cancelled.
        errors = {task: error for task in tasks if not task.cancelled() and (error := task.exception()) is not None}
    first = next((task for task in tasks if task in done and task in errors), None)
    for task, error in errors.items():
        if task is not first:
            logger.info("the same moment: %r", error)
    if first is not None:
        raise errors[first]


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

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0

"""The gateway as a whole: its parts, their background tasks, start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from octavo_gateway.aborts import Aborts
from octavo_gateway.admission import Admission
from octavo_gateway.errors import unavailable
from octavo_gateway.foreign_logs import ForeignLogs
from octavo_gateway.keys import KeyRing
from octavo_gateway.limits import LimitsWatch
from octavo_gateway.log_reader import LogReader
from octavo_gateway.metrics import GatewayMetrics
from octavo_gateway.model_assets import ModelAssets
from octavo_gateway.pressure import Pressure
from octavo_gateway.rates import Rates
from octavo_gateway.tracing import GatewayTracing
from octavo_gateway.watcher import Watcher
from octavo_shared.buckets import Buckets
from octavo_shared.control import ControlChannel
from octavo_shared.ids import RequestId, mint_incarnation
from octavo_shared.records import AbortRecord
from octavo_shared.settings import GatewaySettings
from octavo_shared.streams import Streams

# Tokenising is short and releases the interpreter lock; the cores belong to the forward pass.
WORKER_THREADS = 2
LONGEST_TOKENS_BUCKET = 1_000_000
LEAVE_GRACE_S = 3.0
# How often to see whether the key file has changed.
KEYS_S = 1.0

logger = logging.getLogger(__name__)


class Gateway:
    """Owner of everything that lives as long as the process."""

    def __init__(self, settings: GatewaySettings, assets: ModelAssets) -> None:
        self.settings = settings
        self.assets = assets
        self.model_name = settings.model_name
        self.model_names = frozenset(settings.served_model_name or [settings.model_name])
        key_file = Path(settings.api_key_file) if settings.api_key_file else None
        self.keys = KeyRing(settings.api_key, settings.admin_api_key, key_file)
        self.metrics = GatewayMetrics(self.model_name, LONGEST_TOKENS_BUCKET)
        # Parsing, templates and tokenising of anything that is not tiny happen here, never on the event loop.
        self.workers = ThreadPoolExecutor(WORKER_THREADS, thread_name_prefix="prepare")
        self.streams = Streams.connect(settings.redis_url, self.model_name)
        self.limits = LimitsWatch(self.streams)
        incarnation = mint_incarnation()
        self.aborts = Aborts(self.streams, incarnation)
        self.reader = LogReader(self.streams, self.aborts, incarnation, settings.gateway_lease_s)
        self.foreign_logs = ForeignLogs(self.streams, self.aborts, incarnation)
        self.pressure = Pressure(self.limits, self.metrics.refused, self.reader.incarnation)
        self.rates = Rates(Buckets(self.streams.client, self.streams.keys), self.metrics.rate_limited)
        self.admission = Admission(
            self.streams, self.limits, self.reader, self.aborts, self.pressure, self.rates, settings.seed
        )
        self.control = ControlChannel(self.streams)
        self.tracing = GatewayTracing(settings.otlp_traces_endpoint, self.reader.incarnation)
        # Nothing new is taken any more.
        self.draining = False
        self._tasks: list[asyncio.Task[None]] = []

    def why_not_ready(self) -> str:
        """Empty when requests can be served now, else the reason why not."""
        return "The gateway is shutting down." if self.draining else self.limits.why_not_ready()

    def require_open(self) -> None:
        """Raises ApiError (503) once nothing new is taken any more."""
        if self.draining:
            raise unavailable(self.why_not_ready())

    async def start(self) -> None:
        """Start the background tasks. Redis need not be there yet."""
        for number, tenant in enumerate(self.keys.tenants, 1):
            logger.info("key %d is tenant %s", number, tenant)
        await self.limits.refresh()
        for name, work in (
            ("limits", self.limits.run()),
            ("log", self.reader.run()),
            ("aborts", self.aborts.run()),
            ("lease", self.reader.run_lease()),
            ("keys", self._watch_keys()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_log_crash)
            self._tasks.append(task)

    async def _watch_keys(self) -> None:
        """Take changes of the key file up."""
        while self.settings.api_key_file:
            await asyncio.sleep(KEYS_S)
            self.keys.reload()

    def leave(self, watcher: Watcher, left: Sequence[RequestId], reason: str) -> None:
        """A watcher is not to be told anything more. Those of its requests that are ``left`` have not ended.

        They go on for as long as its client may come back, and while anybody else follows them: of those who do here the last
        one says that it leaves, and one counts what comes.
        """
        followers = self.reader if watcher.ids[0].log == self.reader.incarnation else self.foreign_logs
        failed = reason == "error"
        heir = followers.heir_of(watcher) if left and not failed else None
        if heir is not None:
            heir.generation = max(heir.generation, watcher.generation)
            heir.counts, watcher.counts = heir.counts or watcher.counts, False
        elif left and not watcher.handed_over:
            aborts = [AbortRecord(request_id, -1, watcher.generation, reason) for request_id in left]
            grace_ms = 0 if failed else watcher.records[0].disconnect_grace_ms
            self.aborts.leave_later(aborts, grace_ms / 1000)
        followers.unfollow(watcher)

    def dismiss(self) -> None:
        """End what lives: whoever may come back goes on elsewhere, the others' requests are aborted.

        A request that is followed elsewhere goes on; for those who follow it here it stops.
        """
        answers: dict[tuple[RequestId, ...], list[Watcher]] = {}
        for watcher in self.reader.watchers | self.foreign_logs.watchers:
            if watcher.records and watcher.records[0].disconnect_grace_ms:
                watcher.hand_over()
            else:
                answers.setdefault(watcher.ids, []).append(watcher)
        for ids, watchers in answers.items():
            generation = max(watcher.generation for watcher in watchers)
            aborts = [AbortRecord(request_id, -1, generation, "shutdown") for request_id in ids]
            self.aborts.leave(aborts, partial(_hand_over, watchers))

    async def stop(self) -> None:
        """End what lives, leave Redis clean, stop."""
        aborts = [task for task in self._tasks if task.get_name() == "aborts"]
        others = [task for task in self._tasks if task.get_name() != "aborts"]
        await _cancel(others)
        await self.foreign_logs.stop()
        await self.reader.leave(LEAVE_GRACE_S)
        await _cancel(aborts)
        await self.rates.stop()
        await self.streams.close()
        self.workers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.tracing.shutdown)


def _hand_over(watchers: list[Watcher]) -> None:
    for watcher in watchers:
        watcher.hand_over()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("background task %s failed", task.get_name(), exc_info=error)

"""What goes wrong: each fault is a coroutine that does harm, perhaps for a while, and leaves nothing broken behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos_process import Process
from chaos_proxy import Proxy
from chaos_stack import MODEL, ChaosStack
from redis.exceptions import RedisError

from octavo_shared.entries import MalformedEntryError, decode_entry
from octavo_shared.fold import SnapshotEvent
from octavo_shared.streams import FIELD, Keys

# The share of faults that the next one does not wait for.
ON_TOP = 0.15


@dataclass(frozen=True, slots=True)
class Fault:
    """One that happened: when it began and ended (monotonic seconds), and what it was."""

    name: str
    detail: str
    began_s: float
    ended_s: float


class Saboteur:
    """Draws faults from a seed. ``only``: names (or beginnings of names) that may be drawn; empty = all."""

    def __init__(self, stack: ChaosStack, seed: int, only: list[str]) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self._redis = stack.connect_redis()
        self._keys = Keys(MODEL)
        self.happened: list[Fault] = []
        self._kinds: dict[str, tuple[float, Callable[[], Awaitable[str]]]] = {
            "kill-executor": (3, self._kill_executor),
            "kill-scheduler": (2, self._kill_scheduler),
            "kill-both-executors": (0.5, self._kill_executors),
            "kill-gateway": (2, self._kill_gateway),
            "stop-executor": (1, self._stop_executor),
            "stop-scheduler": (1, self._stop_scheduler),
            "stop-gateway": (1, self._stop_gateway),
            "pause-executor": (2, self._pause_executor),
            "pause-scheduler": (1, self._pause_scheduler),
            "pause-scheduler-long": (1, self._pause_scheduler_long),
            "pause-gateway": (1, self._pause_gateway),
            "pause-redis": (1, self._pause_redis),
            "restart-redis": (1, self._restart_redis),
            "slow-disk": (2, self._slow_disk),
            "rewrite-aof": (0.5, self._rewrite_aof),
            "lose-redis": (1, self._lose_redis),
            "cut-executor": (2, self._cut_executor),
            "cut-redis": (3, self._cut_redis),
            "cut-client": (2, self._cut_client),
            "freeze-executor": (2, self._freeze_executor),
            "freeze-redis": (2, self._freeze_redis),
            "freeze-client": (1, self._freeze_client),
            "half-open-client": (1, self._half_open_client),
            "half-open-executor": (1, self._half_open_executor),
            "half-open-redis": (1, self._half_open_redis),
            "delay": (2, self._delay),
            "repeat-log": (3, self._repeat_log),
            "repeat-request": (1, self._repeat_request),
            "garbage": (1, self._garbage),
        }
        if stack.sizes.appendfsync == "always":
            # Then nothing is lost that anyone has been told of.
            self.without("lose-redis")
        if not stack.disk.usable:
            self.without("slow-disk")
        if only:
            self._kinds = {name: kind for name, kind in self._kinds.items() if name.startswith(tuple(only))}

    def without(self, *endings: str) -> None:
        """Never do what ends so."""
        self._kinds = {name: kind for name, kind in self._kinds.items() if not name.endswith(endings)}

    async def work(
        self,
        count: int,
        every_s: float,
        still: Callable[[], bool],
        overcome: Callable[[Fault], Awaitable[None]],
        say: Callable[[Fault], None],
    ) -> None:
        """Do harm ``count`` times as long as ``still`` holds, mostly about so many seconds after the last fault is overcome,
        sometimes without regard to that; then undo all of it."""
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        while len(self.happened) < count and still():
            await asyncio.sleep(self._rng.uniform(0.3, 1.7) * every_s)
            name = self._rng.choices(names, weights)[0]
            began_s = time.monotonic()
            try:
                detail = await self._kinds[name][1]()
            except (RedisError, OSError, TimeoutError) as error:
                detail = f"could not: {error}"
            fault = Fault(name, detail, began_s, time.monotonic())
            if self._rng.random() >= ON_TOP:
                await overcome(fault)
            # Only now it counts: then more clients may come.
            self.happened.append(fault)
            say(fault)
        self._stack.calm()

    async def close(self) -> None:
        """Give the connection back."""
        await self._redis.aclose()

    # --- processes ---

    async def _kill_executor(self) -> str:
        process = self._rng.choice(self._stack.executors)
        process.kill()
        return process.name

    async def _kill_executors(self) -> str:
        for process in self._stack.executors:
            process.kill()
        return "all"

    async def _kill_scheduler(self) -> str:
        process = await self._scheduler()
        process.kill()
        return process.name

    async def _kill_gateway(self) -> str:
        process = self._rng.choice(self._stack.gateways)
        process.kill()
        return process.name

    async def _stop_gateway(self) -> str:
        return await self._stop(self._rng.choice(self._stack.gateways))

    async def _stop_executor(self) -> str:
        return await self._stop(self._rng.choice(self._stack.executors))

    async def _stop_scheduler(self) -> str:
        return await self._stop(await self._scheduler())

    async def _stop(self, process: Process) -> str:
        """As in a rolling restart: asked to end, and the next one only once this one is back."""
        started = process.starts
        process.terminate()
        async with asyncio.timeout(self._stack.sizes.drain_timeout_s + 30):
            while process.starts == started:
                await asyncio.sleep(0.05)
        return process.name

    async def _scheduler(self) -> Process:
        """Mostly the one at work, sometimes one that stands by."""
        at_work = await asyncio.to_thread(self._stack.at_work)
        standing_by = self._rng.choice(self._stack.schedulers)
        return standing_by if at_work is None or self._rng.random() < 0.2 else at_work

    async def _pause(self, process: Process, least_s: float, most_s: float) -> str:
        seconds = self._rng.uniform(least_s, most_s)
        process.pause()
        await asyncio.sleep(seconds)
        process.resume()
        return f"{process.name} for {seconds:.1f} s"

    async def _pause_executor(self) -> str:
        return await self._pause(self._rng.choice(self._stack.executors), 0.2, 4)

    async def _pause_scheduler(self) -> str:
        return await self._pause(await self._scheduler(), 0.2, 2)

    async def _pause_scheduler_long(self) -> str:
        # Beyond its lease: it wakes as somebody who has been replaced.
        lease_s = self._stack.sizes.lease_s
        return await self._pause(await self._scheduler(), 1.1 * lease_s, 2 * lease_s)

    async def _pause_gateway(self) -> str:
        return await self._pause(self._rng.choice(self._stack.gateways), 0.2, 3)

    async def _pause_redis(self) -> str:
        return await self._pause(self._stack.redis, 0.1, 2)

    async def _restart_redis(self) -> str:
        self._stack.redis.kill()
        return ""

    async def _lose_redis(self) -> str:
        """As when its machine loses power: what had not reached the disk is gone."""
        seconds, lost = self._rng.uniform(0.0, 1.0), []
        self._stack.redis.pause()
        self._stack.redis.kill(lambda: lost.append(self._stack.append_only_file.forget(seconds)))
        await asyncio.sleep(1.0)
        return f"the last {seconds:.1f} s, {lost} bytes"

    async def _slow_disk(self) -> str:
        seconds, delay_s = self._rng.uniform(0.5, 4), self._rng.choice([0.02, 0.1, 0.5, 2.5])
        self._stack.disk.set(delay_s)
        await asyncio.sleep(seconds)
        self._stack.disk.set(0.0)
        return f"every flush takes {1000 * delay_s:.0f} ms for {seconds:.1f} s"

    async def _rewrite_aof(self) -> str:
        await self._redis.bgrewriteaof()
        return ""

    # --- lines ---

    def _line(self, part: str) -> Proxy:
        return self._rng.choice([proxy for name, proxy in self._stack.proxies.items() if part in name])

    async def _cut_executor(self) -> str:
        proxy = self._line("-scheduler")
        proxy.cut(reset=self._rng.random() < 0.5)
        return proxy.name

    async def _cut_client(self) -> str:
        proxy = self._line("client-")
        proxy.cut(reset=self._rng.random() < 0.5)
        return proxy.name

    async def _cut_redis(self) -> str:
        proxy = self._line("-redis")
        proxy.cut(reset=self._rng.random() < 0.5)
        return proxy.name

    async def _freeze(self, proxy: Proxy, least_s: float, most_s: float) -> str:
        seconds = self._rng.uniform(least_s, most_s)
        way = self._rng.choice([{"there": False}, {"back": False}, {}])
        proxy.freeze(**way)
        await asyncio.sleep(seconds)
        ends_in_cut = self._rng.random() < 0.5
        if ends_in_cut:
            # What was held back is lost: the other side never hears whether it arrived.
            proxy.cut()
        proxy.thaw()
        return f"{proxy.name} {way} for {seconds:.1f} s{', then cut' if ends_in_cut else ''}"

    async def _freeze_executor(self) -> str:
        return await self._freeze(self._line("-scheduler"), 0.2, 3)

    async def _freeze_client(self) -> str:
        return await self._freeze(self._line("client-"), 0.2, 3)

    async def _freeze_redis(self) -> str:
        return await self._freeze(self._line("-redis"), 0.1, 1.5)

    async def _half_open(self, suffix: str) -> str:
        proxy = self._line(suffix)
        proxy.abandon()
        return proxy.name

    async def _half_open_client(self) -> str:
        return await self._half_open("client-")

    async def _half_open_executor(self) -> str:
        return await self._half_open("-scheduler")

    async def _half_open_redis(self) -> str:
        return await self._half_open("-redis")

    async def _delay(self) -> str:
        proxy = self._rng.choice(list(self._stack.proxies.values()))
        proxy.delay_s = self._rng.uniform(0.005, 0.2)
        await asyncio.sleep(self._rng.uniform(0.5, 3))
        delay_s, proxy.delay_s = proxy.delay_s, 0.0
        return f"{proxy.name} by {1000 * delay_s:.0f} ms"

    # --- messages ---

    async def _repeat_log(self) -> str:
        """Entries come again, late: as when an append was retried whose answer was lost."""
        logs = [key async for key in self._redis.scan_iter(match="*log:*")]
        repeated = 0
        for log in logs:
            entries = await self._redis.xrevrange(log, count=64)
            for _, fields in self._rng.sample(entries, min(4, len(entries))):
                # A snapshot and its trimming are one atomic step that finds out whether it was done: it never comes twice.
                with contextlib.suppress(MalformedEntryError):
                    if not any(isinstance(event, SnapshotEvent) for event in decode_entry(fields[FIELD])):
                        await self._redis.xadd(log, fields)
                        repeated += 1
        return f"{repeated} entries"

    async def _repeat_request(self) -> str:
        """A request that is not done comes again."""
        entries = await self._redis.xrange(self._keys.requests, count=64)
        if not entries:
            return "none"
        await self._redis.xadd(self._keys.requests, self._rng.choice(entries)[1])
        return "1 entry"

    async def _garbage(self) -> str:
        """Bytes that mean nothing, in every stream."""
        logs = [key async for key in self._redis.scan_iter(match="*log:*")]
        for key in [*logs, self._keys.requests, self._keys.aborts]:
            await self._redis.xadd(key, {FIELD: self._rng.randbytes(self._rng.randrange(40))})
        return ""

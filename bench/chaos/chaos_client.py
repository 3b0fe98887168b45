"""Clients: they ask, read, reconnect, ask again where the server says "not now", and write down all that they were told."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from chaos_http import BrokenError, Exchange
from chaos_jobs import Job

NOT_NOW = (429, 503)
PAUSE_S = 0.2
# A connection on which nothing comes for so long is given up, as clients do.
SILENCE_S = 10.0


@dataclass(slots=True)
class Choice:
    """What a client was told of one choice, in order; every end it was told of."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    ends: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Told:
    """All of one answer. ``heard_s``: when something was heard (monotonic); ``failure``: why there is no answer; ``ended_s``: 0
    until nobody waits for it any more."""

    job: Job
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    done: int = 0
    failure: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    heard_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # What clients had been told when their connection broke and they began again.
    abandoned: list[dict[int, Choice]] = field(default_factory=list)
    id: str = ""
    last_event_id: str = ""
    # What somebody else was told who read the stream beside this client, from its beginning to its end.
    watchers: list[Told] = field(default_factory=list)
    left: bool = False

    def choice(self, index: int) -> Choice:
        """The choice with this number."""
        return self.choices.setdefault(index, Choice())

    def take(self, chunk: dict[str, Any]) -> None:
        """One chunk of a stream, or a whole answer."""
        self.id = chunk.get("id", self.id)
        if "error" in chunk:
            self.failure = f"error: {chunk['error'].get('message')}"
        for part in chunk.get("choices", ()):
            choice = self.choice(part["index"])
            message = part.get("delta") or part.get("message") or {}
            choice.text += part.get("text") or message.get("content") or ""
            self._take_logprobs(choice, part.get("logprobs"))
            if part.get("finish_reason") is not None:
                choice.ends.append((part["finish_reason"], part.get("stop_reason")))
        if chunk.get("usage"):
            self.usage = chunk["usage"]

    @staticmethod
    def _take_logprobs(choice: Choice, logprobs: dict[str, Any] | None) -> None:
        if not logprobs or "tokens" not in logprobs:
            return
        choice.tokens += logprobs["tokens"]
        choice.logprobs += logprobs["token_logprobs"]
        for top in logprobs["top_logprobs"]:
            best = sorted(top.values(), reverse=True)
            choice.margins.append(best[0] - best[1])


class Clients:
    """Plays jobs, so many at once. ``port`` gives the port of gateway number i. Nobody waits for longer than ``patience_s`` for
    the end of an answer, whatever happens meanwhile."""

    def __init__(self, port: Callable[[int], int], gateways: int, seed: int, patience_s: float) -> None:
        self._port = port
        self._gateways = gateways
        self._patience_s = patience_s
        self._rng = random.Random(seed)
        # Who asks again with the same key gets the same answer; another run's are others.
        self._label = f"run-{seed}"
        self.told: list[Told] = []
        self._watching: list[asyncio.Task[None]] = []

    async def play(self, jobs: list[Job], at_once: int, due: Callable[[], int] | None = None) -> list[Told]:
        """Play all jobs, so many at once and no more than ``due`` says; what clients were told, by job."""
        queue = list(reversed(jobs))

        async def client() -> None:
            while queue:
                if due is not None and len(self.told) >= due():
                    await asyncio.sleep(0.02)
                    continue
                told = Told(queue.pop(), began_s=time.monotonic())
                self.told.append(told)
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._ask(told)
                except TimeoutError:
                    told.failure = f"no end within {self._patience_s:g} s"
                told.ended_s = time.monotonic()

        await asyncio.gather(*(client() for _ in range(at_once)))
        await asyncio.gather(*self._watching)
        return sorted(self.told, key=lambda told: told.job.index)

    async def _ask(self, told: Told) -> None:
        gateway = self._rng.randrange(self._gateways)
        while not told.done and not told.failure and not told.left:
            resuming = bool(told.job.resumable and told.last_event_id)
            try:
                await self._exchange(told, self._port(gateway), resuming)
            except (BrokenError, TimeoutError):
                said = "broken" if any(c.text or c.tokens or c.ends for c in told.choices.values()) else "unanswered"
                told.counts[said] += 1
                if not (told.job.resumable and told.last_event_id):
                    told.counts["begun again"] += said == "broken"
                    told.abandoned.append(told.choices)
                    told.choices = {}
                gateway = (gateway + 1) % self._gateways
                await asyncio.sleep(PAUSE_S)

    async def _exchange(self, told: Told, port: int, resuming: bool) -> None:
        job = told.job
        headers = {"Idempotency-Key": f"{self._label}-{job.index}"} if job.resumable else {}
        if resuming:
            headers["Last-Event-ID"] = told.last_event_id
            exchange = Exchange(port, "GET", f"/v1/streams/{told.id}", headers=headers)
        else:
            exchange = Exchange(port, "POST", job.path, job.body, headers)
        async with exchange:
            if exchange.status in NOT_NOW:
                told.counts["not now"] += 1
                await asyncio.sleep(PAUSE_S)
            elif exchange.status != 200:
                told.failure = f"{exchange.status}: {(await exchange.body())[:300]!r}"
            elif not job.stream:
                told.take(json.loads(await exchange.body()))
                told.done += 1
            else:
                await self._read(told, exchange)

    async def _read(self, told: Told, exchange: Exchange) -> None:
        events = exchange.events()
        while (event := await asyncio.wait_for(anext(events, None), SILENCE_S)) is not None:
            told.heard_s.append(time.monotonic())
            if event.id:
                told.last_event_id = event.id
            if told.job.leaves_after and len(told.heard_s) >= told.job.leaves_after:
                told.left = True
                return
            if event.data == "[DONE]":
                told.done += 1
            else:
                told.take(json.loads(event.data))
                if told.job.watched and not told.watchers:
                    watcher = Told(replace(told.job, watched=False, leaves_after=0), id=told.id)
                    told.watchers.append(watcher)
                    self._watching.append(asyncio.create_task(self._watch(watcher)))
        if not told.done:
            raise BrokenError("the stream ended without [DONE]")

    async def _watch(self, watcher: Told) -> None:
        """Read the same stream from its beginning, from any gateway, as a second client."""
        headers = {"X-Octavo-Resumable": "1"}
        port = self._port(self._rng.randrange(self._gateways))
        try:
            async with Exchange(port, "GET", f"/v1/streams/{watcher.id}", headers=headers) as exchange:
                if exchange.status == 200:
                    await self._read(watcher, exchange)
        except (BrokenError, TimeoutError):
            # Its line broke: what it was told so far is no whole answer.
            watcher.counts["broken"] += 1

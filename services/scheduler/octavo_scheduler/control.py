"""Answers an administrator's questions: what the KV cache holds, and the order to forget it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from octavo_scheduler.background import RETRY_S
from octavo_scheduler.core.view import STATES
from octavo_scheduler.service import SchedulerService
from octavo_shared.control import MOST_BLOCKS, Ask, AskRefusedError, ControlChannel, pack_column
from octavo_shared.entries import MalformedEntryError

logger = logging.getLogger(__name__)

BLOCK_S = 2.0
TIERS = ("device", "host")
_NUMBERS = ("state", "references", "filled", "depth", "age_steps", "hits")


class Control:
    """The scheduler's end of the control channel."""

    def __init__(self, service: SchedulerService, channel: ControlChannel) -> None:
        self._service = service
        self._channel = channel
        self._answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {"cache_reset": self._reset, "kv": self._kv}

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            try:
                if (ask := await self._channel.read(block_s=BLOCK_S)) is not None:
                    await self._answer(ask)
            except MalformedEntryError as error:
                logger.warning("a question on the control channel makes no sense (%s); dropped", error)
            except (RedisError, OSError) as error:
                logger.warning("the control channel is out of reach (%s); trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _answer(self, ask: Ask) -> None:
        answer = self._answers.get(ask.kind)
        try:
            if answer is None:
                raise AskRefusedError(f"There is no question {ask.kind!r}.")
            result = answer(ask.payload)
        except AskRefusedError as error:
            await self._channel.answer(ask, refusal=error)
        else:
            await self._channel.answer(ask, result)

    def _reset(self, _: Mapping[str, Any]) -> dict[str, int]:
        blocks = sum(engine.core.reset_prefix_cache() for engine in self._service.engines)
        logger.info("the prefix cache was reset: %d blocks forgotten", blocks)
        return {"blocks": blocks}

    def _kv(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        engines = {engine.info.name: engine for engine in self._service.engines}
        name, tier = payload.get("executor") or next(iter(engines), ""), payload.get("tier", "device")
        start, count = payload.get("start", 0), payload.get("count", 0)
        if not engines:
            raise AskRefusedError("No executor is attached.", 503)
        if name not in engines:
            raise AskRefusedError(f"There is no executor {name!r}; there are {', '.join(map(repr, engines))}.")
        if tier not in TIERS or not isinstance(start, int) or not isinstance(count, int):
            raise AskRefusedError("What is asked for is no part of a cache.")
        view = engines[name].core.kv_view(start, min(count, MOST_BLOCKS), tier)
        totals = asdict(view.totals)
        num_blocks = totals["num_blocks"] if tier == "device" else totals["host_blocks"]
        after = view.start + len(view.owners)
        columns: dict[str, Any] = {
            column: pack_column(np.asarray(getattr(view, column), np.int32)) for column in _NUMBERS
        }
        return {
            "executor": name,
            "executors": list(engines),
            "tier": tier,
            "start": view.start,
            "next": after if after < num_blocks else None,
            "columns": {**columns, "owners": view.owners},
            "words": {"state": STATES},
            "totals": totals,
        }

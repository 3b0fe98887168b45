"""Questions to the scheduler and its answers, over Redis: what an administrator asks, not what requests are made of.

A question goes onto the list ``control``, its answer onto a list of its own, ``control:<ask id>``. Nothing here is part of
the log: a question is worth nothing once its asker has gone, so both lists run out by themselves.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_shared.entries import MalformedEntryError
from octavo_shared.streams import Streams

# How long an answer waits for its asker, who is waiting already.
ANSWER_TTL_S = 10
# Most blocks in one answer to "kv": larger ones would keep the scheduler busy for too long at a time.
MOST_BLOCKS = 1 << 14
# One blocking command waits no longer than this: well below the time after which the client takes a silent connection for
# dead, and drops it with whatever the command was about to return.
MOST_BLOCK_S = 2.0
# Beyond Redis's own bound on the wait, for a connection that says nothing.
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the scheduler. ``until_s``: Unix time from which on nobody waits for the answer."""

    id: str
    kind: str
    until_s: float
    payload: Mapping[str, Any] = field(default_factory=dict)


class NoAnswerError(RuntimeError):
    """The scheduler did not answer in time."""


class AskRefusedError(RuntimeError):
    """The scheduler did answer: that it cannot say, and why. ``status`` is what HTTP calls it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ControlChannel:
    """Both ends of the channel of one model."""

    def __init__(self, streams: Streams) -> None:
        self._client = streams.client
        self._keys = streams.keys

    async def ask(self, kind: str, payload: Mapping[str, Any], timeout_s: float) -> Any:
        """The scheduler's answer to a question, as JSON gives it.

        Raises:
            NoAnswerError: none came in time; the question is withdrawn.
            AskRefusedError: the scheduler cannot answer it.
            redis.exceptions.RedisError: Redis is out of reach.
        """
        ask = Ask(secrets.token_hex(8), kind, time.time() + timeout_s, payload)
        text = json.dumps(asdict(ask))
        reply = None
        try:
            async with asyncio.timeout(timeout_s + PATIENCE_S):
                async with self._client.pipeline(transaction=True) as pipe:
                    pipe.rpush(self._keys.control, text)
                    # Without a scheduler nobody takes them away.
                    pipe.expire(self._keys.control, int(timeout_s) + ANSWER_TTL_S)
                    await pipe.execute()
                reply = await self._take(self._keys.answer(ask.id), timeout_s)
                if reply is None:
                    await self._client.lrem(self._keys.control, 1, text)
        except TimeoutError:
            pass
        if reply is None:
            raise NoAnswerError(f"the scheduler did not answer within {timeout_s:g} s")
        answer = json.loads(reply)
        if "error" in answer:
            raise AskRefusedError(answer["error"], answer.get("status", 400))
        return answer["result"]

    async def read(self, *, block_s: float) -> Ask | None:
        """The oldest question; None when there is none within ``block_s`` seconds or nobody waits for it any more.

        Raises:
            MalformedEntryError: what was asked is no question.
            redis.exceptions.RedisError: Redis is out of reach.
        """
        text = await self._take(self._keys.control, block_s)
        if text is None:
            return None
        try:
            ask = Ask(**json.loads(text))
            if not isinstance(ask.id, str) or not isinstance(ask.payload, dict):
                raise ValueError("its parts are of the wrong types")
            late = time.time() >= ask.until_s
        except (ValueError, TypeError) as error:
            raise MalformedEntryError(str(error)) from error
        return None if late else ask

    async def _take(self, key: str, timeout_s: float) -> str | bytes | None:
        """The first element of a list, waiting for it; None when there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            reply = await self._client.blpop([key], min(left_s, MOST_BLOCK_S))
            if reply is not None:
                return reply[1]
        return None

    async def answer(self, ask: Ask, result: Any = None, *, refusal: AskRefusedError | None = None) -> None:
        """Answer a question: with something JSON can carry, or with why it cannot be answered.

        Raises:
            redis.exceptions.RedisError: Redis is out of reach.
        """
        key = self._keys.answer(ask.id)
        reply = {"result": result} if refusal is None else {"error": str(refusal), "status": refusal.status}
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.rpush(key, json.dumps(reply))
            pipe.expire(key, ANSWER_TTL_S)
            await pipe.execute()


def pack_column(column: npt.NDArray[np.integer[Any]]) -> str:
    """A column of numbers as JSON can carry it, at a fraction of what a list costs: type, then little-endian bytes."""
    data = np.ascontiguousarray(column)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return f"{little.dtype.str}:{base64.b64encode(little.tobytes()).decode()}"


def unpack_column(text: str) -> npt.NDArray[np.integer[Any]]:
    """The column that ``pack_column`` packed.

    Raises:
        ValueError: it is none.
    """
    kind, _, data = text.partition(":")
    if kind[1:] not in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        raise ValueError(f"not a column: {text[:20]!r}")
    return np.frombuffer(base64.b64decode(data, validate=True), kind)

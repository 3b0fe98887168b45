"""What a key may spend per minute: asked before a request is admitted, settled when it is over (429 in between)."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from prometheus_client import Counter
from redis.exceptions import RedisError

from octavo_gateway.errors import ApiError, rate_limited, unavailable
from octavo_gateway.keys import Caller
from octavo_shared.buckets import Buckets, Level, Taken

ASK_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was admitted for. ``headers`` tell the client how its key stands."""

    caller: Caller
    tokens: int = 0
    headers: tuple[tuple[str, str], ...] = ()


class Rates:
    """The owner of what this gateway takes from the buckets of keys."""

    def __init__(self, buckets: Buckets, refusals: Counter) -> None:
        self._buckets = buckets
        self._refusals = refusals
        self._settling: set[asyncio.Task[None]] = set()

    async def charge(self, caller: Caller, tokens: int) -> Charge:
        """Take one request and about as many tokens as it is expected to need from the key's bucket.

        Raises:
            ApiError: 429 when the key has spent what it may, 503 when Redis does not say.
        """
        if not caller.is_rated:
            return Charge(caller)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                taken = await self._buckets.take(caller.bucket, _limits(caller), 1, tokens)
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("a key's rates cannot be asked for: %r", error)
            raise unavailable("The key's rates are not known: Redis cannot be reached.") from error
        if not taken.given:
            self._refusals.inc()
            raise _refusal(taken, tokens)
        return Charge(caller, tokens, _headers(taken))

    def settle(self, charge: Charge, tokens: int, *, withdrawn: bool = False) -> None:
        """A request is over and needed so many ``tokens``; ``withdrawn``: it never began, and does not count."""
        rest = tokens - charge.tokens
        if not charge.caller.is_rated or (rest == 0 and not withdrawn):
            return
        task = asyncio.create_task(self._settle(charge.caller, -1 if withdrawn else 0, rest))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, caller: Caller, requests: int, tokens: int) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._buckets.take(caller.bucket, _limits(caller), requests, tokens, ask=False)
        except (RedisError, OSError, TimeoutError) as error:
            # The estimate stands: within a minute it makes no difference.
            logger.warning("what a request has cost cannot be told: %r", error)

    async def stop(self) -> None:
        """Wait for what is still being settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)


def _limits(caller: Caller) -> tuple[int, int]:
    return (caller.requests_per_minute, caller.tokens_per_minute)


def _refusal(taken: Taken, tokens: int) -> ApiError:
    wait_s = {"requests": taken.requests.wait_s(1), "tokens": taken.tokens.wait_s(tokens)}
    what = max(wait_s, key=lambda name: wait_s[name])
    level = taken.requests if what == "requests" else taken.tokens
    needs = 1 if what == "requests" else tokens
    retry_s = max(1, math.ceil(wait_s[what]))
    message = (
        f"Rate limit reached for {what} per minute: limit {level.limit}, remaining {level.remaining}, this request needs "
        f"{'' if needs == 1 else 'about '}{needs}. Please retry in {retry_s} s."
    )
    return rate_limited(message, retry_s, dict(_headers(taken)))


def _headers(taken: Taken) -> tuple[tuple[str, str], ...]:
    """OpenAI's names: what the limit is, what is left of it, and in how long it is all there again."""
    headers = []
    for name, level in (("requests", taken.requests), ("tokens", taken.tokens)):
        if level.limit:
            headers += [
                (f"x-ratelimit-limit-{name}", str(level.limit)),
                (f"x-ratelimit-remaining-{name}", str(level.remaining)),
                (f"x-ratelimit-reset-{name}", _span(level)),
            ]
    return tuple(headers)


def _span(level: Level) -> str:
    """The time until the bucket is full, as OpenAI writes it: ``6m0s``, ``1.5s``, ``20ms``."""
    seconds = level.wait_s(level.limit)
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    text = f"{rest:.1f}".removesuffix(".0") + "s"
    return f"{int(minutes)}m{text}" if minutes else text

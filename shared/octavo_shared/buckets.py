"""Token buckets in Redis: what a key may spend per minute, counted by all gateways together.

A bucket holds at most what one minute brings and fills evenly (Turner, "New directions in communications", 1986). What a
request will cost is known only at its end: an estimate is taken at its beginning, and the rest at its end, whatever that
leaves. So a bucket may be in debt, and the long run keeps the rate. A request that costs more than a full bucket begins when
the bucket is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import redis.asyncio

from octavo_shared.keys import Keys

# In: per-minute limits of requests and tokens (0 = none), what each costs, and whether to ask first. Out: whether it was
# taken, and what is left of each. The clock is Redis's, so gateways need not agree on the time.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local held = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(held[3]) or now))
local left, taken, full_s = {}, 1, 0
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  left[i] = math.min(limit, (tonumber(held[i]) or limit) + passed * limit / 60)
  if limit > 0 and ARGV[5] == '1' and left[i] < math.min(limit, tonumber(ARGV[i + 2])) then taken = 0 end
end
if taken == 1 then
  for i = 1, 2 do
    local limit = tonumber(ARGV[i])
    if limit > 0 then
      left[i] = math.min(limit, left[i] - tonumber(ARGV[i + 2]))
      full_s = math.max(full_s, (limit - left[i]) * 60 / limit)
    end
  end
  redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', left[1]), 'tokens', string.format('%.6f', left[2]),
    'at', string.format('%.6f', now))
  redis.call('PEXPIRE', KEYS[1], math.ceil(full_s * 1000) + 1000)
end
return {taken, string.format('%.6f', left[1]), string.format('%.6f', left[2])}
"""


@dataclass(frozen=True, slots=True)
class Level:
    """How full one side of a bucket is. ``limit``: per minute, 0 = no bound; ``left`` may be below 0."""

    limit: int
    left: float

    @property
    def remaining(self) -> int:
        """Whole units that are left, at least 0."""
        return max(0, math.floor(self.left))

    def wait_s(self, cost: int) -> float:
        """Seconds until ``cost`` is there (or a full bucket, if that is less)."""
        return max(0.0, min(self.limit, cost) - self.left) * 60.0 / self.limit if self.limit else 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of asking a bucket: whether it gave, and how full it is now."""

    given: bool
    requests: Level
    tokens: Level


class Buckets:
    """The buckets of one model."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._keys = keys
        self._take = client.register_script(_TAKE)

    async def take(self, name: str, limits: tuple[int, int], requests: int, tokens: int, *, ask: bool = True) -> Taken:
        """Take from the bucket ``name`` with per-minute ``limits`` of requests and tokens.

        With ``ask`` all or nothing is taken. Without, it is taken in any case; negative amounts give back.

        Raises:
            redis.exceptions.RedisError: Redis is out of reach.
        """
        given, *left = await self._take(
            keys=[self._keys.bucket(name)], args=[*limits, requests, tokens, "1" if ask else "0"]
        )
        return Taken(bool(given), Level(limits[0], float(left[0])), Level(limits[1], float(left[1])))

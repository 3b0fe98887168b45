"""How long to wait before Redis is tried again."""

from __future__ import annotations

import asyncio
import random

FIRST_S = 0.05
LONGEST_S = 2.0


class Backoff:
    """Waits that double, each somewhere between half of it and all, so that not everybody comes at once."""

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures = 0

    async def sleep(self) -> None:
        """It has failed once more."""
        longest_s = min(LONGEST_S, FIRST_S * 2.0 ** min(self.failures, 20))
        self.failures += 1
        await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """It has succeeded."""
        self.failures = 0

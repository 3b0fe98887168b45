"""The pace of a run: so many requests for each fault, and the next fault mostly only after the last one is overcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import pairwise

from chaos_client import Told
from chaos_faults import Fault
from chaos_stack import ChaosStack

# What takes longer is no longer waited for: the next fault then comes on top of it.
PATIENCE_S = 30.0
# What a fault does to a stream shows within so long after its end.
AFTERMATH_S = 1.0


def due(requests: int, faults: int, happened: int) -> int:
    """How many requests may have begun after so many faults: they are spread evenly, and some are left for the last one."""
    return requests if happened >= faults else -(-requests * (happened + 1) // (faults + 1))


async def overcome(fault: Fault, told: list[Told], stack: ChaosStack) -> None:
    """Wait until every answer that was under way has gone on since the fault, and the stack is whole again."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if all(_goes_on(one, fault) for one in told) and await stack.is_whole():
            return
        await asyncio.sleep(0.1)


def _goes_on(one: Told, fault: Fault) -> bool:
    if one.ended_s or one.began_s > fault.ended_s:
        return True
    return bool(one.heard_s) and one.heard_s[-1] > fault.ended_s


def recovery_s(fault: Fault, told: Iterable[Told]) -> float | None:
    """Seconds from a fault until the longest silence of a stream that it met was over; None when it met none.

    A silence counts when it lasts into the time between the fault's begin and ``AFTERMATH_S`` after its end. Streams that were
    asked for and had not said anything yet are not counted: they may have been waiting for their turn.
    """
    ends = [end for one in told if (end := _silence_end_s(fault, one.heard_s)) is not None]
    return max(ends) - fault.began_s if ends else None


def _silence_end_s(fault: Fault, heard_s: list[float]) -> float | None:
    if not heard_s or not heard_s[0] < fault.began_s < heard_s[-1]:
        return None
    silences = [
        (end - max(start, fault.began_s), end)
        for start, end in pairwise(heard_s)
        if end > fault.began_s and start < fault.ended_s + AFTERMATH_S
    ]
    return max(silences)[1]

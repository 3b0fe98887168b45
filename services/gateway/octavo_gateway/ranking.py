"""The best of several outputs of a prompt: those whose tokens are the likeliest on average (OpenAI's ``best_of``)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from octavo_gateway.slot import Slot


def mean_logprob(slot: Slot) -> float:
    """Mean log-probability of the output tokens the client is told of; -inf for an output that has none."""
    count = slot.view.tokens
    known = slot.fold.logprobs[:count] if slot.fold is not None else []
    if not known or len(known) < count:
        return -math.inf
    mean = sum(entry.logprob for entry in known) / count
    return mean if not math.isnan(mean) else -math.inf


def best_slots(slots: Iterable[Slot], returned: int) -> list[Slot]:
    """The ``returned`` best choices of each prompt, the best one first, numbered anew; of equals the earlier comes first."""
    by_prompt: dict[int, list[Slot]] = {}
    for slot in slots:
        by_prompt.setdefault(slot.record.id.serial, []).append(slot)
    best: list[Slot] = []
    for choices in by_prompt.values():
        for slot in sorted(choices, key=mean_logprob, reverse=True)[:returned]:
            slot.index = len(best)
            best.append(slot)
    return best

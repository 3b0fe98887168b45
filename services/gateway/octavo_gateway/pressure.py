"""How much work is queued, and whether more may come (429 otherwise)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from prometheus_client import Counter

from octavo_gateway.errors import overloaded
from octavo_gateway.limits import LimitsWatch
from octavo_shared.records import ModelLimits, SamplingParams

# While the scheduler has measured no rate yet, clients are told to come back after this long.
UNKNOWN_RETRY_S = 5
MOST_RETRY_S = 3600


def work_of(prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int, limits: ModelLimits) -> int:
    """Tokens to compute and expected to be drawn for ``n`` choices of each prompt."""
    total = 0.0
    for prompt, sampling in zip(prompts, samplings, strict=True):
        total += len(prompt) + max(n, sampling.beam_width) * limits.expected_output(sampling.max_tokens)
    return math.ceil(total)


class Pressure:
    """The owner of what this gateway has admitted since the scheduler last said what is queued."""

    def __init__(self, limits: LimitsWatch, refusals: Counter) -> None:
        self._limits = limits
        self._refusals = refusals
        self._next_ticket = 1
        # Ticket to (Unix seconds, tokens) of what was admitted and has not ended, the oldest first; and their sum.
        self._admitted: dict[int, tuple[float, int]] = {}
        self._own_tokens = 0

    async def take_on(self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int) -> int:
        """Count a request's prompts as admitted, all or none of them; returns the ticket to give back when it is over.

        Raises:
            ApiError: 429 when they are too much work beside what is queued; 503 when nothing can be served now.
        """
        work = work_of(prompts, samplings, n, self._limits.require())
        if self._excess(work):
            # What is known may be a second old: nobody is refused on hearsay.
            await self._limits.refresh()
        limits = self._limits.require()
        if excess := self._excess(work):
            queued = self._queued(limits)
            retry_s = _retry_after_s(min(excess, queued), limits.tokens_per_s)
            message = (
                f"The server is overloaded: {queued} tokens of work are queued, this request needs about {work}, and the "
                f"limit is {limits.max_queued_tokens}. Please retry in {retry_s} s."
            )
            self._refusals.inc()
            raise overloaded(message, retry_s)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._admitted[ticket] = (time.time(), work)
        self._own_tokens += work
        return ticket

    def give_back(self, ticket: int) -> None:
        """What was admitted has ended. Giving a ticket back twice does nothing."""
        _, work = self._admitted.pop(ticket, (0.0, 0))
        self._own_tokens -= work

    def _queued(self, limits: ModelLimits) -> int:
        """What the scheduler says, and what it cannot have known when it said so."""
        while self._admitted:
            ticket, (at_s, _) = next(iter(self._admitted.items()))
            if at_s > limits.written_s:
                break
            self.give_back(ticket)
        return limits.queued_tokens + self._own_tokens

    def _excess(self, work: int) -> int:
        """Tokens beyond the bound that ``work`` more would make; 0 as well when nothing is queued."""
        limits = self._limits.require()
        queued = self._queued(limits)
        return max(0, queued + work - limits.max_queued_tokens) if queued and limits.max_queued_tokens else 0


def _retry_after_s(tokens: int, tokens_per_s: float) -> int:
    """Whole seconds until ``tokens`` are done."""
    if tokens_per_s <= 0:
        return UNKNOWN_RETRY_S
    return min(max(1, math.ceil(tokens / tokens_per_s)), MOST_RETRY_S)

"""How much work is queued and how long a newcomer would wait, and whether it may come all the same (429 otherwise).

Two bounds. ``max_queued_tokens`` bounds all work that is owed. The other is on time. Many that come at once are a burst: they are
let in as long as a request's turn comes within ``max_queue_wait_s``, and worked off. A line that goes on growing afterwards is
none: from LASTING of that wait on (or from what the burst had made of it) there are lastingly more than can be served, and
queueing them would only make everybody wait. Then, until load falls, who is let in can expect its first token within
``max_ttft_ratio`` times what it takes when nothing else runs. (Two bounds, of which the lower one holds while a queue stands:
Maurer, "Fail at Scale", ACM Queue 13(8), 2015, after CoDel.) Nobody who was let in is sent away later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from octavo_gateway.errors import ApiError, overloaded
from octavo_gateway.limits import LimitsWatch
from octavo_shared.records import ModelLimits, SamplingParams

# While the scheduler has measured no rate yet, clients are told to come back after this long.
UNKNOWN_RETRY_S = 5
MOST_RETRY_S = 3600
# When requests come in vain, all of them are told to stay away for at most this long.
MOST_SPREAD_S = 30
# Plans that an executor has when a request comes: the one it works on and the next.
PLANS_BEFORE = 2
# Limits that were read within this time are not asked for again before a refusal.
HEARSAY_S = 0.05
# Overload is over when for this long less than LEAST_REFUSED of those that came were refused. Where one request at a time is
# let in, half are refused when as many come as can be served (Erlang's loss formula for one server).
CALM_S = 10.0
LEAST_REFUSED = 0.5
# What comes within this time of when newcomers began to wait is a burst.
BURST_S = 1.0
# The share of ``max_queue_wait_s`` that a line may make one wait which goes on growing after the burst.
LASTING = 1.0 / 3.0
# Prompts after which an observation has lost all but 1/e of its weight.
MEMORY = 50.0

logger = logging.getLogger(__name__)


def work_of(prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int, limits: ModelLimits) -> int:
    """Tokens to compute and expected to be drawn for ``n`` choices of each prompt."""
    total = 0.0
    for prompt, sampling in zip(prompts, samplings, strict=True):
        total += len(prompt) + max(n, sampling.beam_width) * limits.expected_output(sampling.max_tokens)
    return math.ceil(total)


@dataclass(slots=True)
class _Taken:
    """An admitted request that has not ended: when it came (monotonic seconds), and prompt tokens without a first output."""

    at_s: float
    prompt_tokens: int
    # What its first output was expected to take if it came alone; 0 = it did not, or that is not known.
    alone_s: float = 0.0


class Pressure:
    """The owner of what this gateway has admitted, and of whether there is overload."""

    def __init__(self, limits: LimitsWatch, refusals: Counter, log: str) -> None:
        """``log``: what the scheduler calls this gateway's requests."""
        self._limits = limits
        self._refusals = refusals
        self._log = log
        self._next_ticket = 1
        # Ticket to (Unix seconds, tokens) of what was admitted since the scheduler last said what is queued, and their sum.
        self._admitted: dict[int, tuple[float, int]] = {}
        self._own_tokens = 0
        self._taken: dict[int, _Taken] = {}
        # Prompt tokens of those that wait for their first output.
        self._own_ahead = 0
        # Since when newcomers have had to wait, on the monotonic clock (0 = they have not), and how long after the burst at most.
        self._line_s = self._burst_wait_s = 0.0
        # Since when there is overload, on the monotonic clock; 0 = there is none.
        self._overloaded_s = 0.0
        # Requests that came since about CALM_S, and how many of them were refused, as of ``_counted_s``.
        self._came = self._refused = self._counted_s = 0.0
        # What a first token takes beyond steps, as seen when nothing else ran; 0 = not known.
        self._overhead_s = 0.0
        # Tokens and characters of prompts that were let in; at first English as tokenizers commonly cut it.
        self._seen_tokens, self._seen_chars = 1.0, 4.0

    # --- letting in ---

    async def look_ahead(self, chars: int, ids: int) -> None:
        """Before prompts of so many characters and token ids are tokenised: refuse them if they will most likely be refused.

        Raises:
            ApiError: 429, 503 as for ``take_on``.
        """
        if self._overloaded_s:
            tokens = ids + math.ceil(chars * self._seen_tokens / self._seen_chars)
            await self._refuse_if_due(tokens, tokens, counts=False)

    async def take_on(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int, chars: int = 0
    ) -> int:
        """Count a request's prompts (``chars`` characters) as admitted, all or none; returns the ticket to give back in the end.

        Raises:
            ApiError: 429 when they are too much work beside what is queued, or would wait for too long; 503 when nothing can
                be served now.
        """
        work = work_of(prompts, samplings, n, self._limits.require())
        tokens = sum(map(len, prompts))
        await self._refuse_if_due(work, tokens, counts=True)
        limits = self._limits.require()
        if chars:
            fade = 1.0 - 1.0 / MEMORY
            self._seen_chars, self._seen_tokens = self._seen_chars * fade + chars, self._seen_tokens * fade + tokens
        soon = self._comes_soon(limits, tokens, self._wait_s(limits))
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        alone = not self._taken and not self._ahead(limits) and not self._overloaded_s
        self._taken[ticket] = _Taken(time.monotonic(), tokens, self._alone_s(limits, tokens) if alone else 0.0)
        self._own_ahead += tokens
        self._admitted[ticket] = (time.time(), work)
        self._own_tokens += work
        self._note_line(self._wait_s(limits), soon)
        return ticket

    def began(self, ticket: int, prompt_tokens: int) -> None:
        """The first output of one of a request's prompts is there."""
        taken = self._taken.get(ticket)
        if taken is None:
            return
        self._own_ahead -= min(prompt_tokens, taken.prompt_tokens)
        taken.prompt_tokens -= min(prompt_tokens, taken.prompt_tokens)
        if taken.alone_s and not taken.prompt_tokens:
            over_s = max(time.monotonic() - taken.at_s - taken.alone_s, 0.0)
            # What others run may have been in its way: the least that is seen counts most.
            pace = 0.5 if over_s < self._overhead_s else 0.05
            self._overhead_s += (over_s - self._overhead_s) * pace if self._overhead_s else over_s
            taken.alone_s = 0.0

    def give_back(self, ticket: int) -> None:
        """What was admitted has ended. Giving a ticket back twice does nothing."""
        self._forget_work(ticket)
        if (taken := self._taken.pop(ticket, None)) is not None:
            self._own_ahead -= taken.prompt_tokens

    def _forget_work(self, ticket: int) -> None:
        _, work = self._admitted.pop(ticket, (0.0, 0))
        self._own_tokens -= work

    # --- refusing ---

    async def _refuse_if_due(self, work: int, tokens: int, *, counts: bool) -> None:
        error = self._why_not(work, tokens)
        if error is not None:
            # Nobody is refused on hearsay.
            await self._limits.refresh(HEARSAY_S)
            error = self._why_not(work, tokens)
        if error is not None or counts:
            self._count(refused=error is not None)
        if error is not None:
            self._refusals.inc()
            limits = self._limits.require()
            if not self._overloaded_s and (wait_s := self._wait_s(limits)) > self._longest_wait_s(limits) > 0:
                logger.warning("overload: a request would have to wait for %.1f s", wait_s)
                self._overloaded_s = time.monotonic()
                # How many came before says nothing of how many may come from now on.
                self._came = self._refused = 1.0
            raise error

    def _why_not(self, work: int, tokens: int) -> ApiError | None:
        """Why ``work`` tokens of work with ``tokens`` prompt tokens must not come now; None: they may."""
        limits = self._limits.require()
        if excess := self._excess(work):
            queued = self._queued(limits)
            retry_s = _retry_after_s(min(excess, queued), limits.tokens_per_s)
            return overloaded(
                f"The server is overloaded: {queued} tokens of work are queued, this request needs about {work}, and the "
                f"limit is {limits.max_queued_tokens}. Please retry in {retry_s} s.",
                retry_s,
            )
        if not limits.max_queue_wait_s or not limits.step_s:
            return None
        wait_s = self._wait_s(limits)
        longest_s = self._longest_wait_s(limits)
        if wait_s <= longest_s and (not self._is_overloaded() or self._comes_soon(limits, tokens, wait_s)):
            return None
        retry_s = self._spread_s(wait_s - longest_s if wait_s > longest_s else wait_s)
        return overloaded(
            f"The server is overloaded: a request has to wait for {wait_s:.1f} s. Please retry in {retry_s} s.", retry_s
        )

    def _wait_s(self, limits: ModelLimits) -> float:
        """Seconds until a newcomer's turn."""
        return limits.slot_wait_s + self._ahead(limits) * limits.prompt_token_s / max(limits.executors, 1)

    def _note_line(self, wait_s: float, soon: bool) -> None:
        """One was let in, who comes ``soon`` or has to wait, and the next one will wait for ``wait_s``."""
        now_s = time.monotonic()
        if soon:
            self._line_s = 0.0
        elif not self._line_s:
            self._line_s, self._burst_wait_s = now_s, wait_s
        elif now_s - self._line_s < BURST_S:
            self._burst_wait_s = max(self._burst_wait_s, wait_s)

    def _longest_wait_s(self, limits: ModelLimits) -> float:
        """Seconds that a newcomer may have to wait without there being overload."""
        longest_s = limits.max_queue_wait_s
        if not self._line_s or time.monotonic() - self._line_s < BURST_S:
            return longest_s
        return min(max(self._burst_wait_s, LASTING * longest_s), longest_s)

    def _comes_soon(self, limits: ModelLimits, tokens: int, wait_s: float) -> bool:
        """Whether the first output of ``tokens`` prompt tokens can be expected soon enough under overload."""
        if not limits.max_ttft_ratio:
            return True
        alone_s = self._overhead_s + self._alone_s(limits, tokens)
        prompt_s = limits.prompt_s + tokens * limits.prompt_token_s
        first_s = self._overhead_s + wait_s + (PLANS_BEFORE + 1) * limits.step_s + prompt_s
        if first_s <= limits.max_ttft_ratio * alone_s:
            return True
        # Beside others even a few steps may take longer than a short prompt does alone. Of those, one at a time is let in as
        # long as the batch does not make steps much longer.
        return not wait_s and limits.step_s <= limits.max_ttft_ratio * limits.lone_step_s

    @staticmethod
    def _alone_s(limits: ModelLimits, tokens: int) -> float:
        """Seconds that executors take to the first output of a prompt when nothing else runs."""
        return limits.lone_step_s + limits.prompt_s + tokens * limits.prompt_token_s

    def _ahead(self, limits: ModelLimits) -> int:
        """Prompt tokens to be computed before a newcomer's: of this gateway as of now, of others as the scheduler has said."""
        return self._own_ahead + sum(tokens for log, tokens in limits.prompts_ahead.items() if log != self._log)

    def _is_overloaded(self) -> bool:
        if not self._overloaded_s:
            return False
        if time.monotonic() - self._overloaded_s < CALM_S or self._refused_share() >= LEAST_REFUSED:
            return True
        logger.warning("overload is over")
        self._overloaded_s = 0.0
        return False

    def _count(self, *, refused: bool) -> None:
        self._fade()
        self._came += 1.0
        self._refused += refused

    def _fade(self) -> None:
        now_s = time.monotonic()
        fade = math.exp((self._counted_s - now_s) / CALM_S)
        self._came, self._refused, self._counted_s = self._came * fade, self._refused * fade, now_s

    def _refused_share(self) -> float:
        """Of those that came lately, the share that was refused; 0 when hardly anybody came."""
        self._fade()
        return self._refused / max(self._came, 1.0)

    def _spread_s(self, wait_s: float) -> int:
        """When to come back: after ``wait_s``, or later where only one of many is let in, so that they do not come in vain."""
        came_for_one = self._came / max(self._came - self._refused, 1.0)
        return min(max(1, math.ceil(wait_s), min(round(came_for_one), MOST_SPREAD_S)), MOST_RETRY_S)

    def _queued(self, limits: ModelLimits) -> int:
        """What the scheduler says, and what it cannot have known when it said so."""
        while self._admitted:
            ticket, (at_s, _) = next(iter(self._admitted.items()))
            if at_s > limits.written_s:
                break
            self._forget_work(ticket)
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

"""How much work is queued and how long a newcomer would wait, and whether it may come all the same (429 otherwise).

Two bounds. ``max_queued_tokens`` bounds all work that is owed. The other is on time. Many that come at once are a burst: they are
let in as long as a request's turn comes within ``max_queue_wait_s``, and worked off. If there are lastingly more than can be served,
queueing them would only make everybody wait. Then, until load falls, who is let in can expect its first token within
``max_ttft_ratio`` times what it takes when nothing else runs. (Two bounds, of which the lower one holds while a queue stands:
Maurer, "Fail at Scale", ACM Queue 13(8), 2015, after CoDel.)

Which of the two it is shows after a few seconds only (``Line``). Until then those that would have to wait are held at the door,
with nothing of them queued. Some go in meanwhile, so that executors have as much to do as they can; if it looks like overload, these
are those that came last (adaptive LIFO, same source), whose first token then comes soon, and the others have not waited long when
all are let in, or refused. A line that goes on growing more slowly is overload from LASTING of ``max_queue_wait_s`` on (or from what the burst had made of it). Nobody who was
let in is sent away later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from prometheus_client import Counter

from octavo_gateway.door import Door, Held
from octavo_gateway.errors import ApiError, overloaded, unavailable
from octavo_gateway.limits import LimitsWatch
from octavo_gateway.line import Line, Verdict
from octavo_gateway.outlook import MEMORY, PLANS_BEFORE, Outlook
from octavo_shared.records import ModelLimits, SamplingParams

# While the scheduler has measured no rate yet, clients are told to come back after this long.
UNKNOWN_RETRY_S = 5
MOST_RETRY_S = 3600
# When requests come in vain, all of them are told to stay away for at most this long.
MOST_SPREAD_S = 30
# Limits that were read within this time are not asked for again before a refusal.
HEARSAY_S = 0.05
# How often those at the door are looked at.
DOOR_LOOK_S = 0.05
# Overload is over when for this long less than LEAST_REFUSED of those that came were refused. Where one request at a time is
# let in, half are refused when as many come as can be served (Erlang's loss formula for one server).
CALM_S = 10.0
LEAST_REFUSED = 0.5
# The share of ``max_queue_wait_s`` that a line may make one wait which goes on growing after the burst.
LASTING = 1.0 / 3.0

logger = logging.getLogger(__name__)


def work_of(prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int, limits: ModelLimits) -> int:
    """Tokens to compute and expected to be drawn for ``n`` choices of each prompt."""
    total = 0.0
    for prompt, sampling in zip(prompts, samplings, strict=True):
        total += len(prompt) + max(n, sampling.beam_width) * limits.expected_output(sampling.max_tokens)
    return math.ceil(total)


class Pressure:
    """The owner of what this gateway has admitted, and of whether there is overload."""

    def __init__(self, limits: LimitsWatch, refusals: Counter, log: str) -> None:
        """``log``: what the scheduler calls this gateway's requests."""
        self._limits = limits
        self._refusals = refusals
        self._outlook = Outlook(log)
        self._next_ticket = 1
        # Ticket to (Unix seconds, tokens) of what was admitted since the scheduler last said what is queued, and their sum.
        self._admitted: dict[int, tuple[float, int]] = {}
        self._own_tokens = 0
        self._line = Line()
        # How long the burst made newcomers wait.
        self._burst_wait_s = 0.0
        self._door = Door(self.give_back)
        # What looks at those at the door.
        self._doorman: asyncio.Task[None] | None = None
        # Since when there is overload, on the monotonic clock; 0 = there is none.
        self._overloaded_s = 0.0
        # Requests that came since about CALM_S, and how many of them were refused, as of ``_counted_s``.
        self._came = self._refused = self._counted_s = 0.0
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
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        n: int,
        chars: int = 0,
        deadline_us: int = 0,
    ) -> int:
        """Count a request's prompts (``chars`` characters) as admitted, all or none; returns the ticket to give back in the end.

        Who is held is let in at its deadline (Unix microseconds, 0 = none) at the latest, for the scheduler to end it.

        Raises:
            ApiError: 429 when they are too much work beside what is queued, or would wait for too long; 503 when nothing can
                be served now.
        """
        limits = self._limits.require()
        work, tokens = work_of(prompts, samplings, n, limits), sum(map(len, prompts))
        if self._must_wait(limits, tokens):
            self._join_line(limits, tokens)
        self._look()
        await self._refuse_if_due(work, tokens, counts=True)
        limits = self._limits.require()
        if chars:
            fade = 1.0 - 1.0 / MEMORY
            self._seen_chars, self._seen_tokens = self._seen_chars * fade + chars, self._seen_tokens * fade + tokens
        if not self._must_wait(limits, tokens):
            if not self._door:
                self._end_line()
        elif self._line.verdict is Verdict.UNKNOWN:
            if not self._line:
                # It has ended since, or there was none yet.
                self._join_line(limits, tokens)
            if self._doorman is None:
                self._doorman = asyncio.create_task(self._look_again())
            try:
                async with asyncio.timeout(deadline_us / 1e6 - time.time() if deadline_us else None):
                    return await self._door.hold(work, tokens)
            except TimeoutError:
                limits = self._limits.require()
        return self._let_in(work, tokens, limits)

    def began(self, ticket: int, prompt_tokens: int, cached_tokens: int) -> None:
        """The first output of one of a request's prompts is there, of which ``cached_tokens`` had not to be computed."""
        self._outlook.began(ticket, prompt_tokens, cached_tokens)
        self._look()

    def give_back(self, ticket: int) -> None:
        """What was admitted has ended. Giving a ticket back twice does nothing."""
        self._forget_work(ticket)
        self._outlook.forget(ticket)
        self._look()

    def _let_in(self, work: int, tokens: int, limits: ModelLimits) -> int:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._outlook.take(ticket, tokens, limits, overloaded=bool(self._overloaded_s))
        self._admitted[ticket] = (time.time(), work)
        self._own_tokens += work
        return ticket

    def _forget_work(self, ticket: int) -> None:
        _, work = self._admitted.pop(ticket, (0.0, 0))
        self._own_tokens -= work

    # --- the door ---

    def _must_wait(self, limits: ModelLimits, tokens: int) -> bool:
        """Whether a newcomer comes neither soon nor is needed for executors to be busy."""
        if self._is_overloaded() or not (limits.max_queue_wait_s and limits.max_ttft_ratio and limits.step_s):
            return False
        if self._comes_soon(limits, tokens):
            return False
        # In a large batch steps are long, and so is what must be ahead for none of them to lack prompts.
        return self._outlook.wait_s(limits) > (PLANS_BEFORE + 1) * limits.step_s

    async def _look_again(self) -> None:
        try:
            while self._door:
                await asyncio.sleep(DOOR_LOOK_S)
                self._look()
        finally:
            self._doorman = None
            # Whatever has gone wrong, nobody is held with nobody to look.
            while self._door:
                self._door.send_away(
                    self._door.oldest, unavailable("It cannot be told how long a request has to wait.")
                )

    def _join_line(self, limits: ModelLimits, tokens: int) -> None:
        work_s = self._outlook.prompt_s(limits, tokens) * self._outlook.num_gateways(limits)
        self._line.came(time.monotonic(), work_s)

    def _look(self) -> None:
        """Let those at the door in that may, or send them away, as far as is known."""
        verdict = self._line.look(time.monotonic())
        try:
            limits = self._limits.require()
        except ApiError as error:
            while self._door:
                self._door.send_away(self._door.oldest, error)
            return
        if verdict is Verdict.OVERLOAD:
            self._begin_overload("more keep coming than can be served, and %d wait", len(self._door))
            while self._door:
                # Who came first is told to come back first.
                wait_s = self._wait_s(limits)
                self._door.send_away(self._door.newest, self._too_long(wait_s, wait_s))
                self._refusals.inc()
        elif verdict is Verdict.BURST and self._door:
            while self._door:
                self._open_to(self._door.oldest, limits)
            self._burst_wait_s = self._outlook.wait_s(limits)
        else:
            rushes = self._line.rushes(time.monotonic())
            while self._door:
                next_one = self._door.newest if rushes else self._door.oldest
                if self._must_wait(limits, next_one.prompt_tokens):
                    return
                self._open_to(next_one, limits)

    def _open_to(self, held: Held, limits: ModelLimits) -> None:
        if held.is_gone:
            self._door.forget(held)
        else:
            self._door.let_in(held, self._let_in(held.work, held.prompt_tokens, limits))

    def _end_line(self) -> None:
        self._line, self._burst_wait_s = Line(), 0.0

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
            if not self._door and (wait_s := self._wait_s(limits)) > self._longest_wait_s(limits) > 0:
                self._begin_overload("a request would have to wait for %.1f s", wait_s)
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
        if wait_s <= longest_s and (not self._is_overloaded() or self._comes_soon(limits, tokens)):
            return None
        return self._too_long(wait_s, wait_s - longest_s if wait_s > longest_s else wait_s)

    def _too_long(self, wait_s: float, over_s: float) -> ApiError:
        retry_s = self._spread_s(over_s)
        return overloaded(
            f"The server is overloaded: a request has to wait for {wait_s:.1f} s. Please retry in {retry_s} s.", retry_s
        )

    def _wait_s(self, limits: ModelLimits) -> float:
        """Seconds until a newcomer's turn, after all who are at the door."""
        return self._outlook.wait_s(limits) + self._outlook.prompt_s(limits, self._door.prompt_tokens)

    def _longest_wait_s(self, limits: ModelLimits) -> float:
        """Seconds that a newcomer may have to wait without there being overload."""
        longest_s = limits.max_queue_wait_s
        if self._line.verdict is Verdict.UNKNOWN:
            return longest_s
        return min(max(self._burst_wait_s, LASTING * longest_s), longest_s)

    def _comes_soon(self, limits: ModelLimits, tokens: int) -> bool:
        """Whether the first output of ``tokens`` prompt tokens can be expected soon enough under overload."""
        if not limits.max_ttft_ratio:
            return True
        if self._outlook.first_s(limits, tokens) <= limits.max_ttft_ratio * self._outlook.alone_s(limits, tokens):
            return True
        # Beside others even a few steps may take longer than a short prompt does alone. Of those, one at a time is let in as
        # long as the batch does not make steps much longer.
        busy = self._outlook.wait_s(limits) > 0
        return not busy and limits.step_s <= limits.max_ttft_ratio * limits.lone_step_s

    def _begin_overload(self, why: str, *values: float) -> None:
        if self._overloaded_s:
            return
        logger.warning("overload: " + why, *values)
        self._overloaded_s = time.monotonic()
        self._end_line()
        # How many came before says nothing of how many may come from now on.
        self._came = self._refused = 1.0

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
        queued = self._queued(limits) + self._door.work
        return max(0, queued + work - limits.max_queued_tokens) if queued and limits.max_queued_tokens else 0


def _retry_after_s(tokens: int, tokens_per_s: float) -> int:
    """Whole seconds until ``tokens`` are done."""
    if tokens_per_s <= 0:
        return UNKNOWN_RETRY_S
    return min(max(1, math.ceil(tokens / tokens_per_s)), MOST_RETRY_S)

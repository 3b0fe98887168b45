"""When a newcomer's first token can be expected, from what the scheduler publishes and what this gateway has let in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from octavo_shared.records import ModelLimits

# Plans that an executor has when a request comes: the one it works on and the next.
PLANS_BEFORE = 2
# Words of the scheduler after which one has lost all but 1/e of its weight.
WORDS = 40.0
# Another gateway shares what can be served in full if its prompts wait so many times as often as one's own: which of them wait
# at the moment of a word is chance.
FULL_SHARE = 0.25
# Prompts after which an observation has lost all but 1/e of its weight.
MEMORY = 50.0


@dataclass(frozen=True, slots=True)
class _Lone:
    """A request that came when nothing else ran: when (monotonic seconds), and what its first output is expected to take."""

    ticket: int
    at_s: float
    expected_s: float


class Outlook:
    """The owner of which prompts wait for their first output, and of what was learned from those that had theirs."""

    def __init__(self, log: str) -> None:
        """``log``: what the scheduler calls this gateway's requests."""
        self._log = log
        # Ticket of each request that has not ended to its prompt tokens without a first output.
        self._taken: dict[int, int] = {}
        # Prompt tokens of those that wait for their first output.
        self._own_ahead = 0
        # What the scheduler has said last of whose prompts wait, and for each gateway how often it has lately said so.
        self._heard: Mapping[str, int] = {}
        self._waited: dict[str, float] = {}
        # Who has been alone so far.
        self._lone: _Lone | None = None
        # What a first token takes beyond steps, as seen when nothing else ran; 0 = not known.
        self._overhead_s = 0.0
        # Of lately begun prompts: tokens, and those of them that had to be computed, since no cache had them.
        self._begun_tokens = self._computed_tokens = 1.0

    def take(self, ticket: int, prompt_tokens: int, limits: ModelLimits, *, overloaded: bool) -> None:
        """A request was let in."""
        alone = not self._taken and not self._ahead(limits) and not overloaded
        self._lone = _Lone(ticket, time.monotonic(), self._steps_s(limits, prompt_tokens)) if alone else None
        self._taken[ticket] = prompt_tokens
        self._own_ahead += prompt_tokens

    def began(self, ticket: int, prompt_tokens: int, cached_tokens: int) -> None:
        """The first output of one of a request's prompts is there, of which ``cached_tokens`` had not to be computed."""
        waiting = self._taken.get(ticket)
        if waiting is None:
            return
        fade = 1.0 - 1.0 / MEMORY
        self._begun_tokens = self._begun_tokens * fade + prompt_tokens
        self._computed_tokens = self._computed_tokens * fade + max(prompt_tokens - cached_tokens, 0)
        self._taken[ticket] = max(waiting - prompt_tokens, 0)
        self._own_ahead -= waiting - self._taken[ticket]
        lone = self._lone
        if lone is not None and lone.ticket == ticket and not self._taken[ticket]:
            over_s = max(time.monotonic() - lone.at_s - lone.expected_s, 0.0)
            # What other gateways' requests take may have been in its way: the least that is seen counts most.
            pace = 0.5 if over_s < self._overhead_s else 0.05
            self._overhead_s += (over_s - self._overhead_s) * pace if self._overhead_s else over_s
            self._lone = None

    def forget(self, ticket: int) -> None:
        """A request has ended. Forgetting one twice does nothing."""
        self._own_ahead -= self._taken.pop(ticket, 0)

    def wait_s(self, limits: ModelLimits) -> float:
        """Seconds until a newcomer's turn. Prompts of those that wait for a slot are computed as they get one, not afterwards."""
        return max(limits.slot_wait_s, self.prompt_s(limits, self._ahead(limits)))

    def prompt_s(self, limits: ModelLimits, tokens: int) -> float:
        """Seconds that all executors together take for ``tokens`` of prompts, as far as prompts usually have to be computed."""
        return tokens * self._token_s(limits) / max(limits.executors, 1)

    def alone_s(self, limits: ModelLimits, tokens: int) -> float:
        """Seconds to the first output of a prompt of ``tokens`` tokens when nothing else runs."""
        return self._overhead_s + self._steps_s(limits, tokens)

    def first_s(self, limits: ModelLimits, tokens: int) -> float:
        """Seconds to the first output of a newcomer's prompt of ``tokens`` tokens."""
        prompt_s = limits.prompt_s + tokens * self._token_s(limits)
        return self._overhead_s + self.wait_s(limits) + (PLANS_BEFORE + 1) * limits.step_s + prompt_s

    def num_gateways(self, limits: ModelLimits) -> float:
        """Gateways that share what can be served: this one, and others as far as their prompts have to wait too."""
        if limits.prompts_ahead is not self._heard:
            self._heard = limits.prompts_ahead
            fade = 1.0 - 1.0 / WORDS
            waited = {
                log: fade * self._waited.get(log, 0.0) + (log in self._heard) for log in self._waited | self._heard
            }
            self._waited = {log: times for log, times in waited.items() if times > 1.0 / WORDS}
        own = max(self._waited.get(self._log, 0.0), 1.0)
        return 1.0 + sum(min(times / own / FULL_SHARE, 1.0) for log, times in self._waited.items() if log != self._log)

    def _ahead(self, limits: ModelLimits) -> int:
        """Prompt tokens to be computed before a newcomer's: of this gateway as of now, of others as the scheduler has said."""
        return self._own_ahead + sum(tokens for log, tokens in limits.prompts_ahead.items() if log != self._log)

    def _steps_s(self, limits: ModelLimits, tokens: int) -> float:
        """Seconds of executors alone until the first output of a prompt."""
        return limits.lone_step_s + limits.prompt_s + tokens * self._token_s(limits)

    def _token_s(self, limits: ModelLimits) -> float:
        """Seconds that a prompt token takes, cached ones included."""
        return limits.prompt_token_s * self._computed_tokens / self._begun_tokens

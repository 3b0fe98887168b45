"""How much work is queued, how fast it goes, and how long outputs will be: what gateways need to refuse in time.

Everything here is pure bookkeeping; time comes in as an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from octavo_scheduler.core.events import BeamStep, Ended, Event
from octavo_shared.ids import RequestId
from octavo_shared.records import EndReason, RequestRecord

# Output lengths are told apart by powers of two: range i holds output tokens number 2^i - 1 … 2^(i+1) - 2, from 0 on.
NUM_RANGES = 24
# What is assumed before anything has been seen: an output ends at any token with the same chance, on average after
# PRIOR_MEAN tokens. That assumption, and later the mean over all ranges, weighs as much as PRIOR_TOKENS tokens seen.
PRIOR_MEAN = 256.0
PRIOR_TOKENS = 512.0
# Outputs after which an observation has lost all but 1/e of its weight.
MEMORY = 1000.0
# Seconds of work over which the rate is averaged.
RATE_WINDOW_S = 10.0


class OutputLengths:
    """Learns how long outputs become, from those that have ended.

    An output cut by ``max_tokens``, a deadline or its client says only that it would have been longer, so lengths are not
    averaged: the chance to end is estimated per token, range by range (a coarse form of Kaplan and Meier's estimator, JASA
    53, 1958), and old observations fade.
    """

    def __init__(self) -> None:
        # Per range: tokens drawn within it, and outputs that ended by themselves at one of them.
        self._tokens = [0.0] * NUM_RANGES
        self._ends = [0.0] * NUM_RANGES
        # Instead of letting all that is old fade, what is new counts for more.
        self._weight = 1.0

    def observe(self, num_tokens: int, *, complete: bool) -> None:
        """An output of ``num_tokens`` has ended; ``complete``: by itself, else it was cut."""
        self._weight *= math.exp(1.0 / MEMORY)
        if self._weight > 1e9:
            self._tokens = [value / self._weight for value in self._tokens]
            self._ends = [value / self._weight for value in self._ends]
            self._weight = 1.0
        for place in range(NUM_RANGES):
            start = (1 << place) - 1
            if num_tokens <= start:
                return
            last = num_tokens <= 2 * start + 1 or place == NUM_RANGES - 1
            self._tokens[place] += self._weight * (num_tokens - start if last else start + 1)
            if last:
                self._ends[place] += self._weight * complete
                return

    def expected(self, max_tokens: int) -> float:
        """Output tokens that a choice with ``max_tokens`` makes on average."""
        area, alive = 0.0, 1.0
        for place, chance in enumerate(self._chances()):
            start = (1 << place) - 1
            if start >= max_tokens:
                break
            width = max_tokens - start if place == NUM_RANGES - 1 else min(start + 1, max_tokens - start)
            left = alive * (1.0 - chance) ** width
            area += (alive - left) / chance
            alive = left
        return area

    def curve(self) -> tuple[float, ...]:
        """``expected(2^i)`` for i = 0, 1, … ``NUM_RANGES`` - 1."""
        return tuple(self.expected(1 << place) for place in range(NUM_RANGES))

    def _chances(self) -> list[float]:
        """The chance to end at each token of a range. Where little was seen, it is near the mean over all ranges."""
        prior = PRIOR_TOKENS * self._weight
        mean = (sum(self._ends) + prior / PRIOR_MEAN) / (sum(self._tokens) + prior)
        return [(ended + prior * mean) / (seen + prior) for seen, ended in zip(self._tokens, self._ends, strict=True)]


class Rate:
    """Tokens per second of work, over about the last ``RATE_WINDOW_S`` seconds in which there was any."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """``tokens`` took ``seconds``."""
        fade = math.exp(-seconds / RATE_WINDOW_S)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before anything was seen."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def beside(self, tokens: float, seconds: float) -> float:
        """The rate if ``tokens`` more had taken ``seconds`` more."""
        return (self._tokens + tokens) / (self._seconds + seconds) if self._seconds + seconds > 0 else 0.0


@dataclass(slots=True)
class _Owed:
    """What one request was taken on with: its prompt, and the outputs each of its open choices is expected to make."""

    prompt_tokens: int
    tokens_per_choice: float
    choices: int
    # It has one sequence only.
    is_single: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """Tokens of work that are still owed, and those of them that are of prompts, by log."""

    queued_tokens: int
    prompts_ahead: dict[str, int]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running sequence has come: tokens computed, of which the first ``prompt_tokens`` are its prompt."""

    request_id: RequestId
    prompt_tokens: int
    computed_tokens: int


class Backlog:
    """The work owed to live requests. Constant time per request and choice, whatever their number."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        # The newest rate of all executors together; 0 = none was measured yet.
        self.last_tokens_per_s = 0.0
        self._owed: dict[RequestId, _Owed] = {}
        self._total = 0.0
        # Prompt tokens of what is owed, by log, and how many choices are.
        self._prompts: Counter[str] = Counter()
        self._choices = 0

    def add(self, record: RequestRecord) -> None:
        """A request is owed its choices."""
        # A beam search computes all its beams, whatever number it returns.
        sequences = max(record.n, record.sampling.beam_width)
        per_choice = self.lengths.expected(record.sampling.max_tokens) * sequences / record.n
        self._owed[record.id] = _Owed(len(record.prompt), per_choice, record.n, sequences == 1)
        self._total += len(record.prompt) + per_choice * record.n
        self._prompts[record.id.log] += len(record.prompt)
        self._choices += record.n

    def choice_ended(self, request_id: RequestId) -> None:
        """One of its choices is owed nothing more; with the last one the request is forgotten."""
        owed = self._owed.get(request_id)
        if owed is None:
            return
        # Its prompt has been computed, or soon will not matter any more.
        self._total -= owed.tokens_per_choice + owed.prompt_tokens
        self._count_out(request_id.log, owed.prompt_tokens)
        owed.prompt_tokens = 0
        owed.choices -= 1
        self._choices -= 1
        if not owed.choices:
            del self._owed[request_id]
            if not self._owed:
                # No rounding is carried on for ever.
                self._total = 0.0

    def _count_out(self, log: str, prompt_tokens: int) -> None:
        self._prompts[log] -= prompt_tokens
        if self._prompts[log] <= 0:
            del self._prompts[log]

    @property
    def mean_output(self) -> float:
        """Output tokens that a choice which is owed is expected to make, from its first one on; 0 when none is."""
        return max(self._total - self._prompts.total(), 0.0) / self._choices if self._choices else 0.0

    def learn(self, num_tokens: int, reason: EndReason) -> None:
        """A choice has ended after so many output tokens, or a beam search with all its hypotheses."""
        if reason is not EndReason.ERROR:
            self.lengths.observe(num_tokens, complete=reason is EndReason.STOP)

    def learn_all(self, events: Iterable[Event]) -> None:
        """Learn from the ends among what happened in a core."""
        for event in events:
            if isinstance(event, Ended):
                self.learn(event.sequence.num_outputs, event.reason)
            elif isinstance(event, BeamStep) and event.event.end:
                self.learn(event.event.position + 1, event.event.end)

    def standing(self, running: Iterable[Progress]) -> Standing:
        """What is still owed, given how far the running sequences are."""
        done = 0.0
        prompts_left = Counter(self._prompts)
        prompts: dict[RequestId, int] = {}
        outputs: dict[RequestId, float] = {}
        for progress in running:
            request_id = progress.request_id
            owed = self._owed.get(request_id)
            if owed is None:
                continue
            prompt = min(progress.computed_tokens, owed.prompt_tokens)
            output = min(max(progress.computed_tokens - progress.prompt_tokens, 0), owed.tokens_per_choice)
            if owed.is_single:
                done += prompt + output
                prompts_left[request_id.log] -= prompt
                continue
            # Choices share their prompt: it counts once, as far as the furthest of them is.
            prompts[request_id] = max(prompts.get(request_id, 0), prompt)
            outputs[request_id] = min(outputs.get(request_id, 0.0) + output, owed.tokens_per_choice * owed.choices)
        for request_id, prompt in prompts.items():
            prompts_left[request_id.log] -= prompt
        done += sum(prompts.values()) + sum(outputs.values())
        return Standing(
            max(round(self._total - done), 0), {log: left for log, left in prompts_left.items() if left > 0}
        )

"""How long an executor's steps last: what waiting costs, and when a step is stuck.

A step that only decodes lasts ``base + slope * sequences``; one that computes prompts lasts longer by ``base + slope * tokens``
of their own. That is learned from the steps done; until those tell enough, from a few that the executor measured before it
attached. Everything here is pure bookkeeping in constant time per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo_shared.plan import MeasuredStep

# Steps of a kind after which an observation has lost all but 1/e of its weight.
MEMORY = 200.0
# So many steps, and so many of them with a prompt, tell what others will take. The first ones with a prompt say nothing: much
# is done in them for the first time.
ENOUGH_STEPS = 16
ENOUGH_PROMPTS = 3
WARM_UP_PROMPTS = 2
# A step that lasts longer than so many times what was expected says more of the machine than of steps.
MOST_TIMES = 10.0
# What was measured tells of a few short sequences that had the machine to themselves: so much longer may steps be.
MEASURED_TIMES = 2.0
_FADE = 1.0 - 1.0 / MEMORY


class _Line:
    """A line through points that fade, by least squares, never falling and never below 0.

    ``spread``: points that differ by less than about this in x tell nothing of the slope, which is then taken to be less.
    """

    def __init__(self, spread: float) -> None:
        self._noise = spread * spread
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.base = self.slope = 0.0

    def observe(self, x: float, y: float) -> None:
        """A point."""
        self._weight = self._weight * _FADE + 1.0
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + y
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * y
        x, y = self._x / self._weight, self._y / self._weight
        slope = (self._xy / self._weight - x * y) / (self._xx / self._weight - x * x + self._noise)
        self.slope = min(max(slope, 0.0), self.ratio)
        self.base = max(y - self.slope * x, 0.0)

    @property
    def ratio(self) -> float:
        """Mean y over mean x."""
        return max(self._y, 0.0) / self._x if self._x else 0.0

    def at(self, x: float) -> float:
        """What is expected at ``x``."""
        return self.base + self.slope * x


class _Lines:
    """A line for decodes, and one for what prompts add."""

    def __init__(self, prompt_spread: float) -> None:
        self.decode = _Line(1.0)
        self.prompt = _Line(prompt_spread)

    def expected_s(self, prompt_tokens: int, sequences: int) -> float:
        """Seconds that a step is expected to take, rather too many than too few."""
        prompt, tokens = self.prompt, prompt_tokens
        return self.decode.at(sequences) + (max(prompt.at(tokens), prompt.ratio * tokens) if tokens else 0.0)


class _Measured:
    """What steps tell that an executor has measured: lines, and the seconds that a token attends to one before it."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        # They differ by what was chosen, not by chance.
        self.lines = lines = _Lines(1.0)
        short = [step for step in steps if not step.context_tokens]
        for step in short:
            if not step.prompt_tokens:
                lines.decode.observe(step.sequences, step.seconds)
        for step in short:
            if step.prompt_tokens:
                lines.prompt.observe(step.prompt_tokens, step.seconds - lines.decode.at(step.sequences))
        self.attended_s = 0.0
        for step in steps:
            if attended := step.prompt_tokens * step.context_tokens:
                longer_s = step.seconds - lines.decode.at(step.sequences) - lines.prompt.at(step.prompt_tokens)
                self.attended_s = max(self.attended_s, longer_s / attended)


class StepTimes:
    """What is known of one executor's steps."""

    def __init__(self) -> None:
        self._learned = _Lines(16.0)
        self._measured: _Measured | None = None
        # Prompt tokens of sequences that were given a slot, and how many of them were not in the cache.
        self._looked_up = self._missed = 0.0
        # Steps learned from, those of the present epoch, and those with a prompt.
        self._steps = self._steps_here = self._prompts = 0

    def begin(self, measured: Sequence[MeasuredStep]) -> None:
        """An epoch begins, perhaps of a new process, which has measured these steps (or none)."""
        kinds = {step.prompt_tokens > 0 for step in measured if not step.context_tokens}
        self._measured = _Measured(measured) if len(kinds) == 2 else None
        self._steps_here = 0

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step that drew tokens of ``sequences`` and computed ``prompt_tokens`` took so long."""
        if self.knows:
            seconds = min(seconds, MOST_TIMES * self.expected_s(prompt_tokens, sequences))
        self._steps += 1
        self._steps_here += 1
        if not prompt_tokens:
            self._learned.decode.observe(sequences, seconds)
            return
        self._prompts += 1
        if self._prompts > WARM_UP_PROMPTS:
            self._learned.prompt.observe(prompt_tokens, seconds - self._learned.decode.at(sequences))

    def observe_lookup(self, num_tokens: int, cached_tokens: int) -> None:
        """A sequence of ``num_tokens`` got a slot; ``cached_tokens`` of them need not be computed."""
        self._looked_up = self._looked_up * _FADE + num_tokens
        self._missed = self._missed * _FADE + num_tokens - cached_tokens

    @property
    def _has_learned(self) -> bool:
        return self._steps >= ENOUGH_STEPS and self._prompts >= WARM_UP_PROMPTS + ENOUGH_PROMPTS

    @property
    def _best(self) -> _Lines:
        return self._learned if self._has_learned or self._measured is None else self._measured.lines

    @property
    def knows(self) -> bool:
        """Other steps can be foretold."""
        return self._has_learned or self._measured is not None

    @property
    def foretells(self) -> bool:
        """So can the next one. What a process before this one took says nothing of its first steps, unless it has had some."""
        return self._measured is not None or (self._has_learned and self._steps_here >= ENOUGH_STEPS)

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token takes, those found in the cache counted in."""
        return self._best.prompt.slope * (self._missed / self._looked_up if self._looked_up else 1.0)

    @property
    def prompt_s(self) -> float:
        """Seconds that a step takes longer for having a prompt at all."""
        return self._best.prompt.base

    def decode_s(self, sequences: int) -> float:
        """Seconds that a step of so many sequences takes when it computes no prompt; 0 while nothing is known of it."""
        return self._best.decode.at(sequences)

    def expected_s(self, prompt_tokens: int, sequences: int, attended_tokens: float = 0.0) -> float:
        """Seconds that a step is expected to take, rather too many than too few.

        ``attended_tokens``: how many tokens before it each of its tokens attends to, all in all. What was learned has seen some
        of that already, but those may have been short sequences.
        """
        expected_s = self._learned.expected_s(prompt_tokens, sequences)
        if self._measured is None:
            return expected_s
        if not self._has_learned or self._steps_here < ENOUGH_STEPS:
            expected_s = max(expected_s, MEASURED_TIMES * self._measured.lines.expected_s(prompt_tokens, sequences))
        return expected_s + MEASURED_TIMES * self._measured.attended_s * attended_tokens

"""How long an executor's steps last, learned from those it has done: what waiting costs, and when a step is stuck.

A step that only decodes lasts ``base + slope * sequences``; one that computes prompts lasts longer by ``base + slope * tokens``
of their own. Everything here is pure bookkeeping in constant time per step.
"""

from __future__ import annotations

# Steps of a kind after which an observation has lost all but 1/e of its weight.
MEMORY = 200.0
# So many steps, and so many of them with a prompt, tell what others will take. The first ones with a prompt say nothing: much
# is done in them for the first time.
ENOUGH_STEPS = 16
ENOUGH_PROMPTS = 3
WARM_UP_PROMPTS = 2
# A step that lasts longer than so many times what was expected says more of the machine than of steps.
MOST_TIMES = 10.0
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


class StepTimes:
    """What is known of one executor's steps."""

    def __init__(self) -> None:
        self._decode = _Line(1.0)
        self._prompt = _Line(16.0)
        # Prompt tokens of sequences that were given a slot, and how many of them were not in the cache.
        self._looked_up = self._missed = 0.0
        self._steps = self._prompts = 0

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step that drew tokens of ``sequences`` and computed ``prompt_tokens`` took so long."""
        if self.knows:
            seconds = min(seconds, MOST_TIMES * self.expected_s(prompt_tokens, sequences))
        self._steps += 1
        if not prompt_tokens:
            self._decode.observe(sequences, seconds)
            return
        self._prompts += 1
        if self._prompts > WARM_UP_PROMPTS:
            self._prompt.observe(prompt_tokens, seconds - self._decode.at(sequences))

    def observe_lookup(self, num_tokens: int, cached_tokens: int) -> None:
        """A sequence of ``num_tokens`` got a slot; ``cached_tokens`` of them need not be computed."""
        self._looked_up = self._looked_up * _FADE + num_tokens
        self._missed = self._missed * _FADE + num_tokens - cached_tokens

    @property
    def knows(self) -> bool:
        """Enough was seen to foretell other steps."""
        return self._steps >= ENOUGH_STEPS and self._prompts >= WARM_UP_PROMPTS + ENOUGH_PROMPTS

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token takes, those found in the cache counted in."""
        return self._prompt.slope * (self._missed / self._looked_up if self._looked_up else 1.0)

    @property
    def prompt_s(self) -> float:
        """Seconds that a step takes longer for having a prompt at all."""
        return self._prompt.base

    def decode_s(self, sequences: int) -> float:
        """Seconds that a step of so many sequences takes when it computes no prompt; 0 while none was seen."""
        return self._decode.at(sequences)

    def expected_s(self, prompt_tokens: int, sequences: int) -> float:
        """Seconds that a step is expected to take, rather too many than too few."""
        prompt_s = max(self._prompt.at(prompt_tokens), self._prompt.ratio * prompt_tokens) if prompt_tokens else 0.0
        return self._decode.at(sequences) + prompt_s

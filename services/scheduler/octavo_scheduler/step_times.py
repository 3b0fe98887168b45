"""How long an executor's steps last, learned from those it has done: what waiting costs, and when a step is stuck.

A step that computes no prompt lasts ``base + per_sequence * sequences``; each prompt token adds to that. Everything here is
pure bookkeeping in constant time per step.
"""

from __future__ import annotations

# Steps of a kind after which an observation has lost all but 1/e of its weight.
MEMORY = 200.0
# So many steps, and so many prompt tokens in them, tell what others will take.
ENOUGH_STEPS = 16
ENOUGH_PROMPT_TOKENS = 32
# A step that lasts longer than so many times what was expected says more of the machine than of steps.
MOST_TIMES = 10.0
_FADE = 1.0 - 1.0 / MEMORY


class StepTimes:
    """Two least-squares fits: of steps that only decode over their sequences, and of what is beyond that over prompt tokens."""

    def __init__(self) -> None:
        # Over steps without a prompt: weight, sequences, seconds, sequences squared, sequences times seconds.
        self._weight = self._sum_n = self._sum_s = self._sum_nn = self._sum_ns = 0.0
        # Over steps with one: prompt tokens, and the seconds that they took.
        self._prompt_tokens = self._prompt_s = 0.0
        # Prompt tokens of sequences that were given a slot, and how many of them were not in the cache.
        self._looked_up = self._missed = 0.0
        self.steps = 0
        self.prompt_tokens = 0
        self._base_s = self._per_sequence_s = 0.0

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step that drew tokens of ``sequences`` and computed ``prompt_tokens`` took so long."""
        if self.knows:
            seconds = min(seconds, MOST_TIMES * self.expected_s(prompt_tokens, sequences))
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        if prompt_tokens:
            self._prompt_tokens = self._prompt_tokens * _FADE + prompt_tokens
            self._prompt_s = self._prompt_s * _FADE + seconds - self.decode_s(sequences)
            return
        self._weight = self._weight * _FADE + 1.0
        self._sum_n = self._sum_n * _FADE + sequences
        self._sum_s = self._sum_s * _FADE + seconds
        self._sum_nn = self._sum_nn * _FADE + sequences * sequences
        self._sum_ns = self._sum_ns * _FADE + sequences * seconds
        mean_n, mean_s = self._sum_n / self._weight, self._sum_s / self._weight
        # Batches that never differ tell nothing of what one more costs: the 1.0 keeps their noise out.
        variance = self._sum_nn / self._weight - mean_n * mean_n + 1.0
        slope = (self._sum_ns / self._weight - mean_n * mean_s) / variance
        self._per_sequence_s = min(max(slope, 0.0), mean_s / max(mean_n, 1.0))
        self._base_s = mean_s - self._per_sequence_s * mean_n

    def observe_lookup(self, num_tokens: int, cached_tokens: int) -> None:
        """A sequence of ``num_tokens`` got a slot; ``cached_tokens`` of them need not be computed."""
        self._looked_up = self._looked_up * _FADE + num_tokens
        self._missed = self._missed * _FADE + num_tokens - cached_tokens

    @property
    def knows(self) -> bool:
        """Enough was seen to foretell other steps."""
        return self.steps >= ENOUGH_STEPS and self.prompt_tokens >= ENOUGH_PROMPT_TOKENS

    @property
    def computed_token_s(self) -> float:
        """Seconds that computing a prompt token takes; 0 while nothing was seen."""
        return max(self._prompt_s, 0.0) / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token takes on average, those found in the cache counted in."""
        return self.computed_token_s * (self._missed / self._looked_up if self._looked_up else 1.0)

    def decode_s(self, sequences: int) -> float:
        """Seconds that a step of so many sequences takes when it computes no prompt; 0 while none was seen."""
        return self._base_s + self._per_sequence_s * sequences

    def expected_s(self, prompt_tokens: int, sequences: int) -> float:
        """Seconds that a step is expected to take."""
        return self.decode_s(sequences) + self.computed_token_s * prompt_tokens

"""How long outputs will be, learned from those that have ended, and what memory that will take at most.

After Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025, LightLLM): admitting a
sequence is safe when the memory that those running will need at their worst moment, as far as past lengths tell, fits.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from octavo_shared.records import Int32Array

WINDOW = 1000
# Fewer ends than this say nothing.
ENOUGH = 4


class LengthForecast:
    """Output lengths of the last ``WINDOW`` sequences that ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._sorted: npt.NDArray[np.int64] | None = None
        self._tail_sums: npt.NDArray[np.float64] = np.zeros(1)

    @property
    def is_empty(self) -> bool:
        """Too few sequences have ended to say anything."""
        return len(self._lengths) < ENOUGH

    def observe(self, output_tokens: int) -> None:
        """A sequence ended after so many output tokens."""
        self._lengths.append(output_tokens)
        self._sorted = None

    def remaining(self, generated: Int32Array, limit: Int32Array) -> Int32Array:
        """Expected output tokens still to come after ``generated`` int32[n], at most ``limit`` int32[n]: int32[n].

        It is the mean of past lengths greater than what is there already; where there are none, 0: nobody is kept waiting
        for a guess.
        """
        if self.is_empty:
            return np.zeros_like(generated)
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
            self._tail_sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0).astype(np.float64)
        longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - longer
        mean = self._tail_sums[longer] / np.maximum(count, 1)
        left: Int32Array = np.where(count > 0, np.ceil(mean) - generated, 0).astype(np.int32)
        return np.minimum(left, limit)


def peak_blocks(held: Int32Array, growth: Int32Array) -> int:
    """Most blocks in use at once when sequences that hold ``held`` int32[n] each grow by ``growth`` int32[n], then end.

    They grow at the same pace, so the one with least to grow ends first and gives back what it holds.
    """
    order = np.argsort(-growth, kind="stable")
    grown = growth[order]
    return int((np.cumsum(held[order]) + grown * np.arange(1, len(order) + 1)).max()) if len(order) else 0

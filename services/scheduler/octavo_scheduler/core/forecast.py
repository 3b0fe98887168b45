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
# What is expected before anything is known counts as so many lengths: ``GUESS`` tokens, or half of what the pool holds if
# that is less. A roomy pool admits whoever comes; a tight one does not fill up with what it will have to let go.
GUESSES = 2
GUESS = 2048
# From this share of recomputed tokens on more than the mean is expected; at the second, the longest that is known.
TOLL_TO_HEED, TOLL_TO_FEAR = 0.1, 0.2
# How many times what the pool holds has to be computed until what was computed before counts half.
MEMORY = 16
# So many moments are counted in blocks when the worst one is looked for.
MOMENTS = 16


class LengthForecast:
    """Output lengths of the last ``WINDOW`` sequences that ended by a token or their limit, in a pool of ``pool_tokens``.

    A window of plain lengths, since the question is how much longer one becomes that is so long already, however long;
    ``octavo_scheduler.backlog`` asks how long a new one becomes below any limit, and takes in those that were cut as well.
    """

    def __init__(self, pool_tokens: int = 2 * GUESS) -> None:
        self._horizon = MEMORY * pool_tokens
        self._useful = self._again = 0.0
        self._lengths: deque[int] = deque([min(GUESS, pool_tokens // 2)] * GUESSES, maxlen=WINDOW)
        self._sorted: npt.NDArray[np.int64] | None = None
        self._tail_sums: npt.NDArray[np.float64] = np.zeros(1)

    def count(self, tokens: int, again: int) -> None:
        """So many tokens are computed, ``again`` of them not for the first time."""
        self._useful += tokens - again
        self._again += again
        if self._useful > self._horizon:
            self._useful, self._again = self._useful / 2, self._again / 2

    @property
    def caution(self) -> float:
        """0 … 1, the more the more has been computed again for each useful token."""
        toll = self._again / max(self._useful, 1.0)
        return min(max((toll - TOLL_TO_HEED) / (TOLL_TO_FEAR - TOLL_TO_HEED), 0.0), 1.0)

    def observe(self, output_tokens: int) -> None:
        """A sequence ended after so many output tokens."""
        self._lengths.append(output_tokens)
        self._sorted = None

    def remaining(self, generated: Int32Array, limit: Int32Array) -> Int32Array:
        """Expected output tokens still to come after ``generated`` int32[n], at most ``limit`` int32[n]: int32[n].

        It is the mean of past lengths greater than what is there already, or as much more than that, up to the longest of
        them, as ``caution`` says. Who has outlived them all is expected to go on for as long again: of an age nobody has
        been seen to exceed, the age is all that is known (Lindy's law).
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
            self._tail_sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0).astype(np.float64)
        longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - longer
        mean = self._tail_sums[longer] / np.maximum(count, 1)
        mean += self.caution * (self._sorted[-1] - mean)
        left: Int32Array = np.where(count > 0, np.ceil(mean) - generated, generated).astype(np.int32)
        return np.minimum(left, limit)


def peak_blocks(tokens: Int32Array, growth: Int32Array, shared: Int32Array, block_size: int) -> int:
    """Most blocks in use at once when sequences of ``tokens`` int32[n] each grow by ``growth`` int32[n] tokens, then end.

    ``shared`` int32[n] blocks of each are not its own and do not count. They grow at the same pace, so the one with least to
    grow ends first and gives back what it holds. The moments before each end are compared by tokens, and the worst
    ``MOMENTS`` of them counted in blocks.
    """
    if not len(tokens):
        return 0
    order = np.argsort(-growth, kind="stable")
    tokens, growth, shared = tokens[order], growth[order], shared[order]
    number = np.arange(1, len(tokens) + 1)
    totals = np.cumsum(tokens - shared * block_size) + growth * number
    worst = np.argpartition(totals, -MOMENTS)[-MOMENTS:] if len(totals) > MOMENTS else np.arange(len(totals))
    # [moments, n]: blocks of each sequence that is still there.
    blocks = (tokens + (growth[worst, None] + np.int32(block_size - 1))) // np.int32(block_size) - shared
    return int((blocks * (number <= number[worst, None])).sum(1).max())

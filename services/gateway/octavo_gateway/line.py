"""Whether those that have to wait are a burst or overload."""

from __future__ import annotations

from enum import Enum

# A line is looked at in spans of so many seconds.
SPAN_S = 1.5
# There is overload if in two spans on end so many times as much work comes as can be done in them.
OVERLOAD = 2.0
# One request counts for at most an eighth of that: a few very long prompts are no overload.
MOST_WORK_S = OVERLOAD * SPAN_S / 8


class Verdict(Enum):
    """What a line is: not known in its first two spans, then one of the others. A burst can still become overload."""

    UNKNOWN = "unknown"
    BURST = "burst"
    OVERLOAD = "overload"


class Line:
    """Since when newcomers have to wait, and how much has come since. Times are seconds on the monotonic clock."""

    def __init__(self) -> None:
        self.verdict = Verdict.UNKNOWN
        # When it began, and when the span under way ends; 0 = there is no line.
        self._begin_s = self._end_s = 0.0
        self._spans = 0
        # Seconds of work that came in the span under way, and in the one before it.
        self._this_s = self._last_s = 0.0

    def __bool__(self) -> bool:
        return self._end_s > 0

    def came(self, now_s: float, work_s: float) -> None:
        """A newcomer that brings ``work_s`` seconds of work has to wait; the first one begins the line."""
        if not self:
            self._begin_s, self._end_s = now_s, now_s + SPAN_S
        self.look(now_s)
        self._this_s += min(work_s, MOST_WORK_S)

    def look(self, now_s: float) -> Verdict:
        """What is known by now."""
        if self and now_s >= self._end_s:
            self._close_span()
            if now_s >= self._end_s:
                # Nobody came in the next span, nor in any other.
                self._close_span()
                self._end_s = max(self._end_s, now_s + SPAN_S)
        return self.verdict

    def rushes(self, now_s: float) -> bool:
        """Whether so far it looks like overload (or like a burst that has just come)."""
        return self._last_s + self._this_s >= OVERLOAD * max(now_s - self._begin_s, SPAN_S / 4)

    def _close_span(self) -> None:
        self._spans += 1
        if self._spans > 1:
            grows = min(self._this_s, self._last_s) >= OVERLOAD * SPAN_S
            self.verdict = Verdict.OVERLOAD if grows else Verdict.BURST
        self._last_s, self._this_s = self._this_s, 0.0
        self._end_s += SPAN_S

"""Stop strings in growing text, independent of where token and chunk borders fall.

The text is thought of as read character by character: the stop string that is complete first ends it (of two complete at
the same character, the longer one). Text that may still turn out to begin a stop string is held back, nothing else is.
Both are pure functions of the text so far (rule L8).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Finds the first stop string of one choice. ``include`` keeps it in the text."""

    __slots__ = ("_held", "_include", "_inner", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        # A held-back tail ends in one of these.
        self._inner = frozenset(character for stop in stops for character in stop[:-1])
        self._held = ""
        # The stop string that ended the text.
        self.found: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text in; returns what can be given out now. Once ``found`` is set nothing follows.

        A match must end within ``text``; with ``armed`` false none counts (the text of the first min_tokens tokens),
        but one that begins there and ends later will.
        """
        if not text:
            return ""
        held, buffer = len(self._held), self._held + text
        if armed and (match := self._first(buffer, held)) is not None:
            start, end, self.found = match
            self._held = ""
            return buffer[:end] if self._include else buffer[:start]
        keep = self._tail(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep] if keep else buffer

    def flush(self) -> str:
        """The text is over; returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str, old: int) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop), stop)
        return best

    def _tail(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` with which a stop string begins."""
        if buffer[-1] not in self._inner:
            return 0
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest

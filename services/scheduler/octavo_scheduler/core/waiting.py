"""Who waits, in the order of a policy. Policies are small pure functions chosen by name."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from octavo_scheduler.core.config import PolicyName
from octavo_scheduler.core.sequence import Sequence

# Smaller runs first; the largest among those running is preempted first. Keys of two sequences are never equal.
Key = tuple[int, int]
Policy = Callable[[Sequence], Key]


def first_come(sequence: Sequence) -> Key:
    """In the order of arrival; a preempted sequence keeps its place."""
    return (0, sequence.arrival)


def by_priority(sequence: Sequence) -> Key:
    """Lower number first (vLLM's rule), then in the order of arrival."""
    return (sequence.record.priority, sequence.arrival)


POLICIES: dict[PolicyName, Policy] = {"fcfs": first_come, "priority": by_priority}


class WaitingQueue:
    """A heap of sequences. Removal from the middle is lazy, so it costs nothing until the entry comes up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """Members in no particular order."""
        return iter(self._members.values())

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._members[sequence.uid] = sequence
        heapq.heappush(self._heap, (self._policy(sequence), sequence.uid, sequence))

    def peek(self) -> Sequence | None:
        """Who is next."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.uid in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take the one that ``peek`` shows."""
        sequence = self.peek()
        assert sequence is not None, "nobody waits"
        heapq.heappop(self._heap)
        del self._members[sequence.uid]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """It no longer waits. Entries left behind are swept out once they are the majority."""
        self._members.pop(sequence.uid, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def ordered(self) -> list[Sequence]:
        """All members, next one first (for people and tests)."""
        return sorted(self._members.values(), key=self._policy)

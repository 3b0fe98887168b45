"""Who waits, and who goes next. Policies are chosen by name; each is a queue and an order among those that run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.records import Int32Array

# Smaller runs first; the largest among those running is preempted first. Keys of two sequences are never equal.
Key = tuple[int, int]
# What a token costs under the fair policy: an output token occupies the model as long as many prompt tokens do.
PROMPT_COST = 1.0
OUTPUT_COST = 2.0


def first_come(sequence: Sequence) -> Key:
    """In the order of arrival; a preempted sequence keeps its place."""
    return (0, sequence.arrival)


def by_priority(sequence: Sequence) -> Key:
    """Lower number first (vLLM's rule), then in the order of arrival."""
    return (sequence.record.priority, sequence.arrival)


class WaitingQueue:
    """A heap of sequences. Removal from the middle is lazy, so it costs nothing until the entry comes up."""

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
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
        heapq.heappush(self._heap, (self._key(sequence), sequence.uid, sequence))

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
        return sorted(self._members.values(), key=self._key)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who of those that run is preempted first."""
        return max(running, key=self._key)


class FairQueue:
    """The tenant that has had least goes next: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (VTC).

    ``served`` counts what each tenant has been given, in prompt tokens, divided by its weight. A tenant that had nothing
    waiting starts from the least of those that have: it cannot save up what it did not use. Within a tenant the order is
    that of arrival.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._numbers: dict[str, int] = {}
        self.served: npt.NDArray[np.float64] = np.zeros(8)
        self._shares: npt.NDArray[np.float64] = np.ones(8)
        self._queues: dict[int, WaitingQueue] = {}
        self._last_left = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Members in no particular order."""
        for queue in self._queues.values():
            yield from queue

    def tenant_of(self, sequence: Sequence) -> int:
        """The number of a sequence's tenant."""
        name = sequence.record.tenant
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            if number == len(self.served):
                self.served = np.concatenate([self.served, np.zeros(number)])
                self._shares = np.concatenate([self._shares, np.ones(number)])
            self._shares[number] = self._weights.get(name, 1.0)
        return number

    def _weigh(self, tenant: int, sequence: Sequence) -> None:
        """A tenant's weight may change while the system runs: the newest word counts, but the operator's setting first."""
        record = sequence.record
        if record.tenant_weight > 0 and record.tenant not in self._weights:
            self._shares[tenant] = record.tenant_weight

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        tenant = self.tenant_of(sequence)
        self._weigh(tenant, sequence)
        queue = self._queues.get(tenant)
        if queue is None:
            others = list(self._queues) or [self._last_left]
            if sequence.preemptions == 0:
                self.served[tenant] = max(self.served[tenant], self.served[others].min())
            queue = self._queues[tenant] = WaitingQueue(first_come)
        queue.push(sequence)

    def peek(self) -> Sequence | None:
        """Who is next."""
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=lambda tenant: (self.served[tenant], tenant))].peek()

    def pop(self) -> Sequence:
        """Take the one that ``peek`` shows."""
        sequence = self.peek()
        assert sequence is not None, "nobody waits"
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """It no longer waits."""
        tenant = self.tenant_of(sequence)
        queue = self._queues.get(tenant)
        if queue is None:
            return
        queue.remove(sequence)
        if not len(queue):
            del self._queues[tenant]
            self._last_left = tenant

    def ordered(self) -> list[Sequence]:
        """All members, next one first as of now (for people and tests)."""
        return sorted(self, key=lambda one: (self.served[self.tenant_of(one)], self.tenant_of(one), one.arrival))

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who of those that run is preempted first: the latest of the tenant that has had most."""
        return max(running, key=lambda one: (self.served[self.tenant_of(one)], self.tenant_of(one), one.arrival))

    def charge(self, tenants: Int32Array, costs: npt.NDArray[np.float64]) -> None:
        """Tenants were given something: their numbers int32[n] and its costs float64[n]."""
        given = np.bincount(tenants, costs, minlength=len(self.served))
        self.served += given / self._shares


class Queue(Protocol):
    """What every policy's queue can do."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...
    def push(self, sequence: Sequence) -> None: ...
    def peek(self) -> Sequence | None: ...
    def pop(self) -> Sequence: ...
    def remove(self, sequence: Sequence) -> None: ...
    def ordered(self) -> list[Sequence]: ...
    def victim(self, running: Iterable[Sequence]) -> Sequence: ...


def make_queue(config: CoreConfig) -> Queue:
    """The queue of the policy that is asked for."""
    if config.policy == "fair":
        return FairQueue(config.tenant_weights)
    return WaitingQueue(first_come if config.policy == "fcfs" else by_priority)

"""Whose fault is it when an executor dies or a step fails? (rule L13)

Only requests in unacknowledged plans are suspects. The first time they are all tried again together, since most losses are
nobody's fault. Those that fail again without having got any further are tried in halves, with nothing beside them: the half
that fails is halved again, so that the culprit among n is found with about log2(n) failures. A request is given up only after
failing alone.

Pure: no clocks, no executors. ``SchedulerService`` says what happened and asks who may run where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo_shared.ids import RequestId

# Failures in a row, without progress between them, that make a request a suspect and that end it if it was alone.
SUSPECT_AFTER = 2
GIVE_UP_AFTER = 3
# Who has failed often must get so many times two tokens further to count as innocent, at most.
MOST_DOUBLINGS = 10

Group = tuple[RequestId, ...]


@dataclass(slots=True)
class _Record:
    """Failures of one request: ``total``, those in a row without progress, and its tokens at the last one."""

    total: int = 0
    in_a_row: int = 0
    tokens: int = 0

    def is_beyond(self, tokens: int) -> bool:
        """Has it got so much further since the last failure that this was not its fault?

        One token is enough at first. Who fails again and again a little later each time has to show more.
        """
        return tokens - self.tokens >= 1 << min(self.total - 1, MOST_DOUBLINGS)


def halves(group: Sequence[RequestId]) -> list[Group]:
    """Two groups of about the same size; one of one is left as it is."""
    middle = len(group) // 2
    return [tuple(part) for part in (group[:middle], group[middle:]) if part]


class Blame:
    """Failures per request, the groups of suspects that wait for their trial, and who is on trial."""

    def __init__(self) -> None:
        self._records: dict[RequestId, _Record] = {}
        # In the order of their trials. True: the group behind it is its other half.
        self._groups: deque[tuple[Group, bool]] = deque()
        # Who is on trial and has not got further yet.
        self.on_trial: set[RequestId] = set()
        self._is_first_half = False

    def failed(self, suspects: Mapping[RequestId, int]) -> set[RequestId]:
        """Plans with these requests, which have so many tokens, came to nothing; returns those to be given up."""
        for request_id, tokens in suspects.items():
            record = self._records.setdefault(request_id, _Record())
            record.in_a_row = 1 if record.total and record.is_beyond(tokens) else record.in_a_row + 1
            record.total, record.tokens = record.total + 1, tokens
        tried = [request_id for request_id in suspects if request_id in self.on_trial]
        given_up: set[RequestId] = set()
        if tried:
            self.on_trial = set()
            if len(suspects) == 1 and self._records[tried[0]].in_a_row >= GIVE_UP_AFTER:
                given_up = {tried[0]}
                self.forget(tried[0])
            else:
                self._call(tried, first=True)
        waiting = {request_id for group, _ in self._groups for request_id in group}
        again = [
            request_id
            for request_id in suspects
            if request_id not in waiting | given_up and self._records[request_id].in_a_row >= SUSPECT_AFTER
        ]
        self._call(again, first=False)
        return given_up

    def _call(self, group: Sequence[RequestId], *, first: bool) -> None:
        """A group is to be tried in halves: before the others, or after them."""
        parts = halves(group)
        entries = [(part, len(parts) == 2 and index == 0) for index, part in enumerate(parts)]
        if first:
            self._groups.extendleft(reversed(entries))
        else:
            self._groups.extend(entries)

    def next_trial(self) -> bool:
        """Begin the next trial unless one is on; whether one is on now."""
        while not self.on_trial and self._groups:
            group, self._is_first_half = self._groups.popleft()
            self.on_trial = {request_id for request_id in group if request_id in self._records}
        return bool(self.on_trial)

    def is_suspect(self, request_id: RequestId) -> bool:
        """It is on trial or waits for its trial."""
        return request_id in self.on_trial or any(request_id in group for group, _ in self._groups)

    def got_further(self, request_id: RequestId, tokens: int) -> bool:
        """Has one on trial got so far that it is innocent? True when that was the last of its group."""
        record = self._records.get(request_id)
        if record is None or request_id not in self.on_trial or not record.is_beyond(tokens):
            return False
        record.in_a_row = 0
        return self._leave_trial(request_id)

    def forget(self, request_id: RequestId) -> bool:
        """It has ended; True when it was the last one on trial."""
        self._records.pop(request_id, None)
        return self._leave_trial(request_id)

    def _leave_trial(self, request_id: RequestId) -> bool:
        if request_id not in self.on_trial:
            return False
        self.on_trial.discard(request_id)
        if self.on_trial:
            return False
        if self._is_first_half and self._groups and len(self._groups[0][0]) > 1:
            # This half was not it, so the other one would fail as a whole.
            self._call(self._groups.popleft()[0], first=True)
        return True

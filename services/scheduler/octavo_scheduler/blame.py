"""Whose fault is it when an executor dies or a step fails? (rule L13)

Only requests in unacknowledged plans are suspects. The first time they are all tried again together, since most losses are
nobody's fault. Those that fail again without having got any further are tried one at a time, with nothing beside them; a
request is given up only after failing alone.
"""

from __future__ import annotations

from octavo_shared.ids import RequestId

# Failures in a row, without progress between them, that make a request a suspect and that end it.
SUSPECT_AFTER = 2
GIVE_UP_AFTER = 3


class Blame:
    """Failures in a row per request, and who is on trial."""

    def __init__(self) -> None:
        # (failures in a row, tokens known at the last one)
        self._failures: dict[RequestId, tuple[int, int]] = {}
        self.on_trial: RequestId | None = None

    def failed(self, request_id: RequestId, tokens: int) -> bool:
        """A plan with this request, which has ``tokens`` tokens, came to nothing; True when it is to be given up."""
        count, before = self._failures.get(request_id, (0, 0))
        count = count + 1 if tokens <= before else 1
        self._failures[request_id] = (count, tokens)
        alone = self.on_trial == request_id
        if alone:
            self.on_trial = None
        return alone and count >= GIVE_UP_AFTER

    def is_suspect(self, request_id: RequestId) -> bool:
        """It has failed repeatedly at the same place."""
        return self._failures.get(request_id, (0, 0))[0] >= SUSPECT_AFTER

    def may_start(self, request_id: RequestId) -> bool:
        """False while another request is on trial. A suspect that may start is on trial from then on."""
        if self.on_trial is None and self.is_suspect(request_id):
            self.on_trial = request_id
        return self.on_trial in (None, request_id)

    def got_further(self, request_id: RequestId, tokens: int) -> bool:
        """Has it more tokens than when it last failed? Then it is no suspect any more, and its trial is over."""
        if tokens <= self._failures.get(request_id, (0, tokens))[1]:
            return False
        self.forget(request_id)
        return True

    def forget(self, request_id: RequestId) -> None:
        """It has ended, or is innocent."""
        self._failures.pop(request_id, None)
        if self.on_trial == request_id:
            self.on_trial = None

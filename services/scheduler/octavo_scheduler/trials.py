"""Trials of requests that may be what makes executors fail: where they are held, and who may run beside them (rule L13)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo_scheduler.blame import Blame
from octavo_scheduler.engine import Engine, choose_engine
from octavo_scheduler.live import LiveRequest
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord

if TYPE_CHECKING:
    from octavo_scheduler.service import SchedulerService

logger = logging.getLogger(__name__)


class Trials:
    """Keeps one executor free of everything else while suspects are tried on it; other executors go on as ever."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._blame = Blame()
        self._court: Engine | None = None
        self._is_emptying = False

    def engine_for(self, record: RequestRecord) -> Engine | None:
        """Where a request may run now; None: it has to wait."""
        request_id = record.id
        if request_id in self._blame.on_trial:
            return self._court
        if self._is_emptying or self._blame.is_suspect(request_id):
            return None
        engines = [engine for engine in self._service.engines if engine is not self._court]
        engine = choose_engine(engines, time.monotonic(), record)
        if engine is not None and not engine.has_room_for(record):
            # Not refused while it has room where it may not go just now.
            return None if any(one.has_room_for(record) for one in self._service.engines) else engine
        return engine

    def hold(self) -> None:
        """If suspects wait for their trial, find them an executor that does nothing else, or make one."""
        if self._is_emptying:
            return
        if not self._blame.next_trial():
            self._court = None
            return
        records = [live.record for live in self._service.live if live.record.id in self._blame.on_trial]
        roomy = [
            engine
            for engine in self._service.engines
            if not engine.draining and all(engine.has_room_for(record) for record in records)
        ]
        if self._court in (roomy or self._service.engines):
            return
        self._court = None
        engine = choose_engine(self._service.engines, time.monotonic(), *records)
        if engine is not None and engine.load:
            # What it has goes on elsewhere, or after the trial.
            self._is_emptying = True
            try:
                engine.restart("requests that may break executors are tried on it", blame=False)
            finally:
                self._is_emptying = False
            engine = choose_engine(self._service.engines, time.monotonic(), *records)
        if engine is not None and not engine.load:
            self._court = engine

    def failed(self, engine: Engine, lives: Iterable[LiveRequest]) -> list[LiveRequest]:
        """What an engine was computing came to nothing; returns the requests that are to be given up."""
        suspects = {
            live.record.id: live
            for live in lives
            if any(engine.core.is_in_flight(sequence) for sequence in live.computing)
        }
        if not suspects:
            return []
        given_up = self._blame.failed({key: _tokens(engine, live) for key, live in suspects.items()})
        for request_id in given_up:
            logger.error("request %s is given up: alone on its executor it made it fail", request_id)
            self._service.metrics.count_quarantined()
        return [suspects[request_id] for request_id in given_up]

    def judge(self, engine: Engine) -> bool:
        """A step went well: requests on trial that have got further were not the ones. True when the trial is over."""
        if engine is not self._court:
            return False
        over = False
        for request_id in list(self._blame.on_trial):
            live = self._service.live.get(request_id)
            if live is not None and live.computing:
                over = self._blame.got_further(request_id, _tokens(engine, live)) or over
        return over

    def forget(self, request_id: RequestId) -> bool:
        """A request has ended; True when that is the end of a trial."""
        return self._blame.forget(request_id)


def _tokens(engine: Engine, live: LiveRequest) -> int:
    """Tokens that the sequences of a request have, as far as results are back."""
    return sum(engine.core.known_tokens(sequence) for sequence in live.computing)

"""Where live requests are: on an engine, or in the lobby until one may take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_scheduler.core.errors import NeverFitsError
from octavo_scheduler.engine import Engine
from octavo_scheduler.live import LiveRequest, Standing
from octavo_scheduler.reading import why_unservable
from octavo_scheduler.trials import Trials
from octavo_shared.ids import RequestId
from octavo_shared.records import EndReason, Problem

if TYPE_CHECKING:
    from octavo_scheduler.service import SchedulerService


class Placement:
    """Lets requests run where they may, and remembers where that is."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._trials = Trials(service)
        # Requests that wait for an executor or for a trial to end, in order, with what they have put out so far.
        self._lobby: dict[RequestId, tuple[LiveRequest, Standing]] = {}
        # Which engine has the sequences of a request.
        self._homes: dict[RequestId, Engine] = {}

    @property
    def num_waiting(self) -> int:
        """Requests in the lobby."""
        return len(self._lobby)

    def engine_of(self, request_id: RequestId) -> Engine | None:
        """Which engine has its sequences; None while it has none."""
        return self._homes.get(request_id)

    def place(self, live: LiveRequest, standing: Standing) -> None:
        """Let a request run where it may, or wait until it may."""
        if live.open <= live.ending:
            return
        engine = self._trials.engine_for(live.record)
        if engine is None:
            self._lobby[live.record.id] = (live, standing)
            return
        problem = why_unservable(live.record, engine.info.vocab_size)
        try:
            if problem is None:
                self._service.start(live, engine, standing)
        except NeverFitsError as error:
            problem = Problem(str(error), 400, "BadRequestError", "context_length_exceeded", "input_tokens")
        if problem is not None:
            live.suspend()
            self._service.end_choices(live, set(live.open), EndReason.ERROR, problem)
            return
        self._homes[live.record.id] = engine
        self._service.pump(engine)

    def rearrange(self) -> None:
        """An executor has come or gone, or a trial begins or is over: whoever waited for that may go."""
        self._trials.hold()
        waiting, self._lobby = self._lobby, {}
        for live, standing in waiting.values():
            self.place(live, standing)

    def judge(self, engine: Engine) -> None:
        """A step went well: if that was the end of a trial, the others may go on."""
        if self._trials.judge(engine):
            self.rearrange()

    def forget(self, request_id: RequestId) -> None:
        """A request has ended: if it was the last one on trial, the others may go on."""
        self._lobby.pop(request_id, None)
        self._homes.pop(request_id, None)
        if self._trials.forget(request_id):
            self.rearrange()

    def evict(self, engine: Engine, *, blame: bool) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """An engine is gone: the requests that were there and are to go on, and those that are given up.

        ``blame``: what it was computing may be the cause.
        """
        lives = [live for live in self._service.live if self._homes.get(live.record.id) is engine]
        given_up = self._trials.failed(engine, lives) if blame else []
        for live in lives:
            del self._homes[live.record.id]
        return [live for live in lives if live not in given_up], given_up

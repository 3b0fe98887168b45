"""Beam searches between the core and the log: a decision goes on in the core once it is logged (rule L12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_scheduler.background import insist
from octavo_scheduler.core.beam_groups import BeamGroup
from octavo_scheduler.core.beams import BeamRules, BeamSearch
from octavo_scheduler.core.events import BeamFailed, BeamStep, Event
from octavo_scheduler.engine import Engine
from octavo_scheduler.live import LiveRequest, Standing
from octavo_shared.entries import encode_beams
from octavo_shared.fold_beams import BeamEvent
from octavo_shared.ids import Attempt
from octavo_shared.records import EndReason, Problem

if TYPE_CHECKING:
    from octavo_scheduler.service import SchedulerService

_NOT_FINITE = "The model's output for this request is not finite."


class Searches:
    """What the service does for requests that are answered by beam search."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    def start(self, live: LiveRequest, engine: Engine, standing: Standing) -> None:
        """Let a search begin, or go on from where the log has it.

        Raises:
            NeverFitsError: the executor has no room for it.
        """
        config = engine.core.config
        rules = BeamRules.of(live.record, config.eos_token_ids, config.max_model_len)
        attempt = Attempt(self._service.term, live.attempt_n)
        search = BeamSearch(rules, live.record.id.serial, attempt, standing.beams)
        group = BeamGroup.of(live.record, live.attempt_n, search, config.max_model_len)
        if not search.is_at_limit:
            engine.core.beams.add(group)
        live.beams = group
        self._service.observer.arrived(group.lead)
        live.sequences = [group.lead]
        if search.is_at_limit:
            self._log(engine, group, search.close(EndReason.LENGTH))

    def happened(self, engine: Engine, events: list[Event]) -> None:
        """Decisions among what happened in a core."""
        for event in events:
            if isinstance(event, BeamStep):
                self._log(engine, event.group, event.event)
            elif isinstance(event, BeamFailed):
                live = self._service.live.get(event.group.record.id)
                if live is not None and live.beams is event.group:
                    self._service.end_choices(live, set(live.open), EndReason.ERROR, Problem(_NOT_FINITE))

    def let_go(
        self, live: LiveRequest, choices: set[int], reason: EndReason, lesson: EndReason, engine: Engine | None
    ) -> bytes:
        """Some choices are to end; a search goes on as long as one of the others is wanted.

        ``lesson`` is what the end tells of how long outputs become.

        Returns the entry that is to be in the log before their fences, if any: a search that is out of time gives back what
        it has. Should that entry count for nothing, because an earlier one is not in the log yet, the fences still end it.
        """
        group = live.beams
        if group is None or live.open - live.ending - choices:
            return b""
        words: list[BeamEvent] = [] if group.decided is None else [group.decided]
        if not group.search.is_over:
            self._service.backlog.learn(group.search.state.position, lesson)
            words.append(group.search.close(reason))
        if engine is not None:
            engine.core.beams.end(group)
        self._service.observer.left(live.sequences[0], reason)
        live.suspend()
        return encode_beams(words) if reason is EndReason.TIMEOUT else b""

    def _log(self, engine: Engine, group: BeamGroup, event: BeamEvent) -> None:
        self._service.background.spawn(self._log_then_go_on(engine, group, event))

    async def _log_then_go_on(self, engine: Engine, group: BeamGroup, event: BeamEvent) -> None:
        service, record = self._service, group.record
        # Sent again it counts for nothing, since the state it follows is over.
        await insist(lambda: service.streams.append_log(record.id.log, encode_beams([event])))
        live = service.live.get(record.id)
        if live is None or live.beams is not group:
            # The attempt is over: whoever goes on reads the log.
            return
        if event.end:
            service.observer.left(live.sequences[0], event.end)
            engine.core.beams.end(group)
            for choice in sorted(live.open - live.ending):
                service.close(record.id, choice)
        else:
            engine.core.beams.logged(group)
        service.pump(engine)

"""Resuming is one path (rule L11): after a takeover, a lost executor or a new epoch.

Fence every choice under a new attempt, then read the log up to one's own fence: the fold there is where the new attempt
starts. Whatever an earlier attempt appends after the fence counts for nothing.

A beam search is one thing: the first of the request's fences that counts is for all its choices, and the search goes on from
its state there. The other fences stand in the same entry of the log, so nothing comes between.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from redis.exceptions import RedisError

from octavo_scheduler.live import LiveRequest
from octavo_shared.entries import encode_fences
from octavo_shared.fold import ChoiceFold, FenceEvent, LogFold
from octavo_shared.fold_beams import BeamFold
from octavo_shared.ids import Attempt
from octavo_shared.streams import Streams


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request whose choices have been fenced: outputs so far per open choice, and choices that had ended before.

    ``beams`` is the state of its beam search, for the new attempt to go on with; None when it is not one or no step of it is
    in the log.
    """

    live: LiveRequest
    outputs: dict[int, list[int]]
    ended: tuple[int, ...]
    beams: BeamFold | None = None
    # The term of a greater attempt than one's own that is current at one's own fence.
    outranked_by: int = 0


class FencesLostError(RedisError):
    """Redis was restarted and has forgotten fences before they were read.

    Whoever has seen them may say so again, together with tokens that the new attempt would not start from: it is void.
    """


async def fence_and_read(streams: Streams, lives: list[LiveRequest], term: int) -> list[Resumption]:
    """Give every open choice of ``lives`` a new attempt of ``term`` and find out where it starts.

    Choices whose end is on its way into the log are left alone: a fence that overtook it would void it.

    Raises:
        redis.exceptions.RedisError: the log is out of reach; nothing has been decided, call again.
        FencesLostError: the same, and Redis has forgotten the fences.
    """
    by_log: dict[str, list[LiveRequest]] = defaultdict(list)
    running = {live.record.id: sorted(live.open - live.ending) for live in lives}
    for live in lives:
        live.attempt_n += 1
        if running[live.record.id]:
            by_log[live.record.id.log].append(live)
    resumed: list[Resumption] = []
    for log, members in by_log.items():
        fences = [
            FenceEvent(live.record.id.serial, choice, Attempt(term, live.attempt_n))
            for live in members
            for choice in running[live.record.id]
        ]
        await streams.append_log(log, encode_fences(fences))
        states, searches = await _read_to_fences(streams, log, fences)
        for live in members:
            mine = {choice: states[live.record.id.serial, choice] for choice in running[live.record.id]}
            ended = tuple(choice for choice, state in mine.items() if state.end)
            outputs = {choice: list(state.tokens) for choice, state in mine.items() if not state.end}
            own = Attempt(term, live.attempt_n)
            greater = max(
                (state.attempt.term for state in mine.values() if not state.end and state.attempt > own), default=0
            )
            resumed.append(Resumption(live, outputs, ended, searches.get(live.record.id.serial), greater))
    return resumed


async def _read_to_fences(
    streams: Streams, log: str, fences: list[FenceEvent]
) -> tuple[dict[tuple[int, int], ChoiceFold], dict[int, BeamFold]]:
    """The fold of each choice at its own fence, and beam searches that go on there by serial.

    Raises:
        FencesLostError: they are not in the log any more.
    """
    awaited = {(fence.serial, fence.choice): fence.attempt for fence in fences}
    fold = LogFold()
    states: dict[tuple[int, int], ChoiceFold] = {}
    searches: dict[int, BeamFold] = {}
    after = "0"
    while awaited:
        page = await streams.read_log(log, after)
        if page.last_id == after:
            # The gateway has trimmed them away meanwhile: they are part of its snapshot, which has been read.
            if lost := [key for key, own in awaited.items() if fold.get(*key).attempt < own and not fold.get(*key).end]:
                raise FencesLostError(f"{len(lost)} fences are not in log {log} any more")
            states.update({key: fold.get(*key) for key in awaited})
            searches.update({serial: fold.beams[serial] for serial, _ in awaited if serial in fold.beams})
            break
        after = page.last_id
        for event in page.events:
            fold.apply(event)
            if not isinstance(event, FenceEvent) or awaited.get(key := (event.serial, event.choice)) != event.attempt:
                continue
            del awaited[key]
            states[key] = fold.get(*key)
            search = fold.beams.get(event.serial)
            if search is not None:
                searches[event.serial] = search
    attempts = {fence.serial: fence.attempt for fence in fences}
    # Another attempt's: a scheduler of a later term has been faster, and nothing that is said here will count.
    return states, {serial: search for serial, search in searches.items() if search.attempt == attempts[serial]}

"""Reconnecting: the rest of a stream, or a whole answer once more, from whichever gateway the client asks (rules L4, L7, L8)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from octavo_gateway.admission import Submission
from octavo_gateway.answer import Answer
from octavo_gateway.errors import bad_request, idempotency_conflict, stream_not_found, unavailable
from octavo_gateway.event_ids import Position, parse_event_id
from octavo_gateway.keys import Caller
from octavo_gateway.rates import Charge
from octavo_gateway.slot import read_note
from octavo_gateway.watcher import Watcher
from octavo_shared.fold import LogFold
from octavo_shared.ids import RequestId
from octavo_shared.streams import Standing

if TYPE_CHECKING:
    from octavo_gateway.gateway import Gateway

LOOK_UP_TIMEOUT_S = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


def position_of(request: Request) -> Position | None:
    """What ``Last-Event-ID`` says, if it is there.

    Raises:
        ApiError: 400 for an id that no gateway has given.
    """
    text = request.headers.get("last-event-id", "")
    if not text:
        return None
    try:
        return parse_event_id(text)
    except ValueError as error:
        raise bad_request(
            f"Last-Event-ID is not an id of an event of this server: {error}.", "Last-Event-ID"
        ) from error


def stream_of(name: str) -> RequestId:
    """The stream that a client names: the ``id`` of its answer, with or without the prefix.

    Raises:
        ApiError: 404 when that cannot be one.
    """
    try:
        return RequestId.parse(name.removeprefix("chatcmpl-").removeprefix("cmpl-"))
    except ValueError:
        raise stream_not_found() from None


async def resume(
    gateway: Gateway,
    request: Request,
    stream: RequestId,
    position: Position | None,
    arrival_s: float,
    fingerprint: str = "",
) -> Response:
    """The answer of a stream from ``position`` on. ``fingerprint``: it is to be the answer to that very request.

    Raises:
        ApiError: 404 when the caller has no such stream (any more), 422 when it answers another request, 503 when Redis
            cannot be reached.
    """
    caller: Caller = request.scope["octavo.caller"]
    standings = await _find(gateway, caller, stream)
    records = tuple(standing.record for standing in standings)
    presentation, _ = read_note(records[0])
    if fingerprint and presentation.fingerprint != fingerprint:
        raise idempotency_conflict()
    if position is not None and position.stream != stream:
        raise bad_request("Last-Event-ID belongs to another stream.", "Last-Event-ID")
    if position is not None and position.done:
        # To an EventSource this says: do not come again.
        return Response(status_code=204)
    watcher = Watcher(tuple(record.id for record in records), records[0].n)
    watcher.records = records
    _watch(gateway, watcher, standings)
    await _follow(gateway, watcher, standings)
    submission = Submission(records, watcher, 0, Charge(caller))
    return Answer(
        gateway,
        submission,
        presentation,
        arrival_s=arrival_s,
        echo_texts=[read_note(record)[1] for record in records],
        span=request.scope.get("octavo.span"),
        position=position or Position(stream, ()),
        is_copy=position is None,
    )


async def _find(gateway: Gateway, caller: Caller, stream: RequestId) -> list[Standing]:
    (first,) = await _ask(gateway.streams.look_up([stream]))
    # What belongs to others is as good as not there.
    if first is None or first.record.tenant != caller.tenant or first.record.place != 0:
        raise stream_not_found()
    others = await _ask(gateway.streams.look_up(first.record.siblings[1:])) if first.record.places > 1 else []
    found = [first, *(one for one in others if one is not None)]
    if len(found) < first.record.places:
        raise stream_not_found()
    return found


async def _follow(gateway: Gateway, watcher: Watcher, standings: Sequence[Standing]) -> None:
    """Let everybody know that what has not ended is followed here: it goes on when the others leave."""
    owed = [standing.record.id for standing in standings if standing.is_owed]
    # A Redis that has lost its memory may have forgotten the generations that it gave last; the clock is ahead of them.
    at_least = max(int(time.time()), *(standing.followers.generation + 1 for standing in standings))
    watcher.generation = max(watcher.generation, at_least)
    try:
        generation = await _ask(gateway.streams.follow(owed, gateway.reader.incarnation, at_least=at_least))
    except BaseException:
        # It may have been heard all the same.
        gateway.leave(watcher, owed, "disconnect")
        raise
    watcher.generation = max(watcher.generation, generation)


def _watch(gateway: Gateway, watcher: Watcher, standings: Sequence[Standing]) -> None:
    if not all(standing.end for standing in standings):
        if watcher.ids[0].log == gateway.reader.incarnation:
            gateway.reader.follow(watcher)
        else:
            gateway.foreign_logs.follow(watcher)
    # What is no longer in the log is found with the requests.
    ended = LogFold().apply_all(event for standing in standings for event in standing.end)
    for (serial, index), choice in ended.choices.items():
        watcher.changed(serial, index, choice)


async def find_idempotent(gateway: Gateway, caller: Caller, key: str) -> RequestId | None:
    """The stream that a tenant's idempotency key already stands for."""
    return await _ask(gateway.streams.idempotent(caller.tenant, key)) if key else None


async def _ask(question: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            return await question
    except (RedisError, OSError, TimeoutError) as error:
        logger.warning("a stream cannot be looked up: %r", error)
        raise unavailable("The stream cannot be looked up: Redis cannot be reached.") from error

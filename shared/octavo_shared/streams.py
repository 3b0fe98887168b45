"""Redis as the durable log: every operation the services do on it.

Streams of a model (all keys carry the model as hash tag, so scripts stay within one cluster slot):

* ``requests``: the model stream, read by the scheduler through the consumer group. An entry stays pending until every
  choice of the request has its end in the log; then it is acknowledged and deleted, singly (rules L5, L6).
* ``aborts``: what nobody wants any more, and who has come to follow what; entries are deleted once acted on (rule L7).
* ``log:<gateway incarnation>``: the tokens and ends of that gateway's requests, trimmed only by its owner (rule L5).

``request:<id>`` are hashes (see ``octavo_shared.scripts``), ``control`` and ``control:<ask id>`` are lists (see
``octavo_shared.control``), ``rate:<key>`` are hashes as well (see ``octavo_shared.buckets``).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from octavo_shared import scripts
from octavo_shared.connections import connect, stay_in
from octavo_shared.entries import (
    MalformedEntryError,
    decode_abort,
    decode_entry,
    decode_request,
    encode_abort,
    encode_request,
)
from octavo_shared.fold import LogEvent
from octavo_shared.ids import RequestId
from octavo_shared.keys import Keys
from octavo_shared.records import ANY_GENERATION, AbortRecord, ModelLimits, RequestRecord

logger = logging.getLogger(__name__)

GROUP = "scheduler"
FIELD = b"e"
_FOLLOWERS = re.compile(rb"(\d{1,10})((?: [^ ]+=\d{1,10})*)")


@dataclass(frozen=True, slots=True)
class LogPage:
    """Part of a log: events in order, and the entry id to read on from."""

    events: list[LogEvent]
    last_id: str
    # Entries that could not be read; they count for nothing.
    malformed: int = 0


@dataclass(frozen=True, slots=True)
class Followers:
    """Whose clients follow a request, or may still come back to it."""

    # The last that was given: every reconnect is given a greater one.
    generation: int
    # For each gateway the last one of its clients.
    gateways: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """What Redis knows of a request: its record, who follows it, and its end once that is no longer in the log."""

    record: RequestRecord
    followers: Followers
    # Its choices as they were when all had ended; empty while that is to be read from the log.
    end: tuple[LogEvent, ...]
    # It has not been acknowledged yet.
    is_owed: bool


class NoGroupError(RuntimeError):
    """The model stream has no consumer group (any more)."""


class Streams:
    """The log of one model, over one asyncio Redis client."""

    def __init__(self, client: redis.asyncio.Redis, model: str) -> None:
        self.client = client
        self.keys = Keys(model)
        self._admit = client.register_script(scripts.ADMIT)
        self._readmit = client.register_script(scripts.READMIT)
        self._finish = client.register_script(scripts.FINISH)
        self._look_up = client.register_script(scripts.LOOK_UP)
        self._follow = client.register_script(scripts.FOLLOW)
        self._leave = client.register_script(scripts.LEAVE)
        self._clear = client.register_script(scripts.CLEAR)
        self._trim = client.register_script(scripts.TRIM)
        self._next_term = client.register_script(scripts.NEXT_TERM)
        self._take = client.register_script(scripts.TAKE)
        self._renew = client.register_script(scripts.RENEW)
        self._release = client.register_script(scripts.RELEASE)

    @classmethod
    def connect(cls, url: str, model: str) -> Streams:
        """A client of its own for ``url``; nothing is sent yet."""
        return cls(connect(url), model)

    async def close(self) -> None:
        """Give the connections back."""
        await self.client.aclose()

    # --- requests ---

    async def run_id(self) -> str:
        """Which life of the Redis server this is. Another one may have lost what the append-only file had not got yet."""
        info: Any = await self.client.info("server")
        return str(info["run_id"])

    def stay_in(self, run_id: str) -> None:
        """From now on everything raises OtherLifeError in another life of Redis than this one; "" = in none."""
        stay_in(self.client, run_id)

    async def admit(self, *records: RequestRecord) -> RequestId:
        """Append the requests of one answer, all of them at once; one whose id is taken is left as it is.

        If they have an idempotency key and that is taken, nothing is appended at all. Returns the first id of the answer that
        holds the key: the one that is given, or the one that was faster.
        """
        first = records[0]
        keys = [self.keys.requests, *(self.keys.request(record.id) for record in records), *self._idempotency(first)]
        holder = await self._admit(keys=keys, args=[len(records), str(first.id), *map(encode_request, records)])
        return RequestId.parse(holder.decode())

    async def readmit(self, record: RequestRecord, snapshot: bytes = b"") -> bool:
        """After a changed run id (rule L9): append a request again if Redis has lost it; True when it had.

        ``snapshot`` is an encoded entry with what was delivered of it; it goes into the request's log either way, before the
        scheduler can see the request. ``record`` must say that it is ``readmitted``.
        """
        assert record.readmitted, "the scheduler would start it without looking at its log"
        keys = [
            self.keys.requests,
            self.keys.request(record.id),
            self.keys.log(record.id.log),
            *self._idempotency(record),
        ]
        return bool(await self._readmit(keys=keys, args=[encode_request(record), snapshot, str(record.siblings[0])]))

    def _idempotency(self, record: RequestRecord) -> list[str]:
        return [self.keys.idempotency(record.tenant, record.idempotency_key)] if record.idempotency_key else []

    async def idempotent(self, tenant: str, key: str) -> RequestId | None:
        """The first id of the answer that holds an idempotency key; None when nobody does."""
        holder: Any = await self.client.get(self.keys.idempotency(tenant, key))
        return RequestId.parse(holder.decode()) if holder else None

    async def look_up(self, request_ids: Sequence[RequestId]) -> list[Standing | None]:
        """What is known of each request; None for what has never been admitted, or is no longer kept."""
        async with self.client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                await self._look_up(keys=[self.keys.requests, self.keys.request(request_id)], client=pipe)
            return [_standing(reply) for reply in await pipe.execute()]

    async def follow(self, request_ids: Sequence[RequestId], gateway: str, *, at_least: int = 0, own: int = 0) -> int:
        """A client of ``gateway`` follows an answer's requests from now on: the others' leaving does not end them any more.

        Returns its generation, greater than every one before and not below ``at_least``. With ``own`` a gateway says again, to
        a Redis that may have forgotten it, that its clients follow under that one; what was said without knowing of them
        counts no more.
        """
        generation = max(at_least, 1)
        keys = [self.keys.aborts, *map(self.keys.request, request_ids)]
        while request_ids:
            news = [
                encode_abort(AbortRecord(one, -1, generation, "followed", new_owner=gateway)) for one in request_ids
            ]
            names = (gateway, request_ids[0].log)
            last = int(await self._follow(keys=keys, args=[generation, own or generation, *names, *news]))
            if not last:
                break
            generation = last + 1
        return generation

    async def create_group(self) -> None:
        """Make the consumer group (and the stream) if they are not there."""
        try:
            await self.client.xgroup_create(self.keys.requests, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read_requests(self, consumer: str, *, count: int, block_ms: int) -> list[tuple[bytes, bytes]]:
        """New entries of the model stream as (entry id, payload); they are pending from now on.

        Raises:
            NoGroupError: the stream or its consumer group has been deleted; ``create_group`` makes both.
        """
        try:
            reply = await self.client.xreadgroup(
                GROUP, consumer, {self.keys.requests: ">"}, count=count, block=block_ms
            )
        except ResponseError as error:
            # Valkey says UNBLOCKED to a read that waits while the stream goes away.
            if str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise NoGroupError(str(error)) from error
            raise
        return _entries(reply)

    async def newest_request(self) -> bytes:
        """The id of the newest entry that the model stream ever had."""
        info: Any = await self.client.xinfo_stream(self.keys.requests)
        return bytes(info["last-generated-id"])

    async def num_requests(self) -> int:
        """Entries of the model stream: requests that are owed an end."""
        return int(await self.client.xlen(self.keys.requests))

    async def num_pending(self) -> int:
        """Entries of the model stream that have been read and are not acknowledged yet."""
        return int((await self.client.xpending(self.keys.requests, GROUP))["pending"])

    async def claim_pending(self, consumer: str) -> list[tuple[bytes, bytes]]:
        """Take over every pending entry, whoever had it (only for the holder of a fresh lease)."""
        entries: list[tuple[bytes, bytes]] = []
        cursor: bytes | str = "0-0"
        while True:
            reply = await self.client.xautoclaim(self.keys.requests, GROUP, consumer, 0, cursor, count=256)
            entries += [(entry_id, fields.get(FIELD, b"")) for entry_id, fields in reply[1] if fields]
            cursor = reply[0]
            if cursor in (b"0-0", "0-0"):
                return entries

    async def finish_request(self, entry_id: bytes, record: RequestRecord | None, holder: str = "") -> bool:
        """Acknowledge and delete an entry whose every choice has its end in the log.

        With ``holder`` only while that one holds the scheduler's lease; False when not: who has been replaced unawares may
        have logged an end that counts for nothing. Once every request of an answer is acknowledged, they and the idempotency
        key that names them are kept for as long as their records say.
        """
        keys = [self.keys.requests, self.keys.lease]
        args: list[str | bytes | int] = [GROUP, entry_id, holder]
        if record is not None:
            siblings = record.siblings
            keys += [*map(self.keys.request, siblings), *self._idempotency(record)]
            args += [len(siblings), record.place + 1, record.resume_ttl_ms, str(siblings[0])]
        return bool(await self._finish(keys=keys, args=args))

    async def unfinished(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """For each request whether it is still to be acknowledged."""
        return [entry is not None for entry in await self._fields(request_ids, "entry")]

    async def followers(self, request_ids: Sequence[RequestId]) -> list[Followers]:
        """For each request who follows it."""
        known = await self._fields(request_ids, "followers")
        return [_followers(value, one.log) for value, one in zip(known, request_ids, strict=True)]

    async def _fields(self, request_ids: Sequence[RequestId], name: str) -> list[bytes | None]:
        if not request_ids:
            return []
        async with self.client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.hget(self.keys.request(request_id), name)
            found: list[Any] = await pipe.execute(raise_on_error=False)
        for at, value in enumerate(found):
            if isinstance(value, ResponseError) and str(value).startswith("WRONGTYPE"):
                # Not ours, and it says nothing: of one request, not of all that are asked for.
                found[at] = None
            elif isinstance(value, Exception):
                raise value
        return found

    # --- aborts ---

    async def append_abort(self, record: AbortRecord) -> None:
        """Say that a choice is no longer wanted, whoever follows it."""
        await self.client.xadd(self.keys.aborts, {FIELD: encode_abort(record)})

    async def leave(self, record: AbortRecord, gateway: str) -> bool:
        """No client of ``gateway`` up to the record's generation follows a request any more, nor may come back.

        If nobody else does, the abort is appended. False: somebody does.
        """
        keys = [self.keys.aborts, self.keys.request(record.request_id)]
        generation, said = record.owner_generation, record
        while True:
            names = (gateway, record.request_id.log)
            last = int(
                await self._leave(keys=keys, args=[generation, *names, encode_abort(said), said.owner_generation])
            )
            if last <= 0:
                return last == 0
            # Clients of other gateways had come later, and have gone before.
            said = replace(record, owner_generation=last)

    async def read_aborts(self, after: bytes | str, *, block_ms: int) -> list[tuple[bytes, AbortRecord | None]]:
        """Aborts after an entry id; None stands for one that cannot be read."""
        reply = await self.client.xread({self.keys.aborts: after}, count=256, block=block_ms)
        return [(entry_id, _decode_abort(payload)) for entry_id, payload in _entries(reply)]

    async def delete_aborts(self, entry_ids: Sequence[bytes]) -> None:
        """Aborts that have been acted on go."""
        if entry_ids:
            await self.client.xdel(self.keys.aborts, *entry_ids)

    # --- logs ---

    async def append_log(self, log: str, entry: bytes) -> None:
        """Append an encoded entry to a log."""
        await self._on_log(log, lambda key: self.client.xadd(key, {FIELD: entry}))

    async def log_length(self, log: str) -> int:
        """Entries of a log."""
        return int(await self._on_log(log, self.client.xlen))

    async def _on_log(self, log: str, operation: Callable[[str], Awaitable[Any]]) -> Any:
        """Do something with a log; if what stands in its place is no stream, without that.

        It cannot be ours, and while it stands there nobody's tokens get past it (rule L3).
        """
        key = self.keys.log(log)
        try:
            return await operation(key)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            if await self._clear(keys=[key]):
                logger.error("what stood in the place of log %s was no stream; it is gone", log)
            return await operation(key)

    async def read_log(self, log: str, after: str, *, block_ms: int | None = None, count: int = 256) -> LogPage:
        """Events after an entry id; waits up to ``block_ms`` for the first one (None: not at all)."""
        reply = await self._on_log(log, lambda key: self.client.xread({key: after}, count=count, block=block_ms))
        events: list[LogEvent] = []
        malformed = 0
        for entry_id, payload in _entries(reply):
            after = entry_id.decode()
            try:
                events += decode_entry(payload)
            except MalformedEntryError:
                malformed += 1
        return LogPage(events, after, malformed)

    async def trim_log(
        self, log: str, last_id: str, snapshot: bytes, ends: Mapping[RequestId, bytes] | None = None
    ) -> str:
        """Put a snapshot in place of everything up to ``last_id``; what came after that stands behind it again.

        ``ends`` are the final states, as entries, of requests that the snapshot leaves out: they are kept with the request for
        as long as that is. Returns the snapshot's id, or ``last_id`` when it is empty: where to read on.
        """
        ends = ends or {}
        keys = [self.keys.log(log), *map(self.keys.request, ends)]
        at = await self._trim(keys=keys, args=[last_id, snapshot, *ends.values()])
        return at.decode() or last_id

    async def delete_log(self, log: str) -> None:
        """Forget a log none of whose requests is unfinished."""
        await self.client.delete(self.keys.log(log))

    async def log_names(self) -> set[str]:
        """The gateway incarnations of all logs there are."""
        prefix = self.keys.log("")
        found = self.client.scan_iter(match=_literal(prefix) + "*", count=1000)
        return {key.decode().removeprefix(prefix) async for key in found}

    async def living_gateways(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` whose lease has not run out."""
        if not names:
            return set()
        leases = await self.client.mget([self.keys.gateway(name) for name in names])
        return {name for name, lease in zip(names, leases, strict=True) if lease is not None}

    # --- leases and what is published ---

    async def take_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        """Take a lease if it is free, or ours already."""
        return bool(await self._take(keys=[key], args=[holder, int(ttl_s * 1000)]))

    async def renew_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        """Keep a lease; False when it is no longer ours."""
        return bool(await self._renew(keys=[key], args=[holder, int(ttl_s * 1000)]))

    async def release_lease(self, key: str, holder: str) -> None:
        """Give a lease up, if it is still ours."""
        await self._release(keys=[key], args=[holder])

    async def next_term(self, at_least: int = 0) -> int:
        """A term greater than every one before, and than ``at_least``."""
        return int(await self._next_term(keys=[self.keys.term, self.keys.life], args=[at_least]))

    async def last_life(self) -> str:
        """The life of Redis (a run id) in which the last term was given; empty before the first one."""
        life: Any = await self.client.get(self.keys.life)
        return life.decode() if life else ""

    async def publish_limits(self, limits: ModelLimits) -> None:
        """Tell gateways what can be served."""
        await self.client.set(self.keys.limits, json.dumps(asdict(limits) | {"written_s": time.time()}))

    async def read_limits(self) -> ModelLimits | None:
        """What the scheduler last published; None before the first time."""
        data = await self.client.get(self.keys.limits)
        if data is None:
            return None
        published = json.loads(data)
        # A newer scheduler may say more than is understood here.
        known = {one.name: published[one.name] for one in fields(ModelLimits) if one.name in published}
        return ModelLimits(**{**known, "expected_outputs": tuple(known.get("expected_outputs", ()))})

    async def publish_metrics(self, service: str, exposition: bytes) -> None:
        """A service's metrics in Prometheus' text format, for gateways to serve."""
        await self.client.hset(self.keys.metrics, service, exposition)

    async def let_published_expire(self, service: str, after_s: float = 5.0) -> None:
        """A scheduler leaves: its metrics go, what it said of limits is forgotten unless another one says it again."""
        await self.client.pexpire(self.keys.limits, int(after_s * 1000))
        await self.client.hdel(self.keys.metrics, service)

    async def read_metrics(self) -> dict[bytes, bytes]:
        """Every service's metrics."""
        reply: Any = await self.client.hgetall(self.keys.metrics)
        return dict(reply)


def _literal(text: str) -> str:
    """``text`` as a Redis glob pattern that matches nothing else."""
    return "".join("\\" + letter if letter in "*?[]^-\\" else letter for letter in text)


def _entries(reply: Any) -> list[tuple[bytes, bytes]]:
    """(entry id, payload) of the first stream in an XREAD reply, in RESP2's or RESP3's shape."""
    if not reply:
        return []
    if isinstance(reply, dict):
        batches = next(iter(reply.values()))
        entries = (
            [entry for batch in batches for entry in batch] if batches and isinstance(batches[0], list) else batches
        )
    else:
        entries = reply[0][1]
    return [(entry_id, (fields or {}).get(FIELD, b"")) for entry_id, fields in entries]


def _followers(value: bytes | None, log: str) -> Followers:
    """What the field says; of one that no script has written as much as if it were not there."""
    match = _FOLLOWERS.fullmatch(value or b"")
    if match is None or int(match[1]) >= ANY_GENERATION:
        return Followers(0, {log: 0})
    pairs = (gateway.rsplit(b"=", 1) for gateway in match[2].split())
    return Followers(int(match[1]), {name.decode(errors="replace"): int(own) for name, own in pairs})


def _standing(reply: Any) -> Standing | None:
    payload, followers, end, owed = reply
    if not payload:
        return None
    try:
        record = decode_request(payload)
        known = _followers(followers, record.id.log)
        return Standing(record, known, tuple(decode_entry(end)) if end else (), bool(owed))
    except (MalformedEntryError, ValueError):
        return None


def _decode_abort(payload: bytes) -> AbortRecord | None:
    try:
        return decode_abort(payload)
    except MalformedEntryError:
        return None

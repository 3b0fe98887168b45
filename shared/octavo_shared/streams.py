"""Redis as the durable log: key names, and every operation the services do on streams.

Streams of a model (all keys carry the model as hash tag, so scripts stay within one cluster slot):

* ``requests``: the model stream, read by the scheduler through the consumer group. An entry stays pending until every
  choice of the request has its end in the log; then it is acknowledged and deleted, singly (rules L5, L6).
* ``aborts``: who no longer wants what; entries are deleted once acted on (rule L7).
* ``log:<gateway incarnation>``: the tokens and ends of that gateway's requests, trimmed only by its owner (rule L5).

``control`` and ``control:<ask id>`` are lists (see ``octavo_shared.control``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from octavo_shared.entries import MalformedEntryError, decode_abort, decode_entry, encode_abort, encode_request
from octavo_shared.fold import LogEvent
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord, ModelLimits, RequestRecord

GROUP = "scheduler"
FIELD = b"e"
# Of one process. Hundreds of requests may begin or end in the same moment; this many are on their way at once.
MAX_CONNECTIONS = 64
IDEMPOTENCY_TTL_S = 24 * 3600

# Set-if-absent on the request id and, when given, on the tenant's idempotency key; only then the append (rule L6).
# Returns the id that holds the place: the new one's, or the one that came first.
_ADMIT = """
if KEYS[3] then
  local first = redis.call('GET', KEYS[3])
  if first then return first end
end
if not redis.call('SET', KEYS[2], '', 'NX') then return ARGV[1] end
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[3]) end
redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
return ARGV[1]
"""

# A request that Redis may have lost, with what its gateway has delivered of it. Returns whether it had been lost.
_READMIT = """
local lost = redis.call('SET', KEYS[2], '', 'NX')
if ARGV[2] ~= '' then redis.call('XADD', KEYS[3], '*', 'e', ARGV[2]) end
if not lost then return 0 end
redis.call('XADD', KEYS[1], '*', 'e', ARGV[1])
return 1
"""

# Acknowledge and delete an entry, unless somebody else holds the scheduler's lease by now.
_FINISH = """
if ARGV[3] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if KEYS[3] then redis.call('DEL', KEYS[3]) end
return 1
"""

# Trim a log behind a snapshot, unless entries arrived that the snapshot does not know of. An empty snapshot only trims.
_TRIM = """
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #newest == 0 or newest[1][1] ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then
  local at = redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
  redis.call('XTRIM', KEYS[1], 'MINID', '=', at)
else
  local time, sequence = string.match(ARGV[1], '(%d+)-(%d+)')
  redis.call('XTRIM', KEYS[1], 'MINID', '=', time .. '-' .. (tonumber(sequence) + 1))
end
return 1
"""

# Atomic, so that two schedulers that ask at once never get the same term.
_NEXT_TERM = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return redis.call('INCR', KEYS[1])
"""

# Take a lease that is free or one's own already: the answer to an earlier try may have been lost.
_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# Renew or release a lease, but only one's own.
_RENEW = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) else return 0 end"
)
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end"


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of everything Octavo keeps in Redis for one model."""

    model: str

    def _key(self, *parts: str) -> str:
        return ":".join(("octavo", "{" + self.model + "}", *parts))

    @property
    def requests(self) -> str:
        return self._key("requests")

    @property
    def aborts(self) -> str:
        return self._key("aborts")

    @property
    def term(self) -> str:
        return self._key("term")

    @property
    def lease(self) -> str:
        return self._key("lease")

    @property
    def limits(self) -> str:
        return self._key("limits")

    @property
    def metrics(self) -> str:
        return self._key("metrics")

    @property
    def control(self) -> str:
        return self._key("control")

    def answer(self, ask_id: str) -> str:
        return self._key("control", ask_id)

    def log(self, name: str) -> str:
        return self._key("log", name)

    def gateway(self, name: str) -> str:
        return self._key("gateway", name)

    def request(self, request_id: RequestId) -> str:
        return self._key("request", str(request_id))

    def idempotency(self, tenant: str, key: str) -> str:
        # The tenant's length first: no other tenant can choose a key that spells the same name.
        return self._key("idempotency", str(len(tenant)), tenant, key)


@dataclass(frozen=True, slots=True)
class LogPage:
    """Part of a log: events in order, and the entry id to read on from."""

    events: list[LogEvent]
    last_id: str
    # Entries that could not be read; they count for nothing.
    malformed: int = 0


class NoGroupError(RuntimeError):
    """The model stream has no consumer group (any more)."""


class _PatientPool(redis.asyncio.BlockingConnectionPool):
    """Connections for whoever comes first. When all are busy one waits; the plain pool raises as if Redis were away."""

    async def release(self, connection: AbstractConnection) -> None:
        # A release that is cancelled half-way would never give the connection back.
        await asyncio.shield(super().release(connection))


class Streams:
    """The log of one model, over one asyncio Redis client."""

    def __init__(self, client: redis.asyncio.Redis, model: str) -> None:
        self.client = client
        self.keys = Keys(model)
        self._admit = client.register_script(_ADMIT)
        self._readmit = client.register_script(_READMIT)
        self._finish = client.register_script(_FINISH)
        self._trim = client.register_script(_TRIM)
        self._next_term = client.register_script(_NEXT_TERM)
        self._take = client.register_script(_TAKE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)

    @classmethod
    def connect(cls, url: str, model: str) -> Streams:
        """A client of its own for ``url``; nothing is sent yet."""
        # The handshake for maintenance notifications (a hosted-Redis feature) swallows cancellations.
        quiet = MaintNotificationsConfig(enabled=False)
        # A connection over a unix socket refuses this option outright.
        keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
        pool = _PatientPool.from_url(
            url, max_connections=MAX_CONNECTIONS, maint_notifications_config=quiet, **keepalive
        )
        return cls(redis.asyncio.Redis.from_pool(pool), model)

    async def close(self) -> None:
        """Give the connections back."""
        await self.client.aclose()

    # --- requests ---

    async def admit(self, record: RequestRecord) -> RequestId:
        """Append a request unless its id or idempotency key is taken; returns the id that holds the place."""
        keys = [self.keys.requests, self.keys.request(record.id)]
        if record.idempotency_key:
            keys.append(self.keys.idempotency(record.tenant, record.idempotency_key))
        holder = await self._admit(
            keys=keys,
            args=[str(record.id), encode_request(record), IDEMPOTENCY_TTL_S],
        )
        return RequestId.parse(holder.decode())

    async def readmit(self, record: RequestRecord, snapshot: bytes = b"") -> bool:
        """After a changed run id (rule L9): append a request again if Redis has lost it; True when it had.

        ``snapshot`` is an encoded entry with what was delivered of it; it goes into the request's log either way, before the
        scheduler can see the request. ``record`` must say that it is ``readmitted``.
        """
        assert record.readmitted, "the scheduler would start it without looking at its log"
        keys = [self.keys.requests, self.keys.request(record.id), self.keys.log(record.id.log)]
        return bool(await self._readmit(keys=keys, args=[encode_request(record), snapshot]))

    async def run_id(self) -> str:
        """Which life of the Redis server this is. Another one may have lost what the append-only file had not got yet."""
        info: Any = await self.client.info("server")
        return str(info["run_id"])

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

    async def finish_request(self, entry_id: bytes, request_id: RequestId | None, holder: str = "") -> bool:
        """Acknowledge and delete an entry whose every choice has its end in the log.

        With ``holder`` only while that one holds the scheduler's lease; False when it does not. Who has been replaced unawares
        may have logged an end that counts for nothing.
        """
        keys = [self.keys.requests, self.keys.lease]
        if request_id is not None:
            keys.append(self.keys.request(request_id))
        return bool(await self._finish(keys=keys, args=[GROUP, entry_id, holder]))

    async def unfinished(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """For each request whether it is still to be acknowledged."""
        if not request_ids:
            return []
        async with self.client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.exists(self.keys.request(request_id))
            return [bool(answer) for answer in await pipe.execute()]

    # --- aborts ---

    async def append_abort(self, record: AbortRecord) -> None:
        """Say that a choice is no longer wanted."""
        await self.client.xadd(self.keys.aborts, {FIELD: encode_abort(record)})

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
        await self.client.xadd(self.keys.log(log), {FIELD: entry})

    async def read_log(self, log: str, after: str, *, block_ms: int | None = None, count: int = 256) -> LogPage:
        """Events after an entry id; waits up to ``block_ms`` for the first one (None: not at all)."""
        reply = await self.client.xread({self.keys.log(log): after}, count=count, block=block_ms)
        events: list[LogEvent] = []
        malformed = 0
        for entry_id, payload in _entries(reply):
            after = entry_id.decode()
            try:
                events += decode_entry(payload)
            except MalformedEntryError:
                malformed += 1
        return LogPage(events, after, malformed)

    async def trim_log(self, log: str, newest_id: str, snapshot: bytes) -> bool:
        """Replace everything up to ``newest_id`` by a snapshot; False when newer entries exist (try again later)."""
        return bool(await self._trim(keys=[self.keys.log(log)], args=[newest_id, snapshot]))

    async def delete_log(self, log: str) -> None:
        """Forget a log none of whose requests is unfinished."""
        await self.client.delete(self.keys.log(log))

    async def log_names(self) -> set[str]:
        """The gateway incarnations of all logs there are."""
        prefix = self.keys.log("")
        return {key.decode().removeprefix(prefix) async for key in self.client.scan_iter(match=_literal(prefix) + "*")}

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
        return int(await self._next_term(keys=[self.keys.term], args=[at_least]))

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


def _decode_abort(payload: bytes) -> AbortRecord | None:
    try:
        return decode_abort(payload)
    except MalformedEntryError:
        return None

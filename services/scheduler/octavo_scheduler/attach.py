"""The gRPC side: executors dial in, introduce themselves, and exchange plans for results on one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from octavo_scheduler.core.errors import OutOfStepError
from octavo_scheduler.engine import Engine
from octavo_scheduler.service import SchedulerService
from octavo_shared.entries import MalformedEntryError
from octavo_shared.ids import MOST_TERM
from octavo_shared.plan import PROTOCOL_VERSION, CacheOffer, ExecutorInfo, StepResult
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.proto import executor_pb2_grpc
from octavo_shared.tls import leaves_machine, may_attach
from octavo_shared.wire import (
    KEEPALIVE_OPTIONS,
    FromScheduler,
    Heartbeat,
    Logged,
    Refusal,
    Resync,
    Welcome,
    from_executor,
    to_executor,
)

logger = logging.getLogger(__name__)

_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)]
# Sizes beyond these are a fault of the executor: the scheduler's own tables would fill any machine.
_SIZES = {
    "num_device_blocks": (1, 1 << 24),
    "num_host_blocks": (0, 1 << 24),
    "block_size": (1, 1 << 16),
    "max_model_len": (1, 1 << 28),
    "max_num_seqs": (1, 1 << 16),
    "max_num_batched_tokens": (1, 1 << 28),
    "vocab_size": (1, 1 << 28),
    "run_ahead": (0, 64),
    "highest_term": (0, MOST_TERM),
}

# Of steps that it has measured: how many, and how long one may have lasted.
MOST_MEASURED = 64
LONGEST_S = 86_400.0
# Messages with what its pages hold that one executor may send; of 8,192 pages each that is more than any has.
MOST_OFFERS = 4096

Outgoing = asyncio.Queue[FromScheduler | None]


class AttachServicer(executor_pb2_grpc.SchedulerServicer):
    """One ``Attach`` call per executor, for as long as it lives."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    async def Attach(
        self, request_iterator: AsyncIterator[pb.ExecutorMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SchedulerMessage]:
        """Serve one executor: its messages are taken in by a task beside, plans are yielded from here."""
        if not may_attach(self._service.settings, context.invocation_metadata()):
            logger.warning("a caller from %s does not know the executors' secret; refused", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the executors' secret is missing or wrong")
        outgoing: Outgoing = asyncio.Queue()
        session = _Session(self._service, outgoing)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while (message := await outgoing.get()) is not None:
                yield to_executor(message)
            if session.let_go:
                # Said as the call's status: an executor that gets nowhere ends itself when it hears that (see Session).
                await context.abort(grpc.StatusCode.ABORTED, session.let_go)
        finally:
            reader.cancel()
            session.close("its connection ended")


class _Session:
    """What one executor says, and the engine of its current epoch."""

    def __init__(self, service: SchedulerService, outgoing: Outgoing) -> None:
        self._service = service
        self._outgoing = outgoing
        self._engine: Engine | None = None
        self._info: ExecutorInfo | None = None
        # What it said before it introduced itself of what its pages hold.
        self._offers: list[CacheOffer] = []
        # Why it was let go though it speaks; empty = it was not.
        self.let_go = ""

    async def read(self, messages: AsyncIterator[pb.ExecutorMessage]) -> None:
        """Take messages in until the executor hangs up; then end the call."""
        try:
            async for message in messages:
                self._take(message)
        except (MalformedEntryError, DecodeError) as error:
            self._outgoing.put_nowait(Refusal(f"cannot be understood: {error}"))
        except asyncio.CancelledError:
            raise
        except grpc.aio.BaseError as error:
            # Our own server is stopping.
            logger.debug("the line to an executor has ended: %s", error)
        except Exception:
            # One executor's fault ends its own line only: it attaches anew, and the others' requests go on.
            logger.exception("executor %s: its message could not be handled", self._info.name if self._info else "?")
        finally:
            self._outgoing.put_nowait(None)

    def close(self, why: str) -> None:
        """The executor is gone."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._service.detach(engine, f"left: {why}")

    def hang_up(self, why: str, *, stuck: bool = False) -> None:
        """The executor is as good as gone: end the call. If it lives it dials again; one that is ``stuck`` had better end."""
        self.let_go = why if stuck else ""
        self.close(why)
        self._outgoing.put_nowait(None)

    def _take(self, raw: pb.ExecutorMessage) -> None:
        message = from_executor(raw)
        if isinstance(message, ExecutorInfo):
            self._introduce(message)
            return
        engine = self._engine
        if isinstance(message, CacheOffer) and self._info is None and len(self._offers) < MOST_OFFERS:
            self._offers.append(message)
        if engine is None:
            return
        if isinstance(message, StepResult):
            if message.epoch != engine.core.epoch:
                return
            if message.failed:
                self._new_epoch(f"step {message.step} failed: {message.message}")
                return
            try:
                self._service.take_result(engine, message)
            except OutOfStepError as error:
                self._new_epoch(str(error))
                return
            if message.logged_step and self._engine is engine:
                self._service.take_logged(engine, Logged(message.epoch, message.logged_step))
        elif isinstance(message, Logged):
            if message.epoch == engine.core.epoch:
                self._service.take_logged(engine, message)
        elif isinstance(message, Heartbeat):
            self._service.take_heartbeat(engine, message)
        elif isinstance(message, Resync) and message.epoch in (0, engine.core.epoch):
            self._new_epoch(f"out of step: {message.reason}")

    def _introduce(self, info: ExecutorInfo) -> None:
        reason = self._refusal(info)
        if not reason and not self._service.outranks(info):
            # It dials again, and finds a greater term.
            self._outgoing.put_nowait(None)
            return
        if not reason:
            self._info = info
            try:
                self._begin()
                return
            except (ValueError, MemoryError) as error:
                # Its sizes and this scheduler's settings do not go together.
                reason = str(error)
        logger.error("executor %s refused: %s", info.name, reason)
        self._outgoing.put_nowait(Refusal(reason))
        self._outgoing.put_nowait(None)

    def _refusal(self, info: ExecutorInfo) -> str:
        model = self._service.settings.model_name
        if info.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {info.protocol}, this scheduler {PROTOCOL_VERSION}"
        if info.model != model:
            return f"it serves {info.model!r}, this scheduler {model!r}"
        if self._engine is not None:
            return "it has introduced itself before on this line"
        for name, (least, most) in _SIZES.items():
            if not least <= getattr(info, name) <= most:
                return f"its {name} must be from {least} to {most}, not {getattr(info, name)}"
        if len(info.measured) > MOST_MEASURED or not all(0 <= step.seconds <= LONGEST_S for step in info.measured):
            return f"of steps it may have measured {MOST_MEASURED}, each of up to {LONGEST_S:.0f} s"
        return ""

    def _begin(self) -> None:
        assert self._info is not None
        engine = self._service.attach(self._info, self._outgoing.put_nowait, self._new_epoch, self.hang_up)
        offers, self._offers = self._offers, []
        self._service.adopt(engine, offers)
        self._engine = engine
        self._outgoing.put_nowait(Welcome(engine.core.term, engine.core.epoch))
        self._service.ready(engine)

    def _new_epoch(self, why: str, *, blame: bool = True) -> None:
        """Start afresh with the same executor: its requests resume from the log. For ``blame`` see ``detach``."""
        if self._engine is None:
            return
        old, self._engine = self._engine, None
        self._service.detach(old, f"begins a new epoch: {why}", blame=blame)
        self._begin()


async def start_server(
    service: SchedulerService, address: str, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.aio.Server, int]:
    """Listen on ``host:port`` or ``unix:path``; returns the server and the port (0 for a socket).

    Raises:
        RuntimeError: the address cannot be listened on.
    """
    server = grpc.aio.server(options=[*_OPTIONS, *KEEPALIVE_OPTIONS])
    executor_pb2_grpc.add_SchedulerServicer_to_server(AttachServicer(service), server)
    if credentials is None:
        if leaves_machine(address):
            logger.warning("executors are spoken with in plain text on %s; see --grpc-ssl-certfile", address)
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    return server, port

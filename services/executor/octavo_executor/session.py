"""The gRPC side: dial the scheduler, introduce oneself, receive plans, send results; dial again when the line drops."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc

from octavo_shared.entries import MalformedEntryError
from octavo_shared.plan import ExecutorInfo, StepPlan
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.proto import executor_pb2_grpc
from octavo_shared.tls import Metadata
from octavo_shared.wire import (
    KEEPALIVE_OPTIONS,
    Farewell,
    FromExecutor,
    FromScheduler,
    Heartbeat,
    Refusal,
    Welcome,
    from_scheduler,
    to_scheduler,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    *KEEPALIVE_OPTIONS,
]


class RefusedError(RuntimeError):
    """The scheduler will not work with this executor; the message says why."""


class Session:
    """The line to the scheduler. Its thread reads; the executor's main thread takes what came with ``receive``."""

    def __init__(
        self,
        address: str,
        info: ExecutorInfo,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        """``metadata`` goes with every call; without ``credentials`` the line is plain text."""
        self._info = info
        self._metadata = metadata
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            # A socket's path is no name that a certificate could be for.
            name = [("grpc.ssl_target_name_override", "localhost")] if address.startswith("unix:") else []
            self._channel = grpc.secure_channel(address, credentials, options=[*_OPTIONS, *name])
        self._stub = executor_pb2_grpc.SchedulerStub(self._channel)
        self._incoming: queue.SimpleQueue[tuple[float, FromScheduler | None]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[FromExecutor | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.highest_term = info.highest_term
        # What heartbeats report.
        self.epoch = 0
        self.step = 0
        self._threads = [
            threading.Thread(target=self._dial, name="session", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def receive(self) -> tuple[float, Welcome | StepPlan | Farewell | None]:
        """The next message, with the time (``perf_counter`` seconds) it came; waits. None: the session is closed.

        Raises:
            RefusedError: the scheduler refuses this executor for good.
        """
        arrived, message = self._incoming.get()
        if isinstance(message, Refusal):
            raise RefusedError(message.reason)
        return arrived, message

    @property
    def has_news(self) -> bool:
        """``receive`` would not wait."""
        return not self._incoming.empty()

    def send(self, message: FromExecutor) -> None:
        """Queue a message; it is lost if the line drops (a new epoch follows then)."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Hang up; ``receive`` returns None. Safe to call from any thread or signal handler."""
        self._stop.set()
        self._incoming.put((time.perf_counter(), None))
        self._outgoing.put(None)

    def join(self) -> None:
        """Wait for the line to be down."""
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout=2 * HEARTBEAT_S)

    def _dial(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stop.is_set():
            # Messages of an earlier line mean nothing on a new one.
            self._outgoing = queue.SimpleQueue()
            self._outgoing.put(replace(self._info, highest_term=self.highest_term))
            try:
                for raw in self._stub.Attach(self._messages(self._outgoing), metadata=self._metadata):
                    message = from_scheduler(raw)
                    if isinstance(message, Welcome):
                        retry_s = _FIRST_RETRY_S
                        self.highest_term = max(self.highest_term, message.term)
                    self._incoming.put((time.perf_counter(), message))
                why = "the scheduler hung up"
            except grpc.RpcError as error:
                why = error.details() if isinstance(error, grpc.Call) else str(error)
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self._incoming.put((time.perf_counter(), Refusal(why)))
            except MalformedEntryError as error:
                why = f"the scheduler cannot be understood: {error}"
            self._outgoing.put(None)
            if not self._stop.is_set():
                logger.info("no line to the scheduler (%s); dialling again", why)
            self._stop.wait(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    @staticmethod
    def _messages(outgoing: queue.SimpleQueue[FromExecutor | None]) -> Iterator[pb.ExecutorMessage]:
        while (message := outgoing.get()) is not None:
            yield to_scheduler(message)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.send(Heartbeat(self.epoch, self.step))

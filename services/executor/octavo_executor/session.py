"""The gRPC side: dial the scheduler, introduce oneself, receive plans, send results; dial again when the line drops."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import grpc

from octavo_shared.entries import MalformedEntryError
from octavo_shared.plan import CacheOffer, ExecutorInfo, StepPlan
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
# Once a scheduler has let this executor go, how long its main thread may take to end the step that it is in.
LET_GO_GRACE_S = 10.0
# The exit status of a process that gave itself up (sysexits.h: an internal fault).
EXIT_STUCK = 70
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 1.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Also how long a connection may take to come about: a frozen scheduler accepts and then says nothing.
    ("grpc.min_reconnect_backoff_ms", 5000),
    *KEEPALIVE_OPTIONS,
]


class RefusedError(RuntimeError):
    """The scheduler will not work with this executor; the message says why."""


@dataclass(frozen=True, slots=True)
class LineLost:
    """The line to the scheduler is down: plans that came over it are void. ``Session.park`` lets it dial again."""


def give_up(why: str) -> None:
    """End this process at once: a step that hangs cannot be stopped in any other way. Whoever started it starts it again."""
    logger.critical("%s; giving up", why)
    logging.shutdown()
    os._exit(EXIT_STUCK)


Received = Welcome | StepPlan | Farewell | LineLost | None


class Session:
    """The line to the scheduler. Its thread reads; the executor's main thread takes what came with ``receive``.

    Of several addresses each is tried in turn: only the scheduler that holds the lease listens.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        info: ExecutorInfo,
        drain_timeout_s: float = 10.0,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        stuck: Callable[[str], None] = give_up,
    ) -> None:
        """``metadata`` goes with every call; without ``credentials`` the line is plain text.

        ``stuck`` is called when a scheduler has let this executor go and its main thread does not come out of its step.
        """
        self._stuck = stuck
        self._info = info
        self._metadata = metadata
        self._channels = [_open(address, credentials) for address in addresses]
        self._drain_timeout_s = drain_timeout_s
        self._incoming: queue.SimpleQueue[tuple[float, FromScheduler | LineLost | None]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[FromExecutor | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._parked = threading.Event()
        # Why the scheduler has let this executor go; empty = it has not.
        self._let_go = ""
        self._offers: Sequence[CacheOffer] = ()
        self.highest_term = info.highest_term
        self.draining = False
        # What heartbeats report.
        self.epoch = 0
        self.step = 0
        self._steps_begun = 0
        self._step_since = 0.0
        self._threads = [
            threading.Thread(target=self._dial_forever, name="session", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def receive(self) -> tuple[float, Received]:
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

    # --- where the main thread stands, for heartbeats ---

    def began(self) -> None:
        """A step begins."""
        if not self._steps_begun:
            self._step_since = time.perf_counter()
        self._steps_begun += 1

    def done(self, step: int) -> None:
        """The oldest step that had begun is done."""
        self.step = step
        self._steps_begun = max(self._steps_begun - 1, 0)
        self._step_since = time.perf_counter()

    def at_rest(self, epoch: int) -> None:
        """Nothing of ``epoch`` has begun; whatever had is over."""
        self.epoch, self.step, self._steps_begun = epoch, 0, 0

    # --- the end of a line, and of the session ---

    def park(self, offers: Sequence[CacheOffer] = ()) -> None:
        """The main thread has heard that the line is lost and touches no page until it is welcomed again.

        ``offers`` say what the pages hold; the next scheduler may take them over.
        """
        self.at_rest(0)
        self._offers = offers
        self._parked.set()

    def drain(self) -> None:
        """Ask to be relieved of all sequences, then leave: ``receive`` brings the farewell. At once when not attached.

        Safe to call from a signal handler; called again it closes.
        """
        if self.draining or not self.epoch:
            self.close()
            return
        self.draining = True
        self._say_so()
        timer = threading.Timer(self._drain_timeout_s, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Hang up; ``receive`` returns None. Safe to call from any thread or signal handler."""
        self._stop.set()
        self._parked.set()
        self._incoming.put((time.perf_counter(), None))
        self._outgoing.put(None)

    def join(self) -> None:
        """Wait for the line to be down."""
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.join(timeout=2 * HEARTBEAT_S)

    # --- the threads ---

    def _dial_forever(self) -> None:
        retry_s = _FIRST_RETRY_S
        for turn, channel in enumerate(itertools.cycle(self._channels), 1):
            if self._stop.is_set():
                return
            was_welcomed, why = self._talk(channel)
            self._outgoing.put(None)
            if self._stop.is_set():
                return
            if was_welcomed:
                logger.info("no line to the scheduler (%s); dialling again", why)
                self._incoming.put((time.perf_counter(), LineLost()))
                # Who introduces itself promises to do nothing on behalf of earlier plans any more.
                if self._let_go and not self._parked.wait(LET_GO_GRACE_S):
                    self._stuck(f"the scheduler has let this executor go ({self._let_go}), and its step does not end")
                self._parked.wait()
                self._parked.clear()
                retry_s = _FIRST_RETRY_S
            elif turn % len(self._channels) == 0:
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            self._stop.wait(retry_s)

    def _talk(self, channel: grpc.Channel) -> tuple[bool, str]:
        """One call, from introduction to hanging up: whether we were welcomed, and why it ended."""
        was_welcomed, self._let_go = False, ""
        # Messages of an earlier line mean nothing on a new one.
        self._outgoing = outgoing = queue.SimpleQueue[FromExecutor | None]()
        for offer in self._offers:
            outgoing.put(offer)
        outgoing.put(replace(self._info, highest_term=self.highest_term))
        try:
            for raw in executor_pb2_grpc.SchedulerStub(channel).Attach(
                self._messages(outgoing), metadata=self._metadata
            ):
                message = from_scheduler(raw)
                if isinstance(message, Welcome):
                    was_welcomed, self._offers = True, ()
                    self.highest_term = max(self.highest_term, message.term)
                self._incoming.put((time.perf_counter(), message))
            return was_welcomed, "the scheduler hung up"
        except grpc.RpcError as error:
            why = str(error.details()) if isinstance(error, grpc.Call) else str(error)
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.ABORTED:
                self._let_go = why
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._incoming.put((time.perf_counter(), Refusal(why)))
            return was_welcomed, why
        except MalformedEntryError as error:
            return was_welcomed, f"the scheduler cannot be understood: {error}"

    @staticmethod
    def _messages(outgoing: queue.SimpleQueue[FromExecutor | None]) -> Iterator[pb.ExecutorMessage]:
        while (message := outgoing.get()) is not None:
            yield to_scheduler(message)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._say_so()

    def _say_so(self) -> None:
        step_s = max(time.perf_counter() - self._step_since, 1e-6) if self._steps_begun else 0.0
        self.send(Heartbeat(self.epoch, self.step, self.draining, step_s))


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    # A socket's path is no name that a certificate could be for.
    name = [("grpc.ssl_target_name_override", "localhost")] if address.startswith("unix:") else []
    return grpc.secure_channel(address, credentials, options=[*_OPTIONS, *name])

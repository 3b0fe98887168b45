"""uvicorn's HTTP protocol, with bounds on the head of a request: connections are finite, and some clients never come to the point."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# From the first byte (or the connection) to the end of the headers.
HEAD_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 256 << 10

logger = logging.getLogger(__name__)


# A client whose machine or network is gone says nothing. It is asked after so many seconds of silence, then a few times more.
SILENCE_S = 30
ASK_AGAIN_S = 10
ASK_TIMES = 3
# What was sent and is not acknowledged for so long is not going to be, nor what cannot be sent because nobody reads.
UNTAKEN_S = 120


def _notice_when_it_is_gone(connection: socket.socket | None) -> None:
    """Let the kernel end connections to clients that are gone without a word, so that their requests end as well."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S),
        ("TCP_KEEPINTVL", ASK_AGAIN_S),
        ("TCP_KEEPCNT", ASK_TIMES),
        ("TCP_USER_TIMEOUT", UNTAKEN_S * 1000),
    ):
        # Not every system has each of them.
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request head does not end within ``HEAD_TIMEOUT_S`` or ``MAX_HEAD_BYTES``.

    Between requests uvicorn's own keep-alive timeout holds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        _notice_when_it_is_gone(transport.get_extra_info("socket"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                logger.warning("a request's head is larger than %d bytes; hanging up", MAX_HEAD_BYTES)
                self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._head_is_there()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

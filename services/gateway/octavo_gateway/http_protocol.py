"""uvicorn's HTTP protocol, with bounds on the head of a request: connections are finite, and some clients never come to the point.

Besides, what is no HTTP gets an error of our shape, and whoever offers another protocol is served in this one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo_gateway.errors import render_error
from octavo_shared.records import Problem

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
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            logger.warning("a client does not speak HTTP; hanging up")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                logger.warning("a request's head is larger than %d bytes; hanging up", MAX_HEAD_BYTES)
                self.send_400_response("The head of the request is too large.")

    def _parse(self, data: memoryview) -> None:
        """Offers to go on in another protocol are passed over, as a server may (RFC 9110, section 7.8): ``Upgrade: h2c`` is
        what some clients send with every first request.

        llhttp takes all that follows such a head for the other protocol, also a body. So it reads the head once more without
        the offer, and then what follows.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                head = self._plain_head()
                # The old one may have been told that the connection ends here.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _plain_head(self) -> bytes:
        """The head that has been read last, without an offer of another protocol."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade")]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._head_is_there()
        if not self.parser.should_upgrade() or self.parser.get_method() == b"CONNECT":
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Tell a client that it does not speak HTTP, and hang up."""
        style = self.config.app.state.gateway.settings.error_code_style  # type: ignore[union-attr]
        body = render_error(Problem(msg, 400, "Bad Request"), style)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % len(body) + body)
        self.transport.close()

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

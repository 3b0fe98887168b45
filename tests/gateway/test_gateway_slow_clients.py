"""Clients that do not read, and clients that are gone without a word."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gateway_stage import Reply, Stage, eventually, read_events
from test_gateway_resume import told

MakeStage = Callable[..., AbstractContextManager[Stage]]


def connect(stage: Stage, body: dict[str, object]) -> socket.socket:
    """Send a request and read nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", stage.server.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def busy(stage: Stage) -> list[Any]:
    """Connections with a request that has not been answered."""
    every = [one for one in stage.server.server_state.connections if one.cycle is not None]
    return [one for one in every if not one.cycle.response_complete]


def test_a_client_that_does_not_read_costs_no_memory_and_gets_everything_in_the_end(make_stage: MakeStage) -> None:
    n, tokens = 64, 250
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply([1000 + choice] * tokens)
        body = {"prompt": "x", "max_tokens": tokens, "n": n, "stream": True, "logprobs": 20, "seed": 1}
        with connect(stage, body) as client:
            eventually(lambda: stage.engine.records and stage.engine.live == 0, "everything has been made")
            (protocol,) = busy(stage)
            # Of what would be tens of megabytes little is rendered: what the transport lets wait, and one choice's rest.
            assert protocol.transport.get_write_buffer_size() < 1 << 20
            data = b""
            while part := client.recv(1 << 20):
                data += part
        assert len(data) > 4 << 20
        choices = told(read_events(unchunked(data.partition(b"\r\n\r\n")[2]).decode()))
        assert {index: (len(names), end) for index, (_, names, end, _) in choices.items()} == dict.fromkeys(
            range(n), (tokens, ("length", None))
        )


def unchunked(data: bytes) -> bytes:
    """A body in chunked encoding, put together."""
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if not int(size, 16):
            return b"".join(parts)
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]


def test_the_kernel_is_told_to_look_after_silent_connections(make_stage: MakeStage) -> None:
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply([70] * 3, gate=gate)
        with connect(stage, {"prompt": "x", "stream": True}):
            eventually(lambda: stage.engine.records, "the request has come")
            (protocol,) = busy(stage)
            server_side = protocol.transport.get_extra_info("socket")
            assert server_side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            silent_s = sum(
                server_side.getsockopt(socket.IPPROTO_TCP, option) * times
                for option, times in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 3))
            )
            assert silent_s == 60
            assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        gate.set()

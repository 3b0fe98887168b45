"""Clients that do not read, and clients that are gone without a word."""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from gateway_stage import Reply, Stage, eventually, read_events
from test_gateway_resume import told

from octavo_gateway import http_protocol

SO_ATTACH_FILTER = 26
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


def go_deaf(client: socket.socket) -> None:
    """From now on the kernel drops whatever comes for a socket, unanswered: to its peer this machine is gone without a word.

    A classic BPF program of one instruction, "return 0": keep nothing of the packet (socket(7), SO_ATTACH_FILTER).
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "sending"])
def test_the_request_of_a_client_that_is_gone_without_a_word_ends(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Nothing is heard of the end of a half-open connection: silence, or what is not acknowledged, has to tell."""
    # As in production, only sooner.
    for name in ("SILENCE_S", "ASK_AGAIN_S", "ASK_TIMES", "UNTAKEN_S"):
        monkeypatch.setattr(http_protocol, name, 2 if name == "UNTAKEN_S" else 1)
    gate = threading.Event()
    with make_stage() as stage:
        stage.engine.reply = lambda record, choice: Reply([1000] * 200, gate=gate, before_gate=3)
        with connect(stage, {"prompt": "x", "max_tokens": 200, "stream": True}) as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            go_deaf(client)
            if not idle:
                stage.engine.step_s = 0.1
                gate.set()
            eventually(lambda: stage.engine.aborts, "the gateway gives the request up", 20)
            assert [abort.reason for abort in stage.engine.aborts] == ["disconnect"]
            assert not busy(stage)
            eventually(lambda: stage.engine.live == 0, "nothing of it is left")
        gate.set()


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

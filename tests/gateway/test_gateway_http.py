"""What comes over a connection besides plain HTTP/1.1 requests: offers of other protocols, and what is no HTTP at all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from gateway_stage import Stage

BODY = b'{"prompt":"x","max_tokens":2}'
# What Java's HttpClient and `curl --http2` send with a first request.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def post(headers: bytes = OFFER, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    length = b"" if b"chunked" in headers else b"Content-Length: %d\r\n" % len(body)
    return b"POST /v1/completions HTTP/%b\r\nHost: x\r\n%b%b\r\n%b" % (version, headers, length, body)


def said(stage: Stage, parts: list[bytes]) -> list[tuple[int, dict[str, Any]]]:
    """Status and body of everything that is answered to ``parts``, until the server hangs up."""
    with socket.create_connection(("127.0.0.1", stage.server.port), timeout=60) as link:
        for part in parts:
            link.sendall(part)
            # So that each comes by itself, as from a client that sends it so.
            time.sleep(0.01)
        heard = b"".join(iter(lambda: link.recv(65536), b""))
    answers = []
    while heard:
        head, _, rest = heard.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        answers.append((int(head[9:12]), json.loads(rest[:length])))
        heard = rest[length:]
    return answers


CHUNKED = post(OFFER + b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
LAST = post(b"Connection: close\r\n")


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ([post(), LAST], 2),
        ([post()[:-10], post()[-10:] + LAST], 2),
        ([post()[:120], post()[120:], LAST], 2),
        ([post() + post() + LAST], 3),
        ([CHUNKED, LAST], 2),
        ([post(b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), LAST], 2),
        ([post(b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n")], 1),
        ([post(version=b"1.0")], 1),
    ],
)
def test_offers_of_another_protocol_are_passed_over(stage: Stage, parts: list[bytes], count: int) -> None:
    answers = said(stage, parts)
    assert [status for status, _ in answers] == [200] * count
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [2] * count


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"get /health HTTP/1.1\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/models/" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_in_the_usual_shape(stage: Stage, data: bytes) -> None:
    ((status, answer),) = said(stage, [data])
    assert status == 400
    message = "Invalid HTTP request received."
    assert answer == {"error": {"message": message, "type": "Bad Request", "param": None, "code": None}}


def test_in_the_style_that_was_asked_for(make_stage: Callable[..., AbstractContextManager[Stage]]) -> None:
    with make_stage(error_code_style="vllm") as stage:
        assert said(stage, [b"\0\r\n"])[0][1]["error"]["code"] == 400

"""Reading and checking request bodies, with large ones kept off the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from octavo_gateway.errors import ApiError, too_large, too_late
from octavo_gateway.gateway import Gateway
from octavo_shared.records import Problem

# Bodies up to this size are parsed where they are: handing them over would take longer.
INLINE_BYTES = 32 << 10
# Longest pause within a body.
BODY_SILENCE_S = 30.0
# Nothing that is asked for nests deeper; code that walks a body may recurse.
MAX_JSON_DEPTH = 64
# Lists and objects in a body: each costs many times its two bytes, so a small body could become a large one in memory.
MAX_JSON_CONTAINERS = 1 << 17
# A JSON string. An unfinished one ends with the text, so that none of its parts is looked at again.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
# Of a client's own name for something, in an error's text (characters).
MAX_NAME = 100

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 as soon as it is known to be too large, 408 when nothing more of it comes.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                part = await anext(stream, None)
        except TimeoutError:
            raise too_late() from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > limit_bytes:
            raise too_large(limit_bytes)
        parts.append(part)


async def parse_body(request: Request, gateway: Gateway, kind: type[B]) -> B:
    """The body as a ``kind``.

    Raises:
        ApiError: 413, 408 or 400.
    """
    try:
        data = await read_body(request, gateway.settings.max_request_body_bytes)
    except ClientDisconnect as error:
        raise ApiError(Problem("The client has closed the connection.", 499, "ClientDisconnect")) from error
    if len(data) <= INLINE_BYTES:
        return _parse(data, kind)
    return await in_worker(gateway, _parse, data, kind)


async def in_worker(gateway: Gateway, work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` in a worker thread."""
    return await asyncio.get_running_loop().run_in_executor(gateway.workers, work, *arguments)


def _parse(data: bytes, kind: type[B]) -> B:
    _check_containers(data)
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message = f"1 validation error:\n  {{'type': 'json_invalid', 'loc': ('body', {error.pos}), 'msg': 'JSON decode error: {error.msg}'}}"
        raise ApiError(Problem(message, 400, "Bad Request", param=str(error.pos))) from None
    _check_depth(content)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ApiError(validation_problem(error)) from None


def _check_containers(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") > MAX_JSON_CONTAINERS:
        # Perhaps they stand in strings.
        rest = _STRING.sub(b"", data)
        if rest.count(b"[") + rest.count(b"{") > MAX_JSON_CONTAINERS:
            message = f"The body has more than {MAX_JSON_CONTAINERS} lists and objects."
            raise ApiError(Problem(message, 400, "Bad Request"))


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ApiError(Problem(f"The body is nested deeper than {MAX_JSON_DEPTH} levels.", 400, "Bad Request"))


def validation_problem(error: ValidationError) -> Problem:
    """400 in vLLM's words: how many errors and what each is; ``param`` is where the first one is."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    places = [tuple(part if isinstance(part, int) else part[:MAX_NAME] for part in each["loc"]) for each in errors[:20]]
    lines = "".join(
        f"\n  {{'type': {each['type']!r}, 'loc': {('body', *place)!r}, 'msg': {each['msg']!r}}}"
        for each, place in zip(errors, places, strict=False)
    )
    message = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:{lines}"
    return Problem(message, 400, "Bad Request", param=".".join(map(str, places[0])))

"""Reading and checking request bodies, with large ones kept off the event loop."""

from __future__ import annotations

import asyncio
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
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message = f"1 validation error:\n  {{'type': 'json_invalid', 'loc': ('body', {error.pos}), 'msg': 'JSON decode error: {error.msg}'}}"
        raise ApiError(Problem(message, 400, "Bad Request", param=str(error.pos))) from None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ApiError(validation_problem(error)) from None


def validation_problem(error: ValidationError) -> Problem:
    """400 in vLLM's words: how many errors and what each is; ``param`` is where the first one is."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    lines = "".join(
        f"\n  {{'type': {each['type']!r}, 'loc': {('body', *each['loc'])!r}, 'msg': {each['msg']!r}}}"
        for each in errors[:20]
    )
    message = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:{lines}"
    return Problem(message, 400, "Bad Request", param=".".join(str(part) for part in errors[0]["loc"]))

"""GET /v1/streams/{id}: an answer that is being made or was made a short while ago."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo_gateway.gateway import Gateway
from octavo_gateway.resume import position_of, resume, stream_of
from octavo_gateway.schema.responses import ErrorBody

router = APIRouter()
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer: events or one object, as it was asked for.",
        "content": {"text/event-stream": {}},
    },
    204: {"description": "The client has read all of it."},
    400: {"model": ErrorBody, "description": "Last-Event-ID is none of this stream's."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "The caller has no such stream, or has it no longer."},
    503: {"model": ErrorBody, "description": "Redis cannot be reached, or the gateway shuts down."},
}


@router.get("/v1/streams/{name}", response_class=Response, responses=_RESPONSES)
async def stream(request: Request, name: str) -> Response:
    """What an earlier request answers: from the event on that Last-Event-ID names, else from the beginning."""
    gateway: Gateway = request.app.state.gateway
    gateway.require_open()
    arrival_s = time.monotonic()
    return await resume(gateway, request, stream_of(name), position_of(request), arrival_s)

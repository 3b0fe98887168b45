"""Around every request: its id, its metrics, its span, the API key, and errors in one shape."""

from __future__ import annotations

import logging
import uuid

from opentelemetry.trace import Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_gateway.errors import ApiError, render_error, unauthorized
from octavo_gateway.gateway import Gateway
from octavo_gateway.keys import header_of
from octavo_shared.records import Problem

GUARDED = ("/v1/", "/v2/", "/inference/", "/cohere/")
# Asked for all the time, of no interest in a trace.
UNTRACED = ("/health", "/health/ready", "/metrics")
MAX_REQUEST_ID_BYTES = 256

logger = logging.getLogger(__name__)


async def send_problem(gateway: Gateway, send: Send, error: ApiError) -> None:
    """Answer with an error body."""
    body = render_error(error.problem, gateway.settings.error_code_style)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestMiddleware:
    """The outermost layer: request id, counting, tracing, and the last resort for errors."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        label = header_of(scope, b"x-request-id")[:MAX_REQUEST_ID_BYTES] or uuid.uuid4().hex.encode()
        echoes = self._gateway.settings.enable_request_id_headers
        # What routes want to tell besides, whichever way their answer comes about.
        extra: list[tuple[bytes, bytes]] = []
        scope["octavo.headers"] = extra

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [*extra, (b"x-request-id", label)] if echoes else extra
                if added:
                    message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        span = None
        if self._gateway.tracing.enabled and scope["path"] not in UNTRACED:
            span = scope["octavo.span"] = self._gateway.tracing.server_span(
                scope["method"],
                scope["path"],
                header_of(scope, b"traceparent").decode("latin-1"),
                header_of(scope, b"tracestate").decode("latin-1"),
            )
        try:
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            if status:
                raise
            await send_problem(self._gateway, send_with_id, error)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if status:
                raise
            await send_problem(self._gateway, send_with_id, ApiError(Problem("The server failed.")))
        finally:
            route = scope.get("route")
            self._gateway.metrics.http_request(getattr(route, "path", "none"), scope["method"], status or 499)
            if span is not None:
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                span.end()


class KeyMiddleware:
    """Finds out who calls, and lets requests to guarded paths in only with one of the keys as bearer token."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._keys = gateway.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = scope["octavo.caller"] = self._keys.caller(scope)
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            guarded = self._keys.guards_api and scope["method"] != "OPTIONS" and path.startswith(GUARDED)
            if guarded and not caller.known:
                raise unauthorized()
        await self._app(scope, receive, send)

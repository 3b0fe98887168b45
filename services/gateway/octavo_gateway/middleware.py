"""Around every request: its id, its metrics, its span, the API key, and errors in one shape."""

from __future__ import annotations

import hmac
import logging
import uuid

from opentelemetry.trace import Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_gateway.errors import ApiError, render_error
from octavo_gateway.gateway import Gateway
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
        label = _header(scope, b"x-request-id")[:MAX_REQUEST_ID_BYTES] or uuid.uuid4().hex.encode()
        echoes = self._gateway.settings.enable_request_id_headers

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if echoes:
                    message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", label)]}
            await send(message)

        span = None
        if self._gateway.tracing.enabled and scope["path"] not in UNTRACED:
            span = scope["octavo.span"] = self._gateway.tracing.server_span(
                scope["method"],
                scope["path"],
                _header(scope, b"traceparent").decode("latin-1"),
                _header(scope, b"tracestate").decode("latin-1"),
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
    """Lets requests to guarded paths in only with one of the API keys as bearer token."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._keys = [key.encode() for key in gateway.settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path.startswith(GUARDED) and not self._known(_header(scope, b"authorization")):
                problem = Problem("Unauthorized", 401, "AuthenticationError", "invalid_api_key")
                raise ApiError(problem, {"WWW-Authenticate": "Bearer"})
        await self._app(scope, receive, send)

    def _known(self, header: bytes) -> bool:
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, so that the time taken says nothing.
        return sum(hmac.compare_digest(given.strip(), key) for key in self._keys) > 0


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""

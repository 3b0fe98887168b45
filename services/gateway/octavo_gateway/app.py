"""The FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo_gateway.errors import ApiError, render_error
from octavo_gateway.gateway import Gateway
from octavo_gateway.middleware import KeyMiddleware, RequestMiddleware
from octavo_gateway.model_assets import load_assets
from octavo_gateway.routes import admin, generation, service, streams
from octavo_gateway.routes.openapi import install_schema
from octavo_shared.records import Problem
from octavo_shared.settings import GatewaySettings

_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def create_app(settings: GatewaySettings) -> FastAPI:
    """The application; ``app.state.gateway`` is its owner of everything. Background work starts with the lifespan.

    Raises:
        SettingError: the model's folder cannot be used.
    """
    gateway = Gateway(settings, load_assets(settings))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        yield
        await gateway.stop()

    app = FastAPI(title="Octavo", version=metadata.version("octavo"), lifespan=lifespan, redirect_slashes=False)
    app.state.gateway = gateway
    app.include_router(generation.router)
    app.include_router(streams.router)
    app.include_router(service.router)
    app.include_router(admin.router)
    _handle_errors(app, gateway)
    # Added innermost first.
    app.add_middleware(KeyMiddleware, gateway=gateway)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    app.add_middleware(RequestMiddleware, gateway=gateway)
    install_schema(app)
    return app


def _handle_errors(app: FastAPI, gateway: Gateway) -> None:
    """Errors inside routes, in OpenAI's shape."""
    style = gateway.settings.error_code_style

    def answer(problem: Problem, headers: dict[str, str] | None = None) -> Response:
        body = render_error(problem, style)
        return Response(body, problem.status, headers, media_type="application/json")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return answer(error.problem, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        kind = _TYPES.get(error.status_code, "BadRequestError" if error.status_code < 500 else "InternalServerError")
        return answer(Problem(str(error.detail), error.status_code, kind), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        return answer(Problem(str(error), 400, "Bad Request"))

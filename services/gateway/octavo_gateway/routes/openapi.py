"""The OpenAPI schema of routes that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo_gateway.schema.responses import ErrorBody

_REF = "#/components/schemas/{model}"
_bodies: set[type[BaseModel]] = set()
_ERRORS = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or no such stream.",
    413: "The body is too large.",
    422: "The Idempotency-Key came with another request before.",
    429: "Too much work is queued; see Retry-After.",
    503: "Nothing can be served now; see Retry-After.",
}


def documented(body: type[BaseModel], answer: type[BaseModel], *, stream: bool = False) -> dict[str, Any]:
    """Arguments of a route: what it takes and gives, for the schema only."""
    _bodies.add(body)
    content: dict[str, Any] = {"application/json": {}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "data: {chunk} … data: [DONE]"}}
    return {
        "response_model": None,
        "responses": {
            200: {"model": answer, "content": content, "description": "The answer."},
            **{status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()},
        },
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}},
            }
        },
    }


def install_schema(app: FastAPI) -> None:
    """Make ``app.openapi()`` include the bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            kinds = sorted(_bodies, key=lambda kind: kind.__name__)
            _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

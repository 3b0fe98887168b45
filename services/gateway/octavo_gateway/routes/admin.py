"""What only administrators may do: look into the KV cache, and empty it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from redis.exceptions import RedisError

from octavo_gateway.errors import bad_request, forbidden, no_answer, unauthorized, unavailable
from octavo_gateway.gateway import Gateway
from octavo_gateway.keys import Caller, is_local
from octavo_gateway.kv_page import render_page
from octavo_gateway.schema.responses import CacheReset, ErrorBody, KvPage
from octavo_shared.control import MOST_BLOCKS, AskRefusedError, NoAnswerError

DEFAULT_BLOCKS = 1000
TIERS = ("device", "host")


def require_admin(request: Request) -> None:
    """Let administrators through.

    With admin keys, those who send one. Without, only a server that has no keys at all has administrators: whoever is on
    the same machine.

    Raises:
        ApiError: 401 for strangers, 403 for those who are known but no administrators.
    """
    gateway: Gateway = request.app.state.gateway
    caller: Caller = request.scope["octavo.caller"]
    if caller.admin:
        return
    if gateway.keys.has_admins:
        raise forbidden("This needs an admin key.") if caller.known else unauthorized()
    if gateway.keys.guards_api:
        raise forbidden("This server has no administrators; start it with --admin-api-key.")
    if not is_local(request.scope):
        raise forbidden("Without --admin-api-key this is only answered to clients on the server's own machine.")


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A parameter is wrong."},
    401: {"model": ErrorBody, "description": "The key is missing or wrong."},
    403: {"model": ErrorBody, "description": "Not an administrator."},
    503: {"model": ErrorBody, "description": "There is no scheduler, or Redis cannot be reached."},
    504: {"model": ErrorBody, "description": "The scheduler did not answer in time."},
}
router = APIRouter(dependencies=[Depends(require_admin)], responses=_ERRORS)


@router.post("/v1/cache/reset")
async def reset_cache(request: Request) -> CacheReset:
    """Forget every cached prefix. Requests that run are not disturbed; nothing computed before is found again."""
    gateway: Gateway = request.app.state.gateway
    return CacheReset(blocks=(await _ask(gateway, "cache_reset", {}))["blocks"])


@router.get("/v1/kv", response_model=KvPage)
async def kv(
    request: Request, start: str = "0", limit: str = str(DEFAULT_BLOCKS), tier: str = "device", executor: str = ""
) -> Response:
    """What a tier of an executor's KV cache holds right now, block by block from number ``start`` on, and totals."""
    gateway: Gateway = request.app.state.gateway
    if tier not in TIERS:
        raise bad_request(f"tier must be one of {', '.join(TIERS)}, got {tier[:40]!r}.", "tier")
    payload = {
        "start": _count("start", start, 0, (1 << 31) - 1),
        "count": _count("limit", limit, 0, MOST_BLOCKS),
        "tier": tier,
        "executor": executor,
    }
    return Response(render_page(await _ask(gateway, "kv", payload)), media_type="application/json")


def _count(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise bad_request(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}.", name)
    return int(text)


async def _ask(gateway: Gateway, kind: str, payload: Mapping[str, Any]) -> Any:
    try:
        return await gateway.control.ask(kind, payload, gateway.settings.admin_timeout_s)
    except AskRefusedError as error:
        raise (unavailable(str(error)) if error.status == 503 else bad_request(str(error))) from error
    except NoAnswerError as error:
        if reason := gateway.limits.why_no_scheduler():
            raise unavailable(reason) from error
        raise no_answer(f"The scheduler did not answer within {gateway.settings.admin_timeout_s:g} s.") from error
    except (RedisError, OSError) as error:
        raise unavailable("Redis cannot be reached.") from error

"""Errors that become HTTP answers in OpenAI's shape. Texts and statuses are vLLM's (see docs/api.md)."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from octavo_shared.records import Problem

CodeStyle = Literal["openai", "vllm"]


class ApiError(Exception):
    """A request cannot be served; carries the whole answer."""

    def __init__(self, problem: Problem, headers: dict[str, str] | None = None) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.headers = headers or {}


def bad_request(message: str, param: str = "", code: str = "") -> ApiError:
    """400 with vLLM's type."""
    return ApiError(Problem(message, 400, "BadRequestError", code, param))


def not_supported(what: str, param: str) -> ApiError:
    """400 for a parameter that is known but does nothing here yet."""
    return bad_request(f"{what} is not supported yet.", param)


def model_not_found(name: str) -> ApiError:
    """404 for a model this gateway does not serve."""
    return ApiError(Problem(f"The model `{name}` does not exist.", 404, "NotFoundError", "model_not_found", "model"))


def stream_not_found() -> ApiError:
    """404 for a stream that never was, is kept no longer, or belongs to somebody else."""
    return ApiError(Problem("There is no such stream (any more).", 404, "NotFoundError", "stream_not_found"))


def idempotency_conflict() -> ApiError:
    """422 for a key that came with another request before (draft-ietf-httpapi-idempotency-key-header-07, section 2.7)."""
    message = "This Idempotency-Key has been used for a request with another body."
    return ApiError(Problem(message, 422, "UnprocessableEntityError", "idempotency_key_reused", "Idempotency-Key"))


def unauthorized() -> ApiError:
    """401 for a request without one of the keys."""
    problem = Problem("Unauthorized", 401, "AuthenticationError", "invalid_api_key")
    return ApiError(problem, {"WWW-Authenticate": "Bearer"})


def forbidden(message: str) -> ApiError:
    """403 for someone who may not do this."""
    return ApiError(Problem(message, 403, "PermissionDeniedError", "insufficient_permissions"))


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """429 for a request that would wait for too long."""
    problem = Problem(message, 429, "RateLimitError", "rate_limit_exceeded")
    return ApiError(problem, {"Retry-After": str(retry_after_s)})


def rate_limited(message: str, retry_after_s: int, headers: dict[str, str]) -> ApiError:
    """429 for a key that has spent what it may."""
    problem = Problem(message, 429, "RateLimitError", "rate_limit_exceeded")
    return ApiError(problem, {**headers, "Retry-After": str(retry_after_s)})


def no_answer(message: str) -> ApiError:
    """504 when another service does not answer in time."""
    return ApiError(Problem(message, 504, "GatewayTimeoutError", "timeout"))


def unavailable(reason: str, retry_after_s: int = 1) -> ApiError:
    """503 for now, with a hint when to come back."""
    problem = Problem(reason, 503, "ServiceUnavailableError", "service_unavailable")
    return ApiError(problem, {"Retry-After": str(retry_after_s)})


def too_large(limit_bytes: int) -> ApiError:
    """413 for a body beyond the limit."""
    message = f"The request body is larger than the limit of {limit_bytes} bytes."
    return ApiError(Problem(message, 413, "RequestEntityTooLargeError", "request_too_large"))


def too_late() -> ApiError:
    """408 for a body of which nothing more comes."""
    problem = Problem("The request body did not arrive in time.", 408, "RequestTimeoutError")
    return ApiError(problem, {"Connection": "close"})


def error_body(problem: Problem, style: CodeStyle) -> dict[str, Any]:
    """The JSON body of a problem."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.type or "InternalServerError",
            "param": problem.param or None,
            "code": problem.status if style == "vllm" else problem.code or None,
        }
    }


def render_error(problem: Problem, style: CodeStyle) -> bytes:
    """The JSON body of a problem, as bytes."""
    return orjson.dumps(error_body(problem, style))


def context_overflow(limit: int, output: int, prompt: int, *, at_least: bool = False) -> ApiError:
    """400: prompt and output together are longer than the model allows (all counts in tokens)."""
    about = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {output} output tokens and your "
        f"prompt contains {about}{prompt} input tokens, for a total of {about}{prompt + output} tokens. Please reduce the "
        f"length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value={prompt})"
    )
    return bad_request(message, "input_tokens", "context_length_exceeded")

"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import re
import time
from hashlib import blake2b
from typing import Any

from fastapi import APIRouter, Request, Response
from opentelemetry.trace import Span

from octavo_gateway.admission import AlreadyAdmittedError, Order
from octavo_gateway.answer import Answer
from octavo_gateway.body import in_worker, parse_body
from octavo_gateway.errors import bad_request, model_not_found
from octavo_gateway.gateway import Gateway
from octavo_gateway.keys import Caller
from octavo_gateway.prompts import Bounds, chat_ids, completion_prompts, echo_texts, sizes
from octavo_gateway.resume import find_idempotent, position_of, resume
from octavo_gateway.routes.openapi import documented
from octavo_gateway.sampling import Draft, draft_chat, draft_completion
from octavo_gateway.schema.requests import ChatCompletionRequest, CompletionRequest, GenerationBody
from octavo_gateway.schema.responses import ChatCompletion, Completion
from octavo_gateway.slot import Kind, Presentation

# Stripe's limit.
MAX_IDEMPOTENCY_KEY = 255
MAX_TRACESTATE_CHARS = 512
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

router = APIRouter()


@router.post("/v1/completions", **documented(CompletionRequest, Completion, stream=True))
async def completions(request: Request) -> Response:
    """Continue a prompt, or each of several."""
    arrival_s = time.monotonic()
    gateway: Gateway = request.app.state.gateway
    gateway.require_open()
    if (position := position_of(request)) is not None:
        return await resume(gateway, request, position.stream, position, arrival_s)
    body = await parse_body(request, gateway, CompletionRequest)
    check_model(gateway, body.model)
    draft = draft_completion(body, gateway.settings, gateway.assets.defaults)
    presentation = _presentation(
        gateway, request, body, draft, "text_completion", echo=bool(body.echo), prompt_only=draft.prompt_only
    )
    await _look_ahead(gateway, request, body)
    prompts = await in_worker(
        gateway, completion_prompts, body, gateway.assets, _bounds(gateway, draft), gateway.settings.max_num_prompts
    )
    texts = [""] * len(prompts)
    if body.echo:
        texts = await in_worker(gateway, echo_texts, body, gateway.assets, prompts)
    return await _submit(gateway, request, body, draft, presentation, prompts, texts, arrival_s)


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletion, stream=True))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    gateway: Gateway = request.app.state.gateway
    gateway.require_open()
    if (position := position_of(request)) is not None:
        return await resume(gateway, request, position.stream, position, arrival_s)
    body = await parse_body(request, gateway, ChatCompletionRequest)
    check_model(gateway, body.model)
    draft = draft_chat(body, gateway.settings, gateway.assets.defaults)
    role = gateway.settings.response_role
    if body.add_generation_prompt is False and body.messages:
        role = body.messages[-1].role
    presentation = _presentation(gateway, request, body, draft, "chat", role=role)
    await _look_ahead(gateway, request, body)
    prompt = await in_worker(gateway, chat_ids, body, gateway.assets, _bounds(gateway, draft))
    text = _echoed(body, role) if body.echo else ""
    return await _submit(gateway, request, body, draft, presentation, [prompt], [text], arrival_s)


def check_model(gateway: Gateway, name: str | None) -> None:
    """Raises 404 unless the model is served here (no name means the only one)."""
    if name and name not in gateway.model_names:
        raise model_not_found(name)


async def _look_ahead(gateway: Gateway, request: Request, body: CompletionRequest | ChatCompletionRequest) -> None:
    """Raises 429 for what will most likely be refused; who comes for an answer that is there already never is."""
    if "idempotency-key" not in request.headers:
        await gateway.pressure.look_ahead(*sizes(body))


def _bounds(gateway: Gateway, draft: Draft) -> Bounds:
    return Bounds(gateway.limits.require().max_model_len, draft.max_tokens or 1)


def _echoed(body: ChatCompletionRequest, role: str) -> str:
    last = body.messages[-1]
    return last.content if last.role == role and isinstance(last.content, str) else ""


def _presentation(
    gateway: Gateway, request: Request, body: GenerationBody, draft: Draft, kind: Kind, **others: Any
) -> Presentation:
    options = body.stream_options
    usage = bool(body.stream) and (
        gateway.settings.enable_force_include_usage or (options is not None and options.include_usage is not False)
    )
    as_ids = body.return_tokens_as_token_ids
    return Presentation(
        kind=kind,
        model=body.model or gateway.model_name,
        created_s=int(time.time()),
        stream=bool(body.stream),
        include_usage=usage,
        continuous_usage=usage and options is not None and bool(options.continuous_usage_stats),
        skip_special_tokens=body.skip_special_tokens is not False,
        tokens_as_ids=gateway.settings.return_tokens_as_token_ids if as_ids is None else as_ids,
        logprobs=draft.logprobs,
        returned=draft.returned if draft.returned < draft.n else 0,
        prompt_logprobs=body.prompt_logprobs is not None,
        prompt_tokens_details=gateway.settings.enable_prompt_tokens_details,
        fingerprint=_fingerprint(request, body) if request.headers.get("idempotency-key") else "",
        **others,
    )


async def _submit(
    gateway: Gateway,
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    draft: Draft,
    presentation: Presentation,
    prompts: list[list[int]],
    texts: list[str],
    arrival_s: float,
) -> Response:
    caller: Caller = request.scope["octavo.caller"]
    key = _idempotency_key(request)
    if (first := await find_idempotent(gateway, caller, key)) is not None:
        return await resume(gateway, request, first, None, arrival_s, presentation.fingerprint)
    choices = len(prompts) * max(draft.n, draft.params.beam_width)
    if choices > gateway.settings.max_num_choices:
        most = gateway.settings.max_num_choices
        raise bad_request(f"A request may have at most {most} choices, of all prompts together, got {choices}.", "n")
    samplings = gateway.admission.check(prompts, draft)
    span: Span | None = request.scope.get("octavo.span")
    if span is not None:
        traceparent, tracestate = gateway.tracing.headers_of(span)
    else:
        traceparent, tracestate = _trace_headers(request)
    ttl_s, grace_s = gateway.settings.stream_resume_ttl, gateway.settings.disconnect_grace
    if key or request.headers.get("x-octavo-resumable") == "1":
        grace_s = max(grace_s, ttl_s)
    order = Order(
        draft=draft,
        caller=caller,
        priority=caller.priority(body.priority or 0),
        cache_salt=body.cache_salt or "",
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        traceparent=traceparent,
        tracestate=tracestate,
        presentation=presentation,
        prompt_chars=sizes(body)[0],
        echo_texts=texts,
        idempotency_key=key,
        resume_ttl_s=ttl_s,
        disconnect_grace_s=grace_s,
        deadline_us=_deadline_us(body.timeout, arrival_s),
    )
    try:
        submission = await gateway.admission.submit(prompts, samplings, order)
    except AlreadyAdmittedError as error:
        return await resume(gateway, request, error.stream, None, arrival_s, presentation.fingerprint)
    request.scope["octavo.headers"] += [(name.encode(), value.encode()) for name, value in submission.charge.headers]
    return Answer(gateway, submission, presentation, arrival_s=arrival_s, echo_texts=texts, span=span)


def _idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_IDEMPOTENCY_KEY:
        message = f"An Idempotency-Key has at most {MAX_IDEMPOTENCY_KEY} characters, got {len(key)}."
        raise bad_request(message, "Idempotency-Key")
    return key


def _fingerprint(request: Request, body: GenerationBody) -> str:
    """The same for requests that ask for the same, however their JSON is written."""
    text = f"{request.url.path}\n{body.model_dump_json()}"
    return blake2b(text.encode(), digest_size=16, person=b"octavo request").hexdigest()


def _trace_headers(request: Request) -> tuple[str, str]:
    """The client's trace headers; "" for one that is none, or larger than anybody has to pass on (W3C Trace Context, 3.3.1)."""
    parent, state = request.headers.get("traceparent", ""), request.headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return "", ""
    return parent, state if len(state) <= MAX_TRACESTATE_CHARS else ""


def _deadline_us(timeout_s: float | None, arrival_s: float) -> int:
    """Unix microseconds ``timeout_s`` after the request came (``arrival_s`` on the monotonic clock); 0 without one."""
    if timeout_s is None:
        return 0
    return max(1, int((time.time() + timeout_s - (time.monotonic() - arrival_s)) * 1e6))

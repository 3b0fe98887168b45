"""Everything that does not generate: models, tokenizer, health, metrics, version."""

from __future__ import annotations

import time
from importlib import metadata

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from redis.exceptions import RedisError

from octavo_gateway.body import in_worker, parse_body
from octavo_gateway.errors import bad_request, model_not_found, unavailable
from octavo_gateway.gateway import Gateway
from octavo_gateway.model_assets import ModelAssets
from octavo_gateway.prompts import EMPTY_PROMPT, chat_text
from octavo_gateway.routes.generation import check_model
from octavo_gateway.routes.openapi import documented
from octavo_gateway.schema.requests import DetokenizeRequest, TokenizeRequest
from octavo_gateway.schema.responses import Detokenized, ErrorBody, ModelCard, ModelList, Tokenized, Version

router = APIRouter()
_STARTED_S = int(time.time())


def _max_model_len(gateway: Gateway) -> int | None:
    return None if gateway.limits.latest is None else gateway.limits.latest.max_model_len


def _card(gateway: Gateway, name: str) -> ModelCard:
    return ModelCard(id=name, created=_STARTED_S, root=gateway.model_name, max_model_len=_max_model_len(gateway))


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The served model under each of its names."""
    gateway: Gateway = request.app.state.gateway
    names = gateway.settings.served_model_name or [gateway.model_name]
    return ModelList(data=[_card(gateway, name) for name in names])


@router.get("/v1/models/{name:path}", responses={404: {"model": ErrorBody}})
async def model(request: Request, name: str) -> ModelCard:
    """One served model."""
    gateway: Gateway = request.app.state.gateway
    if name not in gateway.model_names:
        raise model_not_found(name)
    return _card(gateway, name)


@router.post("/tokenize", **documented(TokenizeRequest, Tokenized))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of messages."""
    gateway: Gateway = request.app.state.gateway
    body = await parse_body(request, gateway, TokenizeRequest)
    check_model(gateway, body.model)
    answer = await in_worker(gateway, _tokenize, body, gateway.assets, _max_model_len(gateway))
    return Response(answer.model_dump_json(), media_type="application/json")


def _tokenize(body: TokenizeRequest, assets: ModelAssets, max_model_len: int | None) -> Tokenized:
    if body.messages is not None:
        text, special = chat_text(body, assets), bool(body.add_special_tokens)
    elif body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        raise bad_request(EMPTY_PROMPT, "prompt")
    ids = assets.tokenizer.encode([text], add_special_tokens=special)[0]
    names = [assets.tokenizer.token_name(token) for token in ids] if body.return_token_strs else None
    return Tokenized(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=names)


@router.post("/detokenize", **documented(DetokenizeRequest, Detokenized))
async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    gateway: Gateway = request.app.state.gateway
    body = await parse_body(request, gateway, DetokenizeRequest)
    check_model(gateway, body.model)
    answer = await in_worker(gateway, _detokenize, body, gateway.assets)
    return Response(answer.model_dump_json(), media_type="application/json")


def _detokenize(body: DetokenizeRequest, assets: ModelAssets) -> Detokenized:
    for token in body.tokens:
        if not 0 <= token < assets.tokenizer.vocab_size:
            raise bad_request(f"Token id {token} is out of vocabulary", "tokens")
    return Detokenized(prompt=assets.tokenizer.decode(body.tokens, skip_special_tokens=False))


@router.get("/health", response_class=Response)
async def health() -> Response:
    """200 while this process lives."""
    return Response()


@router.get("/health/ready", response_class=Response, responses={503: {"model": ErrorBody}})
async def ready(request: Request) -> Response:
    """200 when requests can be served now, else 503 with the reason."""
    gateway: Gateway = request.app.state.gateway
    if reason := gateway.why_not_ready():
        raise unavailable(reason)
    return Response()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Metrics of all services in Prometheus' text format."""
    gateway: Gateway = request.app.state.gateway
    try:
        others = await gateway.streams.read_metrics()
    except (RedisError, OSError):
        others = {}
    return Response(gateway.metrics.exposition(others), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


@router.get("/version")
async def version() -> Version:
    """The version of Octavo."""
    return Version(version=metadata.version("octavo"))

"""Bodies of answers, for the OpenAPI schema. Answers themselves are written as bytes (see render_*)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from octavo_gateway.schema.requests import FinishReason


class PromptTokensDetails(BaseModel):
    """What became of the prompt tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(BaseModel):
    """One alternative at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One output of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """Answer of ``POST /v1/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """One token of a chat answer with its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob]


class ChatMessage(BaseModel):
    """What the model says."""

    role: str
    content: str


class ChatChoice(BaseModel):
    """One output of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorBody(BaseModel):
    """Answer of every route when something is wrong."""

    error: ErrorDetail


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int | None


class ModelList(BaseModel):
    """Answer of ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


class Version(BaseModel):
    """Answer of ``GET /version``."""

    version: str


class CacheReset(BaseModel):
    """Answer of ``POST /v1/cache/reset``: how many blocks had content that could be found."""

    object: str = "cache.reset"
    blocks: int


class KvColumns(BaseModel):
    """Parallel lists, one entry per block."""

    block: list[int]
    state: list[Literal["free", "cached", "active"]]
    references: list[int]
    filled: list[int]
    depth: list[int]
    age_steps: list[int]
    hits: list[int]
    owners: list[list[str]]


class KvPage(BaseModel):
    """Answer of ``GET /v1/kv``: some blocks of one tier, and totals over all blocks of both."""

    object: str = "kv"
    executor: str
    executors: list[str]
    tier: Literal["device", "host"]
    start: int
    next: int | None
    columns: KvColumns
    totals: dict[str, int]

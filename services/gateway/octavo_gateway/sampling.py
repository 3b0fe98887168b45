"""From a request's fields to sampling parameters: defaults, ranges, and vLLM's texts for what is out of range."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo_gateway.choices import Choices, choices_of
from octavo_gateway.errors import bad_request, not_supported
from octavo_gateway.schema.requests import ChatCompletionRequest, CompletionRequest, GenerationBody
from octavo_shared.records import SEED_MASK, SamplingParams
from octavo_shared.settings import GatewaySettings

GREEDY_EPSILON = 1e-5
# The executor computes in single precision, where numbers far beyond become 0 or infinite.
LEAST_REPETITION, MOST_REPETITION = 1e-30, 1e30
# vLLM raises temperatures in between, where the division would overflow in low precision.
LEAST_TEMPERATURE = 0.01
DEFAULT_COMPLETION_TOKENS = 16
# Every one is looked for in every piece of text, on the event loop that serves all clients.
MAX_STOP_STRINGS = 256
# Text is held back for as long as it may be the beginning of one.
MAX_STOP_CHARS = 1024
# Some thirty years; what is longer is a mistake (milliseconds, a point in time).
MAX_TIMEOUT_S = 1e9

# One spelling per token: "5", " 5" and "05" would be three entries for the same one.
_TOKEN_ID = re.compile("0|-?[1-9][0-9]{0,9}")

# Known elsewhere and of consequence for the output: better refused than ignored.
_UNSUPPORTED = (
    "allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "kv_transfer_params",
    "logits_processors", "prompt_embeds", "structured_outputs", "truncate_prompt_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A request's sampling before its prompt is known: ``max_tokens`` None means "as many as fit"."""

    params: SamplingParams
    # Choices per prompt; the ``returned`` best of them are given back.
    n: int
    returned: int
    # What the client asked for; None = nothing, then the rest of the context is the bound.
    max_tokens: int | None
    # Used without a client's word; an explicit wish that does not fit is refused, this is cut.
    default_max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    # Only the prompt is wanted back (echo with max_tokens 0).
    prompt_only: bool = False
    # The client wants log-probabilities of the output (ranking needs them in any case).
    logprobs: bool = False


def draft_completion(body: CompletionRequest, settings: GatewaySettings, defaults: Mapping[str, float]) -> Draft:
    """Check and complete the sampling of a completion.

    Raises:
        ApiError: 400 for the first thing that is wrong.
    """
    if body.suffix:
        raise bad_request("suffix is not currently supported", "suffix")
    if body.logprobs is not None and body.logprobs < 0:
        raise bad_request("`logprobs` must be a positive value.", "logprobs")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    elif body.stream and prompt_logprobs is not None:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    return _draft(
        body,
        settings,
        defaults,
        max_tokens=body.max_tokens,
        fallback=DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_only=bool(body.echo) and body.max_tokens == 0,
    )


def draft_chat(body: ChatCompletionRequest, settings: GatewaySettings, defaults: Mapping[str, float]) -> Draft:
    """Check and complete the sampling of a chat completion.

    Raises:
        ApiError: 400 for the first thing that is wrong.
    """
    if body.tools or body.tool_choice not in (None, "none"):
        raise not_supported("Tool calling", "tools" if body.tools else "tool_choice")
    if body.response_format is not None and body.response_format.type != "text":
        raise not_supported(f"response_format of type {body.response_format.type!r}", "response_format")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise bad_request("`top_logprobs` must be a positive value.", "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    return _draft(
        body,
        settings,
        defaults,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        fallback=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _draft(
    body: GenerationBody,
    settings: GatewaySettings,
    defaults: Mapping[str, float],
    *,
    max_tokens: int | None,
    fallback: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    prompt_only: bool = False,
) -> Draft:
    _check_features(body)
    if (own := defaults.get("max_tokens")) is not None:
        fallback = int(own)
    if max_tokens is not None and max_tokens < 1 and not prompt_only:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    min_tokens = body.min_tokens or 0
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens")
    bound = max_tokens if max_tokens is not None else fallback
    if bound is not None and min_tokens > bound and not prompt_only:
        message = f"min_tokens must be less than or equal to max_tokens={bound}, got {min_tokens}."
        raise bad_request(message, "min_tokens")
    choices = choices_of(body, settings)
    if prompt_only:
        choices = Choices(choices.returned, choices.returned)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop may have at most {MAX_STOP_STRINGS} strings, got {len(stop)}.", "stop")
    if any(len(one) > MAX_STOP_CHARS for one in stop):
        raise bad_request(f"stop may have strings of at most {MAX_STOP_CHARS} characters.", "stop")
    if "" in stop:
        raise bad_request("stop cannot contain an empty string.", "stop")
    wanted = _logprob_count(logprobs, settings, "sample", "logprobs")
    params = replace(
        _distribution(body, defaults, choices),
        min_tokens=0 if prompt_only else min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=0 if wanted is None and choices.made > choices.returned else wanted,
        prompt_logprobs=_logprob_count(prompt_logprobs, settings, "prompt", "prompt_logprobs"),
    )
    if params.beam_width and params.prompt_logprobs is not None:
        # No hypothesis is the one whose row they would come with.
        raise bad_request("Log-probabilities of the prompt are not available with beam search.", "prompt_logprobs")
    return Draft(
        params=params,
        n=choices.made,
        returned=choices.returned,
        max_tokens=1 if prompt_only else max_tokens,
        default_max_tokens=fallback,
        seed=None if body.seed is None else body.seed & SEED_MASK,
        stop=stop,
        prompt_only=prompt_only,
        logprobs=wanted is not None,
    )


def _check_features(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.timeout is not None and not 0 < body.timeout <= MAX_TIMEOUT_S:
        raise bad_request(f"timeout must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {body.timeout}.", "timeout")
    if body.cache_salt is not None and not body.cache_salt:
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    for name in _UNSUPPORTED:
        if (body.model_extra or {}).get(name) is not None:
            raise not_supported(f"`{name}`", name)


def _distribution(body: GenerationBody, defaults: Mapping[str, float], choices: Choices) -> SamplingParams:
    """The numbers that shape the distribution, checked in vLLM's order."""

    def value(name: str, neutral: float) -> float:
        given = getattr(body, name)
        return given if given is not None else defaults.get(name, neutral)

    presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
    repetition = value("repetition_penalty", 1.0)
    temperature, top_p, min_p = value("temperature", 1.0), value("top_p", 1.0), value("min_p", 0.0)
    top_k = int(value("top_k", 0))
    if not -2.0 <= presence <= 2.0:
        raise bad_request(f"presence_penalty must be in [-2, 2], got {presence}.", "presence_penalty")
    if not -2.0 <= frequency <= 2.0:
        raise bad_request(f"frequency_penalty must be in [-2, 2], got {frequency}.", "frequency_penalty")
    if not repetition > 0.0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {repetition}.", "repetition_penalty")
    if not LEAST_REPETITION <= repetition <= MOST_REPETITION:
        message = f"repetition_penalty must be in [{LEAST_REPETITION:g}, {MOST_REPETITION:g}], got {repetition}."
        raise bad_request(message, "repetition_penalty")
    if temperature < 0.0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature")
    if not temperature <= 2.0:
        raise bad_request(f"temperature must be in [0, 2], got {temperature}.", "temperature")
    if not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    if top_k < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {top_k}.", "top_k")
    if not 0.0 <= min_p <= 1.0:
        raise bad_request(f"min_p must be in [0, 1], got {min_p}.", "min_p")
    if choices.beam_width:
        # Beam search draws nothing.
        temperature, top_p, top_k, min_p = 0.0, 1.0, 0, 0.0
    elif temperature < GREEDY_EPSILON:
        if choices.made > 1:
            name = "n" if choices.returned > 1 else "best_of"
            raise bad_request(f"{name} must be 1 when using greedy sampling, got {choices.made}.", name)
        temperature, top_p, top_k, min_p = 0.0, 1.0, 0, 0.0
    elif temperature < LEAST_TEMPERATURE:
        temperature = LEAST_TEMPERATURE
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        beam_width=choices.beam_width,
        length_penalty=choices.length_penalty,
        early_stopping=choices.early_stopping,
    )


def _logprob_count(count: int | None, settings: GatewaySettings, kind: str, param: str) -> int | None:
    """The count as asked for; -1 (whole vocabulary) is resolved once the vocabulary's size is known."""
    if count is None:
        return None
    if count < -1:
        raise bad_request(f"`{param}` must be a positive value or -1.", param)
    allowed = settings.max_logprobs
    if allowed >= 0 and (count > allowed or count == -1):
        wanted = "the whole vocabulary" if count == -1 else str(count)
        message = f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {allowed}"
        raise bad_request(message, param)
    return count


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in (biases or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise bad_request(f"logit_bias keys must be token ids, got {key[:40]!r}.", "logit_bias")
        if math.isnan(bias):
            raise bad_request(f"logit_bias of token {key} must be a number, got nan.", "logit_bias")
        pairs.append((int(key), min(100.0, max(-100.0, bias))))
    return tuple(pairs)

"""Log-probabilities in the three shapes clients know: completions', chat's and vLLM's prompt_logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.records import TokenLogprobs

# What -inf becomes: JSON has no infinities.
LEAST = -9999.0

Entry = tuple[int, TokenLogprobs | None]


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > LEAST else LEAST


class TokenNames:
    """How tokens are called in log-probabilities: their text, or ``token_id:N``."""

    def __init__(self, tokenizer: ModelTokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def bytes_of(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


class CompletionLogprobs:
    """Completions' shape for one choice. ``text_offset`` counts characters of token names from the choice's start."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def render(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """The next tokens. An entry without log-probabilities (a prompt's first token) has nulls."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, logprobs in entries:
            name = self._names.name(token)
            tokens.append(name)
            offsets.append(self._offset)
            self._offset += len(name)
            if logprobs is None:
                values.append(None)
                tops.append(None)
                continue
            value = _finite(logprobs.logprob)
            top: dict[str, float] = {}
            # Several tokens may have the same text; the likeliest speaks for them.
            for other, other_value in logprobs.top:
                top.setdefault(self._names.name(other), _finite(other_value))
            if all(other != token for other, _ in logprobs.top):
                top[name] = value
            values.append(value)
            tops.append(top)
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(names: TokenNames, entries: Iterable[Entry]) -> dict[str, Any]:
    """Chat's shape: ``{"content": [...]}``."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": _finite(value), "bytes": names.bytes_of(token)}

    content = []
    for token, logprobs in entries:
        entry = one(token, LEAST if logprobs is None else logprobs.logprob)
        entry["top_logprobs"] = [one(other, value) for other, value in (logprobs.top if logprobs else ())]
        content.append(entry)
    return {"content": content}


def prompt_logprobs(
    tokenizer: ModelTokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's shape: null for the first token, then per token its own and the likeliest alternatives by id."""
    rendered: list[dict[str, Any] | None] = [None]
    for token, logprobs in zip(prompt[1:], entries, strict=False):
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(logprobs.top, 1)]
        if all(other != token for other, _ in logprobs.top):
            ranked.insert(0, (token, logprobs.logprob, logprobs.rank))
        rendered.append(
            {
                str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": tokenizer.token_text(other)}
                for other, value, rank in ranked
            }
        )
    return rendered

"""Answers of /v1/completions as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from octavo_gateway.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from octavo_gateway.rendering import ChunkFraming, Usage, ending, shown_tokens
from octavo_gateway.slot import Presentation, Slot
from octavo_gateway.tokenizer import ModelTokenizer

_PLAIN_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null'


class CompletionRenderer:
    """Renders choices with text. Prompt and output are one text where echo is asked for."""

    def __init__(self, presentation: Presentation, answer_id: str, tokenizer: ModelTokenizer) -> None:
        self._presentation = presentation
        self._id = answer_id
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, presentation.tokens_as_ids)
        self._framing = ChunkFraming(presentation, answer_id, "text_completion")

    def open(self, slot: Slot) -> bytes:
        return b""

    def chunk(self, slot: Slot, text: str, start: int, stop: int) -> bytes:
        finish = slot.view.finish_reason
        wants_logprobs = self._presentation.logprobs
        if self._presentation.prompt_only:
            if finish is None:
                return b""
            text, finish = "", "length"
        if finish is None and not wants_logprobs:
            if not text and not slot.echo_text and not self._presentation.continuous_usage:
                return b""
            end = _PLAIN_END
        else:
            logprobs = self._logprobs(slot, start, stop) if wants_logprobs else None
            end = b',"logprobs":' + orjson.dumps(logprobs) + ending(slot, finish)
        if slot.echo_text:
            text, slot.echo_text = slot.echo_text + text, ""
        return self._framing.head(slot) + b',"text":' + orjson.dumps(text) + end + self._framing.tail(slot)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._framing.usage_chunk(usage)

    def whole(self, slots: Sequence[Slot], usage: Usage) -> bytes:
        return orjson.dumps(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._presentation.created_s,
                "model": self._presentation.model,
                "choices": [self._choice(slot) for slot in slots],
                "usage": usage,
            }
        )

    def _choice(self, slot: Slot) -> dict[str, Any]:
        only_prompt = self._presentation.prompt_only
        choice: dict[str, Any] = {
            "index": slot.index,
            "text": slot.echo_text + ("" if only_prompt else "".join(slot.parts)),
            "logprobs": None,
            "finish_reason": "length" if only_prompt else slot.view.finish_reason,
            "stop_reason": None if only_prompt else slot.view.stop_reason,
        }
        if self._presentation.logprobs:
            choice["logprobs"] = self._logprobs(slot, 0, slot.view.tokens)
        if self._presentation.prompt_logprobs:
            prompt = slot.record.prompt.tolist()
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, slot.prompt_logprobs)
        return choice

    def _logprobs(self, slot: Slot, start: int, stop: int) -> dict[str, Any]:
        """Of output tokens ``start`` … ``stop - 1``, after those of the prompt if the echo is still to come."""
        entries = slot.entries(start, min(stop, shown_tokens(self._presentation, slot)))
        if slot.logprobs is None:
            slot.logprobs = CompletionLogprobs(self._names)
            if self._presentation.echo:
                entries = [*slot.prompt_entries(), *entries]
        assert isinstance(slot.logprobs, CompletionLogprobs)
        return slot.logprobs.render(entries)

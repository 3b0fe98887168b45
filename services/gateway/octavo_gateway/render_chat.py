"""Answers of /v1/chat/completions as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from octavo_gateway.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from octavo_gateway.rendering import ChunkFraming, Usage, ending
from octavo_gateway.slot import Presentation, Slot
from octavo_gateway.tokenizer import ModelTokenizer

_PLAIN_END = b'},"logprobs":null,"finish_reason":null'


class ChatRenderer:
    """Renders choices with messages. The first chunk of each choice names the role."""

    def __init__(self, presentation: Presentation, answer_id: str, tokenizer: ModelTokenizer) -> None:
        self._presentation = presentation
        self._id = answer_id
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, presentation.tokens_as_ids)
        self._framing = ChunkFraming(presentation, answer_id, "chat.completion.chunk")

    def open(self, slot: Slot) -> bytes:
        delta = orjson.dumps({"role": self._presentation.role, "content": ""})
        return self._framing.head(slot) + b',"delta":' + delta[:-1] + _PLAIN_END + self._framing.tail(slot)

    def chunk(self, slot: Slot, text: str, start: int, stop: int) -> bytes:
        finish = slot.view.finish_reason
        wants_logprobs = self._presentation.logprobs
        if slot.echo_text:
            text, slot.echo_text = slot.echo_text + text, ""
        if finish is None and not wants_logprobs:
            if not text and not self._presentation.continuous_usage:
                return b""
            end = _PLAIN_END
        else:
            logprobs = chat_logprobs(self._names, slot.entries(start, stop)) if wants_logprobs else None
            end = b'},"logprobs":' + orjson.dumps(logprobs) + ending(slot, finish)
        content = b',"delta":{"content":' + orjson.dumps(text) if text or finish is None else b',"delta":{'
        return self._framing.head(slot) + content + end + self._framing.tail(slot)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._framing.usage_chunk(usage)

    def whole(self, slots: Sequence[Slot], usage: Usage) -> bytes:
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._presentation.created_s,
            "model": self._presentation.model,
            "choices": [self._choice(slot) for slot in slots],
            "usage": usage,
        }
        if self._presentation.prompt_logprobs:
            prompt = slots[0].record.prompt.tolist()
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, slots[0].prompt_logprobs)
        return orjson.dumps(answer)

    def _choice(self, slot: Slot) -> dict[str, Any]:
        wants_logprobs = self._presentation.logprobs
        return {
            "index": slot.index,
            "message": {"role": self._presentation.role, "content": slot.echo_text + "".join(slot.parts)},
            "logprobs": chat_logprobs(self._names, slot.entries(0, slot.view.tokens)) if wants_logprobs else None,
            "finish_reason": slot.view.finish_reason,
            "stop_reason": slot.view.stop_reason,
        }

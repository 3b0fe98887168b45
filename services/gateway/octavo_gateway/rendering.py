"""What both kinds of answer have in common on the wire: usage, server-sent events, JSON fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from octavo_gateway.slot import Presentation, Slot

DONE = b"data: [DONE]\n\n"

Usage = dict[str, int | dict[str, int]]


class Renderer(Protocol):
    """Turns what is new of a choice into bytes."""

    def open(self, slot: Slot) -> bytes:
        """What is sent before anything else of a choice."""
        ...

    def chunk(self, slot: Slot, text: str, start: int, stop: int) -> bytes:
        """New text and output tokens ``start`` … ``stop - 1``; b"" when there is nothing worth a chunk."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk with nothing but the usage."""
        ...

    def whole(self, slots: Sequence[Slot], usage: Usage) -> bytes:
        """The answer in one piece."""
        ...


def usage_of(presentation: Presentation, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """OpenAI's usage object; ``cached_tokens`` is shown only where the presentation says so."""
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if presentation.prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def shown_tokens(presentation: Presentation, slot: Slot) -> int:
    """Output tokens the client is told of."""
    return 0 if presentation.prompt_only else slot.view.tokens


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


def error_events(body: dict[str, Any], id_line: bytes = b"") -> bytes:
    """How a stream that has begun ends in an error; ``id_line`` stands before both events."""
    return id_line + event(orjson.dumps(body)) + id_line + DONE


class ChunkFraming:
    """The constant parts of a stream's chunks, rendered once.

    A chunk is ``head(slot)``, then the choice's own fields, then ``tail``.
    """

    def __init__(self, presentation: Presentation, answer_id: str, object_name: str) -> None:
        fields = {
            "id": answer_id,
            "object": object_name,
            "created": presentation.created_s,
            "model": presentation.model,
        }
        self._presentation = presentation
        self._fields = orjson.dumps(fields)[:-1]
        self._start = b"data: " + self._fields + b',"choices":[{"index":'
        # OpenAI: with include_usage every chunk has a usage, which is null in all but the last.
        self._plain_tail = b'}],"usage":null}\n\n' if presentation.include_usage else b"}]}\n\n"

    def head(self, slot: Slot) -> bytes:
        """Everything up to a choice's own fields."""
        if not slot.head:
            slot.head = self._start + str(slot.index).encode()
        return slot.head

    def tail(self, slot: Slot) -> bytes:
        """Everything after a choice's own fields."""
        if not self._presentation.continuous_usage:
            return self._plain_tail
        presentation = self._presentation
        usage = usage_of(presentation, len(slot.record.prompt), shown_tokens(presentation, slot), slot.cached_tokens)
        return b'}],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk that has no choice."""
        return b"data: " + self._fields + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"


def ending(slot: Slot, finish_reason: str | None) -> bytes:
    """``finish_reason`` and ``stop_reason`` of a chunk."""
    return b',"finish_reason":' + orjson.dumps(finish_reason) + b',"stop_reason":' + orjson.dumps(slot.view.stop_reason)

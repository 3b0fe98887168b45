"""Ids of server-sent events: how far each choice of an answer had come when the event was sent (rule L8).

An id is ``<stream>/<choices>``, or ``<stream>/<choices>/done`` once nothing is left to be sent. ``<stream>`` is the answer's
first request; ``<choices>`` has one word per choice, in their order, with dots between: how many output tokens the client has
been told of, followed by ``e`` once it has been told the end, or ``-`` where nothing has been said at all. ``5x3`` stands for
three times ``5``; choices at the end of which nothing has been said are left out. ``u`` in the place of ``<choices>`` means
that every choice has ended and the usage has been told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from octavo_shared.ids import RequestId

# Answers of more choices have no ids: each would be longer than the chunk.
MOST_CHOICES = 256
MOST_BYTES = 8192

_WORD = re.compile(r"(?:(\d{1,10})(e?)|-)(?:x([1-9]\d{0,3}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Told:
    """What a client knows of one choice: so many tokens, perhaps its end; or (``began`` false) nothing."""

    tokens: int = 0
    ended: bool = False
    began: bool = False


UNTOLD = Told()


@dataclass(frozen=True, slots=True)
class Position:
    """How far a client has read a stream."""

    stream: RequestId
    choices: tuple[Told, ...]
    usage_told: bool = False
    done: bool = False

    def of(self, index: int) -> Told:
        """What it knows of a choice, by its index in the answer."""
        if self.usage_told:
            return Told(ended=True, began=True)
        return self.choices[index] if index < len(self.choices) else UNTOLD


class EventIds:
    """Makes the ids of one answer's events."""

    def __init__(self, stream: RequestId, num_choices: int, position: Position | None = None) -> None:
        """``position``: what the client knows already, of whatever choice the first event may be."""
        self._start = f"id: {stream}/".encode()
        self._words = ["-"] * num_choices
        self.enabled = num_choices <= MOST_CHOICES
        for index, told in enumerate(position.choices[:num_choices] if position else ()):
            if told.began:
                self.told(index, told.tokens, ended=told.ended)

    def told(self, index: int, tokens: int, *, ended: bool) -> None:
        """The next event tells so much of a choice."""
        self._words[index] = f"{tokens}e" if ended else str(tokens)

    def line(self) -> bytes:
        """The id line of an event after which the client knows what it has been told."""
        if not self.enabled:
            return b""
        words = self._words
        text = words[0] if len(words) == 1 else _pack(words)
        return self._start + text.encode() + b"\n"

    def usage_line(self) -> bytes:
        """The id line of the usage."""
        return self._start + b"u\n" if self.enabled else b""

    def done_line(self) -> bytes:
        """The id line of the last event."""
        return self._start + b"u/done\n" if self.enabled else b""


def _pack(words: list[str]) -> str:
    runs = [(word, len(list(group))) for word, group in groupby(words)]
    if len(runs) > 1 and runs[-1][0] == "-":
        runs.pop()
    return ".".join(word if count == 1 else f"{word}x{count}" for word, count in runs)


def parse_event_id(text: str) -> Position:
    """Read an id.

    Raises:
        ValueError: it is none of ours.
    """
    if len(text) > MOST_BYTES:
        raise ValueError("too long")
    stream, _, rest = text.partition("/")
    choices, _, end = rest.partition("/")
    if end not in ("", "done") or rest.endswith("/"):
        raise ValueError("unknown ending")
    request_id = RequestId.parse(stream)
    if choices == "u":
        return Position(request_id, (), usage_told=True, done=end == "done")
    told: list[Told] = []
    for word in choices.split("."):
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} says nothing of a choice")
        tokens, ended, count = match[1], bool(match[2]), int(match[3] or 1)
        if len(told) + count > MOST_CHOICES:
            raise ValueError("too many choices")
        told += [UNTOLD if tokens is None else Told(int(tokens), ended, True)] * count
    return Position(request_id, tuple(told), done=end == "done")

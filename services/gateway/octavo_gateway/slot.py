"""One choice of an answer on its way to the client, and how the answer as a whole is to look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import orjson

from octavo_gateway.choice_view import ChoiceView
from octavo_gateway.event_ids import Told
from octavo_gateway.logprobs import Entry
from octavo_shared.fold import ChoiceFold
from octavo_shared.records import RequestRecord, TokenLogprobs

Kind = Literal["text_completion", "chat"]


@dataclass(frozen=True, slots=True)
class Presentation:
    """How an answer is rendered. ``created_s`` is Unix time."""

    kind: Kind
    model: str
    created_s: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    skip_special_tokens: bool = True
    tokens_as_ids: bool = False
    # Send the prompt in front of the output; its log-probabilities too, where those of the output are wanted.
    echo: bool = False
    # The answer is the prompt alone.
    prompt_only: bool = False
    # Show the output's log-probabilities.
    logprobs: bool = False
    # Give back only so many of each prompt's choices, the best ones; 0 = all.
    returned: int = 0
    # Show prompt_logprobs as a field of their own.
    prompt_logprobs: bool = False
    # Say in the usage how many prompt tokens were found in the prefix cache.
    prompt_tokens_details: bool = False
    role: str = "assistant"
    # Of the request that this answers, where it came with an idempotency key.
    fingerprint: str = ""


def note_of(presentation: Presentation, echo_text: str) -> bytes:
    """What a request's record says of how its answer is to look."""
    return orjson.dumps({"presentation": presentation, "echo_text": echo_text})


def read_note(record: RequestRecord) -> tuple[Presentation, str]:
    """The other way round. Of what a gateway of another version has noted, what is known here counts."""
    note = orjson.loads(record.presentation)
    known = {one.name for one in fields(Presentation)}
    presentation = {name: value for name, value in note["presentation"].items() if name in known}
    return Presentation(**presentation), note["echo_text"]


class Slot:
    """A choice's place in the answer: what has been said of it and the state needed to say more."""

    __slots__ = (
        "_first",
        "began",
        "choice",
        "echo_text",
        "fold",
        "head",
        "index",
        "logprobs",
        "parts",
        "record",
        "told",
        "view",
    )

    def __init__(
        self,
        record: RequestRecord,
        choice: int,
        index: int,
        view: ChoiceView,
        echo_text: str,
        *,
        first: Slot | None = None,
    ) -> None:
        self.record = record
        # Choice 0 of the same prompt; None for that one itself.
        self._first = first
        # Number within the request, and within the answer (ranking may change it).
        self.choice = choice
        self.index = index
        self.view = view
        self.echo_text = echo_text
        self.fold: ChoiceFold | None = None
        # What the client knows from before it reconnected, until the fold has come as far.
        self.told: Told | None = None
        # Whether something has been sent of it (streams), or what there is to send (others).
        self.began = False
        self.parts: list[str] = []
        # The renderer's own: rendered beginnings of chunks, running text offsets.
        self.head = b""
        self.logprobs: object = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; 0 while its choice 0 has said nothing.

        The other choices do not count: they find what choice 0 has computed.
        """
        fold = (self._first or self).fold
        return fold.cached_tokens if fold is not None else 0

    def entries(self, start: int, stop: int) -> list[Entry]:
        """Output tokens ``start`` … ``stop - 1`` with their log-probabilities."""
        assert self.fold is not None
        known = self.fold.logprobs
        return [
            (self.fold.tokens[at], known[at] if at < len(known) else None)
            for at in range(start, min(stop, len(self.fold.tokens)))
        ]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt from its second token on; choices that share a prefill are told with choice 0."""
        for slot in (self, self._first):
            if slot is not None and slot.fold is not None and slot.fold.prompt_logprobs:
                return slot.fold.prompt_logprobs
        return ()

    def prompt_entries(self) -> Iterator[Entry]:
        """Prompt tokens with their log-probabilities; the first has none."""
        known = self.prompt_logprobs
        for at, token in enumerate(self.record.prompt.tolist()):
            yield token, known[at - 1] if 0 < at <= len(known) else None

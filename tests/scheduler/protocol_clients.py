"""The protocol's world with clients that read events, lose their line, and ask for the rest by the last event's id (rule L8).

What is real: event ids (made, sent and read as text), and a choice's view with stop strings and a detokenizer that holds text
back. A client knows only what it has received: events on the way when its line breaks are lost. What must hold: joined, the
pieces are what somebody who reads the whole log would be told, and after the end of a choice nothing is said of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from protocol_world import CHOICES, ID, World

from octavo_gateway.choice_view import ChoiceView
from octavo_gateway.event_ids import EventIds, Position, Told, parse_event_id
from octavo_shared.fold import ChoiceFold

# Tokens are shown as numbers; some end it.
STOP = ("3,", "5,")


class Words:
    """A token is its number, and a comma once it is certain that no digit follows."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, token: int) -> str:
        text, self._held = f"{self._held}{token}", ","
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def new_view() -> ChoiceView:
    return ChoiceView(Words(), stop=STOP)


@dataclass(frozen=True, slots=True)
class SentEvent:
    """An event of one choice on its way to the client."""

    line: bytes
    choice: int
    text: str
    end: str | None


class Connection:
    """A gateway's answer to one request for a stream, as ``Answer`` gives it. Subclasses break a rule each."""

    def __init__(self, position: Position | None) -> None:
        self.views = [new_view() for _ in range(CHOICES)]
        self.told: list[Told | None] = [position.of(at) if position else None for at in range(CHOICES)]
        self.ids = EventIds(ID, CHOICES, position)
        self.on_the_way: deque[SentEvent] = deque()

    def take(self, folds: list[ChoiceFold]) -> None:
        """The gateway has read on."""
        for choice, fold in enumerate(folds):
            view = self.views[choice]
            if (told := self.told[choice]) is not None:
                if not self.catch_up(view, fold, told):
                    continue
                self.told[choice] = None
            if view.finish_reason is None:
                before = view.tokens
                delta = view.advance(fold)
                if view.tokens != before or view.finish_reason is not None:
                    self.name(choice, folds)
                    event = SentEvent(self.ids.line(), choice, delta.text, view.finish_reason)
                    self.on_the_way.append(event)

    def catch_up(self, view: ChoiceView, fold: ChoiceFold, told: Told) -> bool:
        return view.catch_up(fold, told) is not None

    def name(self, choice: int, folds: list[ChoiceFold]) -> None:
        """What the client knows once it has the next event."""
        self.ids.told(choice, self.views[choice].tokens, ended=self.views[choice].finish_reason is not None)


class ClientWorld(World):
    """Everything there is, and a client that reads."""

    connection_kind = Connection

    def __init__(self) -> None:
        super().__init__()
        self.last_id = ""
        self.text = [""] * CHOICES
        self.finish: list[str | None] = [None] * CHOICES
        self.connection = self.connection_kind(None)

    def options(self) -> list[tuple[str, Callable[[], None]]]:
        options = [option for option in super().options() if "fails in resuming" not in option[0]]
        if self.connection.on_the_way:
            options += [("the client receives an event", self.receive)] * 2
        return options

    def read(self) -> None:
        super().read()
        self.connection.take([self.fold.get(ID.serial, choice) for choice in range(CHOICES)])

    def lose_gateway(self) -> None:
        """The line breaks; another gateway, which knows nothing but the log, is asked for the rest."""
        super().lose_gateway()
        self.connection = self.connection_kind(parse_event_id(self.last_id) if self.last_id else None)
        if not self.last_id:
            # Nothing has come: it asks once more for all.
            assert not any(self.text)

    def receive(self) -> None:
        event = self.connection.on_the_way.popleft()
        assert self.finish[event.choice] is None, "something follows the end"
        self.last_id = event.line.decode().removeprefix("id: ").strip()
        self.text[event.choice] += event.text
        self.finish[event.choice] = event.end

    def check(self) -> None:
        super().check()
        for text, end, fold in zip(self.text, self.finish, self.whole(), strict=True):
            view = new_view()
            whole = view.advance(fold).text
            assert whole.startswith(text), "the client was told otherwise"
            assert end is None or (end, text) == (view.finish_reason, whole), "the client was told another end"

    def come_to_rest(self) -> None:
        super().come_to_rest()
        self.lose_gateway()
        while self.redis.goes_on(self.read_to):
            self.read()
        while self.connection.on_the_way:
            self.receive()
        self.check()
        assert all(self.finish), "the client was not told all"

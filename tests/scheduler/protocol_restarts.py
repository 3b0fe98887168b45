"""The protocol's world with a Redis that is restarted and has forgotten what it was told last (rule L9).

Everybody says again what may have been lost, each in his own time: the gateway what it has delivered, and its request, if
that is gone; executors their last steps; then some scheduler takes over, under a term that nobody has seen before. A
position that was delivered and comes back with another token ends its choice with one error. That is all that may happen
to a client: executors here are *not* deterministic, so whatever had to be made again differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from protocol_world import CHOICES, ID, Executor, Scheduler, World

from octavo_shared.entries import encode_snapshot
from octavo_shared.fold import LogEvent
from octavo_shared.records import EndReason

MOST_RESTARTS = 2


class RestartWorld(World):
    """Everything there is, and a disk behind Redis. Subclasses break a rule each."""

    says_again = True
    compares = True
    terms_are_new = True
    distrusts_redis = True
    acknowledges_in_one_life = True

    def __init__(self) -> None:
        super().__init__()
        self.life = self.gateway_life = 1
        self.heard: dict[str, list[bytes]] = {}
        # The life of Redis in which each scheduler took its term.
        self.lives: dict[str, int] = {}
        # Per executor the lives of Redis in which it has said its last steps again.
        self.repeated: set[tuple[str, int]] = set()
        self.admitted = False
        self.on_disk = self._state()
        self.admitted = True

    def _state(self) -> tuple[list[tuple[int, list[LogEvent]]], int, Scheduler | None, tuple[bool, bool, bool]]:
        marks = self.admitted, self.delivered, self.acknowledged
        return list(self.redis.entries), self.term, self.holder, marks

    def options(self) -> list[tuple[str, Callable[[], None]]]:
        options = super().options()
        options.append(("the disk catches up", self.catch_up))
        if self.life <= MOST_RESTARTS:
            options.append(("Redis is restarted", self.restart))
        if self.gateway_life != self.life:
            options += [("the gateway says again", self.say_again)] * 2
        for executor in self.executors:
            if self.heard.get(executor.name) and (executor.name, self.life) not in self.repeated:
                options.append((f"{executor.name} says again", partial(self.repeat, executor)))
        return options

    # --- Redis ---

    def catch_up(self) -> None:
        self.on_disk = self._state()

    def restart(self) -> None:
        """Time goes on: ids are never given twice."""
        entries, self.term, self.holder, (self.admitted, self.delivered, self.acknowledged) = self.on_disk
        self.redis.entries = list(entries)
        self.life += 1

    # --- those who say again ---

    def say_again(self) -> None:
        """As a gateway that finds another run id: readmit what is owed to its client, and read the log anew."""
        self.gateway_life = self.life
        states = [state for state in self.fold.snapshots() if not self.ends[state.choice]]
        if self.says_again and states:
            self.redis.append(encode_snapshot(states))
        if self.says_again and not all(self.ends):
            self.admitted = True
        self.fold, self.read_to = self.fold_kind(), 0

    def flush(self, executor: Executor, again: bool) -> None:
        self.heard.setdefault(executor.name, []).append(executor.outbox[0])
        super().flush(executor, again)

    def repeat(self, executor: Executor) -> None:
        self.repeated.add((executor.name, self.life))
        for entry in self.heard[executor.name]:
            self.redis.append(entry)

    def take_lease(self) -> None:
        """Under a term that was never given before, whatever Redis remembers."""
        if self.terms_are_new:
            self.term = max([self.term, *(scheduler.term for scheduler in self.schedulers)])
        super().take_lease()
        self.lives[self.schedulers[-1].name] = self.life

    def take_on(self, scheduler: Scheduler) -> None:
        if self.admitted:
            super().take_on(scheduler)

    def acknowledge(self, scheduler: Scheduler) -> None:
        """Ends that were logged before a restart may be forgotten."""
        if self.acknowledges_in_one_life and self.lives[scheduler.name] != self.life:
            scheduler.wants_to_acknowledge = False
        else:
            super().acknowledge(scheduler)

    def is_new(self) -> bool:
        """Redis may have forgotten that somebody has read the request: what was there before the takeover is not new."""
        return super().is_new() and (self.life == 1 or not self.distrusts_redis)

    # --- the client ---

    def read(self) -> None:
        """Whoever was told more than there is now waits; whoever was told otherwise is told of an error, once."""
        if self.gateway_life != self.life:
            # Its connection has broken: before anything else it asks which Redis this is.
            self.say_again()
        page = self.redis.page(self.read_to)
        self.read_to = int(page.last_id)
        for event in page.events:
            self.fold.apply(event)
        for choice in range(CHOICES):
            state, told = self.fold.get(ID.serial, choice), self.told[choice]
            if self.ends[choice]:
                continue
            known = min(len(told), len(state.tokens))
            if self.compares and (state.tokens[:known] != told[:known] or (state.end and known < len(told))):
                self.ends[choice].append(EndReason.ERROR)
                continue
            told += state.tokens[len(told) :]
            if state.end:
                self.ends[choice].append(state.end)

    # --- what must hold ---

    def check(self) -> None:
        for state in self.whole():
            for at, token in enumerate(state.tokens):
                assert self.tokens.origin[token] == tuple(state.tokens[:at]), (
                    "made from other tokens than those before it"
                )
        for told in self.told:
            for at, token in enumerate(told):
                assert self.tokens.origin[token] == tuple(told[:at]), (
                    "the client was told tokens that do not go together"
                )
        for ends in self.ends:
            assert len(ends) <= 1, "two ends"

    def come_to_rest(self) -> None:
        if self.gateway_life != self.life:
            self.say_again()
        super().come_to_rest()

    def check_told(self, choice: int, tokens: list[int]) -> None:
        """At rest a client was told everything, or of an error."""
        if self.ends[choice] != [EndReason.ERROR]:
            assert self.told[choice] == tokens or self.ends[choice], "the client was not told all"

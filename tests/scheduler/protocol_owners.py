"""The protocol's world with gateways that die, clients that leave and come back elsewhere, and what is said against requests.

An owner is (generation, gateway); whoever has come last is it (rule L7). A line is a connection as its gateway sees it: it
may stay long after its client has gone. Redis may forget who has reconnected; lines are then told to it again.

What is real: how a scheduler heeds what is said (``LiveRequest.heed``) and how long it waits for a gateway (``Absences``).
What must hold: a request ends by abort only if the client that came last had gone before it was said, or its gateway has been
dead for the grace. Two things are taken for granted: a scheduler takes over only once everybody has told a restarted Redis
again what it knew (it waits for that, ``RESEND_S``), and no gateway dies together with a Redis that forgets its clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protocol_restarts import RestartWorld
from protocol_world import ID, Scheduler

from octavo_scheduler.live import LiveRequest
from octavo_scheduler.orphans import Absences
from octavo_shared.records import AbortRecord

# In ticks of the world's clock, which are seconds for those who are told to wait.
GRACE, SETTLE, MOST_TICKS = 4, 1, 12
GATEWAYS = ("gateway", "second", "third")
BATCH = 2

# What happens in the other worlds often enough. (Aborts come from clients here.)
ELSEWHERE = (" aborts choice ", "fails in resuming", "logged again", "loses its executor")

Owner = tuple[int, str]


@dataclass(slots=True, eq=False)
class Line:
    """A client's connection. ``coming``: how often the client had come when it made this one."""

    gateway: str
    generation: int
    coming: int
    # When its gateway gives the request up, once it has noticed that the client is gone.
    rings_at: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """An entry of the abort stream, and whether it was true when it was said."""

    record: AbortRecord
    fair: bool = True


class OwnerWorld(RestartWorld):
    """Everything there is, and whose it is. Subclasses break a rule each."""

    grace_ms = GRACE * 1000
    absences_kind = Absences
    heeds: Callable[[LiveRequest, AbortRecord], set[int]] = staticmethod(LiveRequest.heed)
    redis_knows_owners = True
    bumps_generation = True
    generations_are_new = True
    asks_for_owner = True
    adopts_again = True

    def __init__(self) -> None:
        self.now = 0
        self.owner: Owner | None = None
        self.said: tuple[Said, ...] = ()
        self.leases = set(GATEWAYS)
        self.died: dict[str, int] = {}
        self.comings = 0
        self.client: Line | None = Line(GATEWAYS[0], 0, 0)
        self.lines = [self.client]
        self.last = self.client
        self.absences: dict[str, Absences] = {}
        self.owner_on_disk: tuple[Owner | None, tuple[Said, ...]] = (None, ())
        super().__init__()
        self.take_lease()

    def options(self) -> list[tuple[str, Callable[[], None]]]:
        unlikely = list(ELSEWHERE)
        if self.owner != self.owner_on_disk[0] and self.last.gateway in self.died:
            unlikely.append("Redis is restarted")
        options = [option for option in super().options() if not any(words in option[0] for words in unlikely)]
        if self.now < MOST_TICKS:
            options += [("time passes", self.pass_time)] * 3
        if self.client is not None:
            options.append(("the client's line breaks", self.hang_up))
        living = [name for name in GATEWAYS if name not in self.died]
        for name in living:
            options.append((f"the client comes to {name}", partial(self.come, name)))
            if len(living) > 1 and self.gateway_life == self.life:
                options.append((f"{name} dies", partial(self.die, name)))
        for line in self.lines:
            if line is not self.client and line.rings_at is None:
                options += [(f"{line.gateway} notices that a client is gone", partial(self.notice, line))] * 2
            elif line.rings_at is not None and line.rings_at <= self.now:
                options += [(f"{line.gateway} gives up", partial(self.give_up, line))] * 2
        for name in self.died.keys() & self.leases:
            options += [(f"{name}'s lease runs out", partial(self.leases.discard, name))] * 2
        for scheduler in self.schedulers:
            if self.is_told(scheduler):
                options.append((f"{scheduler.name} looks for orphans", partial(self.look, scheduler)))
                if self.said and scheduler is self.holder:
                    options += [(f"{scheduler.name} reads aborts", partial(self.read_aborts, scheduler))] * 2
        return options

    def pass_time(self) -> None:
        self.now += 1

    # --- clients and gateways ---

    def hang_up(self) -> None:
        """The client knows; its gateway does not, yet."""
        self.client = None

    def notice(self, line: Line) -> None:
        line.rings_at = self.now + GRACE

    def come(self, gateway: str) -> None:
        """As ``Streams.adopt``: it may leave a line behind that looks alive."""
        self.comings += 1
        generation = (self.owner[0] if self.owner else 0) + self.bumps_generation
        if self.generations_are_new and self.bumps_generation:
            # The clock: it moves on with every coming.
            generation = max(generation, self.comings)
        self.client = self.last = Line(gateway, generation, self.comings)
        self.lines.append(self.client)
        self.adopt(self.client)

    def adopt(self, line: Line) -> None:
        if self.owner is None or self.owner[0] < line.generation or not self.bumps_generation:
            self.owner = line.generation, line.gateway
            word = AbortRecord(ID, -1, line.generation, "adopted", new_owner=line.gateway)
            self.said += (Said(word),)

    def give_up(self, line: Line) -> None:
        """As ``Streams.append_abort``."""
        self.lines.remove(line)
        if not self.redis_knows_owners or self.owner is None or line.generation >= self.owner[0]:
            fair = line.coming == self.comings
            self.said += (Said(AbortRecord(ID, -1, line.generation, "disconnect"), fair),)

    def die(self, gateway: str) -> None:
        self.died[gateway] = self.now
        self.lines = [line for line in self.lines if line.gateway != gateway]
        if self.client is not None and self.client.gateway == gateway:
            self.client = None

    # --- schedulers ---

    def is_told(self, scheduler: Scheduler) -> bool:
        """It knows which Redis this is, and everybody had had the time to say again what he knew."""
        return self.lives[scheduler.name] == self.life and scheduler.name in self.absences

    def take_on(self, scheduler: Scheduler) -> None:
        """As ``PendingEntries``: who owns what is taken over is asked first."""
        if self.gateway_life == self.life:
            self.absences[scheduler.name] = self.absences_kind(SETTLE)
        if self.owner is not None:
            scheduler.live.generation, scheduler.live.gateway = self.owner
        super().take_on(scheduler)

    def read_aborts(self, scheduler: Scheduler) -> None:
        """As ``Intake``: of what is read together new owners first."""
        read, self.said = self.said[:BATCH], self.said[BATCH:]
        for said in sorted(read, key=lambda said: not said.record.new_owner):
            self.act(scheduler, said)

    def act(self, scheduler: Scheduler, said: Said) -> None:
        choices = type(self).heeds(scheduler.live, said.record)
        assert said.fair or not choices - scheduler.live.ending, "a client that had come back was given up"
        for choice in sorted(choices):
            self.abort(scheduler, choice)

    def look(self, scheduler: Scheduler) -> None:
        """As ``OrphanWatch.look``."""
        live, absences = scheduler.live, self.absences[scheduler.name]
        names = {ID.log, live.gateway}
        absences.look(names, names & self.leases, self.now)
        if not absences.has_abandoned(live, self.now):
            return
        if self.asks_for_owner and self.owner is not None and self.owner[0] > live.generation:
            live.generation, live.gateway = self.owner
            return
        self.act(scheduler, Said(AbortRecord(ID, -1, live.generation, "orphaned"), self.is_abandoned()))

    def is_abandoned(self) -> bool:
        """In truth."""
        died_at = self.died.get(self.last.gateway)
        return self.last not in self.lines and (died_at is None or self.now - died_at >= GRACE)

    # --- Redis ---

    def catch_up(self) -> None:
        super().catch_up()
        self.owner_on_disk = self.owner, self.said

    def restart(self) -> None:
        super().restart()
        self.owner, self.said = self.owner_on_disk

    def say_again(self) -> None:
        super().say_again()
        for line in self.lines:
            if line.generation and self.adopts_again:
                self.adopt(line)

    # --- what must hold ---

    def come_to_rest(self) -> None:
        """What a dead gateway's client does not come back to is given up, whether or not an executor goes on with it."""
        super().come_to_rest()
        if self.last.gateway in self.died:
            self.give_up_at_last()

    def give_up_at_last(self) -> None:
        # As if it had not ended yet, for a scheduler that takes over now.
        scheduler = Scheduler("last", self.term, LiveRequest(self.schedulers[-1].live.record, b"1-1", {0, 1}))
        self.lives["last"], self.absences["last"] = self.life, self.absences_kind(SETTLE)
        if self.owner is not None:
            scheduler.live.generation, scheduler.live.gateway = self.owner
        self.leases -= self.died.keys()
        for _ in range(2 * (SETTLE + GRACE + 2)):
            self.look(scheduler)
            self.now += 1
        assert scheduler.live.open <= scheduler.live.ending, "nobody gives it up"

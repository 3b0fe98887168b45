"""The protocol's world with gateways that die, clients that leave and come back elsewhere, and what is said against requests.

An owner is (generation, gateway); whoever has come last is it (rule L7). A line is a connection as its gateway sees it: it
may stay long after its client has gone. Redis may forget who has reconnected; lines are then told to it again.

What is real: how a scheduler heeds what is said (``LiveRequest.heed``) and how long it waits for a gateway (``Absences``).
What must hold: a request ends by abort only if the client that came last had gone before it was said, or its gateway has been
dead for the grace; and what a gateway has given up for the client that came last is not forgotten, even if the scheduler that
has read of it dies. Two things are taken for granted: a scheduler takes over only once everybody has told a restarted Redis
again what it knew (it waits for that, ``RESEND_S``), and no gateway dies together with a Redis that forgets its clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protocol_restarts import RestartWorld
from protocol_world import CHOICES, ID, Scheduler

from octavo_scheduler.live import LiveRequest
from octavo_scheduler.orphans import Absences
from octavo_shared.records import AbortRecord

# In ticks of the world's clock, which are seconds for those who are told to wait.
GRACE, SETTLE, MOST_TICKS = 3, 1, 12
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


@dataclass(frozen=True, slots=True, eq=False)
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
    gives_up_again = True
    aborts_outlive_readers = True

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
        # Which of the client's lines have been given up, by whom, and with what words.
        self.given_up: list[tuple[Line, AbortRecord]] = []
        self.absences: dict[str, Absences] = {}
        self.has_read: dict[str, set[Said]] = {}
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
                if self.unread(scheduler) and scheduler is self.holder:
                    options += [(f"{scheduler.name} reads aborts", partial(self.read_aborts, scheduler))] * 2
                if self.settled(scheduler):
                    options.append((f"{scheduler.name} deletes aborts", partial(self.delete_aborts, scheduler)))
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
        self.given_up.append((line, AbortRecord(ID, -1, line.generation, "disconnect")))
        self.say_against(*self.given_up[-1])

    def say_against(self, line: Line, word: AbortRecord) -> None:
        if not self.redis_knows_owners or self.owner is None or line.generation >= self.owner[0]:
            self.said += (Said(word, line.coming == self.comings or self.is_given_up()),)

    def is_given_up(self) -> bool:
        """In truth: the client that came last is gone, and its gateway has said so."""
        return any(line is self.last for line, _ in self.given_up)

    def die(self, gateway: str) -> None:
        self.died[gateway] = self.now
        self.lines = [line for line in self.lines if line.gateway != gateway]
        self.given_up = [one for one in self.given_up if one[0].gateway != gateway]
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
        read = self.unread(scheduler)[:BATCH]
        self.has_read.setdefault(scheduler.name, set()).update(read)
        for said in sorted(read, key=lambda said: not said.record.new_owner):
            self.act(scheduler, said)
        if not self.aborts_outlive_readers:
            self.said = tuple(said for said in self.said if said not in read)

    def unread(self, scheduler: Scheduler) -> list[Said]:
        return [said for said in self.said if said not in self.has_read.get(scheduler.name, ())]

    def settled(self, scheduler: Scheduler) -> set[Said]:
        """What it has read, once nothing that it has to say for that is on its way into the log."""
        return set() if scheduler.words else self.has_read.get(scheduler.name, set()).intersection(self.said)

    def delete_aborts(self, scheduler: Scheduler) -> None:
        settled = self.settled(scheduler)
        self.said = tuple(said for said in self.said if said not in settled)

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
        for line, word in self.given_up if self.gives_up_again else ():
            self.say_against(line, word)

    # --- what must hold ---

    def come_to_rest(self) -> None:
        """What nobody comes back to is given up, whether or not an executor goes on with it."""
        if self.gateway_life != self.life:
            self.say_again()
        if self.is_given_up():
            self.expect_given_up()
        super().come_to_rest()
        if self.last.gateway in self.died:
            self.give_up_at_last()

    def expect_given_up(self) -> None:
        """Should every scheduler die now, the next one would know it."""
        live = LiveRequest(self.schedulers[-1].live.record, b"1-1", set(range(CHOICES)))
        if self.owner is not None:
            live.generation, live.gateway = self.owner
        over = {choice for choice, state in enumerate(self.whole()) if state.end}
        over.update(*(executor.computed for executor in self.executors))
        for said in sorted(self.said, key=lambda said: not said.record.new_owner):
            over |= type(self).heeds(live, said.record)
        assert over == set(range(CHOICES)) or self.acknowledged or not self.admitted, "what was given up goes on"

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

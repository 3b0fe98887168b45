"""The protocol's world with gateways that die, clients that come and leave anywhere, and what is said against requests.

Any number of clients follow the request, at any of the gateways. Redis knows the gateways whose clients do (rule L7); it may
forget, and is then told again. A line is a connection as its gateway sees it: it may stay long after its client has gone.

What is real: how a scheduler heeds what is said (``LiveRequest.heed``) and how long it waits for a gateway (``Absences``).
What must hold: a request ends by abort only if every line had been gone for the grace before it was said, or its gateway had
been dead for as long; and what nobody follows any more ends, whoever has died meanwhile. Two things are taken for granted: a
scheduler takes over only once everybody has told a restarted Redis again what he knew (it waits for that, ``RESEND_S``), and
no gateway dies together with a Redis that forgets its clients.
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
from octavo_shared.streams import Followers

# In ticks of the world's clock, which are seconds for those who are told to wait.
GRACE, SETTLE, MOST_TICKS = 3, 1, 12
GATEWAYS = ("gateway", "second", "third")
MOST_COMINGS = 8
BATCH = 2

# What happens in the other worlds often enough. (Aborts come from clients here.)
ELSEWHERE = (" aborts choice ", "fails in resuming", "logged again", "loses its executor")


@dataclass(slots=True, eq=False)
class Line:
    """A client's connection, with the generation of its coming."""

    gateway: str
    generation: int
    # When its gateway gives it up, once it has noticed that the client is gone.
    rings_at: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """An entry of the abort stream, and whether it was true when it was said."""

    record: AbortRecord
    fair: bool = True


class FollowerWorld(RestartWorld):
    """Everything there is, and who follows it. Subclasses break a rule each."""

    grace_ms = GRACE * 1000
    absences_kind = Absences
    heeds: Callable[[LiveRequest, AbortRecord], set[int]] = staticmethod(LiveRequest.heed)
    counts_gateways = True
    knows_who_came_since = True
    bumps_generation = True
    generations_are_new = True
    asks_who_follows = True
    follows_again = True
    follows_anew = True
    leaves_again = True
    aborts_outlive_readers = True

    def __init__(self) -> None:
        self.now = 0
        self.following = Followers(0, {GATEWAYS[0]: 0})
        self.said: tuple[Said, ...] = ()
        self.leases = set(GATEWAYS)
        # When, and when those whose clients were there or might have come back.
        self.died: dict[str, int] = {}
        self.deserted: dict[str, int] = {}
        self.comings = 0
        self.lines = [Line(GATEWAYS[0], 0)]
        # What gateways have given up.
        self.left: list[Line] = []
        self.absences: dict[str, Absences] = {}
        self.has_read: dict[str, set[Said]] = {}
        self.following_on_disk = self.following, self.said
        super().__init__()
        self.take_lease()

    def options(self) -> list[tuple[str, Callable[[], None]]]:
        unlikely = list(ELSEWHERE)
        if self.died and self.following != self.following_on_disk[0]:
            unlikely.append("Redis is restarted")
        options = [option for option in super().options() if not any(words in option[0] for words in unlikely)]
        if self.now < MOST_TICKS:
            options += [("time passes", self.pass_time)] * 3
        living = [name for name in GATEWAYS if name not in self.died]
        for name in living:
            if self.comings < MOST_COMINGS:
                options.append((f"a client comes to {name}", partial(self.come, name)))
            if len(living) > 1 and self.gateway_life == self.life:
                options.append((f"{name} dies", partial(self.die, name)))
        for line in self.lines:
            if line.rings_at is None:
                options.append((f"{line.gateway} notices that a client is gone", partial(self.notice, line)))
            elif line.rings_at <= self.now:
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

    def is_over(self) -> bool:
        """In truth: nobody follows the request, nor may anybody come back to it."""
        gone = all(line.rings_at is not None and line.rings_at <= self.now for line in self.lines)
        return gone and all(self.now - died_at >= GRACE for died_at in self.deserted.values())

    # --- clients and gateways ---

    def come(self, gateway: str) -> None:
        """As ``resume``: there may be a line that only looks alive."""
        self.comings += 1
        generation = self.following.generation + self.bumps_generation
        if self.generations_are_new and self.bumps_generation:
            # The clock: it moves on with every coming.
            generation = max(generation, self.comings)
        self.lines.append(Line(gateway, generation))
        self.follow(gateway, generation, generation)

    def follow(self, gateway: str, generation: int, own: int) -> None:
        """As ``Streams.follow``."""
        own = max(own, self.following.gateways.get(gateway, 0))
        self.following = Followers(generation, {**self.following.gateways, gateway: own})
        self.said += (Said(AbortRecord(ID, -1, generation, "followed", new_owner=gateway)),)

    def notice(self, line: Line) -> None:
        """As ``Gateway.leave``."""
        heirs = (one for one in self.lines if one.gateway == line.gateway and one is not line and one.rings_at is None)
        heir = next(heirs, None)
        if heir is None:
            line.rings_at = self.now + GRACE
        else:
            heir.generation = max(heir.generation, line.generation)
            self.lines.remove(line)

    def give_up(self, line: Line) -> None:
        self.lines.remove(line)
        self.left.append(line)
        self.leave(line)

    def leave(self, line: Line) -> None:
        """As ``Streams.leave``."""
        last, others = max(self.following.generation, line.generation), dict(self.following.gateways)
        if self.knows_who_came_since and others.get(line.gateway, 0) > line.generation:
            return
        others.pop(line.gateway, None)
        self.following = Followers(last, others)
        if others if self.counts_gateways else line.generation < last:
            return
        word = AbortRecord(ID, -1, last, "disconnect")
        self.said += (Said(word, self.is_over()),)

    def die(self, gateway: str) -> None:
        self.died[gateway] = self.now
        if any(line.gateway == gateway for line in self.lines):
            self.deserted[gateway] = self.now
        self.lines = [line for line in self.lines if line.gateway != gateway]
        self.left = [line for line in self.left if line.gateway != gateway]

    # --- schedulers ---

    def is_told(self, scheduler: Scheduler) -> bool:
        """It knows which Redis this is, and everybody had had the time to say again what he knew."""
        return self.lives[scheduler.name] == self.life and scheduler.name in self.absences

    def take_on(self, scheduler: Scheduler) -> None:
        """As ``PendingEntries``: who follows what is taken over is asked first."""
        if self.gateway_life == self.life:
            self.absences[scheduler.name] = self.absences_kind(SETTLE)
        scheduler.live.learn(self.following)
        super().take_on(scheduler)

    def read_aborts(self, scheduler: Scheduler) -> None:
        """As ``Intake``: of what is read together comings first."""
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
        assert said.fair or not choices - scheduler.live.ending, (
            "a client was given up that was there, or had time to come back"
        )
        for choice in sorted(choices):
            self.abort(scheduler, choice)

    def look(self, scheduler: Scheduler) -> None:
        """As ``OrphanWatch.look``."""
        live, absences = scheduler.live, self.absences[scheduler.name]
        names = {ID.log, *live.gateways}
        absences.look(names, names & self.leases, self.now)
        if not live.gateways & absences.gone(self.now):
            return
        gateways = set(live.gateways)
        if self.asks_who_follows:
            live.learn(self.following)
            gateways = set(self.following.gateways)
        if absences.have_abandoned(live, gateways, self.now):
            self.act(scheduler, Said(AbortRecord(ID, -1, live.generation, "orphaned"), self.is_over()))

    # --- Redis ---

    def catch_up(self) -> None:
        super().catch_up()
        self.following_on_disk = self.following, self.said

    def restart(self) -> None:
        super().restart()
        self.following, self.said = self.following_on_disk

    def say_again(self) -> None:
        super().say_again()
        for line in self.lines if self.follows_again else ():
            if line.generation:
                last = self.following.generation
                anew = max(last + 1, self.comings) if self.follows_anew else max(last, line.generation)
                self.follow(line.gateway, anew, line.generation)
        for line in self.left if self.leaves_again else ():
            self.leave(line)

    # --- what must hold ---

    def come_to_rest(self) -> None:
        """What everybody has left is given up, whether or not an executor goes on with it."""
        if self.gateway_life != self.life:
            self.say_again()
        while self.lines:
            for line in list(self.lines):
                if line.rings_at is None:
                    self.notice(line)
                elif line.rings_at <= self.now:
                    self.give_up(line)
            self.now += 1
        self.expect_given_up()
        super().come_to_rest()

    def expect_given_up(self) -> None:
        """Should every scheduler die now, the next one would end it, as if nothing had ended yet."""
        live = LiveRequest(self.schedulers[-1].live.record, b"1-1", set(range(CHOICES)))
        live.learn(self.following)
        scheduler = Scheduler("last", self.term, live)
        self.lives["last"], self.absences["last"] = self.life, self.absences_kind(SETTLE)
        self.leases -= self.died.keys()
        over = {choice for choice, state in enumerate(self.whole()) if state.end}
        over.update(*(executor.computed for executor in self.executors))
        for said in sorted(self.said, key=lambda said: not said.record.new_owner):
            self.act(scheduler, said)
        for _ in range(SETTLE + GRACE + 2):
            self.look(scheduler)
            self.now += 1
        over |= live.ending
        assert over == set(range(CHOICES)) or self.acknowledged or not self.admitted, "nobody gives it up"

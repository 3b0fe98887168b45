"""A world in which the log's protocol can be played step by step: Redis operations, schedulers, executors, a gateway.

What is real: the fold, the entries' encoding, and the scheduler's fencing and reading (``recovery.fence_and_read``), which
is carried one Redis operation at a time. What is a model: who holds the lease, what executors compute (a token names who
made it and from which tokens, so that mixing shows), and when anything happens, which is for the player to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from octavo_scheduler.live import LiveRequest
from octavo_scheduler.recovery import Resumption, fence_and_read
from octavo_shared.entries import decode_entry, encode_fences, encode_snapshot, encode_tokens
from octavo_shared.fold import ChoiceFold, FenceEvent, LogEvent, LogFold
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason, RequestRecord, SamplingParams
from octavo_shared.streams import LogPage

ID = RequestId("gateway", 1)
CHOICES = 2
LENGTH = 3
MOST_SCHEDULERS, MOST_EXECUTORS, MOST_ENTRIES = 4, 5, 24
# Small, so that readers are overtaken in the middle.
PAGE = 2

Story = tuple[int, ...]


class Fate(Enum):
    """What becomes of one Redis operation."""

    DONE = "done"
    LOST = "lost"
    UNHEARD = "done, but the answer is lost"


class Turn:
    """Awaited once per Redis operation: whoever plays decides when it is carried out."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Redis:
    """One log, as ``Streams`` shows it."""

    def __init__(self) -> None:
        # (id, events): what is appended goes through the wire's form, and is read once.
        self.entries: list[tuple[int, list[LogEvent]]] = []
        self.newest = 0
        self.fate = Fate.DONE

    def append(self, entry: bytes) -> None:
        self.newest += 1
        self.entries.append((self.newest, decode_entry(entry)))

    def page(self, after: int) -> LogPage:
        chosen = [one for one in self.entries if one[0] > after][:PAGE]
        events = [event for _, entry in chosen for event in entry]
        return LogPage(events, str(chosen[-1][0] if chosen else after))

    def goes_on(self, after: int) -> bool:
        """Whether there is anything behind an entry."""
        return bool(self.entries) and self.entries[-1][0] > after

    async def append_log(self, log: str, entry: bytes) -> None:
        await Turn()
        if self.fate is not Fate.LOST:
            self.append(entry)
        if self.fate is not Fate.DONE:
            raise RedisError(self.fate.value)

    async def read_log(self, log: str, after: str, **_: Any) -> LogPage:
        await Turn()
        if self.fate is not Fate.DONE:
            raise RedisError(self.fate.value)
        return self.page(int(after))


class Tokens:
    """Numbers for (maker, everything before): equal numbers mean equal origin."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Story], int] = {}
        self.origin: dict[int, Story] = {}

    def made_by(self, maker: str, before: Story) -> int:
        number = self._numbers.setdefault((maker, before), len(self._numbers))
        self.origin[number] = before
        return number


@dataclass(slots=True, eq=False)
class Executor:
    """One attempt on an executor: it may go on, and repeat itself, long after it has been given up."""

    name: str
    attempt: Attempt
    stories: dict[int, Story]
    outbox: list[bytes] = field(default_factory=list)
    # Choices whose end is in the step at the same place of the outbox.
    ends: list[set[int]] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Scheduler:
    """One scheduler, in its term for as long as it believes so."""

    name: str
    term: int
    live: LiveRequest
    executor: Executor | None = None
    work: Coroutine[Any, Any, list[Resumption]] | None = None
    # Ends by abort on their way into the log.
    words: list[bytes] = field(default_factory=list)
    wants_to_acknowledge: bool = False


class World:
    """Everything there is. Subclasses break a rule each."""

    fold_kind: type[LogFold] = LogFold
    acknowledges_unasked = False
    ends_when_computed = False
    fences = True
    new_terms = True
    grace_ms = 0

    def __init__(self) -> None:
        self.redis = Redis()
        self.tokens = Tokens()
        self.term = 0
        self.holder: Scheduler | None = None
        self.schedulers: list[Scheduler] = []
        self.executors: list[Executor] = []
        # The request in the model stream: whether it is there (or was, until it was acknowledged), and whether it was read.
        self.admitted = True
        self.delivered = False
        self.acknowledged = False
        # The gateway that owns the log, and what the client has been told by whichever gateway.
        self.fold = self.fold_kind()
        self.read_to = 0
        self.told: list[list[int]] = [[] for _ in range(CHOICES)]
        self.ends: list[list[EndReason]] = [[] for _ in range(CHOICES)]
        self.checked: object = None

    def options(self) -> list[tuple[str, Callable[[], None]]]:
        """All that may happen next, each with its name; what is listed more than once is likelier."""
        options: list[tuple[str, Callable[[], None]]] = []
        room = len(self.redis.entries) < MOST_ENTRIES
        if len(self.schedulers) < MOST_SCHEDULERS:
            options.append(("another scheduler takes the lease", self.take_lease))
        for scheduler in self.schedulers:
            options += self._options_of(scheduler, room)
        for executor in self.executors:
            name = executor.name
            if len(executor.computed) < len(executor.stories):
                options.append((f"{name} does a step", partial(self.step, executor)))
            if executor.outbox and room:
                options.append((f"{name}'s step is logged", partial(self.flush, executor, again=False)))
                options.append(
                    (f"{name}'s step is logged, to be logged again", partial(self.flush, executor, again=True))
                )
        if self.redis.goes_on(self.read_to):
            options += [("the gateway reads", self.read)] * 2
        elif self.redis.entries:
            options.append(("the gateway trims", self.trim))
        if self.read_to:
            options.append(("the client goes on elsewhere", self.lose_gateway))
        return options

    def _options_of(self, scheduler: Scheduler, room: bool) -> list[tuple[str, Callable[[], None]]]:
        options: list[tuple[str, Callable[[], None]]] = []
        name = scheduler.name
        if scheduler.work is not None and room:
            options += [(f"{name} goes on resuming", partial(self.advance, scheduler, Fate.DONE))] * 3
            for fate in (Fate.LOST, Fate.UNHEARD):
                options.append((f"{name} fails in resuming: {fate.value}", partial(self.advance, scheduler, fate)))
        if scheduler.executor is not None and len(self.executors) < MOST_EXECUTORS:
            options.append((f"{name} loses its executor", partial(self.resume, scheduler)))
        for choice in scheduler.live.open - scheduler.live.ending:
            options.append((f"{name} aborts choice {choice}", partial(self.abort, scheduler, choice)))
        if scheduler.words and room:
            options.append((f"{name}'s abort is logged", partial(self.say, scheduler, again=False)))
            options.append((f"{name}'s abort is logged, to be logged again", partial(self.say, scheduler, again=True)))
        if scheduler.wants_to_acknowledge:
            options.append((f"{name} acknowledges", partial(self.acknowledge, scheduler)))
        return options

    # --- schedulers ---

    def take_lease(self) -> None:
        """A new process takes the lease, and over what is pending."""
        self.term += self.new_terms or not self.term
        sampling, prompt = SamplingParams(max_tokens=LENGTH), np.zeros(1, np.int32)
        record = RequestRecord(ID, 0, prompt, sampling, n=CHOICES, disconnect_grace_ms=self.grace_ms)
        scheduler = Scheduler(f"s{len(self.schedulers)}", self.term, LiveRequest(record, b"1-1", set(range(CHOICES))))
        self.holder = scheduler
        self.schedulers.append(scheduler)
        if not self.acknowledged:
            self.take_on(scheduler)

    def take_on(self, scheduler: Scheduler) -> None:
        """The request is pending, or new."""
        if not self.is_new():
            self.resume(scheduler)
        else:
            scheduler.live.attempt_n = 1
            self.start(scheduler, {})
        self.delivered = True

    def is_new(self) -> bool:
        """Whether nobody can have begun with the request before."""
        return not self.delivered

    def resume(self, scheduler: Scheduler) -> None:
        """After a takeover, or when an executor is lost."""
        scheduler.executor = None
        scheduler.work = self.fence_and_read(scheduler)

    async def fence_and_read(self, scheduler: Scheduler) -> list[Resumption]:
        return await fence_and_read(self.redis, [scheduler.live], scheduler.term)  # type: ignore[arg-type]

    def advance(self, scheduler: Scheduler, fate: Fate) -> None:
        """One Redis operation of a scheduler that resumes."""
        assert scheduler.work is not None
        self.redis.fate = fate
        try:
            scheduler.work.send(None)
        except StopIteration as stop:
            scheduler.work = None
            for resumption in stop.value:
                for choice in resumption.ended:
                    self.end(scheduler, choice)
                # Who is outranked gives up.
                if not resumption.outranked_by:
                    self.start(scheduler, resumption.outputs)
        except RedisError:
            # Nothing has been decided.
            scheduler.work = self.fence_and_read(scheduler)

    def start(self, scheduler: Scheduler, outputs: dict[int, list[int]]) -> None:
        live = scheduler.live
        stories = {choice: tuple(outputs.get(choice, ())) for choice in live.open - live.ending}
        if stories:
            name = f"{scheduler.name}/{live.attempt_n}"
            scheduler.executor = Executor(name, Attempt(scheduler.term, live.attempt_n), stories)
            self.executors.append(scheduler.executor)

    def abort(self, scheduler: Scheduler, choice: int) -> None:
        """As ``SchedulerService.end_choices``: let go, then fence with the end."""
        live, executor = scheduler.live, scheduler.executor
        if choice not in live.open - live.ending:
            return
        if executor is not None:
            if choice in executor.computed:
                return
            executor.stories.pop(choice, None)
        live.ending.add(choice)
        attempt = Attempt(scheduler.term, live.attempt_n + 1)
        scheduler.words.append(encode_fences([FenceEvent(ID.serial, choice, attempt, EndReason.ABORT)]))

    def say(self, scheduler: Scheduler, again: bool) -> None:
        """An end by abort goes into the log; perhaps unheard, then it goes again."""
        self.redis.append(scheduler.words[0])
        if not again:
            entry = scheduler.words.pop(0)
            for event in decode_entry(entry):
                assert isinstance(event, FenceEvent)
                self.end(scheduler, event.choice)

    def end(self, scheduler: Scheduler, choice: int) -> None:
        """A choice's end is in the log, for all that the scheduler knows."""
        scheduler.live.open.discard(choice)
        scheduler.wants_to_acknowledge = not scheduler.live.open

    def acknowledge(self, scheduler: Scheduler) -> None:
        """As ``Streams.finish_request``: only the holder of the lease."""
        scheduler.wants_to_acknowledge = False
        if self.acknowledges_unasked or scheduler is self.holder:
            self.acknowledged = True

    # --- executors ---

    def step(self, executor: Executor) -> None:
        """One token for every choice that is not over."""
        rows, ends = [], set()
        for choice, story in executor.stories.items():
            if len(story) >= LENGTH:
                continue
            token = self.tokens.made_by(executor.name, story)
            executor.stories[choice] = (*story, token)
            end = EndReason.LENGTH if len(story) + 1 == LENGTH else EndReason.NONE
            if end:
                ends.add(choice)
            rows.append(OutputRow(ID, choice, executor.attempt.n, len(story), (token,), end=int(end)))
        if rows:
            entry = encode_tokens(rows, term=executor.attempt.term, executor=executor.name, epoch=1, step=1)
            executor.outbox.append(entry)
            executor.ends.append(ends)
            executor.computed |= ends
            if self.ends_when_computed:
                self.logged(executor, ends)

    def flush(self, executor: Executor, again: bool) -> None:
        """The oldest step goes into the log; perhaps unheard, then it goes again."""
        self.redis.append(executor.outbox[0])
        if not again:
            executor.outbox.pop(0)
            self.logged(executor, executor.ends.pop(0))

    def logged(self, executor: Executor, ends: set[int]) -> None:
        for scheduler in self.schedulers:
            if scheduler.executor is executor:
                for choice in ends - scheduler.live.ending:
                    self.end(scheduler, choice)

    # --- the gateway and its client ---

    def read(self) -> None:
        """The gateway reads on, and the client is told."""
        page = self.redis.page(self.read_to)
        self.read_to = int(page.last_id)
        for event in page.events:
            self.fold.apply(event)
        for choice in range(CHOICES):
            state, told = self.fold.get(ID.serial, choice), self.told[choice]
            known = min(len(told), len(state.tokens))
            assert state.tokens[:known] == told[:known], "a token that was delivered is taken back"
            told += state.tokens[len(told) :]
            if state.end and not self.ends[choice]:
                self.ends[choice].append(state.end)
            assert state.end in (EndReason.NONE, *self.ends[choice]), "a choice ends in two ways"

    def trim(self) -> None:
        """As ``Streams.trim_log``: nothing happens unless all has been read."""
        if self.redis.entries and not self.redis.goes_on(self.read_to):
            states = list(self.fold.snapshots())
            self.redis.entries.clear()
            if states:
                self.redis.append(encode_snapshot(states))
            self.read_to = self.redis.newest

    def lose_gateway(self) -> None:
        """The client goes on with another gateway, which knows nothing but the log."""
        self.fold, self.read_to = self.fold_kind(), 0

    # --- what must hold ---

    def whole(self) -> list[ChoiceFold]:
        """Each choice, for a reader of all that is in the log."""
        log = self.fold_kind().apply_all(event for _, entry in self.redis.entries for event in entry)
        return [log.get(ID.serial, choice) for choice in range(CHOICES)]

    def check(self) -> None:
        now = (self.redis.newest, self.acknowledged, [len(told) for told in self.told])
        if now == self.checked:
            return
        self.checked = now
        for choice, state in enumerate(self.whole()):
            for at, token in enumerate(state.tokens):
                assert self.tokens.origin[token] == tuple(state.tokens[:at]), (
                    "made from other tokens than those before it"
                )
            assert not self.acknowledged or state.end, "acknowledged without an end"
            assert state.tokens[: len(self.told[choice])] == self.told[choice], (
                "a token that was delivered is taken back"
            )

    def come_to_rest(self) -> None:
        """Whatever was going on is gone through with; then a last scheduler that nothing disturbs brings all to an end."""
        for scheduler in self.schedulers:
            while scheduler.work is not None:
                self.advance(scheduler, Fate.DONE)
            while scheduler.words:
                self.say(scheduler, again=False)
        self._finish_steps()
        self.check()
        for scheduler in self.schedulers:
            if scheduler.wants_to_acknowledge:
                self.acknowledge(scheduler)
        self.take_lease()
        last = self.schedulers[-1]
        while last.work is not None:
            self.advance(last, Fate.DONE)
        self._finish_steps()
        if last.wants_to_acknowledge:
            self.acknowledge(last)
        while self.redis.goes_on(self.read_to):
            self.read()
        self.check()
        assert self.acknowledged or not self.admitted, "never acknowledged"
        for choice, state in enumerate(self.whole()):
            assert len(self.ends[choice]) == 1, "not one end"
            self.check_told(choice, state.tokens)

    def check_told(self, choice: int, tokens: list[int]) -> None:
        assert self.told[choice] == tokens, "the client was not told all"

    def _finish_steps(self) -> None:
        for executor in self.executors:
            for _ in range(LENGTH):
                self.step(executor)
            while executor.outbox:
                self.flush(executor, again=False)

    def close(self) -> None:
        """Drop what is half done."""
        for scheduler in self.schedulers:
            if scheduler.work is not None:
                scheduler.work.close()

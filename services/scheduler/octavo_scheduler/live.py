"""Requests that have not ended: what the scheduler owes an end, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo_scheduler.core.beam_groups import BeamGroup
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.fold_beams import BeamFold
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord, RequestRecord
from octavo_shared.streams import Followers


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a request has come, as the log has it: outputs per choice, or the state of its beam search."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    beams: BeamFold | None = None


@dataclass(slots=True)
class LiveRequest:
    """One request between its reading and its acknowledgement.

    ``entry_id`` is its place in the model stream. ``open`` are the choices whose end is not in the log yet; ``attempt_n``
    counts the attempts of this term; ``sequences`` are those of the current attempt. ``ending`` are open choices whose end
    has been decided here and is on its way into the log: they never start again.
    """

    record: RequestRecord
    entry_id: bytes
    open: set[int]
    attempt_n: int = 0
    ending: set[int] = field(default_factory=set)
    sequences: list[Sequence] = field(default_factory=list)
    # Of who has come last to follow it: what was said against it before counts for nothing (rule L7).
    generation: int = 0
    # Every gateway whose clients have followed it, as far as is known here. Who still does is known to Redis.
    gateways: set[str] = field(default_factory=set)
    # Its beam search; ``sequences`` then holds the one that it began with, for those who watch.
    beams: BeamGroup | None = None

    def __post_init__(self) -> None:
        self.generation = self.record.owner_generation
        self.gateways.add(self.record.id.log)

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that compute for it."""
        return self.sequences if self.beams is None else self.beams.members

    @property
    def is_ending(self) -> bool:
        """An end that has been decided here is on its way into the log."""
        return not self.open.isdisjoint(self.ending)

    def learn(self, followers: Followers) -> None:
        """Who follows it, as Redis has it now."""
        self.generation = max(self.generation, followers.generation)
        self.gateways.update(followers.gateways)

    def heed(self, word: AbortRecord) -> set[int]:
        """Take a word about who wants it; returns the open choices that are to end for it.

        What was said before somebody came counts for nothing (rule L7).
        """
        if word.new_owner:
            self.learn(Followers(word.owner_generation, {word.new_owner: word.owner_generation}))
            return set()
        if word.owner_generation < self.generation:
            return set()
        return set(self.open) if word.choice < 0 else {word.choice} & self.open

    def suspend(self) -> None:
        """Nothing computes for it until it starts again."""
        self.sequences, self.beams = [], None

    def start(self, outputs: dict[int, list[int]], max_model_len: int) -> list[Sequence]:
        """Sequences of a new attempt for every choice that is to run, resumed after ``outputs`` where there are any."""
        self.sequences = []
        for choice in sorted(self.open - self.ending):
            sequence = Sequence(self.record, choice, self.attempt_n, max_model_len)
            if outputs.get(choice):
                sequence.resume_with(outputs[choice])
            self.sequences.append(sequence)
        return self.sequences


class LiveRequests:
    """Every request that is owed an end, by id."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """The request, if it is still owed an end."""
        return self._by_id.get(request_id)

    def add(self, live: LiveRequest) -> None:
        """From now on it is owed an end per open choice."""
        self._by_id[live.record.id] = live

    def close(self, request_id: RequestId, choice: int) -> LiveRequest | None:
        """A choice's end is in the log; returns the request when that was the last one, and forgets it."""
        live = self._by_id.get(request_id)
        if live is None:
            return None
        live.open.discard(choice)
        return None if live.open else self._by_id.pop(request_id)

"""What the core tells its surroundings: rare things only, never one event per decoded token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_scheduler.core.sequence import Sequence
from octavo_shared.fold_beams import BeamEvent
from octavo_shared.records import EndReason

if TYPE_CHECKING:
    from octavo_scheduler.core.beam_groups import BeamGroup


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence got a slot; ``cached_tokens`` of its ``num_tokens`` were found in the prefix cache."""

    sequence: Sequence
    step: int
    num_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Step ``step`` computes tokens [start, start + count) of a prompt; ``last`` when the first output follows."""

    sequence: Sequence
    step: int
    start: int
    count: int
    last: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence was let go to make room; it will come back."""

    sequence: Sequence
    step: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The executor ended a sequence in step ``step``; its tokens and end are on their way to the log."""

    sequence: Sequence
    step: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class BeamStep:
    """A search has decided; the decision has to be logged before it goes on (``BeamGroups.logged``)."""

    group: BeamGroup
    event: BeamEvent


@dataclass(frozen=True, slots=True)
class BeamFailed:
    """A search cannot go on: the model's output for one of its hypotheses cannot be used."""

    group: BeamGroup


Event = Admitted | Chunk | Preempted | Ended | BeamStep | BeamFailed

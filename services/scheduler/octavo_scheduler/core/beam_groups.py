"""Beam searches on the executor's memory: which sequences a search computes, and how they fork and are dropped each step.

Every live hypothesis is a sequence of its own that shares blocks with its siblings, as any fork does. One step of a search:

1. Each member computes its newest token; its sample brings candidates instead of a token. It then idles in its slot.
2. When the last member has answered, ``BeamSearch.advance`` decides. The decision goes to the log first (rule L12).
3. When it is logged, the members of the next step take over their parents' blocks: a parent's only child writes on in
   place, further children copy the last block on their first write (``forks``), a parent without children is let go.

A member that is preempted before it has answered waits like any other sequence. One that has answered has nothing left to
compute: if it is preempted its children start from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.beams import BeamSearch, Candidates
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.fold_beams import BeamEvent
from octavo_shared.plan import StepResult
from octavo_shared.records import RequestRecord


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One request's search. ``members`` are the sequences of its live hypotheses, in their order.

    ``answers`` are those of members that have been computed, by uid. ``decided`` is an event that is on its way into the
    log. ``lead`` stands for the request where one sequence is to be named.
    """

    record: RequestRecord
    attempt: int
    search: BeamSearch
    max_model_len: int
    members: list[Sequence] = field(default_factory=list)
    answers: dict[int, Candidates] = field(default_factory=dict)
    decided: BeamEvent | None = None
    cached_tokens: int = 0

    @classmethod
    def of(cls, record: RequestRecord, attempt: int, search: BeamSearch, max_model_len: int) -> BeamGroup:
        """The group of a search, with a member for each of its live hypotheses."""
        group = cls(record, attempt, search, max_model_len)
        group.members = [group.member(place, list(one.tokens)) for place, one in enumerate(search.live)]
        return group

    @property
    def lead(self) -> Sequence:
        """The likeliest hypothesis so far."""
        return self.members[0]

    def member(self, place: int, outputs: list[int]) -> Sequence:
        """A sequence for the live hypothesis at ``place`` with these outputs."""
        sequence = Sequence(self.record, place, self.attempt, self.max_model_len)
        sequence.beams = self
        if outputs:
            sequence.resume_with(outputs)
        return sequence

    def blocks_at_most(self, block_size: int) -> int:
        """Blocks that all its hypotheses need at once when they are as long as they may be."""
        prompt = len(self.record.prompt)
        most = min(prompt + self.record.sampling.max_tokens, self.max_model_len) - 1
        shared = prompt // block_size
        return shared + self.record.sampling.beam_width * (-(-most // block_size) - shared)

    def answer(self, sequence: Sequence, candidates: Candidates) -> BeamEvent | None:
        """A member has been computed; the decision, if it was the last one."""
        self.answers[sequence.uid] = candidates
        if len(self.answers) < len(self.members):
            return None
        ordered = [self.answers[one.uid] for one in self.members]
        self.decided = self.search.advance(ordered, self.cached_tokens)
        return self.decided

    def next_members(self) -> list[tuple[Sequence, Sequence]]:
        """The decision is logged: the members of the next step take the place of this one's. (parent, member) each."""
        event = self.decided
        assert event is not None, "nothing is decided"
        parents = self.members
        self.members = [self.member(place, list(one.tokens)) for place, one in enumerate(self.search.live)]
        self.answers, self.decided = {}, None
        return [(parents[parent], child) for parent, child in zip(event.parents, self.members, strict=True)]


def is_idle(sequence: Sequence) -> bool:
    """It is a beam that has been computed and waits for its siblings: it may hold memory, and needs none."""
    return sequence.beams is not None and sequence.uid in sequence.beams.answers


def split_candidates(result: StepResult, beams: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Candidates]]:
    """(sample, its candidates) for each of a result's samples that are ``beams`` bool[samples] and have any."""
    counts = result.sample_counts
    first = np.cumsum(counts) - counts
    of_beams = np.where(beams, counts, 0)
    first_score = np.cumsum(of_beams) - of_beams
    for sample in (of_beams > 0).nonzero()[0].tolist():
        token, score, count = int(first[sample]), int(first_score[sample]), int(counts[sample])
        yield sample, Candidates(result.tokens[token : token + count], result.scores[score : score + count])

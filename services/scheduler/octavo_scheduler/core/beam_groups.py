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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.beams import BeamSearch, Candidates
from octavo_scheduler.core.errors import NeverFitsError
from octavo_scheduler.core.events import BeamStep
from octavo_scheduler.core.sequence import Sequence, State
from octavo_shared.fold_beams import BeamEvent
from octavo_shared.plan import NO_INTS, NewSequence, StepResult
from octavo_shared.records import Int32Array, RequestRecord

if TYPE_CHECKING:
    from octavo_scheduler.core.in_flight import SentPlan
    from octavo_scheduler.core.scheduler import Scheduler


def blocks_of_beams(record: RequestRecord, block_size: int, max_model_len: int) -> int:
    """Blocks that all hypotheses of a beam search need at once when they are as long as they may be."""
    prompt = len(record.prompt)
    most = min(prompt + record.sampling.max_tokens, max_model_len) - 1
    shared = prompt // block_size
    return shared + record.sampling.beam_width * (-(-most // block_size) - shared)


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
        return blocks_of_beams(self.record, block_size, self.max_model_len)

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


class BeamGroups:
    """The searches of a core."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._groups: list[BeamGroup] = []
        # Members that have taken slots and of which no plan has told yet, by uid.
        self.seated: dict[int, NewSequence] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[BeamGroup]:
        return iter(self._groups)

    def __contains__(self, group: BeamGroup) -> bool:
        return group in self._groups

    def add(self, group: BeamGroup) -> None:
        """Let the hypotheses of a search wait.

        Raises:
            NeverFitsError: they have no room for another output, or there are too few slots or blocks for all of them.
        """
        config, most = self._core.config, group.lead.max_total_tokens
        width = group.record.sampling.beam_width
        if len(group.lead.tokens) >= most:
            raise NeverFitsError(f"{len(group.lead.tokens)} tokens leave no room within {most}")
        if width > config.max_num_seqs:
            raise NeverFitsError(f"{width} beams are more than the {config.max_num_seqs} sequences that run at once")
        if group.blocks_at_most(config.block_size) > config.num_blocks:
            raise NeverFitsError(f"{width} beams of {most} tokens do not fit into the whole KV cache")
        self._groups.append(group)
        for member in group.members:
            self._core.enlist(member)
            self._core.waiting.push(member)

    def end(self, group: BeamGroup) -> bool:
        """A search is over, or nobody wants it; its blocks are free at once. False when it is gone already."""
        if group not in self._groups:
            return False
        self._groups.remove(group)
        for member in group.members:
            self._core.abort(member)
        return True

    def logged(self, group: BeamGroup) -> None:
        """The decision of a search is in the log: it goes on, or is over."""
        if group not in self._groups or group.decided is None:
            return
        if group.search.is_over:
            self.end(group)
            return
        core = self._core
        # What the parents have computed is named before their children go on from it.
        core.tidy()
        parents = group.members
        blocks = {one.uid: core.table.blocks(one).copy() for one in parents if one.state is State.RUNNING}
        pairs = [(blocks.get(parent.uid, NO_INTS), parent, child) for parent, child in group.next_members()]
        for shared, parent, child in pairs:
            core.enlist(child)
            child.arrival, child.preemptions = parent.arrival, parent.preemptions
            core.prefix_cache.inherit(child, parent)
            core.pool.acquire(shared)
        for parent in parents:
            core.abort(parent)
        for shared, _, child in pairs:
            self._succeed(child, shared)

    def _succeed(self, child: Sequence, blocks: Int32Array) -> None:
        """A member goes on with its parent's blocks, to which it has references, if there are any and it finds a slot."""
        core, table = self._core, self._core.table
        if not len(blocks) or not table.num_free:
            core.pool.release(blocks.tolist())
            core.waiting.push(child)
            return
        computed = len(child.tokens) - 1
        slot = core.seat(child, blocks, computed)
        row = table.row(child)
        table.prefill_end[row] = computed
        table.shares_tail[row] = bool(computed % core.config.block_size)
        self.seated[child.uid] = child.placed(slot, blocks, computed)

    def take_seated(self) -> list[NewSequence]:
        """Members that the plan being made has to tell of."""
        seated = list(self.seated.values())
        self.seated.clear()
        return seated

    def commit(self, plan: SentPlan, result: StepResult) -> None:
        """Candidates have come: they are noted, and decided on where they are the last of a step."""
        assert plan.beams is not None
        for sample, candidates in split_candidates(result, plan.beams):
            sequence = self._core.find(int(plan.sample_uids[sample]))
            if sequence is None or sequence.beams is None:
                continue
            if sequence.state is State.WAITING:
                # Let go meanwhile; there is nothing left to compute.
                self._core.waiting.remove(sequence)
                sequence.state = State.IDLE
            event = sequence.beams.answer(sequence, candidates)
            if event is None:
                continue
            if event.end:
                # Of all its hypotheses: they have run for as long as it has.
                self._core.forecast.observe(event.position + 1)
            self._core.note(BeamStep(sequence.beams, event))

    def idle(self) -> list[Sequence]:
        """Members that hold a slot and wait for siblings that are still to be computed."""
        running = self._core.table.running
        return [one for one in running if is_idle(one) and one.beams is not None and one.beams.decided is None]

"""A step on its way through the device: what was planned, and what the host must remember until its results are there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_executor.batch import BatchState, Sequence
from octavo_executor.device import Event, Stream
from octavo_executor.host_pages import Moves
from octavo_executor.lanes import Lane
from octavo_executor.sampler import BeamDraw, Draw, Scores
from octavo_shared.plan import NO_FLOATS, OutputRow, StepPlan
from octavo_shared.records import TokenLogprobs

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a plan that compute (those of ended sequences left out), [rows] each."""

    index: npt.NDArray[np.intp]  # position in the plan
    slots: Ints
    starts: Ints
    counts: Ints
    query_start: Ints  # [rows + 1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.query_start[-1])


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a plan that are drawn, draws before beams; [samples] each, as their sequences stood at the launch.

    Kept here, since a slot may have another sequence when results arrive.
    """

    index: npt.NDArray[np.intp]  # position in the plan
    row_of: npt.NDArray[np.intp]
    slots: Ints
    sequences: list[Sequence]
    num_tokens: Ints
    output_start: Ints
    min_total: Ints
    max_total: Ints
    num_draws: int  # so many are draws, the rest are beams

    @staticmethod
    def of(state: BatchState, index: npt.NDArray[np.intp], row_of: npt.NDArray[np.intp], slots: Ints) -> Samples:
        """Those of ``slots``."""
        beams = state.beam_width[slots] > 0
        num_draws = len(slots) - int(beams.sum())
        if beams.any():
            order = np.argsort(beams, kind="stable")
            index, row_of, slots = index[order], row_of[order], slots[order]
        return Samples(
            index,
            row_of,
            slots,
            [state.sequence(slot) for slot in slots.tolist()],
            num_tokens=state.num_tokens[slots],
            output_start=state.output_start[slots],
            min_total=state.min_total[slots],
            max_total=state.max_total[slots],
            num_draws=num_draws,
        )

    def parts(self, most: int) -> list[slice]:
        """Cut into at most ``most`` samples, draws apart from beams."""
        cuts = [(0, self.num_draws), (self.num_draws, len(self.slots))]
        return [slice(at, min(at + most, end)) for begin, end in cuts for at in range(begin, end, most)]


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows of the last layer's output whose logits are wanted."""

    rows: Ints
    index: Tensor | None  # the same on the device; None where its memory is the host's


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Some rows whose logits score the prompt tokens after them."""

    hidden: HiddenRows
    target: Tensor
    scores: Scores
    kept: list[TokenLogprobs]  # where they go


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Some samples, from as many rows."""

    part: slice
    hidden: HiddenRows
    draw: Draw | BeamDraw


class StreamClock:
    """Marks a stream's work; the seconds are known once it has happened."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._begun = stream.record(timed=True)
        self._marks: list[tuple[str, Event]] = []

    def mark(self, kind: str) -> None:
        """What was enqueued since the last mark is of this kind."""
        self._marks.append((kind, self._stream.record(timed=True)))

    def seconds(self, kind: str) -> float:
        """Of all work of this kind."""
        begun, total = self._begun, 0.0
        for name, event in self._marks:
            if name == kind:
                total += event.seconds_since(begun)
            begun = event
        return total


@dataclass(slots=True)
class Launched:
    """A step under way. It is collected once, after all that were launched before it."""

    plan: StepPlan
    rows: Rows
    samples: Samples
    lane: Lane
    prompts: list[PromptPart] = field(default_factory=list)
    drawn: list[SamplePart] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    clock: StreamClock | None = None
    prepare_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether collecting it would not wait."""
        return self.lane.done is not None and self.lane.done.query() and self.moves.done


@dataclass(slots=True)
class Drawn:
    """What the samples of a plan came to, [samples] each: ``token`` is what was drawn where ``counts`` is 1."""

    counts: Ints
    ends: npt.NDArray[np.uint8]
    token: Ints
    written: dict[int, OutputRow] = field(default_factory=dict)
    # Of beams, by sample: token ids and log-probabilities.
    candidates: dict[int, tuple[Ints, npt.NDArray[np.float32]]] = field(default_factory=dict)

    @staticmethod
    def of(total: int) -> Drawn:
        """Nothing yet."""
        return Drawn(np.zeros(total, np.int32), np.zeros(total, np.uint8), np.zeros(total, np.int32))

    def tokens(self) -> Ints:
        """All samples' tokens, int32[sum(counts)]."""
        if not self.candidates:
            return self.token[self.counts > 0]
        some = np.flatnonzero(self.counts).tolist()
        return np.concatenate([self.candidates[i][0] if i in self.candidates else self.token[i : i + 1] for i in some])

    def scores(self) -> npt.NDArray[np.float32]:
        """All candidates' log-probabilities, in the order of ``tokens``."""
        return np.concatenate([NO_FLOATS, *(self.candidates[i][1] for i in sorted(self.candidates))])

"""From logits to tokens: gathers each row's sampling parameters from the batch state and calls the kernels.

Everything is done in three parts, since results come later than what follows them is begun: the host plans it, with what the
kernels will need on its way to the device; the device does it; the host reads what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.batch import BatchState
from octavo_executor.lanes import Lane, Shared
from octavo_kernels import Kernels, SampleRows, SampleStatus
from octavo_shared.records import TokenLogprobs

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Scores:
    """Log-probabilities of tokens, with the likeliest alternatives."""

    def __init__(self, kernels: Kernels, wanted: Ints, vocab: int, lane: Lane) -> None:
        """``wanted`` int32[R] alternatives of each row."""
        rows, self._width = len(wanted), min(int(wanted.max(initial=0)), vocab)
        self._kernels = kernels
        self._wanted = np.minimum(wanted, self._width).astype(np.int32)
        self._top_n = lane.uploads.put(self._wanted)
        shapes = (((rows,), torch.float32), ((rows,), torch.int32))
        tops = (((rows, self._width), torch.int32), ((rows, self._width), torch.float32))
        self._results = [lane.results.take(shape, dtype) for shape, dtype in (*shapes, *tops)]

    def run(self, logits: Tensor, target: Tensor) -> None:
        """Of ``target`` int32[R] under ``logits`` [R, V]."""
        scored = self._kernels.logprobs(logits, target, self._top_n, self._width)
        found = (scored.logprob, scored.rank, scored.top_ids, scored.top_logprobs)
        for result, tensor in zip(self._results, found, strict=True):
            result.device.copy_(tensor)

    def read(self) -> list[TokenLogprobs]:
        """What came of it."""
        logprobs, ranks, ids, values = (result.host.tolist() for result in self._results)
        wanted = self._wanted.tolist()
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids[r][:n], values[r][:n], strict=True)))
            for r, (logprob, rank, n) in enumerate(zip(logprobs, ranks, wanted, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each of R rows."""

    kernels: Kernels
    rows: SampleRows
    appends: Tensor | None  # int32[slots, length], where drawn tokens go; None: the host puts them there
    token: Shared  # int32[R]
    status: Shared  # uint8[R]
    scored: npt.NDArray[np.intp]  # rows that want log-probabilities
    index: Tensor | None  # the same on the device; None: all
    scores: Scores | None

    def run(self, logits: Tensor) -> None:
        """Draw from ``logits`` [R, V]."""
        token, status = self.kernels.sample(logits, self.rows)
        if self.appends is not None:
            self.kernels.put_tokens(self.appends, self.rows.token_row, self.rows.position, token)
        self.token.device.copy_(token)
        self.status.device.copy_(status)
        if self.scores is not None:
            if self.index is None:
                self.scores.run(logits, token)
            else:
                self.scores.run(logits.index_select(0, self.index), token.index_select(0, self.index))

    def read(self) -> tuple[list[int], list[int], Sequence[TokenLogprobs | None]]:
        """Ids (-1: none), statuses, log-probabilities."""
        tokens = self.token.host.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.scores is not None:
            for i, value in zip(self.scored.tolist(), self.scores.read(), strict=True):
                logprobs[i] = value
        return tokens, self.status.host.tolist(), logprobs


@dataclass(frozen=True, slots=True)
class BeamDraw:
    """The likeliest next tokens of R rows, each a beam."""

    kernels: Kernels
    rows: SampleRows
    wanted: Tensor  # int32[R]
    ids: Shared  # int32[R, N]
    logprobs: Shared  # float32[R, N]
    found: Shared  # int32[R]
    status: Shared  # uint8[R]

    def run(self, logits: Tensor) -> None:
        """List them from ``logits`` [R, V]."""
        scored = self.kernels.candidates(logits, self.rows, self.wanted, self.ids.device.shape[1])
        for result, tensor in (
            (self.ids, scored.ids),
            (self.logprobs, scored.logprobs),
            (self.found, scored.found),
            (self.status, scored.status),
        ):
            result.device.copy_(tensor)

    def read(self) -> list[tuple[Ints, Floats] | None]:
        """Per row ids and log-probabilities, the likeliest first; None where the row cannot be used."""
        ids, logprobs = self.ids.host.numpy().copy(), self.logprobs.host.numpy().copy()
        return [
            (ids[r, :n], logprobs[r, :n]) if status == SampleStatus.FINE else None
            for r, (n, status) in enumerate(zip(self.found.host.tolist(), self.status.host.tolist(), strict=True))
        ]


class Sampler:
    """Plans what is sampled; reads the batch state and never changes it."""

    def __init__(self, state: BatchState, kernels: Kernels, tokens: Tensor, vocab: int, *, appends: bool) -> None:
        """``tokens`` int32[slots, length] on the device; with ``appends`` drawn tokens are put there at once."""
        self._state, self._kernels, self._tokens, self._vocab = state, kernels, tokens, vocab
        self._appends = tokens if appends else None

    def draw(self, slots: Ints, lane: Lane) -> Draw:
        """One token for each of ``slots`` [R]."""
        rows, wanted = self._rows(slots, lane), self._state.logprobs[slots]
        scored = np.flatnonzero(wanted >= 0)
        index, scores = None, None
        if scored.size:
            scores = Scores(self._kernels, wanted[scored], self._vocab, lane)
            if scored.size < len(slots):
                index = lane.uploads.put(scored.astype(np.int32))
        token, status = (lane.results.take((len(slots),), dtype) for dtype in (torch.int32, torch.uint8))
        return Draw(self._kernels, rows, self._appends, token, status, scored, index, scores)

    def beams(self, slots: Ints, lane: Lane) -> BeamDraw:
        """The likeliest next tokens of ``slots`` [R], each a beam.

        Twice as many as the beam is wide, more if all stop ids could be among them, or as many as have a probability above
        zero.
        """
        state = self._state
        widths = state.beam_width[slots].astype(np.int64)
        stops = np.array([len(state.sequence(slot).stop_ids) for slot in slots.tolist()])
        wanted = np.minimum(widths + np.maximum(widths, stops), self._vocab).astype(np.int32)
        rows, width = len(slots), int(wanted.max())
        take = lane.results.take
        return BeamDraw(
            self._kernels,
            self._rows(slots, lane),
            lane.uploads.put(wanted),
            take((rows, width), torch.int32),
            take((rows, width), torch.float32),
            take((rows,), torch.int32),
            take((rows,), torch.uint8),
        )

    def scores(self, wanted: Ints, lane: Lane) -> Scores:
        """Log-probabilities of R tokens, each with the ``wanted`` int32[R] likeliest alternatives."""
        return Scores(self._kernels, wanted, self._vocab, lane)

    def _rows(self, slots: Ints, lane: Lane) -> SampleRows:
        state = self._state

        def put(values: npt.NDArray[np.generic]) -> Tensor:
            return lane.uploads.put(values)

        counts = put(state.num_tokens[slots])
        bias_start, bias_ids, bias_values = self._bias(slots)
        banned_start, banned_ids = self._banned(slots)
        return SampleRows(
            temperature=put(state.temperature[slots]),
            top_k=put(state.top_k[slots]),
            top_p=put(state.top_p[slots]),
            min_p=put(state.min_p[slots]),
            presence=put(state.presence[slots]),
            frequency=put(state.frequency[slots]),
            repetition=put(state.repetition[slots]),
            seed=put(state.seed[slots]),
            position=counts,
            tokens=self._tokens,
            token_row=put(slots.astype(np.int32)),
            token_count=counts,
            output_start=put(state.output_start[slots]),
            bias_start=put(bias_start),
            bias_ids=put(bias_ids),
            bias_values=put(bias_values),
            banned_start=put(banned_start),
            banned_ids=put(banned_ids),
        )

    def _bias(self, slots: Ints) -> tuple[Ints, Ints, Floats]:
        start = np.zeros(len(slots) + 1, np.int32)
        if not self._state.biased[slots].any():
            return start, np.zeros(0, np.int32), np.zeros(0, np.float32)
        sequences = [self._state.sequence(slot) for slot in slots.tolist()]
        np.cumsum([len(sequence.bias_ids) for sequence in sequences], out=start[1:])
        ids = np.concatenate([sequence.bias_ids for sequence in sequences])
        return start, ids, np.concatenate([sequence.bias_values for sequence in sequences])

    def _banned(self, slots: Ints) -> tuple[Ints, Ints]:
        """Stop ids of the sequences that may not end yet."""
        early = self._state.num_tokens[slots] < self._state.min_total[slots]
        start = np.zeros(len(slots) + 1, np.int32)
        if not early.any():
            return start, np.zeros(0, np.int32)
        ids = [
            sorted(self._state.sequence(slot).stop_ids) if banned else []
            for slot, banned in zip(slots.tolist(), early.tolist(), strict=True)
        ]
        np.cumsum([len(row) for row in ids], out=start[1:])
        return start, np.array([token for row in ids for token in row], np.int32)

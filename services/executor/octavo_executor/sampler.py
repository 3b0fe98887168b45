"""From logits to tokens: gathers each row's sampling parameters from the batch state and calls the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.batch import BatchState
from octavo_kernels import Kernels, SampleRows, SampleStatus
from octavo_shared.records import TokenLogprobs

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Sampler:
    """Draws the next token of slots; reads the batch state and never changes it."""

    def __init__(self, state: BatchState, kernels: Kernels) -> None:
        self._state, self._kernels = state, kernels
        self._tokens = torch.from_numpy(state.tokens)
        self._no_ids = torch.zeros(0, dtype=torch.int32)
        self._no_values = torch.zeros(0)

    def draw(self, logits: Tensor, slots: Ints) -> tuple[list[int], list[int], Sequence[TokenLogprobs | None]]:
        """One token per row of ``logits`` [R, V] for ``slots`` [R]: ids (-1: none), statuses, log-probabilities."""
        drawn, status = self._kernels.sample(logits, self._rows(slots))
        token = drawn.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token)
        wanted = self._state.logprobs[slots]
        if (at := np.flatnonzero(wanted >= 0)).size:
            chosen = logits if at.size == len(slots) else logits[torch.from_numpy(at)]
            for i, value in zip(at.tolist(), self.logprobs(chosen, drawn.numpy()[at], wanted[at]), strict=True):
                logprobs[i] = value
        return token, status.tolist(), logprobs

    def candidates(self, logits: Tensor, slots: Ints) -> list[tuple[Ints, Floats] | None]:
        """Per row of ``logits`` [R, V], each a beam in ``slots`` [R], the likeliest next tokens: ids and log-probabilities.

        Twice as many as the beam is wide, or as many as have a probability above zero; None where the row cannot be used.
        """
        wanted = np.minimum(2 * self._state.beam_width[slots], logits.shape[1]).astype(np.int32)
        scored = self._kernels.candidates(logits, self._rows(slots), torch.from_numpy(wanted), int(wanted.max()))
        ids, logprobs = scored.ids.numpy(), scored.logprobs.numpy()
        return [
            (ids[r, :n], logprobs[r, :n]) if status == SampleStatus.FINE else None
            for r, (n, status) in enumerate(zip(scored.found.tolist(), scored.status.tolist(), strict=True))
        ]

    def logprobs(self, logits: Tensor, target: Ints, wanted: Ints) -> list[TokenLogprobs]:
        """Of ``target`` int32[R] under ``logits`` [R, V], with the ``wanted`` int32[R] likeliest alternatives."""
        width = min(int(wanted.max(initial=0)), logits.shape[1])
        wanted = np.minimum(wanted, width).astype(np.int32)
        targets = torch.from_numpy(np.array(target, np.int32))
        scored = self._kernels.logprobs(logits, targets, torch.from_numpy(wanted), width)
        ids, values = scored.top_ids.tolist(), scored.top_logprobs.tolist()
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids[r][:n], values[r][:n], strict=True)))
            for r, (logprob, rank, n) in enumerate(
                zip(scored.logprob.tolist(), scored.rank.tolist(), wanted.tolist(), strict=True)
            )
        ]

    def _rows(self, slots: Ints) -> SampleRows:
        state = self._state
        counts = state.num_tokens[slots]
        bias_start, bias_ids, bias_values = self._bias(slots)
        banned_start, banned_ids = self._banned(slots)

        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values[slots])

        return SampleRows(
            temperature=column(state.temperature),
            top_k=column(state.top_k),
            top_p=column(state.top_p),
            min_p=column(state.min_p),
            presence=column(state.presence),
            frequency=column(state.frequency),
            repetition=column(state.repetition),
            seed=column(state.seed),
            position=torch.from_numpy(counts),
            tokens=self._tokens,
            token_row=torch.from_numpy(np.array(slots, np.int32)),
            token_count=torch.from_numpy(counts),
            output_start=column(state.output_start),
            bias_start=bias_start,
            bias_ids=bias_ids,
            bias_values=bias_values,
            banned_start=banned_start,
            banned_ids=banned_ids,
        )

    def _bias(self, slots: Ints) -> tuple[Tensor, Tensor, Tensor]:
        start = np.zeros(len(slots) + 1, np.int32)
        if not self._state.biased[slots].any():
            return torch.from_numpy(start), self._no_ids, self._no_values
        sequences = [self._state.sequence(slot) for slot in slots.tolist()]
        np.cumsum([len(sequence.bias_ids) for sequence in sequences], out=start[1:])
        ids = np.concatenate([sequence.bias_ids for sequence in sequences])
        values = np.concatenate([sequence.bias_values for sequence in sequences])
        return torch.from_numpy(start), torch.from_numpy(ids), torch.from_numpy(values)

    def _banned(self, slots: Ints) -> tuple[Tensor, Tensor]:
        """Stop ids of the sequences that may not end yet."""
        early = self._state.num_tokens[slots] < self._state.min_total[slots]
        start = np.zeros(len(slots) + 1, np.int32)
        if not early.any():
            return torch.from_numpy(start), self._no_ids
        ids = [
            sorted(self._state.sequence(slot).stop_ids) if banned else []
            for slot, banned in zip(slots.tolist(), early.tolist(), strict=True)
        ]
        np.cumsum([len(row) for row in ids], out=start[1:])
        return torch.from_numpy(start), torch.tensor([token for row in ids for token in row], dtype=torch.int32)

"""What the device knows of every sequence: its tokens and its block table, kept by differences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo_executor.batch import BatchState, Changes
from octavo_executor.device import Device, Work
from octavo_executor.lanes import Arena
from octavo_kernels import Kernels


class DeviceTables:
    """Owns ``tokens`` int32[slots, length] and ``pages`` int32[slots, blocks] on the device.

    Where the host's memory is the device's they are the batch state's own arrays, and there is nothing to keep up.
    Elsewhere a token that was drawn is there before the host knows it: sampling puts it where the next step reads it.
    """

    def __init__(self, state: BatchState, device: Device, kernels: Kernels) -> None:
        self._state, self._device, self._kernels = state, device, kernels
        self.tokens: Tensor
        self.pages: Tensor
        if device.host_memory:
            self.tokens, self.pages = torch.from_numpy(state.tokens), torch.from_numpy(state.tables)
        else:
            self.tokens = device.zeros(state.tokens.shape, torch.int32)
            self.pages = device.zeros(state.tables.shape, torch.int32)

    def stage(self, changes: Changes, uploads: Arena) -> Work | None:
        """Put what a plan has changed into ``uploads``; what then brings the tables up to date, None for nothing."""
        if self._device.host_memory:
            return None
        state = self._state
        tokens = _Pieces()
        pages = _Pieces()
        for slot, count in changes.admitted:
            tokens.add(slot, 0, state.tokens[slot, :count])
            pages.add(slot, 0, state.tables[slot, : state.table_len[slot]])
        for slot, index in changes.entries:
            # What the entry holds now: of a plan that changes one twice all pieces say the same.
            pages.add(slot, index, state.tables[slot, index : index + 1])
        steps = [
            staged
            for pieces, table in ((tokens, self.tokens), (pages, self.pages))
            if (staged := self._staged(pieces, table, uploads)) is not None
        ]
        if not steps:
            return None

        def write() -> None:
            for step in steps:
                step()

        return write

    def _staged(self, pieces: _Pieces, table: Tensor, uploads: Arena) -> Work | None:
        if not pieces.segments:
            return None
        segments = uploads.put(np.array(pieces.segments, np.int32))
        words = uploads.put(np.concatenate(pieces.words))
        longest = pieces.longest
        return lambda: self._kernels.write_rows(table, segments, words, longest)


class _Pieces:
    """Pieces of a table, and their words one after the other."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, int, int]] = []
        self.words: list[np.ndarray] = []
        self.longest = 0
        self._total = 0

    def add(self, row: int, column: int, words: np.ndarray) -> None:
        if len(words):
            self.segments.append((row, column, self._total, len(words)))
            self.words.append(words)
            self.longest = max(self.longest, len(words))
            self._total += len(words)

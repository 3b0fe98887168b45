"""What a step under way keeps of memory: what goes up to the device with it, and where its results arrive.

Both are packed, so that each costs one copy. Memory that a copy reads or writes belongs to its step until the host has
collected it: nothing is written over while the device may still look at it, and nothing is read before it is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.device import Device, Event

# Words (of 4 bytes) of the first piece of memory of either kind; more is made where a step needs more.
UPLOAD_WORDS = 1 << 16
RESULT_WORDS = 1 << 13
# What is packed begins at multiples of 16 bytes: kernels are compiled anew for pointers that are not so aligned.
ALIGNED_WORDS = 4

Values = npt.NDArray[Any]
DTYPES: dict[type, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor on the device and its twin on the host (which is the same one where both share memory)."""

    device: Tensor
    host: Tensor


class Arena(Protocol):
    """Memory of a step on both sides."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Memory that is the step's until ``clear``."""

    def put(self, values: Values) -> Tensor:
        """A tensor of the device that holds ``values`` once ``send`` has happened."""

    def lay(self, values: Values) -> Tensor:
        """A tensor of the host that holds ``values``, and from which the device reads them by itself."""

    def send(self) -> None:
        """Enqueue the copy of all that was put, on the stream of steps."""

    def bring(self) -> None:
        """Enqueue the copy of all that was taken, on the stream of results."""

    def clear(self) -> None:
        """The step is over."""


class HostArena:
    """Where the device's memory is the host's: nothing moves."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        tensor = torch.empty(shape, dtype=dtype)
        return Shared(tensor, tensor)

    def put(self, values: Values) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def lay(self, values: Values) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def send(self) -> None:
        pass

    def bring(self) -> None:
        pass

    def clear(self) -> None:
        pass


class _Piece:
    """Words on both sides, handed out from the front."""

    def __init__(self, device: Tensor, host: Tensor, reserved: int = 0) -> None:
        self.device, self.host = device, host
        self.words: npt.NDArray[np.int32] = host.numpy()
        self.reserved = self.used = reserved

    def take(self, words: int) -> slice | None:
        """Room for ``words``."""
        at = self.used
        if at + words > len(self.words):
            return None
        self.used = at + -(-words // ALIGNED_WORDS) * ALIGNED_WORDS
        return slice(at, at + words)


class StagedArena:
    """Pinned memory on the host's side. ``first`` is memory of the device that steps share, since their order is that of one
    stream; without, it is the arena's own. Its first ``reserved`` words belong to ``header``.
    """

    def __init__(self, device: Device, words: int, first: Tensor | None = None, reserved: int = 0) -> None:
        self._device, self._words = device, words
        if first is None:
            first = device.empty((words,), torch.int32)
        self._pieces = [_Piece(first, device.pinned(tuple(first.shape), torch.int32), reserved)]

    @property
    def header(self) -> npt.NDArray[np.int32]:
        """The host's side of the reserved words."""
        return self._pieces[0].words[: self._pieces[0].reserved]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        count = math.prod(shape)
        piece, at = self._room(count * dtype.itemsize)
        device, host = (side[at].view(dtype)[:count].view(shape) for side in (piece.device, piece.host))
        return Shared(device, host)

    def put(self, values: Values) -> Tensor:
        piece, at = self._filled(values)
        return piece.device[at].view(DTYPES[values.dtype.type]).view(values.shape)

    def lay(self, values: Values) -> Tensor:
        piece, at = self._filled(values)
        return piece.host[at].view(DTYPES[values.dtype.type]).view(values.shape)

    def _filled(self, values: Values) -> tuple[_Piece, slice]:
        piece, at = self._room(values.nbytes)
        piece.words[at].view(values.dtype)[:] = values.ravel()
        return piece, at

    def _room(self, bytes_: int) -> tuple[_Piece, slice]:
        words = -(-bytes_ // 4)
        for piece in self._pieces:
            if (found := piece.take(words)) is not None:
                return piece, found
        size = max(self._words, words)
        piece = _Piece(self._device.empty((size,), torch.int32), self._device.pinned((size,), torch.int32))
        self._pieces.append(piece)
        found = piece.take(words)
        assert found is not None
        return piece, found

    def send(self) -> None:
        used = self._used()

        def copy() -> None:
            for device, host in used:
                device.copy_(host, non_blocking=True)

        self._device.compute.submit(copy)

    def bring(self) -> None:
        used = self._used()

        def copy() -> None:
            for device, host in used:
                host.copy_(device, non_blocking=True)

        self._device.fetch.submit(copy)

    def clear(self) -> None:
        for piece in self._pieces:
            piece.used = piece.reserved

    def _used(self) -> list[tuple[Tensor, Tensor]]:
        return [(piece.device[: piece.used], piece.host[: piece.used]) for piece in self._pieces if piece.used]


class Lane:
    """A step's share. It is taken at its launch and given back when it is collected."""

    def __init__(self, device: Device, staging: Tensor | None, reserved: int) -> None:
        """``staging`` is where uploads begin on the device, of which the header is ``reserved`` words; None on a CPU."""
        self.uploads: Arena
        self.results: Arena
        self.header: npt.NDArray[np.int32] | None = None
        if staging is None:
            self.uploads, self.results = HostArena(), HostArena()
        else:
            uploads = StagedArena(device, UPLOAD_WORDS, staging, reserved)
            self.uploads, self.results, self.header = uploads, StagedArena(device, RESULT_WORDS), uploads.header
        # When results are on the host; set at the end of the launch.
        self.done: Event | None = None

    def clear(self) -> None:
        """The step is over."""
        self.uploads.clear()
        self.results.clear()
        self.done = None

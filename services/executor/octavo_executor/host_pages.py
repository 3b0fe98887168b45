"""The host tier: pages in host memory, and the moves between them and the device's."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.batch import PlanError
from octavo_executor.kv_cache import KvCache
from octavo_kernels import Kernels
from octavo_shared.plan import PageMoves, StepPlan

Ints = npt.NDArray[np.int32]


class HostPages:
    """Owns the host pages: each is one piece of memory, [keys | values] of every layer.

    Moves are begun by ``copy_out`` and ``restore`` and done when ``finish`` returns, which is before the step's result is
    sent. Here they are done at once. A device with a copy engine overrides these three: pinned memory from its own
    ``Kernels.empty``, the moves on a stream of their own that waits for the one of the step before, ``finish`` waiting for
    it. The forward pass need not wait for restores, whose pages no row of the same plan touches; it has to wait for copies out
    of pages that the plan hands out again.
    """

    def __init__(self, cache: KvCache, kernels: Kernels, num_pages: int) -> None:
        layers, blocks = cache.k.shape[:2]
        self.num_pages = num_pages
        self._kernels = kernels
        # Untouched pages cost no memory: the system backs them when they are first written.
        self._pages = kernels.empty((num_pages, 2, layers, cache.k[0, 0].numel()), cache.k.dtype)
        # Keys, then values; of both tiers [layers, pages, elements].
        self._sides = [
            (device.view(layers, blocks, -1), self._pages[:, i].transpose(0, 1))
            for i, device in enumerate((cache.k, cache.v))
        ]
        self._restore_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.nbytes

    def copy_out(self, source: Tensor, destination: Tensor) -> None:
        """Device pages ``source`` int32[m] onto host pages ``destination`` int32[m]."""
        for device, host in self._sides:
            self._kernels.move_pages(device, source, host, destination)

    def restore(self, source: Tensor, destination: Tensor) -> None:
        """Host pages ``source`` int32[m] onto device pages ``destination`` int32[m]."""
        begun = time.perf_counter()
        for device, host in self._sides:
            self._kernels.move_pages(host, source, device, destination)
        self._restore_s += time.perf_counter() - begun

    def finish(self) -> float:
        """Wait until every move begun is done; the seconds that restores took since the last call."""
        seconds, self._restore_s = self._restore_s, 0.0
        return seconds


class PageMover:
    """Carries out the page moves of plans, in both tiers."""

    def __init__(self, cache: KvCache, host: HostPages, kernels: Kernels) -> None:
        self._cache, self._host, self._kernels = cache, host, kernels

    def check(self, plan: StepPlan) -> None:
        """Raises PlanError: a move names a page that is not there, or would overwrite what another one moves."""
        device, host = self._cache.num_blocks, self._host.num_pages
        _check_moves("copy_out", plan.copy_out, "page", device, "host page", host)
        _check_moves("copies", plan.copies, "page", device, "page", device)
        _check_moves("restores", plan.restores, "host page", host, "page", device)
        if len(plan.copies) and np.isin(plan.copies.source, plan.copies.destination).any():
            raise PlanError("copies: a page is both source and destination")

    def carry_out(self, plan: StepPlan) -> None:
        """Copies out, copies, restores, in this order; moves between the tiers may still be under way afterwards."""
        if len(plan.copy_out):
            self._host.copy_out(*_tensors(plan.copy_out))
        if len(plan.copies):
            self._cache.copy_pages(self._kernels, *_tensors(plan.copies))
        if len(plan.restores):
            self._host.restore(*_tensors(plan.restores))

    def finish(self) -> float:
        """Wait for all moves; the seconds this plan's restores took."""
        return self._host.finish()


def _check_moves(phase: str, moves: PageMoves, source: str, sources: int, destination: str, destinations: int) -> None:
    if len(moves.source) != len(moves.destination):
        raise PlanError(f"{phase}: {len(moves.source)} sources for {len(moves.destination)} destinations")
    if not len(moves):
        return
    for pages, kind, count in ((moves.source, source, sources), (moves.destination, destination, destinations)):
        outside = (pages < 0) | (pages >= count)
        if outside.any():
            raise PlanError(f"{phase}: there is no {kind} {pages[outside][0]}; there are {count}")
    if len(np.unique(moves.destination)) != len(moves.destination):
        raise PlanError(f"{phase}: a {destination} is the destination twice")


def _tensors(moves: PageMoves) -> tuple[Tensor, Tensor]:
    source, destination = (torch.from_numpy(np.array(x, np.int32)) for x in (moves.source, moves.destination))
    return source, destination

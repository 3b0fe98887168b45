"""The host tier: pages in host memory, and the moves between them and the device's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_executor.batch import PlanError
from octavo_executor.device import Device, Event
from octavo_executor.kv_cache import KvCache
from octavo_executor.lanes import Arena
from octavo_kernels import Kernels
from octavo_shared.plan import NO_INTS, PageMoves, StepPlan

Ints = npt.NDArray[np.int32]


class HostPages:
    """Owns the host pages: each is one piece of memory, [keys | values] of every layer. A GPU reads and writes them itself."""

    def __init__(self, cache: KvCache, kernels: Kernels, num_pages: int, device: Device | None = None) -> None:
        """Without ``device`` the memory is ``Kernels.empty``'s: the kernels are a CPU's.

        Raises:
            MemoryError: so much memory cannot be pinned.
        """
        layers, blocks = cache.k.shape[:2]
        self.num_pages = num_pages
        self._kernels = kernels
        # Untouched pages cost no memory on a CPU: the system backs them when they are first written.
        empty = kernels.empty if device is None or device.host_memory else device.pinned
        self._pages = empty((num_pages, 2, layers, cache.k[0, 0].numel()), cache.k.dtype)
        # Keys, then values; of both tiers [layers, pages, elements].
        self._sides = [
            (device_pages.view(layers, blocks, -1), self._pages[:, i].transpose(0, 1))
            for i, device_pages in enumerate((cache.k, cache.v))
        ]

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
        for device, host in self._sides:
            self._kernels.move_pages(host, source, device, destination)


@dataclass(slots=True, eq=False)
class Moves:
    """A step's moves between the tiers, under way until the host has waited for the events."""

    saved: Ints = field(default_factory=lambda: NO_INTS)  # device pages that are copied out ...
    saved_at: Event | None = None  # ... when they have been
    restoring: Event | None = None
    restored: Event | None = None

    @property
    def done(self) -> bool:
        """Whether all have happened."""
        return all(event is None or event.query() for event in (self.saved_at, self.restored))


class PageMover:
    """Carries out the page moves of plans, in both tiers.

    Moves between the tiers happen on the device's copy stream, beside the steps. They wait for all steps launched before: those may
    still write what is copied out, and read what a restore overwrites. A step waits for copies out only if it
    writes one of their pages. It never waits for restores: nothing computes on their pages before the host has waited.
    """

    def __init__(self, cache: KvCache, host: HostPages, kernels: Kernels, device: Device) -> None:
        self._cache, self._host, self._kernels, self._device = cache, host, kernels, device
        self._under_way: list[Moves] = []

    def check(self, plan: StepPlan) -> None:
        """Raises PlanError: a move names a page that is not there, or would overwrite what another one moves."""
        device, host = self._cache.num_blocks, self._host.num_pages
        _check_moves("copy_out", plan.copy_out, "page", device, "host page", host)
        _check_moves("copies", plan.copies, "page", device, "page", device)
        _check_moves("restores", plan.restores, "host page", host, "page", device)
        if len(plan.copies) and np.isin(plan.copies.source, plan.copies.destination).any():
            raise PlanError("copies: a page is both source and destination")

    def stage(self, plan: StepPlan, uploads: Arena) -> StagedMoves:
        """Send the page numbers along."""
        return StagedMoves(
            *(
                _staged(moves, uploads, on_host=on_host)
                for moves, on_host in ((plan.copy_out, True), (plan.copies, False), (plan.restores, True))
            )
        )

    def begin(self, plan: StepPlan, staged: StagedMoves, written: Ints) -> Moves:
        """Enqueue copies out, copies, restores. ``written`` are the pages that the step's rows will write."""
        compute, copy = self._device.compute, self._device.copy
        moves = Moves()
        if staged.copy_out is not None:
            source, destination = staged.copy_out
            copy.wait(compute.record())
            copy.submit(lambda: self._host.copy_out(source, destination))
            moves.saved, moves.saved_at = plan.copy_out.source, copy.record()
            self._under_way.append(moves)
        self._wait_for_saves(np.concatenate([written, plan.copies.destination]))
        if staged.copies is not None:
            between = staged.copies
            compute.submit(lambda: self._cache.copy_pages(self._kernels, *between))
        if staged.restores is not None:
            origin, target = staged.restores
            # After the copies too: a page may be copied and then overwritten.
            copy.wait(compute.record())
            moves.restoring = copy.record(timed=True)
            copy.submit(lambda: self._host.restore(origin, target))
            moves.restored = copy.record(timed=True)
        return moves

    def finish(self, moves: Moves) -> float:
        """Wait for a step's moves; the seconds that its restores took."""
        if moves.saved_at is not None:
            moves.saved_at.synchronize()
            self._under_way.remove(moves)
        if moves.restored is None or moves.restoring is None:
            return 0.0
        moves.restored.synchronize()
        return moves.restored.seconds_since(moves.restoring)

    @property
    def num_host_pages(self) -> int:
        """Pages of the host tier."""
        return self._host.num_pages

    @property
    def saving(self) -> bool:
        """Whether pages are being copied out."""
        return bool(self._under_way)

    def clear(self) -> None:
        """Everything that was under way has happened."""
        self._under_way.clear()

    def _wait_for_saves(self, written: Ints) -> None:
        for moves in self._under_way:
            if moves.saved_at is not None and np.isin(written, moves.saved).any():
                self._device.compute.wait(moves.saved_at)


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class StagedMoves:
    """Page numbers (sources, destinations) where the kernels find them; None for no moves.

    Those of the copy stream stay in pinned memory, which kernels read: the device's side is written over by the next step.
    """

    copy_out: Pair | None
    copies: Pair | None
    restores: Pair | None


def _staged(moves: PageMoves, uploads: Arena, *, on_host: bool) -> Pair | None:
    if not len(moves):
        return None
    place = uploads.lay if on_host else uploads.put
    return place(np.array(moves.source, np.int32)), place(np.array(moves.destination, np.int32))


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

"""The host tier: content whose device page is needed for something else moves here, one page at a time, and back on a hit.

Moves are planned, not made here: a plan's ``copy_out`` runs before anything of that plan writes to the device, so a page
may be saved by the very plan that hands it out again. Content counts as being on the host, and a restored page as being on
the device, once the plan that moves it is acknowledged (rules R2, R3); until then both pages are held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo_scheduler.core.block_pool import BlockPool, Content
from octavo_scheduler.core.prefix_cache import Hit
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.plan import NO_MOVES, PageMoves, StepTimings

# A step with fewer prompt tokens says more about its fixed cost than about theirs.
LEAST_PREFILL = 16


@dataclass(frozen=True, slots=True)
class Save:
    """A device page is copied to a host page, each in the life that its generation names."""

    device: int
    generation: int
    host: int
    host_generation: int
    content: Content


@dataclass(frozen=True, slots=True)
class Restore:
    """Pages on their way back for a sequence: (host, device) pairs with the device page's generation and the content.

    ``held`` are all device blocks of the hit in the order of the chain, kept until the restore is acknowledged.
    """

    sequence: Sequence
    held: tuple[int, ...]
    pages: tuple[tuple[int, int, int, Content], ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """What one plan moves between the tiers."""

    saves: tuple[Save, ...] = ()
    restores: tuple[Restore, ...] = ()

    @property
    def num_restored(self) -> int:
        """Pages that come back."""
        return sum(len(restore.pages) for restore in self.restores)

    def out(self) -> PageMoves:
        """The plan's ``copy_out``."""
        return _moves([(save.device, save.host, save.generation) for save in self.saves])

    def back(self) -> PageMoves:
        """The plan's ``restores``."""
        return _moves([(page[0], page[1], page[2]) for restore in self.restores for page in restore.pages])


def _moves(rows: list[tuple[int, int, int]]) -> PageMoves:
    if not rows:
        return NO_MOVES
    source, destination, generations = zip(*rows, strict=True)
    return PageMoves(np.array(source, np.int32), np.array(destination, np.int32), np.array(generations, np.uint32))


class HostTier:
    """Owns the host's pages and every move between the tiers. With no host blocks it does nothing."""

    def __init__(self, device: BlockPool, num_blocks: int) -> None:
        self._device = device
        self.pool = BlockPool(num_blocks, device.block_size)
        self._saves: list[Save] = []
        self._restores: list[Restore] = []
        # Content on its way to the host.
        self._moving: set[bytes] = set()
        self.saved_blocks = 0
        self.restored_blocks = 0
        if num_blocks:
            device.evicting = self.save

    def save(self, block: int) -> None:
        """Copy a named device page to the host, unless its content is there or no host page can be had."""
        content = self._device.content(block)
        pool = self.pool
        if pool.find(content.digest) is not None or content.digest in self._moving or not pool.num_free:
            return
        (host,) = pool.allocate(1).tolist()
        self._moving.add(content.digest)
        generations = int(self._device.generation[block]), int(pool.generation[host])
        self._saves.append(Save(block, generations[0], host, generations[1], content))

    def save_ahead(self, count: int) -> None:
        """Save what is about to be needed: named pages among the next ``count`` that will be handed out."""
        if self.pool.num_blocks:
            for block in self._device.next_free(count):
                if self._device.is_named(block):
                    self.save(block)

    def restore(self, sequence: Sequence, hit: Hit) -> None:
        """Bring the host pages of a hit back for a sequence. There must be as many free device blocks."""
        device, host = self._device, self.pool
        device.acquire(np.concatenate([hit.device, hit.beyond[~hit.on_host]]))
        on_host = hit.beyond[hit.on_host]
        host.acquire(on_host)
        host.touch(on_host)
        sources = on_host.tolist()
        fresh = device.allocate(len(sources)).tolist()
        generations = device.generation[fresh].tolist()
        contents = [host.content(block) for block in sources]
        beyond = hit.beyond.copy()
        beyond[hit.on_host] = fresh
        held = (*hit.device.tolist(), *beyond.tolist())
        pages = tuple(zip(sources, fresh, generations, contents, strict=True))
        self._restores.append(Restore(sequence, held, pages))

    def take_moves(self) -> Moves | None:
        """The moves of the plan that is being made; None when there are none."""
        if not self._saves and not self._restores:
            return None
        moves = Moves(tuple(self._saves), tuple(self._restores))
        self._saves, self._restores = [], []
        return moves

    @property
    def has_moves(self) -> bool:
        """The plan that is being made moves pages."""
        return bool(self._saves or self._restores)

    def settle(self, moves: Moves) -> list[Sequence]:
        """A plan's moves are acknowledged: their content is where it was moved to. Returns who waited for it."""
        for save in moves.saves:
            self._moving.discard(save.content.digest)
            if self._agrees(self._device, save.content):
                self.saved_blocks += self.pool.name(save.host, save.host_generation, save.content)
            self.pool.release([save.host])
        for restore in moves.restores:
            for source, block, generation, content in restore.pages:
                if self._agrees(self.pool, content):
                    self.restored_blocks += self._device.name(block, generation, content)
                self.pool.release([source])
            self._device.release(restore.held)
        return [restore.sequence for restore in moves.restores]

    @staticmethod
    def _agrees(other: BlockPool, content: Content) -> bool:
        """The other tier does not know the same content by another number (computed anew while it was on its way)."""
        holder = other.find(content.digest)
        return holder is None or int(other.number[holder]) == content.number

    def holds(self, sent: list[Moves]) -> tuple[list[int], list[int]]:
        """Device and host blocks that moves hold, those of plans ``sent`` and those being planned (for integrity checks)."""
        every = [*sent, Moves(tuple(self._saves), tuple(self._restores))]
        device = [block for moves in every for restore in moves.restores for block in restore.held]
        host = [save.host for moves in every for save in moves.saves]
        host += [page[0] for moves in every for restore in moves.restores for page in restore.pages]
        return device, host


@dataclass(slots=True)
class MoveCosts:
    """What moving and computing cost on this executor, as it has reported: seconds, 0 = not known yet."""

    restore_s_per_block: float = 0.0
    prefill_s_per_token: float = 0.0

    def learn(self, timings: StepTimings, *, restored_blocks: int, prompt_tokens: int, num_tokens: int) -> None:
        """A step that restored pages or computed ``num_tokens``, of prompts ``prompt_tokens``, took so long."""
        if restored_blocks and timings.restore_s > 0:
            self.observe_restore(restored_blocks, timings.restore_s)
        # Only steps that are mostly prefill tell what a prompt token costs.
        if timings.forward_s > 0 and prompt_tokens >= max(LEAST_PREFILL, num_tokens // 2):
            self.observe_prefill(num_tokens, timings.forward_s)

    def observe_restore(self, blocks: int, seconds: float) -> None:
        """``blocks`` pages were restored in ``seconds``."""
        self.restore_s_per_block = _blend(self.restore_s_per_block, seconds / blocks)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """``tokens`` prompt tokens were computed in ``seconds``."""
        self.prefill_s_per_token = _blend(self.prefill_s_per_token, seconds / tokens)


def worth_restoring(blocks: int, tokens: int, costs: MoveCosts) -> bool:
    """Is bringing ``blocks`` pages back cheaper than computing the ``tokens`` they make usable? If unknown, it is tried."""
    if not costs.restore_s_per_block or not costs.prefill_s_per_token:
        return True
    return blocks * costs.restore_s_per_block < tokens * costs.prefill_s_per_token


def _blend(old: float, new: float) -> float:
    """An average that forgets: the latest counts a fifth."""
    return new if not old else 0.8 * old + 0.2 * new

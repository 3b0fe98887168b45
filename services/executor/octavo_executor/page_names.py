"""What this executor's pages hold, as the schedulers that planned it have said: for the next one to find them warm.

The executor understands nothing of it. It keeps names in step with the plans it has carried out, so that what it offers is
true of the pages as they are, and forgets everything when a step fails.
"""

from __future__ import annotations

import numpy as np

from octavo_shared.plan import NO_NAMES, CacheOffer, PageNames, StepPlan

# Pages per message of an offer.
CHUNK = 8192
# Roots are forgotten once nothing continues them; looked at when there are twice as many as the last time, at least these.
_FEW_ROOTS = 1024


class _Tier:
    """Columns over the pages of one tier; memory becomes resident where pages really are named."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.numbers = np.zeros(num_pages, np.int64)
        self.parents = np.zeros(num_pages, np.int64)
        self.tokens = np.empty((num_pages, block_size), np.int32)

    def apply(self, names: PageNames) -> None:
        if len(names):
            self.numbers[names.pages], self.parents[names.pages] = names.numbers, names.parents
            named = names.numbers != 0
            if named.any():
                self.tokens[names.pages[named]] = names.tokens

    def part(self, pages: np.ndarray) -> PageNames:
        if not len(pages):
            return NO_NAMES
        return PageNames(pages.astype(np.int32), self.numbers[pages], self.parents[pages], self.tokens[pages])


class PageNameTable:
    """Owns the names of all pages of an executor, both tiers."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._device = _Tier(num_device_blocks, block_size)
        self._host = _Tier(num_host_blocks, block_size)
        self._roots: dict[int, bytes] = {}
        self._many_roots = _FEW_ROOTS

    def apply(self, plan: StepPlan) -> None:
        """A plan is about to be carried out. The first one of an epoch begins from nothing."""
        if plan.step == 1:
            self.clear()
        names = plan.names
        self._device.apply(names.device)
        self._host.apply(names.host)
        self._roots.update(names.roots)
        if len(self._roots) > self._many_roots:
            self._prune()

    def clear(self) -> None:
        """Nothing is known of any page."""
        self._device.numbers[:] = 0
        self._host.numbers[:] = 0
        self._roots = {}

    def offers(self) -> list[CacheOffer]:
        """Everything that is known, in messages of a bearable size."""
        self._prune()
        device, host = np.flatnonzero(self._device.numbers), np.flatnonzero(self._host.numbers)
        offers = [CacheOffer(roots=tuple(self._roots.items()))] if self._roots else []
        offers += [CacheOffer(device=self._device.part(device[i : i + CHUNK])) for i in range(0, len(device), CHUNK)]
        offers += [CacheOffer(host=self._host.part(host[i : i + CHUNK])) for i in range(0, len(host), CHUNK)]
        return offers

    def _prune(self) -> None:
        needed = {int(parent) for tier in (self._device, self._host) for parent in tier.parents[tier.numbers != 0]}
        self._roots = {number: root for number, root in self._roots.items() if number in needed}
        self._many_roots = max(2 * len(self._roots), _FEW_ROOTS)

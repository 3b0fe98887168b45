"""Who gets a slot: waiting sequences, next one first, while budget, slots and blocks last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_scheduler.core.events import Admitted
from octavo_scheduler.core.forecast import peak_blocks
from octavo_scheduler.core.host_tier import worth_restoring
from octavo_scheduler.core.prefix_cache import Hit
from octavo_scheduler.core.sequence import Sequence
from octavo_scheduler.core.waiting import PROMPT_COST, FairQueue
from octavo_shared.plan import NewSequence
from octavo_shared.records import Int32Array

if TYPE_CHECKING:
    from octavo_scheduler.core.scheduler import Scheduler

# A sequence whose restored pages were lost again this often computes them.
MAX_RESTORES = 2


class Admission:
    """One step's admissions. The order of the queue is strict: who does not fit holds back those behind."""

    def __init__(self, core: Scheduler, budget: int) -> None:
        self._core = core
        self._budget = budget
        self._block_size = core.config.block_size
        self.admitted: list[NewSequence] = []
        self.grants: list[int] = []
        # Blocks that others will need for tokens they have already.
        self._reserved = core.table.blocks_still_needed() + core.restoring_blocks
        self._partial = self._count_partial()

    def _count_partial(self) -> int:
        table = self._core.table
        n = len(table)
        return int((table.planned[:n] + 1 < table.prefill_end[:n]).sum())

    def run(self) -> None:
        """Admit whom there is room for."""
        core = self._core
        while self._budget > 0 and core.table.num_free and (sequence := core.waiting.peek()) is not None:
            if sequence.last_step > core.acknowledged or not self._admit(sequence):
                break

    def _admit(self, sequence: Sequence) -> bool:
        """Give one sequence what it needs to go; False when it has to wait."""
        core, config = self._core, self._core.config
        if core.pool.num_free <= self._reserved:
            return False
        hit = core.prefix_cache.find(sequence)
        num_tokens = len(sequence.tokens)
        # Room for all it has, not just for this chunk: otherwise prompts would evict each other half-way.
        need = -(-num_tokens // self._block_size) - len(hit.device)
        restores = self._worth_restoring(sequence, hit)
        room = core.pool.num_free - core.pool.num_free_among(hit.device)
        if restores:
            again = hit.beyond[~hit.on_host]
            need -= len(again)
            room -= core.pool.num_free_among(again)
        if need + self._reserved > room or not self._will_fit(sequence, len(hit.device)):
            return False
        if restores:
            core.waiting.pop()
            core.begin_restore(sequence, hit)
            self._reserved += need - int(hit.on_host.sum())
            return True
        start = len(hit.device) * self._block_size
        missing = num_tokens - start
        grant = min(missing, self._budget, config.long_prefill_token_threshold or self._budget)
        if grant < missing:
            if not config.enable_chunked_prefill:
                return False
            if config.max_num_partial_prefills and self._partial >= config.max_num_partial_prefills:
                return False
            self._partial += 1
        core.waiting.pop()
        now = -(-(start + grant) // self._block_size) - len(hit.device)
        self.admitted.append(self._take(sequence, hit.device, now))
        self.grants.append(grant)
        self._reserved += need - now
        self._budget -= grant
        return True

    def _worth_restoring(self, sequence: Sequence, hit: Hit) -> bool:
        if not len(hit.beyond) or sequence.restores >= MAX_RESTORES:
            return False
        tokens = len(hit.beyond) * self._block_size
        return worth_restoring(int(hit.on_host.sum()), tokens, self._core.costs)

    def _will_fit(self, sequence: Sequence, shared_blocks: int) -> bool:
        """As far as past lengths tell, nobody will have to be preempted for it; alone it may always go."""
        core, size = self._core, self._block_size
        table = core.table
        n = len(table)
        if not n or core.forecast.is_empty:
            return True
        tokens = np.append(table.expected[:n], np.int32(len(sequence.tokens)))
        held = -(-tokens // size)
        outputs = np.append(table.outputs(n), np.int32(len(sequence.tokens) - sequence.output_start))
        limit = np.append(table.max_total[:n], np.int32(sequence.max_total_tokens)) - tokens
        growth = -(-(tokens + core.forecast.remaining(outputs, limit)) // size) - held
        # What several hold is there once.
        shared = max(int(held[:n].sum()) - core.pool.num_used, 0) + shared_blocks
        return peak_blocks(held, growth) - shared <= core.pool.num_blocks

    def _take(self, sequence: Sequence, cached: Int32Array, num_new_blocks: int) -> NewSequence:
        core = self._core
        core.pool.acquire(cached.tolist())
        core.prefix_cache.adopt(sequence, cached)
        blocks = np.concatenate([cached, core.pool.allocate(num_new_blocks)])
        start, num_tokens = len(cached) * self._block_size, len(sequence.tokens)
        slot = core.seat(sequence, blocks, start)
        sequence.restores = 0
        if sequence.beams is not None and num_tokens == sequence.output_start:
            sequence.beams.cached_tokens = start
        if core.prefix_cache.enabled:
            core.stats.count_lookup(num_tokens, start, resumed=sequence.preemptions > 0)
        if isinstance(core.waiting, FairQueue) and not sequence.preemptions:
            cost = np.array([PROMPT_COST * (num_tokens - start)])
            core.waiting.charge(np.array([core.waiting.tenant_of(sequence)], np.int32), cost)
        core.note(Admitted(sequence, core.step + 1, num_tokens, start))
        return sequence.placed(slot, blocks, start)

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
# Who found no memory is not looked at again for so many steps, unless somebody comes or goes.
PATIENCE_STEPS = 8


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
            if sequence.last_step > core.acknowledged or self._was_refused(sequence) or not self._admit(sequence):
                break

    def _was_refused(self, sequence: Sequence) -> bool:
        core = self._core
        return (
            bool(core.table.running)
            and core.refused[:2] == (sequence.uid, core.table.version)
            and core.step < core.refused[2]
        )

    def _refuse(self, sequence: Sequence) -> bool:
        core = self._core
        core.refused = (sequence.uid, core.table.version, core.step + PATIENCE_STEPS)
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give one sequence what it needs to go; False when it has to wait."""
        core, config = self._core, self._core.config
        if core.pool.num_free <= self._reserved:
            return self._refuse(sequence)
        hit = core.prefix_cache.find(sequence)
        num_tokens = len(sequence.tokens)
        # Room for all it has, not just for this chunk: otherwise prompts would evict each other half-way.
        need = -(-num_tokens // self._block_size) - len(hit.device)
        restores = self._worth_restoring(sequence, hit)
        taken = core.pool.num_free_among(hit.device)
        room = core.pool.num_free - taken
        if restores:
            again = hit.beyond[~hit.on_host]
            need -= len(again)
            room -= core.pool.num_free_among(again)
        if need + self._reserved > room or not self._will_fit(sequence, len(hit.device), taken):
            return self._refuse(sequence)
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

    def _will_fit(self, sequence: Sequence, found: int, taken: int) -> bool:
        """As far as past lengths tell, nobody will have to be preempted for it; alone it may always go."""
        core = self._core
        if all(one.beams is not None and one.beams is sequence.beams for one in core.table.running):
            return True
        return will_fit(core, sequence, 1, found, taken)

    def _take(self, sequence: Sequence, cached: Int32Array, num_new_blocks: int) -> NewSequence:
        core = self._core
        core.pool.acquire(cached)
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
        again = max(0, min(sequence.computed, num_tokens) - start)
        core.stats.recomputed_tokens += again
        core.forecast.count(0, again)
        core.note(Admitted(sequence, core.step + 1, num_tokens, start))
        return sequence.placed(slot, blocks, start)


def will_fit(core: Scheduler, sequence: Sequence, count: int, found: int, taken: int = 0) -> bool:
    """Can ``count`` more choices like ``sequence`` run beside those that do, as far as past lengths tell?

    Each starts on the same ``found`` blocks, ``taken`` of which nobody holds yet.
    """
    table, size, n = core.table, core.config.block_size, len(core.table)

    def beside(column: Int32Array, value: int) -> Int32Array:
        return np.append(column[:n], np.full(count, value, np.int32))

    known = len(sequence.tokens)
    tokens = beside(table.expected, known)
    outputs = beside(table.outputs(n), known - sequence.output_start)
    limit = beside(table.max_total, sequence.max_total_tokens) - tokens
    # A plan or more is on its way when the executor's word comes that a sequence has ended.
    growth = np.minimum(core.forecast.remaining(outputs, limit) + core.config.run_ahead, limit)
    # Blocks that are nobody's own: found by those that run, and left by who computed them.
    common = core.pool.num_used - int((table.capacity[:n] // size - table.found[:n]).sum())
    peak = peak_blocks(tokens, growth, beside(table.found, found), size)
    return peak + max(common, 0) + taken <= core.config.num_blocks

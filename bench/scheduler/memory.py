"""Resident memory of a pool whose every block has a name: run in a fresh process, prints bytes."""

from __future__ import annotations

import gc
import sys

import numpy as np
import psutil
from core import BLOCK_SIZE, add, answer, make_core, prompt_of, record

from octavo_scheduler.core.scheduler import Scheduler

LENGTH = 8192


def resident_bytes() -> int:
    """What this process has in memory."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def grown_by(num_blocks: int) -> int:
    """Bytes that a core grows by until all its ``num_blocks`` blocks hold content that can be found.

    Prompts go through it as they would in service: admitted, computed, acknowledged, hashed, ended.
    """
    # What the first request touches is no part of the pool.
    warm_up(make_core(8, LENGTH + 64, 2 * LENGTH // BLOCK_SIZE, budget=LENGTH), 1)
    before = resident_bytes()
    core = make_core(8, LENGTH + 64, num_blocks, budget=LENGTH)
    warm_up(core, -(-num_blocks * BLOCK_SIZE // LENGTH))
    assert core.pool.num_cached == num_blocks
    return resident_bytes() - before


def warm_up(core: Scheduler, prompts: int) -> None:
    """Prompts nobody has sent before, one after the other."""
    rng = np.random.default_rng(0)
    for serial in range(prompts):
        (sequence,) = add(core, record(serial, prompt_of(rng, LENGTH), 4))
        while (plan := core.schedule()) is not None:
            core.commit(answer(plan))
            core.tidy()
            if len(plan.sample_slots):
                break
        core.abort(sequence)
        core.drain_events()


if __name__ == "__main__":
    print(grown_by(int(sys.argv[1])))

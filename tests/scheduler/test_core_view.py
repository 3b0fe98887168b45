"""The view on the memory says what the memory holds: against a plain account of every block."""

from __future__ import annotations

import random

from core_harness import Harness

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.sequence import NO_SLOT
from octavo_scheduler.core.view import STATES


def test_every_block_is_told_as_it_is() -> None:
    """Forks, preemptions, a host tier and a full cache: at any moment the columns agree with the block tables."""
    config = CoreConfig(
        num_blocks=40,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=60,
        num_host_blocks=30,
    )
    harness, rng = Harness(config), random.Random(4)
    prompt = [rng.randrange(3) for _ in range(40)]
    seen: set[str] = set()
    for turn in range(160):
        if turn % 6 == 0:
            harness.add(prompt[: rng.randrange(3, 30)], rng.choice([1, 3]), max_tokens=rng.randrange(2, 20))
        harness.step()
        harness.scheduler.tidy()
        harness.check()
        core = harness.scheduler
        view = core.kv_view(0, 1000)
        start = rng.randrange(40)
        part = core.kv_view(start, 7)
        assert part.state == view.state[start : start + 7]
        assert part.owners == view.owners[start : start + 7]
        tables = {
            f"{one.request_id}/{one.choice}": core.table.blocks(one).tolist()
            for one in core.sequences
            if one.slot != NO_SLOT
        }
        for block in range(40):
            owners = sorted(name for name, blocks in tables.items() if block in blocks)
            assert sorted(view.owners[block]) == owners
            assert view.references[block] >= len(owners)
            state = STATES[view.state[block]]
            seen.add(state)
            assert (state == "active") == (view.references[block] > 0)
            assert (view.depth[block] > 0) == core.pool.is_named(block)
            assert view.filled[block] == 4 or state != "cached"
            assert view.age_steps[block] >= 0
        totals = view.totals
        assert totals.free_blocks + totals.cached_blocks + totals.active_blocks == totals.num_blocks == 40
        assert totals.active_blocks == core.pool.num_used
        assert totals.shared_blocks == sum(references > 1 for references in view.references)
        assert totals.saved_blocks == sum(max(references - 1, 0) for references in view.references)
        assert totals.external_waste_tokens == 0
        host = core.kv_view(0, 100, "host")
        assert len(host.state) == 30
        assert sum(depth > 0 for depth in host.depth) == totals.host_cached_blocks
    assert seen == set(STATES)
    harness.finish()
    assert harness.scheduler.kv_view(0, 40).totals.active_blocks == 0


def test_windows_outside_the_pool_are_empty() -> None:
    core = Harness(
        CoreConfig(num_blocks=4, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16)
    ).scheduler
    assert core.kv_view(4, 10).state == []
    assert core.kv_view(-3, 2).start == 0
    assert core.kv_view(2, 10).state == [0, 0]
    assert core.kv_view(0, 10, "host").state == []

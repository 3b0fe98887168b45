"""A warm cache outlives its scheduler: what the executor keeps is true, what is taken over is found, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from core_harness import Harness
from hypothesis import given, settings

from octavo_executor.page_names import PageNameTable
from octavo_scheduler.core.adoption import DoubtfulError
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.scheduler import Scheduler
from octavo_shared.plan import CacheOffer, PageNames, StepPlan

SIZE = 4


def config(**more: object) -> CoreConfig:
    sizes = {"num_blocks": 24, "block_size": SIZE, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return CoreConfig(**{**sizes, "fingerprint": "f", **more})  # type: ignore[arg-type]


class Keeper(Harness):
    """A harness whose executor keeps the names of its pages; they are compared with what the pages hold at every step."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.names = PageNameTable(config.num_blocks, config.num_host_blocks, config.block_size)

    def _run(self, plan: StepPlan) -> None:
        self.names.apply(plan)
        super()._run(plan)
        for offer in self.names.offers():
            for pages, held in ((offer.device, self.executor.page_tokens), (offer.host, self.executor.host_tokens)):
                if len(pages):
                    assert (held[pages.pages] == pages.tokens).all(), "a page holds something else than its name says"

    def replace_scheduler(self, config: CoreConfig | None = None) -> int:
        """The scheduler dies and another one takes over the pages. Nothing may be under way. Returns pages adopted."""
        assert not self.plans
        self.scheduler = Scheduler(config or self.config, hash_key=b"another")
        self.executor.slots.clear()
        self.executor.step = 0
        return self.scheduler.adopt(self.names.offers())


def drain(harness: Harness) -> None:
    while harness.scheduler.sequences or harness.plans or harness.results:
        while harness.schedule() is not None:
            pass
        while harness.plans:
            harness.execute()
        while harness.results:
            harness.deliver()
            # As the service does once the next plan is on its way.
            harness.scheduler.tidy()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 12]))
def test_what_is_taken_over_can_be_read(seed: int, host_blocks: int) -> None:
    """The executor's model verifies every token that is read, also from pages that an earlier scheduler had filled."""
    draw = random.Random(seed)
    harness = Keeper(config(num_host_blocks=host_blocks))
    beginnings = [[draw.randrange(3) for _ in range(draw.randrange(4, 20))] for _ in range(3)]
    for _ in range(3):
        for _ in range(draw.randrange(2, 7)):
            prompt = draw.choice(beginnings) + [draw.randrange(3) for _ in range(draw.randrange(1, 8))]
            harness.add(prompt, n=draw.randrange(1, 3), max_tokens=draw.randrange(1, 20), tenant=draw.choice("ab"))
        drain(harness)
        before = harness.scheduler.pool.num_cached + harness.scheduler.host.pool.num_cached
        adopted = harness.replace_scheduler()
        # What the last plan's tokens filled has no plan after it to be told with.
        assert adopted <= before
        harness.scheduler.check_integrity()


def test_a_prefix_is_found_after_a_takeover() -> None:
    harness = Keeper(config())
    prompt = [1, 2, 0, 1] * 5
    harness.add([*prompt, 0], max_tokens=12)
    drain(harness)
    assert harness.replace_scheduler() >= 5
    harness.add([*prompt, 2, 1], max_tokens=1)
    drain(harness)
    assert harness.scheduler.stats.prefix_hits == len(prompt)
    # Names are told anew: a second takeover finds them as well.
    assert harness.replace_scheduler() >= 5


def test_other_tenants_and_other_models_find_nothing() -> None:
    prompt = [1, 2, 0, 1] * 5
    harness = Keeper(config())
    harness.add([*prompt, 0], max_tokens=12, tenant="a")
    drain(harness)
    assert harness.replace_scheduler()
    harness.add([*prompt, 2, 1], max_tokens=1, tenant="b")
    drain(harness)
    assert harness.scheduler.stats.prefix_hits == 0
    assert harness.replace_scheduler(config(fingerprint="g")) == 0


ROOT = (1, b"\x01\x00\x00\x00f")


def names(*rows: tuple[int, int, int, int]) -> PageNames:
    """(page, number, parent, token)"""
    pages, numbers, parents, tokens = zip(*rows, strict=True)
    return PageNames(
        np.array(pages, np.int32),
        np.array(numbers, np.int64),
        np.array(parents, np.int64),
        np.repeat(np.array(tokens, np.int32), SIZE).reshape(-1, SIZE),
    )


def test_what_hangs_in_the_air_is_left_out() -> None:
    scheduler = Scheduler(config())
    good = names((3, 2, 1, 0), (4, 3, 2, 0), (5, 9, 8, 0), (6, 11, 12, 1), (7, 12, 11, 1))
    assert scheduler.adopt([CacheOffer(good, roots=(ROOT,))]) == 2
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "doubtful",
    [
        names((3, 2, 1, 0), (3, 3, 2, 0)),
        names((99, 2, 1, 0)),
        names((-1, 2, 1, 0)),
        names((3, 2, 1, 0), (4, 2, 1, 1)),
        names((3, 2, 1, 0), (4, 2, 7, 0)),
        names((3, 1, 2, 0)),
        names((3, -2, 1, 0)),
        names((3, 2, 1, -5)),
        replace(names((3, 2, 1, 0)), tokens=np.zeros((1, 3), np.int32)),
        replace(names((3, 2, 1, 0)), numbers=np.zeros(1, np.int64)),
    ],
)
def test_in_doubt_everything_is_dropped(doubtful: PageNames) -> None:
    scheduler = Scheduler(config())
    with pytest.raises(DoubtfulError):
        scheduler.adopt([CacheOffer(roots=(ROOT,)), CacheOffer(doubtful)])
    assert scheduler.pool.num_cached == 0
    scheduler.check_integrity()

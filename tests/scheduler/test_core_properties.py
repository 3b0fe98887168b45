"""The scheduler's core under arbitrary arrivals, cancels, late and duplicate results, tiny pools and cache resets.

After every move: refcounts equal references held, every block is in exactly one place, nothing is planned past its
length, every page read holds exactly the tokens it should (verified by the executor model), each sequence ends once. At
the end: nobody starved, all blocks are back, and every output is what it would have been alone.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from core_executor_model import ALPHABET
from core_harness import Harness
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.hashing import BlockHasher


@st.composite
def configs(draw: st.DrawFn) -> CoreConfig:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    max_model_len = draw(st.integers(3, 40))
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    full = -(-max_model_len // block_size)
    return CoreConfig(
        num_blocks=draw(st.sampled_from([max(1, full - 1), full, full + 1, 2 * full, 6 * full])),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, draw(st.integers(1, 24)), 0 if chunked else max_model_len),
        max_model_len=max_model_len,
        num_host_blocks=draw(st.sampled_from([0, 0, 1, full, 20 * full])),
        policy=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 5])) if chunked else 0,
        max_num_partial_prefills=draw(st.sampled_from([0, 0, 1])),
        prefix_cache_scope=draw(st.sampled_from(["global", "tenant", "tenant", "request"])),
        tenant_weights={"a": 2.0},
        run_ahead=draw(st.sampled_from([0, 1, 1, 2])),
    )


PROMPTS = st.tuples(
    st.integers(0, 1), st.integers(0, 30), st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=4)
)
SHARED = [[random.Random(i).randrange(ALPHABET) for _ in range(64)] for i in range(2)]


class CoreMachine(RuleBasedStateMachine):
    """The moves; what must hold is in the harness."""

    def make(self, config: CoreConfig, careless: bool, late: bool) -> Harness:
        return Harness(config, careless=careless, late=late)

    @initialize(config=configs(), careless=st.booleans(), late=st.booleans())
    def start(self, config: CoreConfig, careless: bool, late: bool) -> None:
        self.harness = self.make(config, careless, late)

    @rule(
        prompt=PROMPTS,
        n=st.integers(1, 3),
        max_tokens=st.integers(0, 40),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "", "a"]),
        tenant=st.sampled_from(["", "", "a"]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def arrive(self, prompt: tuple[int, int, list[int]], n: int, **more: object) -> None:
        shared, length, rest = prompt
        self.harness.add(SHARED[shared][:length] + rest, n, **more)

    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.plans)
    @rule()
    def execute(self) -> None:
        self.harness.execute()

    @precondition(lambda self: self.harness.results)
    @rule()
    def deliver(self) -> None:
        self.harness.deliver()

    @rule(seed=st.integers(0, 99))
    def deliver_wrongly(self, seed: int) -> None:
        self.harness.deliver_wrongly(random.Random(seed))

    @rule(turns=st.integers(1, 25))
    def run_on(self, turns: int) -> None:
        for _ in range(turns):
            self.harness.step()
            self.harness.check()

    @precondition(lambda self: self.harness.everyone)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(self.harness.everyone)))

    @rule()
    def preempt_everyone(self) -> None:
        self.harness.scheduler.preempt_all()

    @rule()
    def reset_cache(self) -> None:
        self.harness.reset_cache()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish()


class ColludingHasher(BlockHasher):
    """Nearly all contents have the same hash: what is shared must be right all the same."""

    def follow(self, parent: bytes, content: bytes) -> bytes:
        return bytes([super().follow(parent, content)[0] & 1])


class CollisionMachine(CoreMachine):
    """The same moves with a hash of one bit."""

    def make(self, config: CoreConfig, careless: bool, late: bool) -> Harness:
        harness = super().make(config, careless, late)
        harness.scheduler.prefix_cache.hasher = ColludingHasher(b"", config.block_size)
        return harness


_LIMITS = settings(max_examples=60, stateful_step_count=40)
TestCore = CoreMachine.TestCase
TestCore.settings = _LIMITS
TestCollisions = CollisionMachine.TestCase
TestCollisions.settings = settings(_LIMITS, max_examples=40)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_constant_preemption(block_size: int, policy: str, run_ahead: int) -> None:
    """A pool that holds one and a half sequences, with six of them wanted: outputs are those of a roomy pool."""
    longest = 32
    config = CoreConfig(
        num_blocks=longest * 3 // 2 // block_size,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=longest,
        policy=policy,  # type: ignore[arg-type]
        run_ahead=run_ahead,
    )
    harness = Harness(config, careless=True)
    rng = random.Random(block_size)
    for serial in range(24):
        harness.add(
            SHARED[serial % 2][: rng.randrange(1, 20)], rng.choice([1, 1, 3]), max_tokens=30, priority=serial % 3
        )
    harness.finish()
    assert harness.scheduler.stats.preemptions > 5
    if block_size < 16:
        assert harness.scheduler.stats.resumed_hits > 0


def test_abort_in_every_state() -> None:
    """Queued, following, prefilling, decoding, drained by preemption: the blocks are free at once, the rest is unharmed."""
    config = CoreConfig(
        num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40, run_ahead=1
    )
    for turns in range(14):
        harness = Harness(config)
        crowd = [s for i in range(4) for s in harness.add(SHARED[i % 2][: 9 + i], 3, max_tokens=12)]
        for _ in range(turns):
            harness.step()
            harness.check()
        states = {s.state for s in crowd}
        for victim in crowd[turns % 3 :: 3]:
            harness.abort(victim)
            harness.check()
        assert len(states) >= 2 or turns > 10
        harness.finish()

"""The host tier: pages move one by one, content counts where it was moved to only once that is acknowledged (R2, R3)."""

from __future__ import annotations

import numpy as np
import pytest
from core_bench import Bench, sequence
from core_harness import Harness

from octavo_scheduler.core.admission import MAX_RESTORES
from octavo_scheduler.core.block_pool import BlockPool, Content
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.host_tier import HostTier, MoveCosts, Moves, worth_restoring
from octavo_scheduler.core.prefix_cache import Hit
from octavo_scheduler.core.sequence import Sequence, State
from octavo_shared.plan import StepPlan, StepTimings

# --- the tier on its own ----------------------------------------------------------------------------------------------


def content(number: int) -> Content:
    return Content(bytes([number]), number, 0, 1, np.array([number, number], np.int32).tobytes())


def filled(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks with these contents, let go: the last is kept longest."""
    blocks: list[int] = pool.allocate(len(numbers)).tolist()
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.name(block, int(pool.generation[block]), content(number))
    for block in blocks:
        pool.release([block])
    return blocks


def pairs(moves: Moves | None) -> list[tuple[int, int]]:
    assert moves is not None
    return [(save.device, save.host) for save in moves.saves]


def test_what_makes_room_is_saved_once() -> None:
    device = BlockPool(3, 2)
    tier = HostTier(device, 4)
    filled(device, 1, 2, 3)
    device.allocate(1)
    tier.save_ahead(2)
    moves = tier.take_moves()
    assert pairs(moves) == [(0, 0), (1, 1), (2, 2)]
    assert moves is not None
    assert moves.out().source.tolist() == [0, 1, 2]
    assert moves.out().destination.tolist() == [0, 1, 2]
    # Those still on their way are not sent again, whoever takes their device page.
    tier.save_ahead(2)
    device.allocate(1)
    assert not tier.has_moves
    assert tier.take_moves() is None
    assert (tier.pool.num_used, tier.pool.num_cached, tier.saved_blocks) == (3, 0, 0)
    assert tier.settle(moves) == []
    assert (tier.pool.num_used, tier.pool.num_cached, tier.saved_blocks) == (0, 3, 3)
    assert tier.pool.content(1) == content(2)
    # Nor what is there already.
    device.allocate(1)
    assert not tier.has_moves


def test_what_holds_nothing_is_not_saved() -> None:
    device = BlockPool(3, 2)
    tier = HostTier(device, 4)
    device.release(device.allocate(1).tolist())
    tier.save_ahead(3)
    device.allocate(3)
    assert not tier.has_moves


def test_without_a_page_on_the_host_content_is_dropped() -> None:
    """Never waits: one host page, which a move on its way holds."""
    device = BlockPool(2, 2)
    tier = HostTier(device, 1)
    filled(device, 1, 2)
    device.allocate(2)
    moves = tier.take_moves()
    assert pairs(moves) == [(0, 0)]
    assert moves is not None
    tier.settle(moves)
    assert tier.pool.find(content(1).digest) == 0
    assert tier.pool.find(content(2).digest) is None


def test_the_host_forgets_what_was_not_used_for_longest() -> None:
    device = BlockPool(4, 2)
    tier = HostTier(device, 2)

    def save(*numbers: int) -> None:
        filled(device, *numbers)
        device.allocate(4)
        device.release([0, 1, 2, 3])
        moves = tier.take_moves()
        assert moves is not None
        tier.settle(moves)

    save(1, 2)
    save(3)
    assert [tier.pool.find(content(number).digest) is not None for number in (1, 2, 3)] == [False, True, True]
    # 2 is wanted again, and so outlives 3.
    pool = tier.pool
    hit = pool.find(content(2).digest)
    assert hit is not None
    restore(tier, [], [(hit, True)])
    moves = tier.take_moves()
    assert moves is not None
    tier.settle(moves)
    save(4)
    assert [pool.find(content(number).digest) is not None for number in (2, 3, 4)] == [True, False, True]


def restore(tier: HostTier, device: list[int], beyond: list[tuple[int, bool]]) -> Sequence:
    one = sequence(1)
    blocks, on_host = np.array([b for b, _ in beyond], np.int32), np.array([h for _, h in beyond], np.bool_)
    tier.restore(one, Hit(np.array(device, np.int32), blocks, on_host))
    return one


def test_a_restore_holds_both_sides_until_it_is_acknowledged() -> None:
    """Of a chain of four: the second and the last are on the host, the others on the device, and stay there."""
    device = BlockPool(5, 2)
    tier = HostTier(device, 3)
    # 11 and 12 on the host, nothing of them on the device.
    filled(device, 11, 12)
    device.allocate(5)
    device.release([0, 1, 2, 3, 4])
    first = tier.take_moves()
    assert first is not None
    tier.settle(first)
    one, three = filled(device, 1, 3)
    sequence = restore(tier, [one], [(0, True), (three, False), (1, True)])
    moves = tier.take_moves()
    assert moves is not None
    assert moves.num_restored == 2
    back = moves.back()
    assert back.source.tolist() == [0, 1]
    fresh = back.destination.tolist()
    assert back.generations.tolist() == device.generation[fresh].tolist()
    assert set(fresh).isdisjoint({one, three})
    on_device, on_host = tier.holds([moves])
    assert (sorted(on_device), sorted(on_host)) == (sorted([one, three, *fresh]), [0, 1])
    assert device.refcount[on_device].tolist() == [1] * 4
    # Neither is findable yet, nor can anybody take a page of it.
    assert device.find(content(11).digest) is None
    assert device.num_free == 1
    assert tier.pool.num_free == 1
    assert tier.settle(moves) == [sequence]
    assert device.find(content(11).digest) == fresh[0]
    assert device.content(fresh[1]) == content(12)
    assert (device.num_used, tier.pool.num_used, tier.restored_blocks) == (0, 0, 2)


def test_a_reset_overtakes_moves() -> None:
    """What was on its way when everything was forgotten arrives for nobody, on either side."""
    device = BlockPool(4, 2)
    tier = HostTier(device, 4)
    filled(device, 1, 2)
    device.allocate(4)
    device.release([0, 1, 2, 3])
    moves = tier.take_moves()
    assert moves is not None
    tier.settle(moves)
    filled(device, 3)
    tier.save(device.find(content(3).digest))  # type: ignore[arg-type]
    restore(tier, [], [(0, True), (1, True)])
    moves = tier.take_moves()
    assert moves is not None
    device.forget_all()
    tier.pool.forget_all()
    tier.settle(moves)
    assert device.num_cached == tier.pool.num_cached == 0
    assert device.num_used == tier.pool.num_used == 0
    # The same content can be saved again afterwards.
    filled(device, 3)
    tier.save(device.find(content(3).digest))  # type: ignore[arg-type]
    assert tier.has_moves


def test_content_that_was_computed_anew_meanwhile_keeps_one_number() -> None:
    """Forgotten on the device while it moved to the host, and known there again by another number: the host's is dropped."""
    device = BlockPool(2, 2)
    tier = HostTier(device, 2)
    filled(device, 1)
    tier.save_ahead(2)
    device.allocate(2)
    moves = tier.take_moves()
    assert moves is not None
    anew = Content(content(1).digest, 77, 0, 1, content(1).tokens)
    assert device.name(0, int(device.generation[0]), anew)
    tier.settle(moves)
    assert tier.pool.num_cached == 0
    assert tier.pool.num_used == 0


@pytest.mark.parametrize(
    ("blocks", "tokens", "restore_s", "prefill_s", "worth"),
    [
        (1, 16, 0.0, 0.0, True),  # nothing known: it is tried
        (1, 16, 0.1, 0.0, True),
        (1, 16, 0.0, 0.1, True),
        (1, 16, 0.016, 0.001, False),  # equal: not cheaper
        (1, 16, 0.0159, 0.001, True),
        (2, 16, 0.0159, 0.001, False),
        (2, 160, 0.0159, 0.001, True),  # device blocks behind them become usable as well
        (100, 1600, 1e-4, 1e-3, True),
        (100, 1600, 1e-1, 1e-3, False),
    ],
)
def test_worth_restoring(blocks: int, tokens: int, restore_s: float, prefill_s: float, worth: bool) -> None:
    assert worth_restoring(blocks, tokens, MoveCosts(restore_s, prefill_s)) is worth


def test_costs_are_an_average_that_forgets() -> None:
    costs = MoveCosts()
    costs.observe_restore(4, 8.0)
    costs.observe_prefill(100, 1.0)
    assert (costs.restore_s_per_block, costs.prefill_s_per_token) == (2.0, 0.01)
    costs.observe_restore(1, 7.0)
    costs.observe_prefill(10, 0.6)
    assert costs.restore_s_per_block == pytest.approx(3.0)
    assert costs.prefill_s_per_token == pytest.approx(0.02)


# --- under pressure ---------------------------------------------------------------------------------------------------

SIZE = 4


def pressed(num_host_blocks: int, **changes: object) -> CoreConfig:
    """Twenty sequences of up to ten blocks want 200; there are 20."""
    values: dict[str, object] = {
        "num_blocks": 20,
        "block_size": SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 40,
        "num_host_blocks": num_host_blocks,
    }
    return CoreConfig(**values | changes)  # type: ignore[arg-type]


def crowd(harness: Harness, count: int = 20) -> None:
    """Outputs of 28 tokens each, after prompts that have little in common. No seed of theirs ends early."""
    for serial in range(count):
        harness.add([serial % 3, serial % 2, (serial // 3) % 3] * 4, max_tokens=28, seed=4 * serial + 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_outputs_do_not_depend_on_the_tier(run_ahead: int, late: bool) -> None:
    """Greedy would be one case of it: here every draw is a function of (seed, position), as rule L10 asks."""
    logs, recomputed = [], []
    for host_blocks in (0, 1, 6, 400):
        harness = Harness(pressed(host_blocks, run_ahead=run_ahead), careless=True, late=late)
        crowd(harness)
        harness.finish()
        stats, executor = harness.scheduler.stats, harness.executor
        assert stats.preemptions > 20, "constant preemption"
        if host_blocks:
            assert executor.saved > 0
            assert executor.restored > 0
        if host_blocks == 400:
            assert executor.saved > 100
            assert executor.restored > 50
        logs.append(executor.log)
        recomputed.append(stats.recomputed_tokens)
    assert logs[1:] == logs[:1] * 3
    assert recomputed[0] > 250
    assert recomputed[3] < recomputed[0] / 2, "coming back through the host spares computing"


def test_a_preempted_sequence_comes_back_through_the_host() -> None:
    bench = Bench(num_blocks=8, block_size=4, num_host_blocks=8, policy="priority")
    low = bench.add(22, max_tokens=9, priority=1)
    bench.step()
    bench.scheduler.preempt_all()
    high = bench.add(25, max_tokens=6, priority=0)
    plan = bench.step()
    assert bench.admitted(plan) == [1]
    assert sorted(plan.copy_out.generations.tolist()) == [1] * 5
    assert bench.scheduler.host.saved_blocks == 5
    plan = bench.step(ending=[high])
    restoring = bench.plan()
    assert (low.state, len(restoring.row_slots), len(restoring.restores)) == (State.RESTORING, 0, 4)
    # Nothing is computed on these pages before they are there.
    assert bench.scheduler.schedule() is None
    bench.acknowledge(restoring)
    plan = bench.step()
    assert [(new.num_computed, len(new.tokens)) for new in plan.admit] == [(20, 23)]
    assert low.state is State.RUNNING


class Hasty(Harness):
    """Trusts restored pages as soon as the plan is made."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        host, device = self.scheduler.host, self.scheduler.pool
        for sent in self.scheduler.sent:
            for restore in sent.moves.restores if sent.moves is not None else ():
                for _, block, generation, kept in restore.pages:
                    device.name(block, generation, kept)
                if self.scheduler.restoring.pop(restore.sequence.uid, None) is not None:
                    self.scheduler._let_wait(restore.sequence)
        assert host.pool.num_blocks
        return plan


def test_reading_a_restored_page_too_early_would_be_noticed() -> None:
    """The executor model delays moves to the last moment allowed: the test above can fail."""
    harness = Hasty(pressed(400), careless=True, late=True)
    crowd(harness)
    with pytest.raises(AssertionError, match=r"pages hold other tokens|computed elsewise"):
        harness.finish()


def restoring(bench: Bench) -> tuple[Sequence, StepPlan]:
    """A sequence whose five pages were saved and are on their way back."""
    one, _ = bench.run(22, max_tokens=6)
    bench.scheduler.preempt_all()
    bench.scheduler.abort(bench.run_first(25))
    plan = bench.plan()
    assert one.state is State.RESTORING
    assert len(plan.restores) == 5
    return one, plan


def tight(**changes: object) -> Bench:
    values: dict[str, object] = {"num_blocks": 7, "block_size": 4, "num_host_blocks": 9, "policy": "priority"}
    return Bench(**values | changes)


def test_an_abort_while_pages_come_back() -> None:
    bench = tight()
    one, plan = restoring(bench)
    assert bench.pool.num_used == 5
    assert bench.scheduler.abort(one)
    bench.scheduler.check_integrity()
    # The pages are the move's until it is acknowledged, then anybody's.
    assert bench.pool.num_used == 5
    bench.acknowledge(plan)
    assert (bench.pool.num_used, bench.scheduler.host.pool.num_used) == (0, 0)
    assert bench.scheduler.schedule() is None
    assert bench.run([*one.record.prompt.tolist()[:20], 7])[1] == 20


def test_others_run_while_pages_come_back() -> None:
    bench = tight(num_blocks=12)
    one, _ = bench.run(22, max_tokens=6)
    bench.scheduler.preempt_all()
    bench.scheduler.abort(bench.run_first(45))
    other = bench.add(10, max_tokens=5, priority=1)
    plan = bench.plan()
    assert (one.state, other.state) == (State.RESTORING, State.RUNNING)
    assert bench.granted(plan, other) == [10]
    bench.acknowledge(plan)
    assert bench.granted(bench.step(), other) == [1]


@pytest.mark.parametrize("moment", ["restoring", "saving"])
def test_a_reset_while_pages_move(moment: str) -> None:
    bench = tight()
    if moment == "restoring":
        one, plan = restoring(bench)
    else:
        one, _ = bench.run(22, max_tokens=6)
        bench.scheduler.preempt_all()
        first = bench.add(25, max_tokens=3, priority=-1)
        plan = bench.plan()
        assert len(plan.copy_out) == 5
    bench.scheduler.reset_prefix_cache()
    bench.acknowledge(plan)
    assert bench.scheduler.host.pool.num_cached == 0
    if moment == "saving":
        assert bench.pool.num_cached == 0
        bench.scheduler.abort(first)
    # Everything is computed anew.
    plan = bench.step()
    assert [(new.num_computed, len(new.tokens)) for new in plan.admit] == [(0, 23)]
    assert one.state is State.RUNNING


def test_pages_that_get_lost_again_are_computed_in_the_end() -> None:
    """Restored pages are let go until their sequence starts on them: somebody may take them. That ends."""
    bench = tight()
    one, plan = restoring(bench)
    for number in range(1, MAX_RESTORES + 1):
        assert (one.state, one.restores) == (State.RESTORING, number)
        bench.acknowledge(plan)
        assert one.state is State.WAITING
        # Somebody takes them all, and lets them go.
        bench.pool.release(bench.pool.allocate(7).tolist())
        assert bench.pool.num_cached == 0
        plan = bench.plan()
    assert one.state is State.RUNNING
    assert [new.num_computed for new in plan.admit] == [0]
    assert one.restores == 0, "the next time it may try again"


@pytest.mark.parametrize(("restore_s", "cheap"), [(1e-6, True), (10.0, False)])
def test_restores_come_to_an_end_where_computing_is_cheaper(restore_s: float, cheap: bool) -> None:
    """A page that takes longer to bring back than to compute is tried until both prices are known, and then no more."""

    def timings_of(plan: StepPlan) -> StepTimings:
        restored, computed = len(plan.restores), int(plan.row_tokens.sum())
        return StepTimings(restore_s=restored * restore_s, forward_s=0.001 * computed)

    harness = Harness(pressed(400), careless=True, timings_of=timings_of)
    crowd(harness)
    harness.finish()
    free = Harness(pressed(400), careless=True)
    crowd(free)
    free.finish()
    costs = harness.scheduler.costs
    assert costs.prefill_s_per_token == pytest.approx(0.001)
    assert costs.restore_s_per_block == pytest.approx(restore_s)
    if cheap:
        assert harness.executor.restored == free.executor.restored > 50
    else:
        assert 0 < harness.executor.restored < 20
    assert harness.executor.log == free.executor.log


def test_a_step_of_decodes_says_nothing_about_the_price_of_a_prompt() -> None:
    bench = Bench(num_blocks=100)
    for _ in range(15):
        bench.add(4, max_tokens=50)
    plan = bench.plan()
    bench.acknowledge(plan, timings=StepTimings(forward_s=0.6))
    assert bench.scheduler.costs.prefill_s_per_token == pytest.approx(0.01)
    for _ in range(3):
        bench.acknowledge(bench.plan(), timings=StepTimings(forward_s=9.0))
    bench.add(12, max_tokens=5)
    bench.acknowledge(bench.plan(), timings=StepTimings(forward_s=9.0))
    assert bench.scheduler.costs.prefill_s_per_token == pytest.approx(0.01)


def test_device_blocks_behind_a_host_block_are_not_counted_twice() -> None:
    """A sequence as large as the pool whose first page is on the host and whose others are not: it may go."""
    bench = Bench(num_blocks=4, block_size=4, num_host_blocks=4, policy="priority", max_model_len=17)
    large = bench.add(13, max_tokens=4, priority=1)
    plan = bench.plan()
    # Let go before it is known what they hold: now the head of the chain goes first.
    bench.scheduler.preempt_all()
    small = bench.add(7, max_tokens=2, priority=0)
    bench.acknowledge(plan)
    bench.step()
    bench.step(ending=[small])
    hit = bench.scheduler.prefix_cache.find(large)
    assert (len(hit.device), hit.on_host.tolist()) == (0, [True, False, False])
    plan = bench.step()
    assert len(plan.restores) == 1
    plan = bench.step()
    assert [new.num_computed for new in plan.admit] == [12]


def test_no_tier_without_a_prefix_cache() -> None:
    harness = Harness(pressed(400, enable_prefix_caching=False), careless=True)
    crowd(harness)
    harness.finish()
    assert harness.scheduler.host.pool.num_blocks == 0
    assert harness.executor.saved == harness.executor.restored == 0


def test_copies_out_run_ahead_of_demand() -> None:
    """A plan saves about as many pages as it has needed, before somebody needs theirs."""
    bench = Bench(num_blocks=12, block_size=4, num_host_blocks=12)
    bench.scheduler.abort(bench.run(41, max_tokens=3)[0])
    assert bench.pool.num_cached == 10
    other = bench.add(9, max_tokens=9)
    plan = bench.step()
    # Two pages were free of content; the third was saved and taken, and three more are saved while they are free.
    assert len(plan.copy_out) == 4
    assert len(set(plan.copy_out.source.tolist()) & set(bench.blocks(other))) == 1
    assert bench.pool.num_cached == 9 + 2

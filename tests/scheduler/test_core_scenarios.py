"""The field's agreed scheduler and prefix-cache behaviour, with its exact numbers.

The scenarios are facts that vLLM's own tests pin down (``tests/v1/core``), told in Octavo's terms: 16 tokens per block and
10 usable blocks unless said otherwise. Their block ids count from 1 (vLLM keeps block 0 for itself), ours from 0; the
tables here keep theirs and ``ids`` translates. Octavo makes a block findable only once the executor has acknowledged the
step that filled it and ``tidy`` has hashed it, so every scenario acknowledges and tidies before it looks.

Waiting for what is not built yet: everything on EAGLE and draft tokens (rows 11's second half, 23's first half and 29) and
on sliding-window groups (rows 13 and 25's second half). Rows 22 and 23 (stop ids, ``min_tokens``) are the executor's.
"""

from __future__ import annotations

import numpy as np
import pytest
from careless import Careless
from core_bench import Bench

from octavo_scheduler.core.errors import NeverFitsError
from octavo_scheduler.core.sequence import Sequence, State
from octavo_scheduler.core.stats import HitRateWindow
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepResult
from octavo_shared.records import EndReason, RequestRecord, SamplingParams

COMMON = list(range(100, 148))


def ids(*from_one: int) -> list[int]:
    """Block ids that count from 1, as ours."""
    return [block - 1 for block in from_one]


@pytest.fixture
def shared_prefix() -> tuple[Bench, Sequence, Sequence]:
    """Row 1: a 55-token prompt takes 4 blocks, hit 0; then the same 48 tokens + 5: hit 48, one block more, 5 free."""
    bench = Bench()
    first, hit = bench.run(COMMON + list(range(7)))
    assert (hit, bench.blocks(first)) == (0, ids(1, 2, 3, 4))
    second, hit = bench.run(COMMON + list(range(50, 55)))
    assert (hit, bench.blocks(second)) == (48, ids(1, 2, 3, 5))
    assert bench.pool.num_free == 5
    return bench, first, second


def test_row_1_hit_on_a_shared_prefix(shared_prefix: tuple[Bench, Sequence, Sequence]) -> None:
    bench, first, second = shared_prefix
    assert bench.pool.num_cached == 3
    assert {first.state, second.state} == {State.RUNNING}


@pytest.fixture
def third_request(shared_prefix: tuple[Bench, Sequence, Sequence]) -> tuple[Bench, Sequence]:
    """Row 2: both freed, then the 48-token prefix comes again."""
    bench, first, second = shared_prefix
    bench.scheduler.abort(first)
    bench.scheduler.abort(second)
    assert bench.pool.free_blocks() == ids(5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    third, hit = bench.run(COMMON + list(range(70, 75)))
    assert (hit, bench.blocks(third)) == (48, ids(1, 2, 3, 5))
    assert bench.pool.num_free == 6
    return bench, third


def test_row_2_freed_blocks_stay_findable(third_request: tuple[Bench, Sequence]) -> None:
    bench, _ = third_request
    assert bench.pool.free_blocks() == ids(4, 6, 7, 8, 9, 10)


def test_row_3_eviction_takes_the_tail_first(third_request: tuple[Bench, Sequence]) -> None:
    bench, third = third_request
    bench.scheduler.abort(third)
    large = bench.add(160)
    bench.plan()
    assert bench.blocks(large) == ids(5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    assert (bench.pool.num_free, bench.pool.num_cached) == (0, 0)


def test_row_5_decoding_fills_and_takes_blocks() -> None:
    bench = Bench()
    sequence, _ = bench.run(55, max_tokens=100)
    for _ in range(4):
        bench.step()
    # 59 tokens have been computed.
    assert bench.planned(sequence) == 59
    assert bench.blocks(sequence) == ids(1, 2, 3, 4)
    assert bench.pool.num_cached == 3
    for _ in range(19):
        bench.step()
    assert bench.planned(sequence) == 78
    assert bench.blocks(sequence) == ids(1, 2, 3, 4, 5)
    assert bench.pool.num_cached == 4


def test_row_7_full_pool_without_cache() -> None:
    bench = Bench(block_size=4, num_blocks=4, enable_prefix_caching=False)
    first, hit = bench.run(list(range(10)))
    assert (hit, len(bench.blocks(first))) == (0, 3)
    bench.scheduler.abort(first)
    second, hit = bench.run(list(range(16)), max_tokens=1)
    assert (hit, len(bench.blocks(second)), bench.pool.num_free) == (0, 4, 0)
    bench.add(4)
    assert bench.scheduler.schedule() is None
    with pytest.raises(NeverFitsError):
        bench.add(list(range(16)), max_tokens=4)
    assert bench.pool.num_cached == 0


def test_row_8_cache_salt() -> None:
    bench = Bench()
    first, hit = bench.run([*COMMON, 1], cache_salt="a")
    assert hit == 0
    bench.scheduler.abort(first)
    for salt, expected in (("a", 48), ("b", 0), ("", 0)):
        sequence, hit = bench.run([*COMMON, 2], cache_salt=salt)
        assert hit == expected
        bench.scheduler.abort(sequence)


@pytest.mark.parametrize("field", ["tenant", "lora"])
def test_row_8_holds_for_tenants_and_adapters(field: str) -> None:
    bench = Bench()
    for name, expected in (("a", 0), ("a", 48), ("b", 0)):
        sequence, hit = bench.run([*COMMON, 1], **{field: name})
        assert hit == expected
        bench.scheduler.abort(sequence)


def test_row_10_reset_while_blocks_are_held() -> None:
    """vLLM refuses a reset (returns False, clears nothing) while any block is in use, and does it when none is.

    Octavo does it at any time and says how many blocks could be found: what is held is forgotten as well, and so is what
    its holders go on to compute, which continues it. So the fact that remains is the second half: after a reset nothing
    computed before it is found, by anyone.
    """
    bench = Bench()
    sequence, _ = bench.run(55, max_tokens=100)
    assert bench.pool.num_cached == 3
    assert bench.scheduler.reset_prefix_cache() == 3
    assert (bench.pool.num_cached, sequence.state) == (0, State.RUNNING)
    for _ in range(10):
        bench.step()
    assert bench.planned(sequence) == 65
    assert bench.pool.num_cached == 0
    bench.scheduler.abort(sequence)
    assert bench.scheduler.reset_prefix_cache() == 0
    again = Bench()
    first, _ = again.run(COMMON)
    again.scheduler.abort(first)
    assert again.scheduler.reset_prefix_cache() == 3
    assert again.run([*COMMON, 1])[1] == 0
    # What is computed from now on counts again.
    assert again.run([*COMMON, 1])[1] == 48


def test_reset_also_forgets_what_is_in_flight() -> None:
    bench = Bench()
    bench.add([*COMMON, 1], max_tokens=5)
    plan = bench.plan()
    assert bench.scheduler.reset_prefix_cache() == 0
    bench.acknowledge(plan)
    assert bench.pool.num_cached == 0
    bench.scheduler.preempt_all()
    (new,) = bench.step().admit
    assert (new.num_computed, bench.pool.num_cached) == (0, 3)


def test_reset_also_forgets_what_waits_to_be_hashed() -> None:
    bench = Bench()
    bench.add([*COMMON, 1], max_tokens=5)
    plan = bench.plan()
    bench.scheduler.commit(
        StepResult(plan.term, plan.epoch, plan.step, np.ones(1, np.int32), np.ones(1, np.int32), np.zeros(1, np.uint8))
    )
    assert bench.scheduler.reset_prefix_cache() == 0
    bench.scheduler.tidy()
    assert bench.pool.num_cached == 0


def test_row_11_the_last_token_is_always_computed() -> None:
    bench = Bench()
    bench.run(COMMON)
    sequence, hit = bench.run(COMMON)
    assert hit == 32
    assert len(bench.blocks(sequence)) == 3


def test_row_14_all_in_the_first_step_in_order() -> None:
    bench = Bench(num_blocks=100)
    for _ in range(10):
        bench.add(20)
    plan = bench.step()
    assert bench.admitted(plan) == list(range(10))
    assert plan.row_samples.all()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (10, 0)


def test_row_15_long_prefill_threshold() -> None:
    bench = Bench(num_blocks=1000, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    three = [bench.add(800, max_tokens=5) for _ in range(3)]
    assert bench.granted(bench.step(), *three) == [400, 400, 224]
    assert bench.granted(bench.step(), *three) == [400, 400, 224]
    assert bench.granted(bench.step(), *three) == [1, 1, 352]


@pytest.mark.parametrize(("chunked", "expected"), [(True, [800, 224, 0, 0]), (False, [800, 0, 0, 0])])
def test_row_16_chunked_prefill(chunked: bool, expected: list[int]) -> None:
    bench = Bench(
        num_blocks=1000,
        max_num_batched_tokens=1024,
        max_num_seqs=3,
        enable_chunked_prefill=chunked,
    )
    four = [bench.add(length, max_tokens=5) for length in (800, 800, 10, 10)]
    assert bench.granted(bench.step(), *four) == expected


@pytest.mark.parametrize(
    ("priorities", "arrivals", "expected"),
    [
        ([2, 0, 1], [0, 1, 2], [1, 2, 0]),
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
        ([0, 0, 0, 0], [4, 1, 3, 2], [1, 3, 2, 0]),
    ],
)
def test_row_18_priorities(priorities: list[int], arrivals: list[int], expected: list[int]) -> None:
    bench = Bench(num_blocks=100, policy="priority")
    # The core knows the order of arrival as the order of ``add``.
    by_arrival = sorted(range(len(arrivals)), key=arrivals.__getitem__)
    for index in by_arrival:
        bench.add(20, priority=priorities[index])
    assert [by_arrival[serial] for serial in bench.admitted(bench.step())] == expected


@pytest.mark.parametrize(
    ("slots", "running", "waiting", "priorities"),
    [(2, [3, 1], [2, 0], [3, 1, 2, 0]), (1, [3], [1, 2, 0], [3, 1, 2, 0])],
)
def test_row_19_few_slots(slots: int, running: list[int], waiting: list[int], priorities: list[int]) -> None:
    bench = Bench(num_blocks=100, policy="priority", max_num_seqs=slots)
    for priority in priorities:
        bench.add(20, priority=priority, max_tokens=5)
    assert bench.admitted(bench.step()) == running
    assert [s.request_id.serial - 1 for s in bench.scheduler.waiting.ordered()] == waiting


def test_row_21_the_low_priority_is_preempted_and_resumes() -> None:
    bench = Bench(num_blocks=4, policy="priority")
    # Otherwise it would be foreseen that the two do not fit.
    bench.scheduler.forecast = Careless()
    low = bench.add(30, max_tokens=20, priority=1)
    bench.step()
    high = bench.add(32, max_tokens=20, priority=0)
    bench.step()
    plan = bench.step()
    assert (low.state, high.state) == (State.WAITING, State.RUNNING)
    assert bench.granted(plan, high) == [1]
    assert len(low.tokens) == 32
    assert low.preemptions == bench.scheduler.stats.preemptions == 1
    bench.scheduler.abort(high)
    plan = bench.plan()
    (new,) = plan.admit
    assert (new.request_id, len(new.tokens), new.output_start) == (low.request_id, 32, 30)
    # One block of 16 had been filled and acknowledged; the rest is computed again.
    assert (new.num_computed, bench.granted(plan, low)) == (16, [16])


def test_row_25_concurrency_of_full_length_sequences() -> None:
    assert (
        Bench(num_blocks=1536, max_model_len=16384, max_num_batched_tokens=16384).scheduler.config.max_concurrency
        == 1.5
    )


def test_row_26_everyone_back_to_waiting_in_order() -> None:
    bench = Bench(num_blocks=100)
    ten = [bench.add(20, max_tokens=9) for _ in range(10)]
    bench.step()
    assert bench.scheduler.num_running == 10
    bench.scheduler.preempt_all()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 10)
    assert bench.scheduler.waiting.ordered() == ten
    bench.scheduler.check_integrity()
    assert bench.admitted(bench.step()) == list(range(10))


def test_row_27_hit_rate_window() -> None:
    window = HitRateWindow(5)
    assert window.rate == 0.0
    rates = []
    for observation in ((1, 20, 9), (4, 80, 16), (1, 10, 2)):
        window.observe(*observation)
        rates.append(window.rate)
    assert rates == pytest.approx([0.45, 0.25, 0.20])


def test_row_30_lookups_are_counted_once_per_admission() -> None:
    bench = Bench()
    stats = bench.scheduler.stats
    first, _ = bench.run(COMMON, max_tokens=9)
    for _ in range(3):
        bench.step()
    assert (stats.prefix_queries, stats.prefix_hits) == (48, 0)
    bench.run([*COMMON, 1])
    assert (stats.prefix_queries, stats.prefix_hits) == (97, 48)
    assert (stats.resumed_queries, stats.resumed_hits) == (0, 0)
    bench.scheduler.preempt_all()
    known = len(first.tokens)
    bench.step()
    assert (stats.prefix_queries, stats.prefix_hits) == (97, 48)
    assert (stats.resumed_queries, stats.resumed_hits) == (known + 50, 96)
    off = Bench(enable_prefix_caching=False)
    off.run(COMMON)
    assert (off.scheduler.stats.prefix_queries, off.scheduler.stats.window.rate) == (0, 0.0)


# --- what Octavo adds -------------------------------------------------------------------------------------------------


def test_nothing_is_findable_before_it_is_acknowledged() -> None:
    bench = Bench(num_blocks=20)
    first = bench.add(COMMON)
    bench.plan()
    second = bench.add([*COMMON, 1])
    later = bench.plan()
    assert later.admit[0].num_computed == 0
    assert set(bench.blocks(first)).isdisjoint(bench.blocks(second))


def test_a_late_acknowledgement_never_names_a_reused_page() -> None:
    bench = Bench(num_blocks=3)
    first = bench.add(COMMON[:47], max_tokens=1)
    plan = bench.plan()
    bench.scheduler.preempt_all()
    bench.scheduler.abort(first)
    other = bench.add(40, max_tokens=2)
    later = bench.plan()
    assert set(bench.blocks(other)) == {0, 1, 2}
    bench.acknowledge(plan)
    assert bench.pool.num_cached == 0
    bench.acknowledge(later)
    assert bench.pool.num_cached == 2


def test_a_preempted_sequence_waits_for_its_plans_and_keeps_their_tokens() -> None:
    """Rule R4."""
    bench = Bench(num_blocks=10)
    sequence = bench.add(10, max_tokens=9)
    plans = [bench.plan(), bench.plan()]
    bench.scheduler.preempt_all()
    assert sequence.state is State.WAITING
    for plan in plans:
        assert bench.scheduler.is_in_flight(sequence)
        assert bench.scheduler.schedule() is None
        bench.acknowledge(plan)
    assert not bench.scheduler.is_in_flight(sequence)
    assert len(sequence.tokens) == 12
    plan = bench.plan()
    assert len(plan.admit[0].tokens) == 12


def test_ended_in_the_middle_of_run_ahead() -> None:
    """The plan that was sent ahead for a sequence that ends wastes one row, and changes nothing."""
    bench = Bench()
    sequence = bench.add(10, max_tokens=9)
    first, ahead = bench.plan(), bench.plan()
    bench.acknowledge(first, EndReason.STOP)
    assert sequence.state is State.ENDED
    assert bench.pool.num_used == 0
    none = np.zeros(1, np.int32)
    bench.scheduler.commit(StepResult(ahead.term, ahead.epoch, ahead.step, none, none[:0], np.zeros(1, np.uint8)))
    bench.scheduler.check_integrity()
    assert bench.scheduler.num_unacknowledged == 0


def test_decodes_come_before_prefills_when_the_budget_is_short() -> None:
    bench = Bench(num_blocks=100, max_num_batched_tokens=20, long_prefill_token_threshold=15)
    long, short, late = (bench.add(length, max_tokens=50) for length in (100, 5, 100))
    assert bench.granted(bench.step(), long, short) == [15, 5]
    assert bench.granted(bench.step(), long, short, late) == [15, 1, 4]
    assert bench.granted(bench.step(), long, short, late) == [15, 1, 4]


def test_a_prompt_is_admitted_only_with_room_for_all_of_it() -> None:
    """Otherwise two prompts that do not fit together would evict each other half-way."""
    bench = Bench(num_blocks=8, long_prefill_token_threshold=16)
    bench.add(80, max_tokens=5)
    bench.add(80, max_tokens=5)
    for _ in range(4):
        plan = bench.step()
        assert bench.admitted(plan) in ([0], [])
        assert plan.row_tokens.tolist() == [16]
    assert bench.scheduler.stats.preemptions == 0


def test_a_row_that_failed_leaves_nothing_to_find() -> None:
    """Its logits were not numbers, so what it wrote into its pages is not worth sharing."""
    bench = Bench()
    sequence = bench.add(COMMON, max_tokens=9)
    plan = bench.plan()
    none = np.zeros(1, np.int32)
    ends = np.full(1, EndReason.ERROR, np.uint8)
    bench.scheduler.commit(StepResult(plan.term, plan.epoch, plan.step, none, none[:0], ends))
    assert sequence.state is State.ENDED
    assert (bench.pool.num_cached, bench.pool.num_used) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1023}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 400}, "long_prefill_token_threshold"),
    ],
)
def test_configurations_that_would_starve_somebody_are_refused(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Bench(**changes)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [
        (1023, 1, True),
        (1024, 1, False),
        (10, 0, False),
        (160, 1, True),
        (160, 2, False),
        (161, 1, False),
        (10, 999, False),
    ],
)
def test_what_never_fits_is_refused(prompt: int, max_tokens: int, fits: bool) -> None:
    bench = Bench(num_blocks=64 if prompt > 1000 else 10)
    if fits:
        bench.add(prompt, max_tokens=max_tokens)
        bench.step()
        return
    with pytest.raises(NeverFitsError):
        bench.add(prompt, max_tokens=max_tokens)
    assert not bench.scheduler.sequences


def test_one_choice_that_never_fits_keeps_the_others_out_too() -> None:
    bench = Bench()
    record = RequestRecord(RequestId("log", 1), 0, np.array([1, 2], np.int32), SamplingParams(max_tokens=3), n=2)
    choices = [Sequence(record, choice, 1, 1024) for choice in range(2)]
    choices[1].resume_with([7, 8, 9])
    with pytest.raises(NeverFitsError):
        bench.scheduler.add(choices)
    assert (bench.scheduler.num_waiting, len(bench.scheduler.waiting)) == (0, 0)

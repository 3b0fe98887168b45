"""Choices of one request: one prefill, then forks that share every block until they write (rule R5)."""

from __future__ import annotations

import pytest
from careless import Careless
from core_bench import Bench
from core_executor_model import expected_outcome
from core_harness import Harness

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.sequence import Sequence, State
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan
from octavo_shared.records import EndReason, RequestRecord, SamplingParams

SIZE = 4


def config_of(**changes: object) -> CoreConfig:
    values: dict[str, object] = {
        "num_blocks": 200,
        "block_size": SIZE,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }
    return CoreConfig(**values | changes)  # type: ignore[arg-type]


def talkative_seed(n: int, least: int = 3) -> int:
    """A seed with which each of n choices says at least so much."""
    for seed in range(1, 10_000):
        outcomes = [
            expected_outcome(RequestRecord(RequestId("x", 1), 0, PROMPT_OF_ONE, SamplingParams(seed=seed), n=n), i, 16)
            for i in range(n)
        ]
        if all(len(tokens) >= least for tokens, _ in outcomes):
            return seed
    raise AssertionError("no such seed")


PROMPT_OF_ONE = Bench().add(1).record.prompt


def fork(harness: Harness) -> StepPlan:
    """Run until a plan forks."""
    for _ in range(20):
        plan = harness.schedule()
        assert plan is not None
        if len(plan.sample_slots) > int((plan.row_samples > 0).sum()):
            return plan
        harness.execute()
        harness.deliver()
        harness.check()
    raise AssertionError("no fork")


def tables(harness: Harness, choices: list[Sequence]) -> list[list[int]]:
    return [harness.scheduler.table.blocks(one).tolist() for one in choices if one.state is State.RUNNING]


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 16, 18])
@pytest.mark.parametrize("caching", [True, False])
def test_one_prefill_and_a_copy_for_all_but_one(n: int, prompt: int, caching: bool) -> None:
    harness = Harness(config_of(enable_prefix_caching=caching))
    choices = harness.add([0] * prompt, n, max_tokens=9, seed=talkative_seed(n))
    plan = fork(harness)
    assert [(new.choice, new.num_computed) for new in plan.admit] == [(i, 0) for i in range(n)]
    assert plan.row_tokens.tolist() == [prompt]
    assert plan.row_samples.tolist() == [n]
    blocks = -(-prompt // SIZE)
    assert harness.scheduler.pool.num_used == blocks
    (table, *others) = tables(harness, choices)
    assert len(table) == blocks
    assert others == [table] * (n - 1), "every block is shared, the last one too"
    harness.step()
    after = tables(harness, choices)
    assert all(one[: prompt // SIZE] == table[: prompt // SIZE] for one in after), "full blocks stay shared"
    tails = [one[prompt // SIZE] for one in after]
    assert len(set(tails)) == n, "each writes into a block of its own"
    if prompt % SIZE:
        assert tails.count(table[-1]) == 1, "the last owner writes in place"
    harness.finish()
    assert harness.executor.forked == n - 1
    assert harness.executor.copied == (n - 1 if prompt % SIZE else 0)
    assert harness.scheduler.stats.prompt_tokens == prompt


@pytest.mark.parametrize("leaving", [1, 2, 3])
def test_who_leaves_before_writing_spares_a_copy(leaving: int) -> None:
    harness = Harness(config_of(run_ahead=0))
    choices = harness.add([0] * 6, 4, max_tokens=9, seed=talkative_seed(4))
    fork(harness)
    harness.execute()
    harness.deliver()
    for one in choices[:leaving]:
        harness.abort(one)
        harness.check()
    harness.finish()
    assert harness.executor.copied == 3 - leaving


def test_memory_compared_with_separate_requests() -> None:
    """Eight choices of a prompt of six blocks and a bit: the bits and what follows are all that is held eightfold."""
    held = []
    for n in (8, 1):
        bench = Bench(num_blocks=300, enable_prefix_caching=False)
        choices = [one for _ in range(8 // n) for one in bench.choices(list(range(100)), n, max_tokens=100)]
        for _ in range(9):
            bench.step()
        assert [bench.planned(one) for one in choices] == [108] * 8
        held.append(bench.pool.num_used)
    assert held == [6 + 8, 8 * 7]


def test_late_choices_find_the_prompt_in_the_cache() -> None:
    harness = Harness(config_of(max_num_seqs=3))
    harness.add([0] * 18, 7, max_tokens=9, seed=talkative_seed(7))
    plan = fork(harness)
    assert [new.choice for new in plan.admit] == [0, 1, 2]
    assert len(harness.scheduler.waiting) == 0
    assert harness.scheduler.num_waiting == 4
    harness.execute()
    harness.deliver()
    # Those wait from here on, and may go once there are slots.
    assert len(harness.scheduler.waiting) == 4
    harness.finish()
    assert harness.executor.forked == 2
    assert harness.scheduler.stats.prompt_tokens == 18 + 4 * 2, "a late choice computes what is no full block"
    assert harness.scheduler.stats.prefix_hits == 4 * 16


def test_late_choices_compute_the_prompt_without_a_cache() -> None:
    harness = Harness(config_of(max_num_seqs=3, enable_prefix_caching=False))
    harness.add([0] * 18, 7, max_tokens=9, seed=talkative_seed(7))
    harness.finish()
    assert harness.executor.forked == 2
    assert harness.scheduler.stats.prompt_tokens == 18 * 5


def test_only_those_are_forked_that_will_find_room() -> None:
    """Past outputs were 40 tokens long: of eight choices three fit beside the shared prompt, the others wait."""
    harness = Harness(config_of(num_blocks=40))
    for _ in range(4):
        harness.scheduler.forecast.observe(40)
    harness.add([0] * 12, 8, max_tokens=40, seed=talkative_seed(8))
    assert [new.choice for new in fork(harness).admit] == [0, 1, 2]
    harness.finish()
    assert harness.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("prompt", [30, 32])
def test_followers_wait_for_the_last_chunk(prompt: int) -> None:
    harness = Harness(config_of(max_num_batched_tokens=12))
    choices = harness.add([0] * prompt, 3, max_tokens=9, seed=talkative_seed(3))
    for start in (0, 12):
        plan = harness.schedule()
        assert plan is not None
        assert plan.row_starts.tolist() == [start]
        assert plan.row_samples.tolist() == [0]
        assert [one.state for one in choices] == [State.RUNNING, State.FOLLOWING, State.FOLLOWING]
        harness.execute()
        harness.deliver()
    plan = harness.schedule()
    assert plan is not None
    assert [(new.choice, new.num_computed) for new in plan.admit] == [(1, 24), (2, 24)]
    assert (plan.row_starts.tolist(), plan.row_samples.tolist()) == ([24], [3])
    harness.finish()
    assert harness.scheduler.stats.prompt_tokens == prompt


@pytest.mark.parametrize("when", ["queued", "prefilling", "in flight"])
def test_an_heir_leads_when_the_leader_goes_before_the_fork(when: str) -> None:
    harness = Harness(config_of(max_num_batched_tokens=12))
    choices = harness.add([0] * 30, 4, max_tokens=9, seed=talkative_seed(4))
    if when != "queued":
        harness.schedule()
        if when == "prefilling":
            harness.execute()
            harness.deliver()
            harness.scheduler.tidy()
    harness.abort(choices[0])
    harness.check()
    assert [one.state for one in choices] == [State.ENDED, State.WAITING, State.FOLLOWING, State.FOLLOWING]
    # One of those that follow goes as well, and the heir of the heir is asked.
    harness.abort(choices[2])
    harness.check()
    harness.finish()
    assert harness.executor.forked == 1
    # What the first had computed and been acknowledged for is found.
    assert harness.scheduler.stats.prompt_tokens == {"queued": 30, "prefilling": 30, "in flight": 42}[when]


def test_the_last_heir_is_alone() -> None:
    harness = Harness(config_of())
    choices = harness.add([0] * 9, 3, max_tokens=9, seed=talkative_seed(3))
    harness.abort(choices[1])
    harness.abort(choices[0])
    harness.check()
    assert choices[2].state is State.WAITING
    harness.finish()
    assert harness.executor.forked == 0
    assert len(harness.executor.log[choices[2].request_id, 2]) >= 3


@pytest.mark.parametrize("executed", [0, 1, 2])
@pytest.mark.parametrize("gone", [0, 2])
def test_anyone_may_go_after_the_fork(executed: int, gone: int) -> None:
    """Leader or child, with the fork planned, run or acknowledged: the others do not notice."""
    harness = Harness(config_of())
    choices = harness.add([0] * 10, 3, max_tokens=20, seed=talkative_seed(3, 8))
    fork(harness)
    harness.schedule()
    for _ in range(executed):
        harness.execute()
    harness.abort(choices[gone])
    harness.check()
    harness.finish()
    assert harness.executor.forked == 2


@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("prompt", [8, 10])
def test_a_forked_pair_is_preempted_and_comes_back(acknowledged: bool, prompt: int) -> None:
    harness = Harness(config_of())
    pair = harness.add([0] * prompt, 2, max_tokens=12, seed=talkative_seed(2, 8))
    fork(harness)
    if acknowledged:
        harness.execute()
        harness.deliver()
    harness.scheduler.preempt_all()
    harness.check()
    assert {one.state for one in pair} == {State.WAITING}
    assert harness.scheduler.pool.num_used == 0
    harness.finish()
    stats = harness.scheduler.stats
    assert stats.preemptions == 2
    # Both find the full blocks; the odd tokens each computes for itself.
    assert stats.resumed_hits == 2 * 8
    assert harness.executor.forked == 1


@pytest.mark.parametrize("who", [0, 1])
def test_one_of_a_pair_is_preempted_before_it_writes(who: int) -> None:
    """The block they share is the other's alone then: no copy."""
    harness = Harness(config_of(run_ahead=0))
    pair = harness.add([0] * 10, 2, max_tokens=12, seed=talkative_seed(2, 8))
    fork(harness)
    harness.execute()
    harness.deliver()
    harness.scheduler._preempt(pair[who])
    harness.check()
    plan = harness.schedule()
    assert plan is not None
    assert len(plan.copies) == 0
    harness.finish()
    assert harness.executor.copied == 0


@pytest.mark.parametrize("careless", [False, True])
def test_forks_under_constant_preemption(careless: bool) -> None:
    """Pool of two sequences' length; five requests of four choices. Everything comes out as it would alone."""
    harness = Harness(config_of(num_blocks=22, max_model_len=40), careless=careless)
    for serial in range(5):
        harness.add([serial % 3] * (7 + serial), 4, max_tokens=28)
    harness.finish()
    assert harness.executor.forked > 0
    assert harness.executor.copied > 0
    assert (harness.scheduler.stats.preemptions > 10) is careless


def test_what_children_compute_can_be_found() -> None:
    bench = Bench(num_blocks=40)
    choices = bench.choices(list(range(40)), 3, max_tokens=60)
    for _ in range(34):
        bench.step()
    bench.step(ending=choices)
    assert {one.state for one in choices} == {State.ENDED}
    # 40 + 34 tokens of each have been computed: four full blocks, two of them the prompt's.
    assert bench.pool.num_cached == 2 + 3 * 2
    for one in choices:
        _, hit = bench.run([*one.tokens.tolist(), 1, 2])
        assert hit == 64


def test_a_reset_while_a_fork_is_in_flight_reaches_the_children() -> None:
    bench = Bench(num_blocks=40)
    choices = bench.choices(list(range(40)), 3, max_tokens=60)
    plan = bench.plan()
    bench.scheduler.reset_prefix_cache()
    bench.acknowledge(plan)
    for _ in range(30):
        bench.step()
    assert bench.pool.num_cached == 0
    bench.scheduler.preempt_all()
    bench.step()
    assert bench.pool.num_cached == 4 + 2 * 2
    assert {one.state for one in choices} == {State.RUNNING}


def test_choices_that_were_resumed_are_not_forked() -> None:
    """Those with outputs of their own start by themselves; of the others one leads."""
    bench = Bench(num_blocks=40)
    record = RequestRecord(RequestId("log", 1), 0, bench.add(40).record.prompt, SamplingParams(max_tokens=9), n=4)
    bench.scheduler.abort(bench.scheduler.sequences[0])
    choices = [Sequence(record, choice, 1, 1024) for choice in range(4)]
    choices[0].resume_with([7, 8])
    choices[2].resume_with([7])
    bench.scheduler.add(choices)
    assert [one.state for one in choices] == [State.WAITING, State.WAITING, State.WAITING, State.FOLLOWING]
    plan = bench.step()
    assert [(new.choice, len(new.tokens)) for new in plan.admit] == [(0, 42), (1, 40), (2, 41), (3, 40)]
    assert plan.row_samples.tolist() == [1, 2, 1]


def test_a_broken_leader_leaves_its_prompt_to_nobody_new() -> None:
    """Its logits were not numbers, those of its children, drawn from the same row, were: they go on, nothing is published."""
    bench = Bench(num_blocks=40)
    leader, child = bench.choices(list(range(40)), 2, max_tokens=20)
    plan = bench.plan()
    sent = bench.scheduler.sent[0]
    assert sent.sample_uids.tolist() == [leader.uid, child.uid]
    bench.answer(plan, counts=[0, 1], ends=[EndReason.ERROR, EndReason.NONE])
    assert (leader.state, child.state) == (State.ENDED, State.RUNNING)
    assert bench.pool.num_cached == 0
    bench.step()
    assert bench.run(list(range(40)))[1] == 0


def test_a_careless_scheduler_forks_whatever_slots_allow() -> None:
    bench = Bench(num_blocks=20, max_num_seqs=6)
    bench.scheduler.forecast = Careless()
    bench.choices(30, 8, max_tokens=100)
    assert len(bench.step().admit) == 6

"""Drives a ``Scheduler`` against the executor model and checks, after every move, what must always hold."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import pytest
from careless import Careless
from core_executor_model import ExecutorModel, expected_outcome

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import NeverFitsError, OutOfStepError
from octavo_scheduler.core.events import Admitted, Chunk, Ended, Preempted
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import NO_SLOT, Sequence, State
from octavo_shared.ids import RequestId
from octavo_shared.plan import StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, RequestRecord, SamplingParams


class Harness:
    """One scheduler, one executor, and the wire between them: plans not yet run, results not yet delivered."""

    def __init__(
        self,
        config: CoreConfig,
        *,
        careless: bool = False,
        late: bool = False,
        timings_of: Callable[[StepPlan], StepTimings] | None = None,
    ) -> None:
        """``careless``: forecast nothing, preempt all the more. ``late``: results arrive once nothing else is left to do.

        ``timings_of``: what the executor reports about a plan.
        """
        self.config = config
        self.late = late
        self.timings_of = timings_of
        self.scheduler = Scheduler(config)
        if careless:
            self.scheduler.forecast = Careless()
        self.records: dict[RequestId, RequestRecord] = {}
        self.executor = ExecutorModel(
            config.num_blocks,
            config.block_size,
            config.max_num_seqs,
            self.records,
            config.num_host_blocks,
            config.prefix_cache_scope,
        )
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.old_results: list[StepResult] = []
        self.everyone: list[Sequence] = []
        self.ended: Counter[int] = Counter()
        self.aborted: set[int] = set()
        # Sequences aborted while they had a slot -> plans run since then.
        self.leaving: dict[int, int] = {}
        # Next position each admitted sequence must prefill, and where its prompt ends.
        self.prefilling: dict[int, tuple[int, int]] = {}
        self.steps = 0
        self.refused = 0

    # --- moves ---

    def add(self, prompt: list[int], n: int = 1, **more: object) -> list[Sequence]:
        """A request arrives; [] when it is refused because it never fits."""
        serial = len(self.records) + 1
        names = {"max_tokens", "prompt_logprobs", "seed"}
        sampling = SamplingParams(**{"seed": serial} | {k: v for k, v in more.items() if k in names})  # type: ignore[arg-type]
        rest = {k: v for k, v in more.items() if k not in names}
        record = RequestRecord(RequestId("log", serial), serial, np.array(prompt, np.int32), sampling, n=n, **rest)  # type: ignore[arg-type]
        sequences = [Sequence(record, choice, 1, self.config.max_model_len) for choice in range(n)]
        total = min(len(prompt) + sampling.max_tokens, self.config.max_model_len)
        fits = len(prompt) < total and -(-(total - 1) // self.config.block_size) <= self.config.num_blocks
        self.records[record.id] = record
        before = len(self.scheduler.sequences)
        if not fits:
            with pytest.raises(NeverFitsError):
                self.scheduler.add(sequences)
            assert len(self.scheduler.sequences) == before
            self.refused += 1
            return []
        self.scheduler.add(sequences)
        self.everyone += sequences
        return sequences

    def schedule(self) -> StepPlan | None:
        """The scheduler plans once, if it wants to."""
        scheduler = self.scheduler
        unacknowledged = scheduler.num_unacknowledged
        waiting = {s.uid: s for s in scheduler.waiting if s.state is State.WAITING}
        plan = scheduler.schedule()
        if plan is None:
            if not unacknowledged:
                assert not scheduler.sequences, "nothing is on its way and nobody is served: a standstill"
            return None
        assert unacknowledged <= self.config.run_ahead
        self._check_plan(plan)
        self._check_admission(plan, waiting)
        self.plans.append(plan)
        self.steps += 1
        return plan

    def execute(self) -> None:
        """The executor runs the oldest plan."""
        plan = self.plans.popleft()
        self._run(plan)
        held = {(slot.new.request_id, slot.new.choice) for slot in self.executor.slots.values()}
        for sequence in [s for s in self.everyone if s.uid in self.leaving]:
            if (sequence.request_id, sequence.choice) not in held:
                del self.leaving[sequence.uid]
                continue
            self.leaving[sequence.uid] += 1
            assert self.leaving[sequence.uid] <= self.config.run_ahead + 1, "an aborted sequence stays on the executor"

    def deliver(self) -> None:
        """The oldest result arrives."""
        result = self.results.popleft()
        self.executor.acknowledged(result.step)
        self.scheduler.commit(result)
        self.old_results.append(result)

    def deliver_wrongly(self, rng: random.Random) -> None:
        """A result arrives twice, too early, or broken: it is refused and changes nothing."""
        wrong: list[StepResult] = self.old_results[-3:] + list(self.results)[1:]
        if self.results:
            good = self.results[0]
            wrong += [
                _replaced(good, term=good.term + 1),
                _replaced(good, epoch=good.epoch + 1),
                _replaced(good, sample_counts=np.append(good.sample_counts, np.int32(0)), ends=np.append(good.ends, 0)),
                _replaced(good, tokens=np.append(good.tokens, np.int32(1))),
                _replaced(good, ends=np.append(good.ends, np.uint8(0))),
                _replaced(good, failed=True),
            ]
            if len(good.ends):
                wrong += [
                    _replaced(good, ends=np.full(len(good.ends), 77, np.uint8)),
                    _replaced(
                        good,
                        sample_counts=np.full(len(good.ends), 2, np.int32),
                        tokens=np.zeros(2 * len(good.ends), np.int32),
                    ),
                ]
            sent = self.scheduler._sent[0]
            alive = {sequence.uid for sequence in self.scheduler.sequences}
            if not alive.isdisjoint(sent.uids[sent.sampled].tolist()):
                none = np.zeros(len(good.ends), np.int32)
                wrong.append(_replaced(good, sample_counts=none, tokens=none[:0], ends=none.astype(np.uint8)))
        if wrong:
            before = self.fingerprint()
            with pytest.raises(OutOfStepError):
                self.scheduler.commit(rng.choice(wrong))
            assert self.fingerprint() == before

    def abort(self, sequence: Sequence) -> None:
        """Someone cancels a sequence: its blocks are free at once."""
        alive = sequence.state is not State.ENDED
        had_slot = sequence.slot != NO_SLOT
        own = self._only_own_blocks(sequence) if had_slot else 0
        free = self.scheduler.pool.num_free
        assert self.scheduler.abort(sequence) is alive
        assert self.scheduler.pool.num_free == free + own
        if alive:
            self.aborted.add(sequence.uid)
            self.ended[sequence.uid] += 1
            if had_slot:
                self.leaving[sequence.uid] = 0

    def reset_cache(self) -> None:
        """The prefix cache is emptied; nothing known so far may be found afterwards."""
        scheduler = self.scheduler
        scheduler.tidy()
        before = scheduler.pool.num_cached + scheduler.host.pool.num_cached
        assert scheduler.reset_prefix_cache() == before
        assert scheduler.pool.num_cached == scheduler.host.pool.num_cached == 0
        if not scheduler.pool.num_used:
            # What was computed until now is worthless from here on: a later hit on it reads these.
            for plan in self.plans:
                self._run(plan)
            self.plans.clear()
            self.executor.page_keys[:] = -1
            self.executor.host_keys[:] = -1

    def _run(self, plan: StepPlan) -> None:
        result = self.executor.execute(plan)
        self.results.append(_replaced(result, timings=self.timings_of(plan)) if self.timings_of else result)

    def step(self) -> None:
        """One full turn of a loop that keeps the pipeline as full as allowed; with ``late`` results, all that may run has."""
        while self.schedule() is not None:
            pass
        if self.plans:
            self.execute()
        while self.late and self.plans:
            self.execute()
        if self.results:
            self.deliver()

    # --- what must always hold ---

    def check(self) -> None:
        """Everything that must hold between two moves."""
        self._note_events()
        scheduler, table, pool = self.scheduler, self.scheduler.table, self.scheduler.pool
        scheduler.check_integrity()
        restoring, on_host = scheduler.host.holds([plan.moves for plan in scheduler.sent if plan.moves is not None])
        self._check_host(on_host)
        held: Counter[int] = Counter(restoring)
        for sequence in scheduler.sequences:
            if sequence.slot != NO_SLOT:
                row = table.row(sequence)
                assert table.uid[row] == sequence.uid
                blocks = table.blocks(sequence).tolist()
                assert len(set(blocks)) == len(blocks)
                held.update(blocks)
                assert table.planned[row] <= table.expected[row] <= sequence.max_total_tokens
                assert table.known[row] <= table.expected[row]
                assert table.known[row] + scheduler.num_unacknowledged >= table.expected[row]
        free = pool.free_blocks()
        assert len(set(free)) == len(free)
        assert set(free).isdisjoint(held)
        assert set(free) | set(held) == set(range(pool.num_blocks)), "a block is nowhere"
        assert pool.num_used == len(held)
        assert len(table) <= self.config.max_num_seqs
        if not self.config.enable_prefix_caching:
            assert pool.num_cached == 0
        assert max(self.ended.values(), default=1) == 1, "a sequence ended twice"
        assert {s.uid for s in self.everyone} == {s.uid for s in scheduler.sequences} | set(self.ended)

    def _check_host(self, held: list[int]) -> None:
        """Every host page is either free, in the order of reuse, or part of a move on its way."""
        pool = self.scheduler.host.pool
        free = pool.free_blocks()
        assert len(set(free)) == len(free)
        assert set(free).isdisjoint(held)
        assert set(free) | set(held) == set(range(pool.num_blocks)), "a host page is nowhere"
        assert pool.refcount.tolist() == [held.count(block) for block in range(pool.num_blocks)]

    def finish(self) -> None:
        """Nothing more arrives: everything ends within a bounded number of steps, as foretold, and all blocks return."""
        live = self.scheduler.sequences
        # At least the first in line moves by one token in every step, or waits for plans on their way.
        bound = 4 * sum(s.max_total_tokens for s in live) + 8 * len(live) + 8
        while self.scheduler.sequences or self.plans or self.results:
            self.step()
            self.check()
            bound -= 1
            assert bound > 0, "somebody starves"
        assert self.scheduler.pool.num_free == self.config.num_blocks
        assert self.scheduler.host.pool.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_unacknowledged == 0
        assert len(self.scheduler.waiting) == 0
        for sequence in self.everyone:
            assert sequence.state is State.ENDED
            assert self.ended[sequence.uid] == 1
            name = (sequence.request_id, sequence.choice)
            tokens, end = expected_outcome(sequence.record, sequence.choice, sequence.max_total_tokens)
            logged = self.executor.log.get(name, [])
            assert logged == tokens[: len(logged)]
            if sequence.uid not in self.aborted:
                assert (logged, self.executor.ends[name]) == (tokens, end)

    def fingerprint(self) -> object:
        """The whole state of the scheduler, comparable."""
        s = self.scheduler
        t = s.table
        live = [
            (q.uid, q.state, q.slot, q.tokens.tolist(), q.last_step, len(q.chain), q.preemptions) for q in s.sequences
        ]
        columns = [c.tolist() for c in (t.uid, t.planned, t.expected, t.known, t.capacity, t.last_step)]
        pool = (s.pool.free_blocks(), s.pool.num_cached, s.pool.generation.tolist())
        return copy.deepcopy((live, columns, pool, s.num_unacknowledged, [q.uid for q in s.waiting.ordered()]))

    # --- parts ---

    def _only_own_blocks(self, sequence: Sequence) -> int:
        table = self.scheduler.table
        held = table.references(self.config.num_blocks)
        blocks = table.blocks(sequence)
        return int((held[blocks] == 1).sum())

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        assert int(plan.row_tokens.sum()) <= config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            assert plan.row_tokens.max(initial=0) <= config.long_prefill_token_threshold
        if not config.enable_chunked_prefill:
            assert plan.row_samples.all(), "without chunked prefill every row samples"
        pool = self.scheduler.pool
        for moves in (plan.copies, plan.restores):
            assert (pool.generation[moves.destination] == moves.generations).all(), (
                "a move names another life of its page"
            )
            assert (pool.refcount[moves.destination] > 0).all(), "a move fills a page that nobody holds"
        # A page that is saved is as it was, or has just been handed out again.
        lives = pool.generation[plan.copy_out.source] - plan.copy_out.generations
        assert (lives <= 1).all()
        assert (self.scheduler.host.pool.refcount[plan.copy_out.destination] > 0).all()
        assert (self.scheduler.host.pool.refcount[plan.restores.source] > 0).all()

    def _check_admission(self, plan: StepPlan, waiting: dict[int, Sequence]) -> None:
        """Admitted in the policy's order, and nobody who may go is passed over."""

        def key(sequence: Sequence) -> tuple[int, int]:
            return (sequence.record.priority if self.config.policy == "priority" else 0, sequence.uid)

        admitted = [int(self.scheduler.table.uid_of_slot[new.slot]) for new in plan.admit]
        # Forks have not waited in the queue.
        admitted = [uid for uid in admitted if uid in waiting]
        if self.config.policy == "fair":
            return
        keys = [key(waiting[uid]) for uid in admitted]
        assert keys == sorted(keys)
        left = [key(s) for uid, s in waiting.items() if uid not in admitted and s.state is State.WAITING]
        if keys and left:
            assert keys[-1] < min(left)

    def _note_events(self) -> None:
        for event in self.scheduler.drain_events():
            uid = event.sequence.uid
            if isinstance(event, Admitted):
                assert uid not in self.prefilling
                self.prefilling[uid] = (event.cached_tokens, event.num_tokens)
            elif isinstance(event, Chunk):
                at, end = self.prefilling[uid]
                assert event.start == at
                assert event.last == (event.start + event.count == end)
                self.prefilling[uid] = (event.start + event.count, end)
                if event.last:
                    del self.prefilling[uid]
            elif isinstance(event, Preempted):
                self.prefilling.pop(uid, None)
            else:
                assert isinstance(event, Ended)
                name = (event.sequence.request_id, event.sequence.choice)
                assert event.reason == self.executor.ends[name] != EndReason.NONE
                self.ended[uid] += 1
        for uid in self.aborted:
            self.prefilling.pop(uid, None)


def _replaced(result: StepResult, **changes: object) -> StepResult:
    fields = {name: getattr(result, name) for name in StepResult.__dataclass_fields__}
    return StepResult(**fields | changes)  # type: ignore[arg-type]

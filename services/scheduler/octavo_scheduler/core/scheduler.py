"""The step: who computes what next, on which blocks.

There are no phases. Each sequence has ``planned`` tokens chasing ``expected`` tokens; every step grants tokens from one
budget, running sequences first, then waiting ones. A prompt cut by the budget *is* chunked prefill; a sequence that is one
token behind *is* decoding.

One request's walk: ``add`` puts its sequences into the waiting queue. ``schedule`` admits the first of them: the prefix
cache is asked, blocks are taken, a slot is taken, and the plan carries it to the executor. ``commit`` takes the result in:
the sampled token becomes known, blocks filled by that step become findable. Every further ``schedule`` grants one more
token, until a ``commit`` brings the executor's word that it ended: slot and blocks return.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError, NeverFitsError, OutOfStepError
from octavo_scheduler.core.events import Admitted, Chunk, Ended, Event, Preempted
from octavo_scheduler.core.in_flight import BlockFills, SentPlan, find_fills
from octavo_scheduler.core.prefix_cache import PrefixCache
from octavo_scheduler.core.sequence import NO_SLOT, Sequence, State
from octavo_scheduler.core.slots import SlotTable
from octavo_scheduler.core.stats import CoreStats
from octavo_scheduler.core.waiting import POLICIES, WaitingQueue
from octavo_shared.plan import NewSequence, StepPlan, StepResult
from octavo_shared.records import EndReason, Int32Array


class Scheduler:
    """Everything that runs on one executor: its slots, its blocks, its queue. ``hash_key`` keys the block hashes."""

    def __init__(self, config: CoreConfig, *, term: int = 1, epoch: int = 1, hash_key: bytes = b"") -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")
        if not config.enable_chunked_prefill and config.long_prefill_token_threshold:
            raise ValueError("long_prefill_token_threshold cuts prompts into chunks, so it needs chunked prefill")
        self.config = config
        self.term = term
        self.epoch = epoch
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.table = SlotTable(config)
        self.waiting = WaitingQueue(POLICIES[config.policy])
        self.stats = CoreStats()
        self.prefix_cache = PrefixCache(config, self.pool, hash_key)
        self._key = POLICIES[config.policy]
        self._sequences: dict[int, Sequence] = {}
        self._leaders: dict[int, Sequence] = {}
        self._sent: deque[SentPlan] = deque()
        self._released: list[int] = []
        self._events: list[Event] = []
        self._step = 0
        self._next_uid = 0

    # --- requests come and go ---

    def add(self, sequences: list[Sequence]) -> None:
        """Let the choices of one request wait.

        Raises:
            NeverFitsError: one of them has no room for another output, or the whole pool is too small for it; none is
                taken.
        """
        config = self.config
        first = sequences[0]
        for sequence in sequences:
            if len(sequence.tokens) >= sequence.max_total_tokens:
                raise NeverFitsError(f"{len(sequence.tokens)} tokens leave no room within {sequence.max_total_tokens}")
            if -(-(sequence.max_total_tokens - 1) // config.block_size) > config.num_blocks:
                raise NeverFitsError(f"{sequence.max_total_tokens} tokens do not fit into the whole KV cache")
        root = self.prefix_cache.root_of(first.record)
        shares = self.prefix_cache.enabled and first.reads_cache and first.output_start > config.block_size
        for sequence in sequences:
            sequence.uid = sequence.arrival = self._next_uid
            self._next_uid += 1
            sequence.root = root
            self._sequences[sequence.uid] = sequence
            # Until forks share a prefill, further choices wait for the first one's prompt and find it in the cache.
            if sequence is not first and shares:
                sequence.state = State.FOLLOWING
                first.followers.append(sequence)
            else:
                sequence.state = State.WAITING
                self.waiting.push(sequence)
        if first.followers:
            self._leaders[first.uid] = first

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence wherever it is; its blocks are free at once. False when it has ended already."""
        if sequence.state is State.ENDED:
            return False
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is not State.FOLLOWING:
            self.waiting.remove(sequence)
        self._end(sequence)
        return True

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self.table)

    @property
    def num_waiting(self) -> int:
        """Sequences that have none."""
        return len(self._sequences) - len(self.table)

    @property
    def num_unacknowledged(self) -> int:
        """Plans sent whose results are not back."""
        return len(self._sent)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Some unacknowledged plan names it."""
        return bool(sequence.in_flight if sequence.slot == NO_SLOT else self.table.in_flight[sequence.slot])

    def known_tokens(self, sequence: Sequence) -> int:
        """Tokens it has, prompt included, as far as results are back."""
        return len(sequence.tokens) if sequence.slot == NO_SLOT else int(self.table.known[sequence.slot])

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that has not ended."""
        return list(self._sequences.values())

    def drain_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # --- the step ---

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute or enough is unacknowledged already."""
        if len(self._sent) > self.config.run_ahead:
            return None
        slots, counts, grow_slots, grow_blocks, preempted = self._grant_running()
        admitted: list[NewSequence] = []
        if not preempted:
            admitted, new_counts = self._admit_waiting(self.config.max_num_batched_tokens - int(counts.sum()))
            if admitted:
                slots = np.append(slots, np.array([new.slot for new in admitted], np.int32))
                counts = np.append(counts, np.array(new_counts, np.int32))
        if not len(slots):
            return None
        return self._send(slots, counts, grow_slots, grow_blocks, tuple(admitted))

    def commit(self, result: StepResult) -> None:
        """Take the result of the oldest unacknowledged plan in.

        Raises:
            OutOfStepError: it answers another plan, reports a failed step (the epoch is over then), or its columns do
                not answer every sample once; nothing was taken in.
        """
        self._check_result(result)
        plan = self._sent.popleft()
        present = self.table.uid[plan.slots] == plan.uids
        self.table.in_flight[plan.slots[present]] -= 1
        self._commit_tokens(plan, result, present)
        if plan.fills is not None and self.prefix_cache.enabled:
            self._publish_fills(plan, plan.fills, result)
        for uid in plan.uids[~present].tolist():
            self._settle(uid)
        for sample in result.ends.nonzero()[0].tolist():
            self._end_by_executor(int(plan.uids[plan.sampled[sample]]), EndReason(int(result.ends[sample])), plan.step)
        if self._leaders:
            self._release_followers(plan)

    def _check_result(self, result: StepResult) -> None:
        if not self._sent or (result.term, result.epoch, result.step) != (self.term, self.epoch, self._sent[0].step):
            raise OutOfStepError(f"result of step {result.step} is not the one awaited")
        if result.failed:
            raise OutOfStepError(f"step {result.step} failed: {result.message}")
        plan, counts, ends = self._sent[0], result.sample_counts, result.ends
        if not len(counts) == len(ends) == len(plan.sampled) or int(counts.sum()) != len(result.tokens):
            raise OutOfStepError(f"result of step {result.step} does not answer every sample")
        # Seen as unsigned, a negative count is a large one.
        if len(counts) and (counts.view(np.uint32).max() > 1 or ends.max() > _LAST_END):
            raise OutOfStepError(f"result of step {result.step} has impossible counts or ends")
        silent = plan.sampled[(counts + ends == 0).nonzero()[0]]
        if any(uid in self._sequences for uid in plan.uids[silent].tolist()):
            raise OutOfStepError(f"result of step {result.step} skips a sequence that has not ended")

    # --- grants ---

    def _grant_running(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, bool]:
        """Tokens for running sequences, with the blocks they need: (slots, counts, grow slots, grow blocks, preempted)."""
        table, pool, block_size = self.table, self.pool, self.config.block_size
        preempted = False
        while True:
            order = table.order
            slots = order[table.expected[order] < table.max_total[order]]
            slots, counts = self._share_budget(slots, table.expected[slots] - table.planned[slots])
            need = np.maximum(-(-(table.planned[slots] + counts) // block_size) - table.num_blocks[slots], 0)
            total = int(need.sum())
            if total <= pool.num_free:
                break
            self._preempt(max(table.sequences(), key=self._key))
            preempted = True
        if not total:
            return slots, counts, _NONE, _NONE, preempted
        blocks = pool.allocate(total)
        grow_slots = np.repeat(slots, need)
        offset = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(need) - need, need)
        table.block_table[grow_slots, table.num_blocks[grow_slots] + offset] = blocks
        table.num_blocks[slots] += need.astype(np.int32)
        return slots, counts, grow_slots, blocks, preempted

    def _share_budget(self, slots: Int32Array, behind: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Grants for slots that are ``behind`` tokens behind, int32[r] each: those one behind first, then in order.

        Returns the slots that get any, with their grants.
        """
        budget = self.config.max_num_batched_tokens
        limit = self.config.long_prefill_token_threshold or budget
        want = np.minimum(behind, limit)
        if int(want.sum()) <= budget:
            return slots, want
        order = np.argsort(behind > 1, kind="stable")
        before = np.cumsum(want[order]) - want[order]
        grants = np.empty_like(want)
        grants[order] = np.clip(budget - before, 0, want[order])
        return slots[grants > 0], grants[grants > 0]

    def _preempt(self, victim: Sequence) -> None:
        """Just letting go: the references drop, the tokens stay, and it waits at its old place."""
        self._leave(victim)
        victim.state = State.DRAINING if victim.in_flight else State.WAITING
        victim.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.push(victim)
        self._events.append(Preempted(victim, self._step))

    def preempt_all(self) -> None:
        """Let every running sequence go, each to its old place in the queue."""
        for sequence in self.table.sequences():
            self._preempt(sequence)

    # --- admission ---

    def _admit_waiting(self, budget: int) -> tuple[list[NewSequence], list[int]]:
        """Give slots to waiting sequences while budget, slots and blocks last: (new sequences, their grants)."""
        admitted: list[NewSequence] = []
        grants: list[int] = []
        if self.table.full or not self.waiting:
            return admitted, grants
        reserved = self.table.blocks_still_needed(self.config.block_size)
        while budget > 0 and not self.table.full and (sequence := self.waiting.peek()) is not None:
            if sequence.in_flight:
                break
            cached = self.prefix_cache.find(sequence)
            start = len(cached) * self.config.block_size
            missing = len(sequence.tokens) - start
            grant = min(missing, budget, self.config.long_prefill_token_threshold or budget)
            if grant < missing and not self.config.enable_chunked_prefill:
                break
            # Room for all it has, not just for this chunk: otherwise prompts would evict each other half-way.
            need = -(-len(sequence.tokens) // self.config.block_size) - len(cached)
            if need + reserved > self.pool.num_free - self.pool.num_free_among(cached.tolist()):
                break
            self.waiting.pop()
            now = -(-(start + grant) // self.config.block_size) - len(cached)
            admitted.append(self._admit(sequence, cached, now))
            grants.append(grant)
            reserved += need - now
            budget -= grant
        return admitted, grants

    def _admit(self, sequence: Sequence, cached: Int32Array, num_new_blocks: int) -> NewSequence:
        self.pool.acquire(cached.tolist())
        blocks = np.concatenate([cached, self.pool.allocate(num_new_blocks)])
        start = len(cached) * self.config.block_size
        num_tokens = len(sequence.tokens)
        slot = self.table.take(sequence, blocks, start)
        sequence.state = State.RUNNING
        self.prefix_cache.adopt(sequence, cached)
        step = self._step + 1
        if self.prefix_cache.enabled:
            self.stats.count_lookup(num_tokens, start, resumed=sequence.preemptions > 0)
        self._events.append(Admitted(sequence, step, num_tokens, start))
        return sequence.placed(slot, blocks, start)

    # --- sending ---

    def _send(
        self,
        slots: Int32Array,
        counts: Int32Array,
        grow_slots: Int32Array,
        grow_blocks: Int32Array,
        admitted: tuple[NewSequence, ...],
    ) -> StepPlan:
        """Make the plan final: lengths move on, and what its result will mean is remembered."""
        table = self.table
        self._step += 1
        starts = table.planned[slots]
        ends = starts + counts
        samples = (ends == table.expected[slots]).astype(np.int32)
        sampled = samples.nonzero()[0]
        sample_slots = slots[sampled]
        self._note_chunks(slots, starts, counts, samples)
        table.planned[slots] = ends
        table.expected[sample_slots] += 1
        table.in_flight[slots] += 1
        fills = find_fills(starts, ends, slots, table.block_table, self.pool.generation, self.config.block_size)
        self._sent.append(SentPlan(self._step, slots, table.uid[slots], sampled, sample_slots, fills))
        released, self._released = self._released, []
        self.stats.steps += 1
        self.stats.scheduled_tokens += int(counts.sum())
        return StepPlan(
            term=self.term,
            epoch=self.epoch,
            step=self._step,
            release=np.array(released, np.int32),
            admit=admitted,
            grow_slots=grow_slots,
            grow_blocks=grow_blocks,
            row_slots=slots,
            row_starts=starts,
            row_tokens=counts,
            row_samples=samples,
            sample_slots=sample_slots,
        )

    def _note_chunks(self, slots: Int32Array, starts: Int32Array, counts: Int32Array, samples: Int32Array) -> None:
        """Events for rows that prefill."""
        table = self.table
        for row in (starts < table.prefill_end[slots]).nonzero()[0].tolist():
            sequence = self._sequences[int(table.uid[slots[row]])]
            self.stats.prompt_tokens += int(counts[row])
            self._events.append(
                Chunk(sequence, self._step, int(starts[row]), int(counts[row]), last=bool(samples[row]))
            )

    # --- commit ---

    def _commit_tokens(self, plan: SentPlan, result: StepResult, present: npt.NDArray[np.bool_]) -> None:
        """Sampled tokens become known: at once for slots still held, one by one for sequences let go meanwhile."""
        counts = result.sample_counts
        self.stats.generated_tokens += len(result.tokens)
        here = present[plan.sampled] & (counts > 0)
        if here.all():
            self.table.append(plan.sample_slots, result.tokens)
            return
        offsets = np.cumsum(counts) - counts
        self.table.append(plan.sample_slots[here], result.tokens[offsets[here]])
        for sample in (~here & (counts > 0)).nonzero()[0].tolist():
            sequence = self._sequences.get(int(plan.uids[plan.sampled[sample]]))
            tokens = result.tokens[offsets[sample] : offsets[sample] + counts[sample]]
            if sequence is not None and sequence.slot == NO_SLOT:
                sequence.tokens = np.concatenate([sequence.tokens, tokens])

    def _publish_fills(self, plan: SentPlan, fills: BlockFills, result: StepResult) -> None:
        """Blocks filled by this step become findable, under the identity they had when it was planned."""
        # A row that could not be sampled (its logits were not numbers) leaves pages nobody should read.
        sound = np.ones(len(plan.slots), np.bool_)
        sound[plan.sampled[result.sample_counts == 0]] = False
        size = self.config.block_size * 4
        # Valid for rows that still have their slot; the few let go meanwhile carry their tokens themselves.
        contents = self.table.contents(plan.slots[fills.row], fills.index, self.config.block_size)
        columns = zip(
            range(0, len(contents), size),
            plan.uids[fills.row].tolist(),
            sound[fills.row].tolist(),
            fills.index.tolist(),
            fills.block.tolist(),
            fills.generation.tolist(),
            strict=True,
        )
        for start, uid, is_sound, index, block, generation in columns:
            sequence = self._sequences.get(uid)
            if sequence is None or not is_sound:
                continue
            if sequence.slot != NO_SLOT:
                content = contents[start : start + size]
            else:
                content = sequence.tokens.data.cast("B")[index * size : (index + 1) * size].tobytes()
            self.prefix_cache.publish(sequence, index, block, generation, content)

    def _settle(self, uid: int) -> None:
        """A plan that named a sequence let go meanwhile is acknowledged; after the last one it may resume (rule R4)."""
        sequence = self._sequences.get(uid)
        if sequence is None:
            return
        sequence.in_flight -= 1
        if not sequence.in_flight and sequence.state is State.DRAINING:
            sequence.state = State.WAITING

    def _end_by_executor(self, uid: int, reason: EndReason, step: int) -> None:
        sequence = self._sequences.get(uid)
        if sequence is None:
            return
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        self._end(sequence)
        self._events.append(Ended(sequence, step, reason))

    def _release_followers(self, plan: SentPlan) -> None:
        """Choices that waited for the first one's prompt may go now that it is in the cache."""
        for uid in plan.uids[plan.sampled].tolist():
            leader = self._leaders.pop(uid, None)
            if leader is not None:
                self._let_follow(leader)

    def _let_follow(self, leader: Sequence) -> None:
        for follower in leader.followers:
            if follower.state is State.FOLLOWING:
                follower.state = State.WAITING
                self.waiting.push(follower)
        leader.followers.clear()

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and blocks back; the executor hears of it with the next plan."""
        self._released.append(sequence.slot)
        self.pool.release(self.table.leave(sequence).tolist())

    def _end(self, sequence: Sequence) -> None:
        sequence.state = State.ENDED
        del self._sequences[sequence.uid]
        if self._leaders.pop(sequence.uid, None) is not None:
            self._let_follow(sequence)

    # --- integrity ---

    def check_integrity(self) -> None:
        """Verify every invariant that ties the parts together.

        Raises:
            IntegrityError: the first breach found.
        """
        table = self.table
        table.check_integrity(self.config.block_size)
        self.pool.check_integrity(table.references(self.config.num_blocks))
        for sequence in self._sequences.values():
            running = sequence.state is State.RUNNING
            if running != (sequence.slot != NO_SLOT) or (running and table.uid[sequence.slot] != sequence.uid):
                raise IntegrityError(f"sequence {sequence.uid} and its slot disagree")
        waiting = {sequence.uid for sequence in self.waiting}
        states = {State.WAITING, State.DRAINING}
        if waiting != {uid for uid, sequence in self._sequences.items() if sequence.state in states}:
            raise IntegrityError("the waiting queue and the states disagree")
        if not self._sequences and not self._sent and self.pool.num_used:
            raise IntegrityError("blocks are referenced although nothing runs")


_NONE: Int32Array = np.empty(0, np.int32)
_LAST_END = max(EndReason)

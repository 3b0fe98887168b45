"""The step: who computes what next, on which blocks.

There are no phases. Each sequence has ``planned`` tokens chasing ``expected`` tokens; every step grants tokens from one
budget, running sequences first, then waiting ones. A prompt cut by the budget *is* chunked prefill; a sequence that is one
token behind *is* decoding.

One request's walk: ``add`` puts its first choice into the waiting queue; the others follow it. ``schedule`` admits it: the
prefix cache is asked, blocks are taken, a slot is taken, and the plan carries it to the executor. With the last piece of
the prompt the followers are forked from it. ``commit`` takes the result in: sampled tokens become known; ``tidy``, when
there is time, makes the blocks filled findable. Every further ``schedule`` grants one more token, until a ``commit`` brings
the executor's word that a sequence ended: slot and blocks return.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.admission import Admission
from octavo_scheduler.core.beam_groups import BeamGroup, is_idle, split_candidates
from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.commit import check_result, commit_tokens
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.draft import Draft, Samples
from octavo_scheduler.core.errors import IntegrityError, NeverFitsError
from octavo_scheduler.core.events import Admitted, BeamFailed, BeamStep, Chunk, Ended, Event, Preempted
from octavo_scheduler.core.forecast import LengthForecast
from octavo_scheduler.core.forks import CopyOnWrite, Families
from octavo_scheduler.core.host_tier import HostTier, MoveCosts
from octavo_scheduler.core.in_flight import Fork, SentPlan
from octavo_scheduler.core.prefix_cache import Hit, PrefixCache
from octavo_scheduler.core.publisher import Publisher
from octavo_scheduler.core.sequence import NO_SLOT, Sequence, State
from octavo_scheduler.core.slots import Rows, SlotTable
from octavo_scheduler.core.stats import CoreStats
from octavo_scheduler.core.view import KvView, Tier, view_kv
from octavo_scheduler.core.waiting import OUTPUT_COST, FairQueue, make_queue
from octavo_shared.plan import NewSequence, StepPlan, StepResult
from octavo_shared.records import EndReason, Int32Array


class Scheduler:
    """Everything that runs on one executor: its slots, its blocks, its queue. ``hash_key`` keys the block hashes."""

    def __init__(self, config: CoreConfig, *, term: int = 1, epoch: int = 1, hash_key: bytes = b"") -> None:
        config.check()
        self.config = config
        self.term = term
        self.epoch = epoch
        self.step = 0
        # The last step whose result is in.
        self.acknowledged = 0
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.host = HostTier(self.pool, config.num_host_blocks if config.enable_prefix_caching else 0)
        self.costs = MoveCosts()
        self.table = SlotTable(config)
        self.waiting = make_queue(config)
        self.forecast = LengthForecast()
        self.stats = CoreStats()
        self.prefix_cache = PrefixCache(config, self.pool, self.host.pool, hash_key)
        self._families = Families()
        self._copy_on_write = CopyOnWrite(self.table, self.pool, config.block_size)
        self._publisher = Publisher(self.prefix_cache, self.table, config.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._restoring: dict[int, int] = {}
        self._groups: list[BeamGroup] = []
        # Beams that have taken slots and of which no plan has told yet, by uid.
        self._seated: dict[int, NewSequence] = {}
        self._sent: deque[SentPlan] = deque()
        self._released: list[int] = []
        self._events: list[Event] = []
        self._next_uid = 0

    # --- requests come and go ---

    def add(self, sequences: list[Sequence]) -> None:
        """Let the choices of one request wait.

        Raises:
            NeverFitsError: one of them has no room for another output, or the whole pool is too small for it; none is
                taken.
        """
        config = self.config
        for sequence in sequences:
            if len(sequence.tokens) >= sequence.max_total_tokens:
                raise NeverFitsError(f"{len(sequence.tokens)} tokens leave no room within {sequence.max_total_tokens}")
            if -(-(sequence.max_total_tokens - 1) // config.block_size) > config.num_blocks:
                raise NeverFitsError(f"{sequence.max_total_tokens} tokens do not fit into the whole KV cache")
        alike: list[Sequence] = []
        for sequence in sequences:
            self._enlist(sequence)
            # Those resumed with outputs of their own have no more than the prompt in common: the prefix cache knows it.
            if len(sequence.tokens) == sequence.output_start:
                alike.append(sequence)
            if sequence not in alike[1:]:
                sequence.state = State.WAITING
                self.waiting.push(sequence)
        if alike:
            self._families.form(alike[0], alike[1:])

    def _enlist(self, sequence: Sequence) -> None:
        sequence.uid = sequence.arrival = self._next_uid
        self._next_uid += 1
        sequence.root = self.prefix_cache.root_of(sequence.record)
        self._sequences[sequence.uid] = sequence

    def add_beams(self, group: BeamGroup) -> None:
        """Let the hypotheses of a beam search wait.

        Raises:
            NeverFitsError: they have no room for another output, or there are too few slots or blocks for all of them.
        """
        most = group.lead.max_total_tokens
        if len(group.lead.tokens) >= most:
            raise NeverFitsError(f"{len(group.lead.tokens)} tokens leave no room within {most}")
        width = group.record.sampling.beam_width
        if width > self.config.max_num_seqs:
            raise NeverFitsError(
                f"{width} beams are more than the {self.config.max_num_seqs} sequences that run at once"
            )
        if group.blocks_at_most(self.config.block_size) > self.config.num_blocks:
            raise NeverFitsError(f"{width} beams of {most} tokens do not fit into the whole KV cache")
        self._groups.append(group)
        for member in group.members:
            self._enlist(member)
            self.waiting.push(member)

    def abort_beams(self, group: BeamGroup) -> bool:
        """End a search wherever it is; its blocks are free at once. False when it is over already."""
        if group not in self._groups:
            return False
        self._groups.remove(group)
        for member in group.members:
            self._withdraw(member)
            self._end(member)
        return True

    def beams_logged(self, group: BeamGroup) -> None:
        """The decision of a search is in the log: it goes on, or is over."""
        if group not in self._groups or group.decided is None:
            return
        if group.search.is_over:
            self.abort_beams(group)
            return
        self.tidy()
        parents = group.members
        blocks = {one.uid: self.table.blocks(one).copy() for one in parents if one.state is State.RUNNING}
        pairs = group.next_members()
        for parent, child in pairs:
            self._enlist(child)
            child.arrival, child.preemptions = parent.arrival, parent.preemptions
            self.prefix_cache.inherit(child, parent)
            self.pool.acquire(blocks.get(parent.uid, _NONE).tolist())
        for parent in parents:
            self._withdraw(parent)
            self._end(parent)
        for parent, child in pairs:
            self._succeed(child, blocks.get(parent.uid, _NONE))

    def _succeed(self, child: Sequence, blocks: Int32Array) -> None:
        """A beam goes on with its parent's blocks, to which it has references, if there are any and it finds a slot."""
        if not len(blocks) or not self.table.num_free:
            self.pool.release(blocks.tolist())
            self.waiting.push(child)
            return
        computed = len(child.tokens) - 1
        slot = self.seat(child, blocks, computed)
        row = self.table.row(child)
        child.state = State.RUNNING
        self.table.prefill_end[row] = computed
        self.table.shares_tail[row] = bool(computed % self.config.block_size)
        self._seated[child.uid] = child.placed(slot, blocks, computed)

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence wherever it is; its blocks are free at once. False when it has ended already."""
        if sequence.state is State.ENDED:
            return False
        self._withdraw(sequence)
        self._end(sequence)
        return True

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self._restoring.pop(sequence.uid, None)

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

    @property
    def restoring_blocks(self) -> int:
        """Blocks that sequences whose pages are being restored will need beside those pages."""
        return sum(self._restoring.values())

    @property
    def sent(self) -> list[SentPlan]:
        """Plans sent whose results are not back, oldest first."""
        return list(self._sent)

    def kv_view(self, start: int, count: int, tier: Tier = "device") -> KvView:
        """What ``count`` blocks of a tier from ``start`` on hold right now, with the totals."""
        return view_kv(self, start, count, tier)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Some unacknowledged plan names it."""
        running = sequence.slot != NO_SLOT
        last = int(self.table.last_step[self.table.row(sequence)]) if running else sequence.last_step
        return last > self.acknowledged

    def known_tokens(self, sequence: Sequence) -> int:
        """Tokens it has, prompt included, as far as results are back."""
        if sequence.slot == NO_SLOT:
            return len(sequence.tokens)
        return int(self.table.known[self.table.row(sequence)])

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that has not ended."""
        return list(self._sequences.values())

    def note(self, event: Event) -> None:
        """Something happened that the surroundings should hear of."""
        self._events.append(event)

    def drain_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # --- the step ---

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute or enough is unacknowledged already."""
        if len(self._sent) > self.config.run_ahead:
            return None
        self.pool.now = self.host.pool.now = self.step + 1
        while True:
            draft, preempted = self._grant_running()
            if not preempted and self.table.num_free and self.waiting.peek() is not None:
                self.tidy()
                admission = Admission(self, self.config.max_num_batched_tokens - draft.num_tokens)
                admission.run()
                draft.admit(admission.admitted, admission.grants)
            if draft.num_rows or self.host.has_moves:
                return self._send(draft)
            if self._sent or not self._stir():
                return None

    def _stir(self) -> bool:
        """Nothing moves: is it because beams that wait for their siblings hold what those need? Then one lets go."""
        idle = [
            one for one in self.table.running if is_idle(one) and one.beams is not None and one.beams.decided is None
        ]
        if not idle or self.waiting.peek() is None:
            return False
        self._preempt(self.waiting.victim(idle))
        return True

    def commit(self, result: StepResult) -> None:
        """Take the result of the oldest unacknowledged plan in.

        Raises:
            OutOfStepError: it answers another plan, reports a failed step (the epoch is over then), or its columns do
                not answer every sample once; nothing was taken in.
        """
        check_result(result, (self.term, self.epoch), self._sent, self._sequences)
        plan = self._sent.popleft()
        self.acknowledged = plan.step
        self.stats.generated_tokens += len(result.tokens) - len(result.scores)
        commit_tokens(plan, result, self.table, self._sequences)
        if plan.fills is not None and self.prefix_cache.enabled:
            self._note_fills(plan, result)
        for fork in plan.forks:
            # Its parent's blocks up to the fork are published now, if ever.
            self.tidy()
            self.prefix_cache.inherit(fork.child, fork.parent)
        self._learn_costs(plan, result)
        if plan.moves is not None:
            self._settle_moves(plan)
        if plan.beams is not None:
            self._commit_beams(plan, plan.beams, result)
        if result.ends.any():
            for sample in result.ends.nonzero()[0].tolist():
                self._end_by_executor(int(plan.sample_uids[sample]), EndReason(int(result.ends[sample])), plan.step)
        for follower in plan.late:
            self._let_wait(follower)

    def tidy(self) -> None:
        """What need not be done before the next plan is sent: hash and publish the blocks that steps have filled."""
        self._publisher.publish()

    # --- grants ---

    def _grant_running(self) -> tuple[Draft, bool]:
        """Tokens for running sequences, with the blocks they need; and whether somebody had to be preempted for that."""
        preempted = False
        while True:
            rows, counts = self._grants()
            growing, need = self._growth(rows, counts)
            forked = self._forked(rows)
            copies = self._copy_on_write.copies_needed(forked) if len(forked) else 0
            total = int(need.sum()) + copies
            if total <= self.pool.num_free:
                break
            self._preempt(self.waiting.victim(self.table.running))
            preempted = True
        draft = Draft(self.table, rows, counts)
        if len(need):
            blocks = self.pool.allocate(total - copies)
            draft.grow(self.table.grow(growing, need, blocks), blocks)
        if len(forked):
            self._copy_on_write.diverge(forked)
        return draft, preempted

    def _grants(self) -> tuple[Rows, Int32Array]:
        """Rows of the slot table that compute, and how many tokens each."""
        table, n = self.table, len(self.table)
        budget = self.config.max_num_batched_tokens
        expected = table.expected[:n]
        behind = expected - table.planned[:n]
        # Who has all the tokens it may have waits for its end.
        behind[expected >= table.max_total[:n]] = 0
        if self.config.long_prefill_token_threshold:
            np.minimum(behind, self.config.long_prefill_token_threshold, out=behind)
        if int(behind.sum()) > budget:
            behind = _share(behind, budget)
        if behind.all():
            return slice(0, n), behind
        rows = behind.nonzero()[0]
        return rows, behind[rows]

    def _growth(self, rows: Rows, counts: Int32Array) -> tuple[npt.NDArray[np.intp], Int32Array]:
        """Rows that need more blocks, and how many each."""
        missing: Int32Array = self.table.planned[rows] + counts - self.table.capacity[rows]
        places = (missing > 0).nonzero()[0]
        if not len(places):
            return places, _NONE
        growing: npt.NDArray[np.intp] = places if isinstance(rows, slice) else rows[places]
        need: Int32Array = -(-missing[places] // np.int32(self.config.block_size))
        return growing, need

    def _forked(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Rows that write into a block that others may hold."""
        flagged: npt.NDArray[np.intp] = self.table.shares_tail[rows].nonzero()[0]
        if isinstance(rows, slice):
            return flagged
        found: npt.NDArray[np.intp] = rows[flagged]
        return found

    def _preempt(self, victim: Sequence) -> None:
        """Just letting go: the references drop, the tokens stay, and it waits at its old place."""
        self._leave(victim)
        victim.preemptions += 1
        self.stats.preemptions += 1
        if is_idle(victim):
            victim.state = State.IDLE
        else:
            victim.state = State.WAITING
            self.waiting.push(victim)
        self.note(Preempted(victim, self.step))

    def preempt_all(self) -> None:
        """Let every running sequence go, each to its old place in the queue."""
        for sequence in list(self.table.running):
            self._preempt(sequence)

    # --- what admission asks for ---

    def seat(self, sequence: Sequence, blocks: Int32Array, num_computed: int) -> int:
        """A sequence takes a slot with its blocks, ``num_computed`` of its tokens being there; returns the slot."""
        tenant = self.waiting.tenant_of(sequence) if isinstance(self.waiting, FairQueue) else 0
        return self.table.take(sequence, blocks, num_computed, tenant)

    def begin_restore(self, sequence: Sequence, hit: Hit) -> None:
        """Its pages come back from the host first; meanwhile others may go."""
        total = -(-len(sequence.tokens) // self.config.block_size)
        self.host.restore(sequence, hit)
        sequence.state = State.RESTORING
        sequence.restores += 1
        self._restoring[sequence.uid] = total - len(hit.device) - len(hit.beyond)

    # --- sending ---

    def _send(self, draft: Draft) -> StepPlan:
        """Make the plan final: lengths move on, and what its result will mean is remembered."""
        table, size = self.table, self.config.block_size
        self.step += 1
        samples = Samples.of(table, draft)
        forks, late = self._fork_followers(draft, samples)
        fills = draft.advance(self.pool.generation, size, self.step)
        beams = samples.beams(table) if self._groups else None
        samples.advance(table, self.step, beams)
        prompt_tokens = self._note_chunks(draft)
        if isinstance(self.waiting, FairQueue):
            decoding = (draft.starts >= table.prefill_end[draft.rows]).astype(np.float64)
            self.waiting.charge(table.tenant[draft.rows], OUTPUT_COST * decoding)
        self.stats.steps += 1
        self.stats.scheduled_tokens += draft.num_tokens
        # What the next step will need is about what this one has needed.
        self.host.save_ahead(self.pool.take_handed_out())
        moves = self.host.take_moves()
        self._sent.append(
            SentPlan(
                step=self.step,
                version=table.version,
                slots=draft.slots,
                uids=table.uid[draft.rows].copy(),
                sampled=samples.of_row,
                sample_slots=samples.slots,
                sample_uids=samples.uids,
                sample_rows=samples.rows,
                num_tokens=draft.num_tokens,
                prompt_tokens=prompt_tokens,
                fills=fills,
                beams=beams,
                forks=tuple(forks),
                late=tuple(late),
                moves=moves,
            )
        )
        released, self._released = self._released, []
        draft.admitted += self._seated.values()
        self._seated.clear()
        return draft.build((self.term, self.epoch, self.step), released, samples, self._copy_on_write.take(), moves)

    def _fork_followers(self, draft: Draft, samples: Samples) -> tuple[list[Fork], list[Sequence]]:
        """Followers of leaders whose prompt this plan completes: those that find a slot are forked, the others are late."""
        forks: list[Fork] = []
        late: list[Sequence] = []
        if not len(self._families):
            return forks, late
        for place, uid in reversed(list(enumerate(samples.uids.tolist()))):
            if not self._families.leads(uid):
                continue
            leader = self._sequences[uid]
            followers = self._families.release(uid)
            room = self.table.num_free
            late += followers[room:]
            children = followers[:room]
            forks += [Fork(leader, child) for child in children]
            rows = [self._fork(draft, samples.of_row[place], leader, child) for child in children]
            samples.insert(place + 1, rows, self.table)
        return forks, late

    def _fork(self, draft: Draft, place: int, leader: Sequence, child: Sequence) -> int:
        """The child takes a slot on the leader's blocks; returns its row."""
        blocks = self.table.blocks(leader).copy()
        num_tokens = len(child.tokens)
        self.pool.acquire(blocks.tolist())
        slot = self.seat(child, blocks, num_tokens)
        child.state = State.RUNNING
        if num_tokens % self.config.block_size:
            self.table.shares_tail[[self.table.row(leader), self.table.row(child)]] = 1
        # As of before the forward pass it has what its leader has.
        start = int(draft.starts[place])
        draft.admitted.append(child.placed(slot, blocks, start))
        self.note(Admitted(child, self.step, num_tokens, num_tokens))
        self.note(Chunk(child, self.step, num_tokens, 0, last=True))
        return self.table.row(child)

    def _note_chunks(self, draft: Draft) -> int:
        """Events for rows that prefill; returns how many prompt tokens they compute."""
        table = self.table
        places = (draft.starts < table.prefill_end[draft.rows]).nonzero()[0]
        if not len(places):
            return 0
        rows = places if isinstance(draft.rows, slice) else draft.rows[places]
        total = 0
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            start, count = int(draft.starts[place]), int(draft.counts[place])
            total += count
            last = start + count >= int(table.prefill_end[row])
            self.note(Chunk(table.running[row], self.step, start, count, last))
        self.stats.prompt_tokens += total
        return total

    # --- commit ---

    def _note_fills(self, plan: SentPlan, result: StepResult) -> None:
        fills = plan.fills
        assert fills is not None
        uids = plan.uids[fills.row].tolist()
        sequences = [self._sequences.get(uid) for uid in uids]
        if not result.sample_counts.all():
            # A row that could not be sampled (its logits were not numbers) leaves pages nobody should read.
            unsound = set(plan.sampled[result.sample_counts == 0].tolist())
            rows = fills.row.tolist()
            sequences = [None if row in unsound else one for row, one in zip(rows, sequences, strict=True)]
        self._publisher.add(plan, sequences)

    def _commit_beams(self, plan: SentPlan, beams: npt.NDArray[np.bool_], result: StepResult) -> None:
        for sample, candidates in split_candidates(result, beams):
            sequence = self._sequences.get(int(plan.sample_uids[sample]))
            if sequence is None or sequence.beams is None:
                continue
            if sequence.state is State.WAITING:
                # Let go meanwhile; there is nothing left to compute.
                self.waiting.remove(sequence)
                sequence.state = State.IDLE
            event = sequence.beams.answer(sequence, candidates)
            if event is not None:
                self.note(BeamStep(sequence.beams, event))

    def _learn_costs(self, plan: SentPlan, result: StepResult) -> None:
        timings = result.timings
        restored = plan.moves.num_restored if plan.moves is not None else 0
        if restored and timings.restore_s > 0:
            self.costs.observe_restore(restored, timings.restore_s)
        # Only steps that are mostly prefill tell what a prompt token costs.
        if timings.forward_s > 0 and plan.prompt_tokens >= max(self.config.block_size, plan.num_tokens // 2):
            self.costs.observe_prefill(plan.num_tokens, timings.forward_s)

    def _settle_moves(self, plan: SentPlan) -> None:
        assert plan.moves is not None
        for sequence in self.host.settle(plan.moves):
            if self._restoring.pop(sequence.uid, None) is not None:
                sequence.last_step = 0
                self._let_wait(sequence)

    def _let_wait(self, sequence: Sequence) -> None:
        if sequence.state in (State.FOLLOWING, State.RESTORING):
            sequence.state = State.WAITING
            self.waiting.push(sequence)

    def _end_by_executor(self, uid: int, reason: EndReason, step: int) -> None:
        sequence = self._sequences.get(uid)
        if sequence is None:
            return
        if sequence.beams is not None:
            self.abort_beams(sequence.beams)
            self.note(BeamFailed(sequence.beams))
            return
        self._withdraw(sequence)
        if reason in (EndReason.STOP, EndReason.LENGTH):
            self.forecast.observe(len(sequence.tokens) - sequence.output_start)
        self._end(sequence)
        self.note(Ended(sequence, step, reason))

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and blocks back; the executor hears of it with the next plan."""
        # Blocks go back in the order of their worth, so their content must be known first.
        self.tidy()
        if self._seated.pop(sequence.uid, None) is None:
            self._released.append(sequence.slot)
        self.pool.release(self.table.leave(sequence).tolist())

    def _end(self, sequence: Sequence) -> None:
        sequence.state = State.ENDED
        del self._sequences[sequence.uid]
        heir = self._families.leave(sequence)
        if heir is not None:
            self.waiting.push(heir)

    def reset_prefix_cache(self) -> int:
        """Nothing computed until now is found again, by anyone; returns how many blocks could be."""
        self._publisher.forget()
        for sequence in self._sequences.values():
            # What it goes on to compute continues what is forgotten.
            sequence.num_findable = -1
        return self.prefix_cache.reset()

    # --- integrity ---

    def check_integrity(self) -> None:
        """Verify every invariant that ties the parts together.

        Raises:
            IntegrityError: the first breach found.
        """
        table, pool, host = self.table, self.pool, self.host.pool
        table.check_integrity()
        on_device, on_host = self.host.holds([plan.moves for plan in self._sent if plan.moves is not None])
        held = np.bincount(np.array(on_device, np.int64), minlength=pool.num_blocks)
        pool.check_integrity(table.references(pool.num_blocks) + held)
        host.check_integrity(np.bincount(np.array(on_host, np.int64), minlength=host.num_blocks))
        running = {sequence.uid for sequence in table.running}
        by_state: dict[State, set[int]] = {state: set() for state in State}
        for uid, sequence in self._sequences.items():
            by_state[sequence.state].add(uid)
        if running != by_state[State.RUNNING] or {one.uid for one in self.waiting} != by_state[State.WAITING]:
            raise IntegrityError("slots, the waiting queue and the states of sequences disagree")
        if set(self._restoring) != by_state[State.RESTORING]:
            raise IntegrityError("sequences whose pages are restored and the states disagree")
        late = {one.uid for plan in self._sent for one in plan.late}
        following = {one.uid for one in self._families.followers()}
        if not by_state[State.FOLLOWING] <= late | following or not following <= by_state[State.FOLLOWING]:
            raise IntegrityError("somebody follows nobody")
        members = {one.uid: one for group in self._groups for one in group.members}
        if any(self._sequences.get(uid) is not one for uid, one in members.items()) or any(
            uid not in members for uid, one in self._sequences.items() if one.beams is not None
        ):
            raise IntegrityError("beam searches and their sequences disagree")
        if any(not is_idle(self._sequences[uid]) for uid in by_state[State.IDLE]):
            raise IntegrityError("a beam that has not been computed waits for nothing")
        if not self._sequences and not self._sent and pool.num_used:
            raise IntegrityError("blocks are referenced although nothing runs")


def _share(behind: Int32Array, budget: int) -> Int32Array:
    """Grants int32[n] for rows that are ``behind`` int32[n] tokens behind: those one behind first, then in order."""
    order = np.argsort(behind > 1, kind="stable")
    before = np.cumsum(behind[order]) - behind[order]
    grants = np.empty_like(behind)
    grants[order] = np.clip(budget - before, 0, behind[order])
    return grants


_NONE: Int32Array = np.empty(0, np.int32)

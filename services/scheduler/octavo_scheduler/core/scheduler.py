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
from collections.abc import Sequence as Items

import numpy as np

from octavo_scheduler.core.admission import Admission
from octavo_scheduler.core.beam_groups import BeamGroups, is_idle
from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.commit import check_result, commit_tokens
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.draft import Draft, Samples
from octavo_scheduler.core.errors import NeverFitsError
from octavo_scheduler.core.events import BeamFailed, Chunk, Ended, Event, Preempted
from octavo_scheduler.core.forecast import LengthForecast
from octavo_scheduler.core.forks import CopyOnWrite, Families, fork_followers
from octavo_scheduler.core.grants import Granter
from octavo_scheduler.core.host_tier import HostTier, MoveCosts, Moves
from octavo_scheduler.core.in_flight import SentPlan
from octavo_scheduler.core.integrity import check_core
from octavo_scheduler.core.prefix_cache import Hit, PrefixCache
from octavo_scheduler.core.publisher import Publisher
from octavo_scheduler.core.sequence import NO_SLOT, Sequence, State
from octavo_scheduler.core.slots import SlotTable
from octavo_scheduler.core.stats import CoreStats
from octavo_scheduler.core.view import KvView, Tier, view_kv
from octavo_scheduler.core.waiting import OUTPUT_COST, FairQueue, make_queue
from octavo_shared.plan import CacheOffer, StepPlan, StepResult
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
        self.forecast = LengthForecast(config.num_blocks * config.block_size)
        self.stats = CoreStats()
        self.prefix_cache = PrefixCache(config, self.pool, self.host.pool, hash_key)
        self.families = Families()
        self.beams = BeamGroups(self)
        self._copy_on_write = CopyOnWrite(self.table, self.pool, config.block_size)
        self._granter = Granter(config, self.table, self.pool, self._copy_on_write)
        self._publisher = Publisher(self.prefix_cache, self.table, config.block_size)
        self._sequences: dict[int, Sequence] = {}
        # Sequences whose pages are being restored: blocks that each will need beside those, by uid.
        self.restoring: dict[int, int] = {}
        self._sent: deque[SentPlan] = deque()
        self._released: list[int] = []
        # Who waits because there was no memory for it: its uid, the slot table's version then, and until which step.
        self.refused = (-1, -1, 0)
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
            self.enlist(sequence)
            # Those resumed with outputs of their own have no more than the prompt in common: the prefix cache knows it.
            if len(sequence.tokens) == sequence.output_start:
                alike.append(sequence)
            if sequence not in alike[1:]:
                sequence.state = State.WAITING
                self.waiting.push(sequence)
        if alike:
            self.families.form(alike[0], alike[1:])

    def enlist(self, sequence: Sequence) -> None:
        """A sequence becomes one of this core's; where it waits is for the caller to say."""
        sequence.uid = sequence.arrival = self._next_uid
        self._next_uid += 1
        sequence.root = self.prefix_cache.root_of(sequence.record)
        self._sequences[sequence.uid] = sequence

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
        self.restoring.pop(sequence.uid, None)

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
        """Blocks that sequences whose pages are being restored will need beside those pages, in all."""
        return sum(self.restoring.values())

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

    def sequence(self, uid: int) -> Sequence:
        """A sequence that has not ended."""
        return self._sequences[uid]

    def find(self, uid: int) -> Sequence | None:
        """A sequence, unless it has ended."""
        return self._sequences.get(uid)

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

    def _grant_running(self) -> tuple[Draft, bool]:
        """Tokens for running sequences, with the blocks they need; and whether somebody had to be preempted for that."""
        preempted = False
        while (grant := self._granter.propose()).num_blocks > self.pool.num_free:
            self._preempt(self.waiting.victim(self.table.running))
            preempted = True
        return self._granter.carry_out(grant), preempted

    def _stir(self) -> bool:
        """Nothing moves: is it because beams that wait for their siblings hold what those need? Then one lets go."""
        idle = self.beams.idle()
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
        plain = check_result(result, (self.term, self.epoch), self._sent, self._sequences)
        plan = self._sent.popleft()
        self.acknowledged = plan.step
        self.stats.generated_tokens += len(result.tokens) - len(result.scores)
        commit_tokens(plan, result, plain, self.table, self._sequences)
        self._publisher.add(plan, None if plain else result.sample_counts)
        for fork in plan.forks:
            # Its parent's blocks up to the fork are published now, if ever.
            self.tidy()
            self.prefix_cache.inherit(fork.child, fork.parent)
        self.costs.learn(
            result.timings,
            restored_blocks=plan.moves.num_restored if plan.moves is not None else 0,
            prompt_tokens=plan.prompt_tokens,
            num_tokens=plan.num_tokens,
        )
        if plan.moves is not None:
            self._settle_moves(plan.moves)
        if plan.beams is not None:
            self.beams.commit(plan, result)
        if np.count_nonzero(result.ends):
            for sample in result.ends.nonzero()[0].tolist():
                self._end_by_executor(int(plan.sample_uids[sample]), EndReason(int(result.ends[sample])), plan.step)
        for follower in plan.late:
            self._let_wait(follower)

    def tidy(self) -> None:
        """What need not be done before the next plan is sent: hash and publish the blocks that steps have filled."""
        self._publisher.publish(self._sequences)
        self.prefix_cache.prepare_names()

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
        sequence.state = State.RUNNING
        tenant = self.waiting.tenant_of(sequence) if isinstance(self.waiting, FairQueue) else 0
        return self.table.take(sequence, blocks, num_computed, tenant)

    def begin_restore(self, sequence: Sequence, hit: Hit) -> None:
        """Its pages come back from the host first; meanwhile others may go."""
        total = -(-len(sequence.tokens) // self.config.block_size)
        self.host.restore(sequence, hit)
        sequence.state = State.RESTORING
        sequence.restores += 1
        self.restoring[sequence.uid] = total - len(hit.device) - len(hit.beyond)

    # --- sending ---

    def _send(self, draft: Draft) -> StepPlan:
        """Make the plan final: lengths move on, and what its result will mean is remembered."""
        table, size = self.table, self.config.block_size
        self.step += 1
        samples = Samples.of(table, draft)
        forks, late = fork_followers(self, draft, samples)
        fills = draft.advance(self.pool.generation, size, self.step)
        beams = samples.beams(table) if len(self.beams) else None
        samples.advance(table, self.step, beams)
        prompt_tokens = self._note_chunks(draft)
        if isinstance(self.waiting, FairQueue):
            decoding = (draft.starts >= table.prefill_end[draft.rows]).astype(np.float64)
            self.waiting.charge(table.tenant[draft.rows], OUTPUT_COST * decoding)
        self.stats.steps += 1
        self.stats.scheduled_tokens += draft.num_tokens
        self.forecast.count(draft.num_tokens, 0)
        # What the next step will need is about what this one has needed.
        self.host.save_ahead(self.pool.take_handed_out())
        moves = self.host.take_moves()
        self._sent.append(
            SentPlan(
                step=self.step,
                version=table.version,
                slots=draft.slots,
                uids=draft.uids,
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
        draft.admitted += self.beams.take_seated()
        swaps, names = self._copy_on_write.take(), self.prefix_cache.take_names()
        return draft.build((self.term, self.epoch, self.step), released, samples, swaps, moves, names)

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

    def _settle_moves(self, moves: Moves) -> None:
        for sequence in self.host.settle(moves):
            if self.restoring.pop(sequence.uid, None) is not None:
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
            self.beams.end(sequence.beams)
            self.note(BeamFailed(sequence.beams))
            return
        self._withdraw(sequence)
        if reason in (EndReason.STOP, EndReason.LENGTH):
            self.forecast.observe(sequence.num_outputs)
        self._end(sequence)
        self.note(Ended(sequence, step, reason))

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and blocks back; the executor hears of it with the next plan."""
        # Blocks go back in the order of their worth, so their content must be known first.
        self.tidy()
        if self.beams.seated.pop(sequence.uid, None) is None:
            self._released.append(sequence.slot)
        self.pool.release(self.table.leave(sequence).tolist())

    def _end(self, sequence: Sequence) -> None:
        sequence.state = State.ENDED
        del self._sequences[sequence.uid]
        heir = self.families.leave(sequence)
        if heir is not None:
            self.waiting.push(heir)

    def adopt(self, offers: Items[CacheOffer]) -> int:
        """Before the first plan: take over what the executor's pages hold already; returns how many pages that are.

        Raises:
            DoubtfulError: the offers contradict themselves; the cache stays empty.
        """
        assert not self.step, "names are for an executor that has done nothing yet"
        return self.prefix_cache.take_over(offers)

    def reset_prefix_cache(self) -> int:
        """Nothing computed until now is found again, by anyone; returns how many blocks could be."""
        self._publisher.forget()
        for sequence in self._sequences.values():
            # What it goes on to compute continues what is forgotten.
            sequence.num_findable = -1
        return self.prefix_cache.reset()

    def check_integrity(self) -> None:
        """Verify every invariant that ties the parts together.

        Raises:
            IntegrityError: the first breach found.
        """
        check_core(self)

"""A faithful model of an executor, for tests of the scheduler's core.

It follows the docstring of ``octavo_shared.plan`` to the letter. Its pages hold, for every position, the token id and a
*key*: a hash of everything that position's keys and values would depend on in a real model (adapter, tenant, salt and all
tokens up to it). Every row verifies every position it would read, so a page that is shared or reused wrongly is found at
once. What it samples is a pure function of (seed of the choice, position), as rule L10 asks, so the outcome of every
sequence is known beforehand and must not depend on scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, StepPlan, StepResult
from octavo_shared.records import EndReason, RequestRecord

_STOP_ONE_IN = 23
ALPHABET = 3


def sample(seed: int, position: int, alphabet: int = ALPHABET) -> tuple[int, EndReason]:
    """The token drawn at an output position, and whether it ends the sequence: by STOP, or by ERROR without a token."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & ((1 << 64) - 1)
    mixed ^= mixed >> 29
    mixed = (mixed * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed ^= mixed >> 32
    ends = (mixed // alphabet) % _STOP_ONE_IN == 0
    end = {0: EndReason.STOP, 1: EndReason.ERROR}.get(seed % 4, EndReason.NONE) if ends else EndReason.NONE
    return mixed % alphabet, end


def expected_outcome(record: RequestRecord, choice: int, max_total_tokens: int) -> tuple[list[int], EndReason]:
    """What a choice must come to, however it is scheduled."""
    tokens: list[int] = []
    while True:
        token, end = sample(record.sampling.seed_of(choice), len(tokens))
        if end is EndReason.ERROR:
            return tokens, end
        tokens.append(token)
        if end:
            return tokens, end
        if len(record.prompt) + len(tokens) >= max_total_tokens:
            return tokens, EndReason.LENGTH


@dataclass
class _Slot:
    new: NewSequence
    tokens: list[int]
    keys: list[int]
    table: list[int]
    computed: int
    row_start: int = 0
    ended: bool = False


class ExecutorModel:
    """Slots, block tables and pages; ``log`` collects the outputs of every choice."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        records: dict[RequestId, RequestRecord],
        num_host_blocks: int = 0,
        scope: str = "tenant",
    ) -> None:
        self.block_size = block_size
        self.scope = scope
        self.max_num_seqs = max_num_seqs
        self.records = records
        self.page_keys: npt.NDArray[np.int64] = np.zeros((num_blocks, block_size), np.int64)
        self.page_tokens: npt.NDArray[np.int32] = np.full((num_blocks, block_size), -1, np.int32)
        self.host_keys: npt.NDArray[np.int64] = np.zeros((num_host_blocks, block_size), np.int64)
        self.host_tokens: npt.NDArray[np.int32] = np.full((num_host_blocks, block_size), -1, np.int32)
        # Moves between the tiers arrive as late as they may: when the scheduler hears of the step. Until then whoever reads
        # their destination reads nonsense.
        self._moving: dict[int, list[tuple[bool, int, npt.NDArray[np.int32], npt.NDArray[np.int64]]]] = {}
        self.copied = self.saved = self.restored = self.forked = 0
        self.slots: dict[int, _Slot] = {}
        self.log: dict[tuple[RequestId, int], list[int]] = {}
        self.ends: dict[tuple[RequestId, int], EndReason] = {}
        self.step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan in the order of its phases."""
        assert plan.step == self.step + 1, "plans come in order, without gaps"
        self.step = plan.step
        for slot in plan.release.tolist():
            del self.slots[slot]
        rows = set(plan.row_slots.tolist())
        for new in plan.admit:
            self._admit(new, is_fork=new.slot not in rows)
        assert len(plan.grow_slots) == len(plan.grow_blocks)
        for slot, block in zip(plan.grow_slots.tolist(), plan.grow_blocks.tolist(), strict=True):
            self.slots[slot].table.append(block)
        for slot, index, block in zip(
            plan.swap_slots.tolist(), plan.swap_indices.tolist(), plan.swap_blocks.tolist(), strict=True
        ):
            self.slots[slot].table[index] = block
        self._check_tables()
        self._move(plan)
        self._forward(plan)
        return self._sample(plan)

    def _move(self, plan: StepPlan) -> None:
        arriving = self._moving.setdefault(plan.step, [])
        saves, copies, restores = plan.copy_out, plan.copies, plan.restores
        for destinations in (saves.destination, copies.destination, restores.destination):
            assert len(set(destinations.tolist())) == len(destinations), "a page is a destination twice"
        assert set(copies.source.tolist()).isdisjoint(copies.destination.tolist()), "a copy's source is overwritten"
        for source, host in zip(saves.source.tolist(), saves.destination.tolist(), strict=True):
            arriving.append((False, host, self.page_tokens[source].copy(), self.page_keys[source].copy()))
            self.host_keys[host] = -2
        for source, block in zip(copies.source.tolist(), copies.destination.tolist(), strict=True):
            self.page_tokens[block], self.page_keys[block] = self.page_tokens[source], self.page_keys[source]
        for host, block in zip(restores.source.tolist(), restores.destination.tolist(), strict=True):
            assert (self.host_keys[host] != -2).all(), "a host page is read before it was written"
            arriving.append((True, block, self.host_tokens[host].copy(), self.host_keys[host].copy()))
            self.page_keys[block] = -2
        self.saved, self.restored = self.saved + len(saves), self.restored + len(restores)
        self.copied += len(copies)

    def acknowledged(self, step: int) -> None:
        """The scheduler has heard of a step: its moves are complete now."""
        for on_device, page, tokens, keys in self._moving.pop(step, ()):
            if on_device:
                self.page_tokens[page], self.page_keys[page] = tokens, keys
            else:
                self.host_tokens[page], self.host_keys[page] = tokens, keys

    def _admit(self, new: NewSequence, *, is_fork: bool) -> None:
        assert 0 <= new.slot < self.max_num_seqs
        assert new.slot not in self.slots, "a slot is taken twice"
        record = self.records[new.request_id]
        known = record.prompt.tolist() + self.log.get((new.request_id, new.choice), [])
        assert new.tokens.tolist() == known, "a sequence comes with exactly its prompt and what has been logged"
        assert (new.request_id, new.choice) not in self.ends, "an ended choice never restarts"
        assert new.output_start == len(record.prompt)
        assert 0 <= new.num_computed < len(new.tokens), "the last token is always computed"
        assert new.seed == record.sampling.seed_of(new.choice)
        assert is_fork or not (new.no_cache_read and new.num_computed), "log-probabilities of the prompt read no cache"
        assert new.no_cache_read or record.sampling.prompt_logprobs is None or len(known) > len(record.prompt)
        owner = {"global": "", "tenant": record.tenant, "request": record.id}[self.scope]
        root = hash((record.lora, owner, record.cache_salt))
        slot = _Slot(new, [], [root], new.block_table.tolist(), new.num_computed)
        for token in known:
            self._append(slot, token)
        self.slots[new.slot] = slot

    @staticmethod
    def _append(slot: _Slot, token: int) -> None:
        slot.tokens.append(token)
        slot.keys.append(hash((slot.keys[-1], token)))

    def _check_tables(self) -> None:
        for slot in self.slots.values():
            assert len(set(slot.table)) == len(slot.table), "a page stands twice in one block table"
            assert all(0 <= block < len(self.page_tokens) for block in slot.table)

    def _forward(self, plan: StepPlan) -> None:
        assert len(set(plan.row_slots.tolist())) == len(plan.row_slots), "one row per slot"
        holders: dict[int, int] = {}
        # Forks of this step hold what their row computes; they are not there before it.
        forks = set(plan.sample_slots.tolist()) - set(plan.row_slots.tolist())
        for number, slot in self.slots.items():
            for block in slot.table if number not in forks else ():
                holders[block] = holders.get(block, 0) + 1
        rows = [(self.slots[number], start, count) for number, start, count in self._rows(plan)]
        rows = [row for row in rows if not row[0].ended]
        for slot, start, count in rows:
            assert start == slot.computed, "a row starts where its pages end"
            assert count > 0, "a row computes something"
            assert start + count <= len(slot.tokens), "a row computes known tokens only"
            assert -(-(start + count) // self.block_size) <= len(slot.table), "a row writes into its own block table"
            self._verify_reads(slot, start)
        for slot, start, count in rows:
            for position in range(start, start + count):
                block, offset = slot.table[position // self.block_size], position % self.block_size
                assert holders[block] == 1, "a page that others hold is never written"
                self.page_tokens[block, offset] = slot.tokens[position]
                self.page_keys[block, offset] = slot.keys[position + 1]
            slot.row_start, slot.computed = start, start + count

    def _verify_reads(self, slot: _Slot, end: int) -> None:
        if not end:
            return
        blocks = np.array(slot.table[: -(-end // self.block_size)])
        assert self.page_tokens[blocks].ravel()[:end].tolist() == slot.tokens[:end], "pages hold other tokens"
        assert self.page_keys[blocks].ravel()[:end].tolist() == slot.keys[1 : end + 1], "pages were computed elsewise"

    @staticmethod
    def _rows(plan: StepPlan) -> list[tuple[int, int, int]]:
        columns = (plan.row_slots, plan.row_starts, plan.row_tokens)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _sample(self, plan: StepPlan) -> StepResult:
        rows = np.repeat(plan.row_slots, plan.row_samples).tolist()
        samples = plan.sample_slots.tolist()
        assert len(samples) == len(rows), "as many sample slots as samples"
        assert len(set(samples)) == len(samples), "a slot is sampled once"
        for number, count in zip(plan.row_slots.tolist(), plan.row_samples.tolist(), strict=True):
            slot = self.slots[number]
            assert slot.ended or (count > 0) == (slot.computed == len(slot.tokens)), (
                "samples come at the end of what is known"
            )
        forked = {number for row, number in zip(rows, samples, strict=True) if row != number}
        forked |= {row for row, number in zip(rows, samples, strict=True) if row != number}
        skipped = {row for row in rows if self.slots[row].ended}
        counts, tokens, ends = [], [], []
        for row, number in zip(rows, samples, strict=True):
            slot = self.slots[number]
            if row != number and row not in skipped:
                assert slot.tokens == self.slots[row].tokens[: len(slot.tokens)], "a fork has other tokens than its row"
                assert slot.new.num_computed == self.slots[row].row_start
                slot.computed, slot.row_start = self.slots[row].computed, self.slots[row].row_start
                self.forked += 1
            if slot.ended:
                counts.append(0)
                ends.append(EndReason.NONE)
                continue
            drawn, end = self._draw(slot, spoils=number not in forked)
            counts.append(len(drawn))
            tokens += drawn
            ends.append(end)
        return StepResult(
            plan.term,
            plan.epoch,
            plan.step,
            np.array(counts, np.int32),
            np.array(tokens, np.int32),
            np.array(ends, np.uint8),
        )

    def _draw(self, slot: _Slot, *, spoils: bool) -> tuple[list[int], EndReason]:
        new = slot.new
        name = (new.request_id, new.choice)
        log = self.log.setdefault(name, [])
        assert len(log) == len(slot.tokens) - new.output_start, "an output position is sampled once and in order"
        assert name not in self.ends, "nothing follows an end"
        token, end = sample(new.seed, len(log))
        drawn = []
        if end is EndReason.ERROR:
            # What the row has written is as broken as its logits. (Of forks, each of which draws by a seed of its own here,
            # the others go on, so their common pages must be good.)
            for position in range(slot.row_start, slot.computed if spoils else 0):
                self.page_keys[slot.table[position // self.block_size], position % self.block_size] = -1
        else:
            drawn = [token]
            self._append(slot, token)
            log.append(token)
            if not end and len(slot.tokens) >= new.max_total_tokens:
                end = EndReason.LENGTH
        if end:
            slot.ended = True
            self.ends[name] = end
        return drawn, end

"""Running sequences as columns: lengths, block tables and token ids.

A running sequence has a *row*, its place in the order of admission (rows are dense: row i is the i-th of those that run),
and a *slot*, its number on the executor, which stays the same. Lengths are columns over rows, so that a step works on
whole arrays without looking anything up; token ids and block tables are large and stay where they are, by slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_shared.plan import NO_INTS, NO_LONGS
from octavo_shared.records import Int32Array

NO_UID = -1
# Rows of a step: all of them, or some.
Rows = slice | npt.NDArray[np.intp]


class Roster(NamedTuple):
    """Who has the n rows: ``slots`` int32[n] and ``uids`` int64[n], beside ``rows`` intp[n] (0 … n-1) and ``ones`` int32[n].

    Plans share these arrays, so they cannot be written to.
    """

    slots: Int32Array
    uids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.intp]
    ones: Int32Array


class SlotTable:
    """``max_num_seqs`` slots. S = slots, L = max_model_len, B = blocks of the longest sequence.

    Three lengths chase each other: ``planned`` (tokens whose keys and values will be in the pages once every plan sent has
    run) ≤ ``expected`` (tokens there will be then) and ``known`` (tokens whose ids have come back).
    """

    def __init__(self, config: CoreConfig) -> None:
        slots = config.max_num_seqs
        self._block_size = config.block_size
        # One array, so that closing a gap is one move. [columns, S], by row:
        self._columns: Int32Array = np.zeros((12, slots), np.int32)
        (
            self.slot,
            self.planned,
            self.expected,
            self.known,
            # Tokens the sequence came with: below this it is being prefilled, from here on it decodes.
            self.prefill_end,
            self.max_total,
            # Tokens its blocks have room for.
            self.capacity,
            # It writes next into a block that others may hold too (a fork): look before writing.
            self.shares_tail,
            # Number of its tenant, for policies that count per tenant.
            self.tenant,
            self.output_start,
            # Its samples bring candidates, not tokens.
            self.is_beam,
            # Leading blocks that were there when it came: others may hold them as well.
            self.found,
        ) = self._columns
        self.uid: npt.NDArray[np.int64] = np.full(slots, NO_UID, np.int64)  # [S] by row
        # Where the row's tokens begin in all of them.
        self._origin: npt.NDArray[np.intp] = np.zeros(slots, np.intp)  # [S] by row
        # The last plan that names the row.
        self.last_step: npt.NDArray[np.int64] = np.zeros(slots, np.int64)  # [S] by row
        self.uid_of_slot: npt.NDArray[np.int64] = np.full(slots, NO_UID, np.int64)  # [S]
        self.row_of_slot: npt.NDArray[np.intp] = np.zeros(slots, np.intp)  # [S]
        # np.empty touches no memory: pages of these tables become resident only where tokens really are.
        self.tokens: Int32Array = np.empty((slots, config.max_model_len), np.int32)  # [S, L] by slot
        self._all_tokens: Int32Array = self.tokens.reshape(-1)  # [S * L]
        self.block_table: Int32Array = np.empty((slots, config.max_blocks_per_seq), np.int32)  # [S, B] by slot
        self._free = list(range(slots - 1, -1, -1))
        self.running: list[Sequence] = []
        # Changes whenever somebody comes or goes: rows mean the same as long as it stays.
        self.version = 0
        self._roster = (-1, Roster(NO_INTS, NO_LONGS, np.arange(0), NO_INTS))

    def __len__(self) -> int:
        return len(self.running)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def roster(self) -> Roster:
        """Who has the rows now. As long as ``version`` stays it is the same object, and so costs a step nothing."""
        version, roster = self._roster
        if version != self.version:
            n = len(self.running)
            roster = Roster(self.slot[:n].copy(), self.uid[:n].copy(), np.arange(n), np.ones(n, np.int32))
            for column in roster:
                column.setflags(write=False)
            self._roster = (self.version, roster)
        return roster

    def row(self, sequence: Sequence) -> int:
        """The row of a running sequence."""
        return int(self.row_of_slot[sequence.slot])

    def blocks(self, sequence: Sequence) -> Int32Array:
        """The block table of a running sequence, int32[blocks] (a view)."""
        count = int(self.capacity[self.row(sequence)]) // self._block_size
        view: Int32Array = self.block_table[sequence.slot, :count]
        return view

    def take(self, sequence: Sequence, blocks: Int32Array, num_computed: int, tenant: int = 0) -> int:
        """Give a sequence a slot, its blocks and its ``num_computed`` computed tokens; returns the slot."""
        slot, row, count = self._free.pop(), len(self.running), len(sequence.tokens)
        capacity = len(blocks) * self._block_size
        self._columns[:, row] = (
            slot,
            num_computed,
            count,
            count,
            count,
            sequence.max_total_tokens,
            capacity,
            0,
            tenant,
            sequence.output_start,
            sequence.beams is not None,
            num_computed // self._block_size,
        )
        self.uid[row] = self.uid_of_slot[slot] = sequence.uid
        self.last_step[row] = 0
        self._origin[row] = slot * self.tokens.shape[1]
        self.row_of_slot[slot] = row
        self.tokens[slot, :count] = sequence.tokens
        self.block_table[slot, : len(blocks)] = blocks
        sequence.slot = slot
        self.running.append(sequence)
        self.version += 1
        return slot

    def leave(self, sequence: Sequence) -> Int32Array:
        """Take a sequence's slot away; it carries its known tokens off. Returns its blocks, int32[blocks]."""
        slot, row, last = sequence.slot, self.row(sequence), len(self.running) - 1
        blocks: Int32Array = self.blocks(sequence).copy()
        sequence.tokens = self.tokens[slot, : self.known[row]].copy()
        sequence.last_step = int(self.last_step[row])
        sequence.computed = max(sequence.computed, int(self.planned[row]))
        sequence.slot = NO_SLOT
        self._columns[:, row:last] = self._columns[:, row + 1 : last + 1]
        self.uid[row:last] = self.uid[row + 1 : last + 1]
        self.last_step[row:last] = self.last_step[row + 1 : last + 1]
        self._origin[row:last] = self._origin[row + 1 : last + 1]
        self.row_of_slot[self.slot[row:last]] -= 1
        self.uid_of_slot[slot] = self.uid[last] = NO_UID
        del self.running[row]
        self._free.append(slot)
        self.version += 1
        return blocks

    def append(self, rows: Rows, tokens: Int32Array) -> None:
        """One more known token for each of n different rows: int32[n]."""
        # With one index instead of two numpy takes half the time.
        self._all_tokens[self._origin[rows] + self.known[rows]] = tokens
        self.known[rows] += 1

    def grow(self, rows: npt.NDArray[np.intp], need: Int32Array, blocks: Int32Array) -> Int32Array:
        """Append ``need`` int32[n] blocks to each of ``rows``, all of ``blocks`` in order; the slot of each block, int32."""
        slots: Int32Array = self.slot[rows]
        first = self.capacity[rows] // self._block_size
        if len(blocks) == len(rows):
            self.block_table[slots, first] = blocks
        else:
            offset = np.arange(len(blocks), dtype=np.int32) - np.repeat(np.cumsum(need) - need, need)
            self.block_table[np.repeat(slots, need), np.repeat(first, need) + offset] = blocks
            slots = np.repeat(slots, need)
        self.capacity[rows] += need * np.int32(self._block_size)
        return slots

    def contents(self, slots: Int32Array, indices: Int32Array) -> bytes:
        """Token ids of the blocks at ``indices`` of ``slots``, int32[n] each, one after the other: int32[n * block_size]."""
        size = self._block_size
        positions = (indices * size)[:, None] + np.arange(size, dtype=np.int32)
        found: Int32Array = self.tokens[slots[:, None], positions]
        return found.tobytes()

    def blocks_still_needed(self) -> int:
        """Blocks that running sequences need for tokens they have already (prompts that are being prefilled)."""
        n = len(self.running)
        missing = self.expected[:n] - self.capacity[:n]
        return int((-(-missing[missing > 0] // self._block_size)).sum())

    def outputs(self, count: int) -> Int32Array:
        """Output tokens of the first ``count`` rows once every plan sent has run, int32[count]."""
        outputs: Int32Array = np.maximum(self.expected[:count] - self.output_start[:count], 0)
        return outputs

    def references(self, num_blocks: int) -> npt.NDArray[np.int64]:
        """How often the block tables name each block, int64[num_blocks]."""
        tables = [self.blocks(sequence) for sequence in self.running]
        return np.bincount(np.concatenate(tables), minlength=num_blocks) if tables else np.zeros(num_blocks, np.int64)

    def check_integrity(self) -> None:
        """Verify that lengths, blocks and slots fit together.

        Raises:
            IntegrityError: the first breach found.
        """
        n = len(self.running)
        planned, expected, known = self.planned[:n], self.expected[:n], self.known[:n]
        if (planned > self.capacity[:n]).any() or (planned > expected).any():
            raise IntegrityError("a sequence runs ahead of its blocks or tokens")
        if (expected > self.max_total[:n]).any() or (known > expected).any():
            raise IntegrityError("a sequence was planned past its length, or knows more tokens than were planned")
        taken = self.slot[:n].tolist()
        if sorted([*self._free, *taken]) != list(range(len(self.uid_of_slot))):
            raise IntegrityError("a slot is in two places or in none")
        for row, (sequence, slot) in enumerate(zip(self.running, taken, strict=True)):
            uids = {sequence.uid, int(self.uid[row]), int(self.uid_of_slot[slot])}
            if sequence.slot != slot or len(uids) != 1 or self.row_of_slot[slot] != row:
                raise IntegrityError(f"sequence {sequence.uid}, its slot and its row disagree")

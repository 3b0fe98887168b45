"""The running sequences as columns indexed by slot, so that a decode step is a handful of numpy operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_shared.records import Int32Array

NO_UID = -1


class SlotTable:
    """``max_num_seqs`` slots. S = slots, L = max_model_len, B = blocks of the longest sequence.

    Three lengths chase each other: ``planned`` (tokens whose keys and values will be in the pages once every plan sent has
    run) ≤ ``expected`` (tokens there will be then) and ``known`` (tokens whose ids have come back).
    """

    def __init__(self, config: CoreConfig) -> None:
        slots = config.max_num_seqs
        self.uid: npt.NDArray[np.int64] = np.full(slots, NO_UID, np.int64)  # [S]
        self.planned: Int32Array = np.zeros(slots, np.int32)  # [S]
        self.expected: Int32Array = np.zeros(slots, np.int32)  # [S]
        self.known: Int32Array = np.zeros(slots, np.int32)  # [S]
        # Tokens the sequence came with: below this it is being prefilled, from here on it decodes.
        self.prefill_end: Int32Array = np.zeros(slots, np.int32)  # [S]
        self.max_total: Int32Array = np.zeros(slots, np.int32)  # [S]
        self.num_blocks: Int32Array = np.zeros(slots, np.int32)  # [S]
        self.in_flight: Int32Array = np.zeros(slots, np.int32)  # [S] unacknowledged plans that name the slot
        # np.empty touches no memory: pages of these tables become resident only where tokens really are.
        self.tokens: Int32Array = np.empty((slots, config.max_model_len), np.int32)  # [S, L]
        self.block_table: Int32Array = np.empty((slots, config.max_blocks_per_seq), np.int32)  # [S, B]
        self._free = list(range(slots - 1, -1, -1))
        self._running: dict[int, Sequence] = {}
        self._order: Int32Array | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def full(self) -> bool:
        """No slot is left."""
        return not self._free

    @property
    def order(self) -> Int32Array:
        """Occupied slots, in the order in which they were taken: int32[running]."""
        if self._order is None:
            self._order = np.fromiter(self._running, np.int32, len(self._running))
        return self._order

    def sequences(self) -> list[Sequence]:
        """The running sequences, in the order in which they came in."""
        return list(self._running.values())

    def take(self, sequence: Sequence, blocks: Int32Array, num_computed: int) -> int:
        """Give a sequence a slot, its blocks and its ``num_computed`` cached tokens; returns the slot."""
        slot = self._free.pop()
        count = len(sequence.tokens)
        self.uid[slot] = sequence.uid
        self.planned[slot] = num_computed
        self.expected[slot] = self.known[slot] = self.prefill_end[slot] = count
        self.max_total[slot] = sequence.max_total_tokens
        self.tokens[slot, :count] = sequence.tokens
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.in_flight[slot] = 0
        sequence.slot = slot
        self._running[slot] = sequence
        self._order = None
        return slot

    def leave(self, sequence: Sequence) -> Int32Array:
        """Take a sequence's slot away; it carries its known tokens off. Returns its blocks, int32[blocks]."""
        slot = sequence.slot
        blocks: Int32Array = self.block_table[slot, : self.num_blocks[slot]].copy()
        sequence.tokens = self.tokens[slot, : self.known[slot]].copy()
        sequence.in_flight = int(self.in_flight[slot])
        sequence.slot = NO_SLOT
        self.uid[slot] = NO_UID
        self.num_blocks[slot] = 0
        del self._running[slot]
        self._free.append(slot)
        self._order = None
        return blocks

    def append(self, slots: Int32Array, tokens: Int32Array) -> None:
        """One more known token for each of different slots: int32[n], int32[n]."""
        self.tokens[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def contents(self, slots: Int32Array, indices: Int32Array, block_size: int) -> bytes:
        """Token ids of the blocks at ``indices`` of ``slots``, int32[n] each, one after the other: int32[n * block_size]."""
        positions = indices[:, None] * block_size + np.arange(block_size, dtype=np.int32)
        found: Int32Array = self.tokens[slots[:, None], positions]
        return found.tobytes()

    def blocks_still_needed(self, block_size: int) -> int:
        """Blocks that running sequences need for tokens they have already (prompts that are being prefilled)."""
        order = self.order
        need = -(-self.expected[order] // block_size) - self.num_blocks[order]
        return int(np.maximum(need, 0).sum())

    def references(self, num_blocks: int) -> npt.NDArray[np.int64]:
        """How often the block tables name each block, int64[num_blocks]."""
        rows = [self.block_table[slot, : self.num_blocks[slot]] for slot in self._running]
        return np.bincount(np.concatenate(rows), minlength=num_blocks) if rows else np.zeros(num_blocks, np.int64)

    def check_integrity(self, block_size: int) -> None:
        """Verify that lengths, blocks and slots fit together.

        Raises:
            IntegrityError: the first breach found.
        """
        order = self.order
        covered = -(-self.planned[order] // block_size)
        if (covered > self.num_blocks[order]).any() or (self.planned[order] > self.expected[order]).any():
            raise IntegrityError("a sequence runs ahead of its blocks or tokens")
        if (self.expected[order] > self.max_total[order]).any() or (self.known[order] > self.expected[order]).any():
            raise IntegrityError("a sequence was planned past its length, or knows more tokens than were planned")
        if sorted([*self._free, *self._running]) != list(range(len(self.uid))):
            raise IntegrityError("a slot is in two places or in none")

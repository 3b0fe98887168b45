"""The executor's memory of every running sequence, by slot; plans only say what changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, StepPlan
from octavo_shared.records import TokenLogprobs


class PlanError(ValueError):
    """A plan contradicts what the executor holds: the step is not run and the epoch is over."""


@dataclass(slots=True)
class Sequence:
    """What a slot holds besides columns. ``stop_ids`` are all ids that end it, the model's own included."""

    request_id: RequestId
    choice: int
    attempt: int
    stop_ids: frozenset[int]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    # Collected until the first output carries them; None where not wanted or not complete. Forks share one list.
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None)
    # Prompt tokens found in the prefix cache; 0 for a sequence resumed with outputs, whose prompt was told of before.
    cached_tokens: int = 0
    # Its end is known; what was computed for it afterwards concerns nobody.
    over: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """What a plan changed: (slot, tokens) of the sequences admitted, (slot, index) of the entries of block tables set."""

    admitted: list[tuple[int, int]]
    entries: list[tuple[int, int]]


class BatchState:
    """Owns the columns. Arrays are [slots] unless said otherwise; only slots with ``live`` set mean anything.

    It says how sequences stand after all steps that were launched, of which some may be under way: tokens drawn by those
    are counted (``num_tokens``) but still -1 in ``tokens``. ``ended`` are sequences of which nothing computes any more.
    """

    def __init__(
        self, *, max_seqs: int, max_model_len: int, block_size: int, num_blocks: int, eos: frozenset[int]
    ) -> None:
        self.block_size, self.num_blocks, self.max_model_len = block_size, num_blocks, max_model_len
        self._eos = eos
        self.tokens = np.zeros((max_seqs, max_model_len), np.int32)
        self.tables = np.zeros((max_seqs, -(-max_model_len // block_size)), np.int32)
        self.table_len = np.zeros(max_seqs, np.int32)
        self.num_tokens = np.zeros(max_seqs, np.int32)
        self.num_computed = np.zeros(max_seqs, np.int32)
        self.output_start = np.zeros(max_seqs, np.int32)
        self.max_total = np.zeros(max_seqs, np.int32)
        self.min_total = np.zeros(max_seqs, np.int32)  # stop ids are banned below this many tokens
        self.live = np.zeros(max_seqs, bool)
        self.ended = np.zeros(max_seqs, bool)
        self.temperature = np.zeros(max_seqs, np.float32)
        self.top_k = np.zeros(max_seqs, np.int32)
        self.top_p = np.ones(max_seqs, np.float32)
        self.min_p = np.zeros(max_seqs, np.float32)
        self.presence = np.zeros(max_seqs, np.float32)
        self.frequency = np.zeros(max_seqs, np.float32)
        self.repetition = np.ones(max_seqs, np.float32)
        self.seed = np.zeros(max_seqs, np.int64)
        self.biased = np.zeros(max_seqs, bool)
        self.logprobs = np.full(max_seqs, -1, np.int32)  # -1: none wanted
        self.prompt_logprobs = np.full(max_seqs, -1, np.int32)  # -1: none wanted with the next output
        self.beam_width = np.zeros(max_seqs, np.int64)  # 0: tokens are drawn
        self.sequences: list[Sequence | None] = [None] * max_seqs

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""
        return len(self.live)

    def sequence(self, slot: int) -> Sequence:
        """The sequence in a live slot."""
        found = self.sequences[slot]
        assert found is not None
        return found

    def clear(self) -> None:
        """Forget every sequence (a new epoch)."""
        self.live[:] = False
        self.sequences = [None] * self.num_slots

    def apply(self, plan: StepPlan) -> Changes:
        """Phases 1 to 3 of a plan: release, admit, grow and swap.

        Raises:
            PlanError: it does not fit what is held. The state is then undefined until ``clear``.
        """
        entries: list[tuple[int, int]] = []
        for slot in plan.release.tolist():
            self._check_live(slot)
            self.live[slot] = False
            self.sequences[slot] = None
        for new in plan.admit:
            self._admit(new)
        for slot, block in zip(plan.grow_slots.tolist(), plan.grow_blocks.tolist(), strict=True):
            self._check_live(slot)
            self._check_block(block)
            at = int(self.table_len[slot])
            if at >= self.tables.shape[1]:
                raise PlanError(f"slot {slot} already has {at} blocks, the most a sequence can have")
            self.tables[slot, at] = block
            self.table_len[slot] = at + 1
            entries.append((slot, at))
        swaps = (plan.swap_slots.tolist(), plan.swap_indices.tolist(), plan.swap_blocks.tolist())
        for slot, index, block in zip(*swaps, strict=True):
            self._check_live(slot)
            self._check_block(block)
            if not 0 <= index < self.table_len[slot]:
                raise PlanError(f"slot {slot} has no block {index}")
            self.tables[slot, index] = block
            entries.append((slot, index))
        return Changes([(new.slot, len(new.tokens)) for new in plan.admit], entries)

    def _check_live(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots or not self.live[slot]:
            raise PlanError(f"slot {slot} holds no sequence")

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise PlanError(f"there is no page {block}; there are {self.num_blocks}")

    def _admit(self, new: NewSequence) -> None:
        slot, count, sampling = new.slot, len(new.tokens), new.sampling
        if not 0 <= slot < self.num_slots or self.live[slot]:
            raise PlanError(f"slot {slot} is not free")
        if not 0 < count <= self.max_model_len or new.max_total_tokens > self.max_model_len:
            raise PlanError(f"{count} tokens of at most {new.max_total_tokens} exceed {self.max_model_len}")
        if sampling.beam_width < 0:
            raise PlanError(f"a beam width of {sampling.beam_width}")
        if not 0 <= new.num_computed < count or not 0 < new.output_start <= count:
            raise PlanError(
                f"{new.num_computed} computed and {new.output_start} prompt tokens of {count} make no sense"
            )
        blocks = len(new.block_table)
        if blocks > self.tables.shape[1] or blocks * self.block_size < new.num_computed:
            raise PlanError(f"{blocks} blocks do not suit {new.num_computed} computed tokens")
        if blocks and not (int(new.block_table.min()) >= 0 and int(new.block_table.max()) < self.num_blocks):
            raise PlanError(f"a page of slot {slot} is not below {self.num_blocks}")
        self.tokens[slot, :count] = new.tokens
        self.tables[slot, :blocks] = new.block_table
        self.table_len[slot], self.num_tokens[slot], self.num_computed[slot] = blocks, count, new.num_computed
        self.output_start[slot], self.max_total[slot] = new.output_start, new.max_total_tokens
        self.min_total[slot] = min(new.output_start + sampling.min_tokens, self.max_model_len)
        self.temperature[slot], self.top_k[slot] = sampling.temperature, max(0, sampling.top_k)
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.seed[slot] = np.uint64(new.seed & ((1 << 64) - 1)).astype(np.int64)
        self.biased[slot] = bool(sampling.logit_bias)
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        # They come with the first output, from one pass over the whole prompt: its own or that of the row it is forked from.
        owed = sampling.prompt_logprobs is not None and count == new.output_start
        self.prompt_logprobs[slot] = (sampling.prompt_logprobs or 0) if owed else -1
        self.beam_width[slot] = sampling.beam_width
        own = frozenset() if sampling.ignore_eos else self._eos
        self.sequences[slot] = Sequence(
            new.request_id,
            new.choice,
            new.attempt,
            own | frozenset(sampling.stop_token_ids),
            np.array([token for token, _ in sampling.logit_bias], np.int32),
            np.array([value for _, value in sampling.logit_bias], np.float32),
            [] if owed and new.num_computed == 0 else None,
            new.num_computed if count == new.output_start else 0,
        )
        self.live[slot], self.ended[slot] = True, False

    def fork(self, slot: int, leader: int) -> None:
        """``slot`` is to draw from the row ``leader`` has just computed: from here on it stands where that one stands.

        Raises:
            PlanError: it has not the tokens and pages that ``leader`` has computed.
        """
        computed = int(self.num_computed[leader])
        blocks = -(-computed // self.block_size)
        if not (
            self.num_tokens[slot] == computed
            and self.table_len[slot] >= blocks
            and np.array_equal(self.tokens[slot, :computed], self.tokens[leader, :computed])
            and np.array_equal(self.tables[slot, :blocks], self.tables[leader, :blocks])
        ):
            raise PlanError(f"slot {slot} has not the tokens and pages of slot {leader}, from whose row it is sampled")
        self.num_computed[slot] = computed
        child, parent = self.sequence(slot), self.sequence(leader)
        child.cached_tokens = parent.cached_tokens
        alike = self.prompt_logprobs[slot] == self.prompt_logprobs[leader]
        child.prompt_logprobs = parent.prompt_logprobs if alike else None

    def expect(self, slots: npt.NDArray[np.int32]) -> None:
        """One more token of each of ``slots`` is being drawn; those that it fills compute nothing any more."""
        self.tokens[slots, self.num_tokens[slots]] = -1
        self.num_tokens[slots] += 1
        self.ended[slots] |= self.num_tokens[slots] >= self.max_total[slots]

    def arrive(self, slot: int, sequence: Sequence, at: int, token: int) -> None:
        """The token at position ``at`` of ``sequence``, once in ``slot``, is known."""
        if self.sequences[slot] is sequence:
            self.tokens[slot, at] = token

    def end(self, slot: int, sequence: Sequence) -> None:
        """``sequence``, once in ``slot``, has come to its end."""
        sequence.over = True
        if self.sequences[slot] is sequence:
            self.ended[slot] = True

    def check_integrity(self) -> None:
        """Raises AssertionError: lengths, tables and pages of a live slot contradict each other, or those of two."""
        holders: dict[int, tuple[int, int]] = {}
        for slot in np.flatnonzero(self.live).tolist():
            computed, tokens, blocks = (int(x[slot]) for x in (self.num_computed, self.num_tokens, self.table_len))
            assert 0 <= computed <= tokens <= self.max_model_len, f"slot {slot}: {computed} of {tokens} computed"
            assert 0 < self.output_start[slot] <= tokens, f"slot {slot}: outputs start at {self.output_start[slot]}"
            assert blocks * self.block_size >= computed, f"slot {slot}: {blocks} blocks for {computed} tokens"
            used = self.tables[slot, :blocks]
            assert len(set(used.tolist())) == blocks, f"slot {slot}: a page occurs twice in its block table"
            assert blocks == 0 or (used.min() >= 0 and used.max() < self.num_blocks), f"slot {slot}: no such page"
            assert self.sequences[slot] is not None, f"slot {slot}: no sequence"
            for index, page in enumerate(used.tolist()):
                other, at = holders.setdefault(page, (slot, index))
                # Slots share a page only for what it holds: the same tokens at the same place, after the same tokens.
                assert at == index, f"page {page} is block {at} of slot {other} and block {index} of slot {slot}"
                both = min(computed, int(self.num_computed[other]), (index + 1) * self.block_size)
                same = np.array_equal(self.tokens[slot, :both], self.tokens[other, :both])
                assert same, f"slots {other} and {slot} share page {page} and differ in what it holds"

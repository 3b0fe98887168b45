"""One step from plan to output: pages, forward pass, sampling, ends. Pure compute: no sockets, no log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.batch import BatchState, PlanError
from octavo_executor.host_pages import HostPages, PageMover
from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.sampler import Sampler
from octavo_kernels import Kernels, SampleStatus
from octavo_shared.plan import NO_FLOATS, OutputRow, StepOutput, StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, Problem, TokenLogprobs

Ints = npt.NDArray[np.int32]

PROBLEMS = {
    SampleStatus.NOT_FINITE: "The model's output for this request is not finite.",
    SampleStatus.NOTHING_LEFT: "Every token was ruled out by logit_bias or min_tokens.",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a plan that compute (those of ended sequences left out), [rows] each."""

    index: npt.NDArray[np.intp]  # position in the plan
    slots: Ints
    starts: Ints
    counts: Ints
    query_start: Ints  # [rows + 1]


@dataclass(slots=True)
class Drawn:
    """What the samples of a plan came to, [samples] each: ``token`` is what was drawn where ``counts`` is 1."""

    counts: Ints
    ends: npt.NDArray[np.uint8]
    token: Ints
    written: list[OutputRow] = field(default_factory=list)
    # Of beams, by sample: token ids and log-probabilities.
    candidates: dict[int, tuple[Ints, npt.NDArray[np.float32]]] = field(default_factory=dict)

    def tokens(self) -> Ints:
        """All samples' tokens, int32[sum(counts)]."""
        if not self.candidates:
            return self.token[self.counts > 0]
        some = np.flatnonzero(self.counts).tolist()
        return np.concatenate([self.candidates[i][0] if i in self.candidates else self.token[i : i + 1] for i in some])

    def scores(self) -> npt.NDArray[np.float32]:
        """All candidates' log-probabilities, in the order of ``tokens``."""
        return np.concatenate([NO_FLOATS, *(self.candidates[i][1] for i in sorted(self.candidates))])


class Runner:
    """Owns the batch state and drives the transformer. Not thread-safe: plans run strictly in order (rule R1)."""

    def __init__(
        self,
        model: Transformer,
        kernels: Kernels,
        cache: KvCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        host: HostPages | None = None,
    ) -> None:
        """Without ``host`` there is no host tier."""
        self._model, self._cache = model, cache
        self._moves = PageMover(cache, host or HostPages(cache, kernels, 0), kernels)
        self.state = BatchState(
            max_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            eos=frozenset(model.spec.eos_token_ids),
        )
        self._sampler = Sampler(self.state, kernels)
        self._logits_s = 0.0

    def reset(self) -> None:
        """Forget every sequence: the next plan begins a new epoch."""
        self.state.clear()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan. A row that fails alone ends alone, with ERROR.

        Raises:
            PlanError: the plan contradicts what is held. After this or any other exception the step did not happen,
                and what is held means nothing until ``reset``.
        """
        with torch.inference_mode():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepOutput:
        begun = time.perf_counter()
        self._logits_s = 0.0
        if len(plan.row_drafts):
            raise PlanError("this executor has no speculation")
        self._moves.check(plan)
        self.state.apply(plan)
        rows = self._rows(plan)
        self._fill_inputs(rows)
        self._moves.carry_out(plan)
        prepared = time.perf_counter()
        num_tokens = int(rows.query_start[-1])
        if num_tokens:
            self._model.forward(num_tokens)
        self.state.num_computed[rows.slots] = rows.starts + rows.counts
        computed = time.perf_counter()
        self._collect_prompt_logprobs(rows)
        drawn = self._sample(plan, rows)
        done = time.perf_counter()
        timings = StepTimings(
            prepare_s=prepared - begun,
            forward_s=computed - prepared + self._logits_s,
            sample_s=done - computed - self._logits_s,
            restore_s=self._moves.finish(),
        )
        result = StepResult(
            plan.term,
            plan.epoch,
            plan.step,
            drawn.counts,
            drawn.tokens(),
            drawn.ends,
            timings=timings,
            scores=drawn.scores() if drawn.candidates else NO_FLOATS,
        )
        return StepOutput(result, tuple(drawn.written))

    def _rows(self, plan: StepPlan) -> Rows:
        """The rows that compute.

        Raises:
            PlanError: a row does not start where its sequence stands, or lacks tokens or pages.
        """
        state = self.state
        slots = plan.row_slots
        if not len(slots) == len(plan.row_starts) == len(plan.row_tokens) == len(plan.row_samples):
            raise PlanError("the row arrays differ in length")
        if (plan.row_samples < 0).any() or len(plan.sample_slots) != int(plan.row_samples.sum()):
            raise PlanError(f"{len(plan.sample_slots)} sample slots for {int(plan.row_samples.sum())} samples")
        for named in (slots, plan.sample_slots):
            if len(named) and not (named.min() >= 0 and named.max() < state.num_slots and state.live[named].all()):
                raise PlanError("a row or sample names a slot without a sequence")
            if len(np.unique(named)) != len(named):
                raise PlanError("a slot has two rows or two samples")
        index = np.flatnonzero(~state.ended[slots])
        slots, starts, counts = slots[index], plan.row_starts[index], plan.row_tokens[index]
        sampled = plan.row_samples[index] > 0
        computed, tokens = state.num_computed[slots], state.num_tokens[slots]
        wrong = (starts != computed) | (counts < 1) | (counts > tokens - computed)
        wrong |= sampled & ((counts != tokens - computed) | (tokens >= state.max_model_len))
        wrong |= computed + counts > state.table_len[slots] * state.block_size
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            slot = int(slots[at])
            raise PlanError(
                f"slot {slot} cannot compute {counts[at]} tokens from {starts[at]}: it has {state.num_tokens[slot]} tokens, "
                f"{state.num_computed[slot]} computed, and {state.table_len[slot]} blocks"
            )
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        if query_start[-1] > self._model.max_tokens:
            raise PlanError(f"{query_start[-1]} tokens in a step of at most {self._model.max_tokens}")
        return Rows(index, slots, starts, counts, query_start)

    def _fill_inputs(self, rows: Rows) -> None:
        state, inputs, count, block = self.state, self._model.inputs, len(rows.slots), self._cache.block_size
        total = int(rows.query_start[-1])
        inputs.np_num_seqs[0] = count
        if not count:
            return
        lengths = rows.starts + rows.counts
        inputs.np_query_start[: count + 1] = rows.query_start
        inputs.np_seq_lens[:count] = lengths
        width = -(-int(lengths.max()) // block)
        inputs.np_block_tables[:count, :width] = state.tables[rows.slots, :width]
        if total == count:
            slot, position = rows.slots, rows.starts
        else:
            slot = np.repeat(rows.slots, rows.counts)
            position = np.arange(total, dtype=np.int32) + np.repeat(rows.starts - rows.query_start[:-1], rows.counts)
        inputs.np_ids[:total] = state.tokens[slot, position]
        inputs.np_positions[:total] = position
        inputs.np_slots[:total] = state.tables[slot, position // block] * block + position % block

    def _logits(self, hidden_rows: npt.NDArray[np.integer]) -> Tensor:
        """Logits of at most ``max_logits`` rows of the step; overwritten by the next call."""
        begun = time.perf_counter()
        self._model.inputs.np_logits_index[: len(hidden_rows)] = hidden_rows
        logits = self._model.logits(len(hidden_rows))
        self._logits_s += time.perf_counter() - begun
        return logits

    def _collect_prompt_logprobs(self, rows: Rows) -> None:
        """Score every prompt token whose predecessor was computed in this step."""
        state = self.state
        for i in np.flatnonzero(state.prompt_logprobs[rows.slots] >= 0).tolist():
            slot, start = int(rows.slots[i]), int(rows.starts[i])
            kept = state.sequence(slot).prompt_logprobs
            scored = min(start + int(rows.counts[i]), int(state.output_start[slot]) - 1) - start
            for done in range(0, scored if kept is not None else 0, self._model.max_logits):
                n = min(self._model.max_logits, scored - done)
                first = int(rows.query_start[i]) + done
                target = state.tokens[slot, start + done + 1 : start + done + 1 + n]
                wanted = np.full(n, state.prompt_logprobs[slot], np.int32)
                assert kept is not None
                kept.extend(self._sampler.logprobs(self._logits(np.arange(first, first + n)), target, wanted))

    def _sample(self, plan: StepPlan, rows: Rows) -> Drawn:
        """Draw all samples, and the candidates of beams."""
        state, total = self.state, len(plan.sample_slots)
        drawn = Drawn(np.zeros(total, np.int32), np.zeros(total, np.uint8), np.zeros(total, np.int32))
        first_sample = np.cumsum(plan.row_samples) - plan.row_samples
        samples = plan.row_samples[rows.index]
        # One entry per sample: its place in the plan, its row of hidden states.
        row_of = np.repeat(np.arange(len(rows.slots)), samples)
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(samples) - samples, samples)
        sample = (first_sample[rows.index][row_of] + within).astype(np.intp)
        alive = ~state.ended[plan.sample_slots[sample]]
        sample, row_of = sample[alive], row_of[alive]
        self._fork(plan.sample_slots[sample], rows, row_of)
        hidden = rows.query_start[1:][row_of] - 1
        for at in range(0, len(sample), self._model.max_logits):
            part = slice(at, at + self._model.max_logits)
            slots = plan.sample_slots[sample[part]]
            logits = self._logits(hidden[part])
            beams = state.beam_width[slots] > 0
            if not beams.any():
                self._draw(drawn, sample[part], slots, logits)
                continue
            for draw, chosen in ((self._draw, np.flatnonzero(~beams)), (self._draw_candidates, np.flatnonzero(beams))):
                if len(chosen):
                    own = logits if len(chosen) == len(slots) else logits[torch.from_numpy(chosen)]
                    draw(drawn, sample[part][chosen], slots[chosen], own)
        return drawn

    def _draw(self, drawn: Drawn, sample: npt.NDArray[np.intp], slots: Ints, logits: Tensor) -> None:
        """One token for each of ``slots`` [R], samples ``sample`` [R] of the plan, from ``logits`` [R, V]."""
        token, status, logprobs = self._sampler.draw(logits, slots)
        for j, (where, slot) in enumerate(zip(sample.tolist(), slots.tolist(), strict=True)):
            row = self._finish(slot, token[j], SampleStatus(status[j]), logprobs[j])
            drawn.written.append(row)
            drawn.ends[where] = row.end
            if row.tokens:
                drawn.counts[where], drawn.token[where] = 1, row.tokens[0]

    def _draw_candidates(self, drawn: Drawn, sample: npt.NDArray[np.intp], slots: Ints, logits: Tensor) -> None:
        """The likeliest tokens of beams; a beam whose row cannot be used has none and ends."""
        candidates = self._sampler.candidates(logits, slots)
        for where, slot, found in zip(sample.tolist(), slots.tolist(), candidates, strict=True):
            if found is None:
                self.state.ended[slot] = True
                drawn.ends[where] = int(EndReason.ERROR)
            else:
                drawn.counts[where] = len(found[0])
                drawn.candidates[where] = found

    def _fork(self, slots: Ints, rows: Rows, row_of: npt.NDArray[np.intp]) -> None:
        """A sample for a slot other than its row's (rule R5): that slot shares what the row has computed."""
        leaders = rows.slots[row_of]
        children = slots != leaders
        if not children.any():
            return
        if np.isin(slots[children], rows.slots).any():
            raise PlanError("a slot is sampled from the row of another one and has a row itself")
        for slot, leader in zip(slots[children].tolist(), leaders[children].tolist(), strict=True):
            self.state.fork(slot, leader)

    def _finish(self, slot: int, token: int, status: SampleStatus, logprobs: TokenLogprobs | None) -> OutputRow:
        """Append a drawn token, decide whether the sequence ends, and say so."""
        state, sequence = self.state, self.state.sequence(slot)
        position = int(state.num_tokens[slot] - state.output_start[slot])
        who = (sequence.request_id, sequence.choice, sequence.attempt, position)
        if status is not SampleStatus.FINE:
            state.ended[slot] = True
            return OutputRow(*who, (), int(EndReason.ERROR), problem=Problem(PROBLEMS[status]))
        state.append(slot, token)
        end, stop_token = EndReason.NONE, -1
        if token in sequence.stop_ids and state.num_tokens[slot] > state.min_total[slot]:
            end, stop_token = EndReason.STOP, token
        elif state.num_tokens[slot] >= state.max_total[slot]:
            end = EndReason.LENGTH
        state.ended[slot] = end is not EndReason.NONE
        own = None if logprobs is None else (logprobs,)
        if position:
            return OutputRow(*who, (token,), int(end), stop_token, own)
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
        cached_tokens = sequence.cached_tokens
        return OutputRow(*who, (token,), int(end), stop_token, own, prompt_logprobs, cached_tokens=cached_tokens)

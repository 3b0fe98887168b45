"""One step from plan to output: pages, forward pass, sampling, ends. Pure compute: no sockets, no log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from octavo_executor.batch import BatchState, PlanError
from octavo_executor.device import Device, Work
from octavo_executor.forward import StepForward
from octavo_executor.host_pages import HostPages, PageMover
from octavo_executor.kv_cache import KvCache
from octavo_executor.lanes import Lane
from octavo_executor.model import Transformer
from octavo_executor.sampler import BeamDraw, Draw, Sampler
from octavo_executor.step_work import Drawn, Launched, PromptPart, Rows, SamplePart, Samples, StreamClock
from octavo_executor.tables import DeviceTables
from octavo_executor.warm_up import warm_up_plans
from octavo_kernels import Kernels, SampleStatus
from octavo_shared.plan import NO_FLOATS, NO_INTS, OutputRow, StepOutput, StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, Problem, TokenLogprobs

Ints = npt.NDArray[np.int32]

PROBLEMS = {
    SampleStatus.NOT_FINITE: "The model's output for this request is not finite.",
    SampleStatus.NOTHING_LEFT: "Every token was ruled out by logit_bias or min_tokens.",
}


class Runner:
    """Owns the batch state and drives the transformer. Not thread-safe: plans run strictly in order (rule R1).

    A step has two halves. ``launch`` does what the host can do alone and enqueues the rest; it never waits for the device.
    ``collect`` waits for the step's results and decides who has ended. On a GPU the next step is launched before this one is
    collected: its inputs are then still on their way, and only the device ever sees them.
    """

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
        """Without ``host`` there is no host tier. The device is the model's."""
        self._model, self._cache, self._kernels = model, cache, kernels
        self._device: Device = model.device
        self._moves = PageMover(cache, host or HostPages(cache, kernels, 0, self._device), kernels, self._device)
        self.state = BatchState(
            max_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            eos=frozenset(model.spec.eos_token_ids),
        )
        self._tables = DeviceTables(self.state, self._device, kernels)
        on_host = self._device.host_memory
        self._sampler = Sampler(self.state, kernels, self._tables.tokens, model.spec.vocab_size, appends=not on_host)
        self._forward = StepForward(model, kernels, self.state, self._tables)
        inputs = model.inputs
        staging = None if on_host else inputs.staging
        self._lanes = [Lane(self._device, staging, inputs.header_words) for _ in range(self._device.depth)]
        self._free = list(self._lanes)
        # What was made so far, weights included, was made on other streams than those of steps.
        self._device.synchronize()

    @property
    def depth(self) -> int:
        """How many steps may be under way: with fewer, the device would wait for the host between steps."""
        return self._device.depth

    def capture_graphs(self, sizes: Iterable[int], progress: Callable[[float], None] | None = None) -> None:
        """Capture steps of decodes with each of ``sizes`` rows, where the device can; ``progress`` is told the fraction done.

        Nothing may be under way.
        """
        self._forward.capture(sizes, progress)

    def warm_up(self) -> None:
        """Run steps of the largest size: kernels are compiled, and memory is at its peak. What pages hold is lost.

        Nothing may be under way; every sequence is forgotten.
        """
        self.reset()
        for plan in warm_up_plans(self.state, self._model.max_tokens, self._moves.num_host_pages):
            self.execute(plan)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence and every step under way: the next plan begins a new epoch."""
        self._device.synchronize()
        for lane in self._lanes:
            lane.clear()
        self._free = list(self._lanes)
        self._moves.clear()
        self.state.clear()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan. A row that fails alone ends alone, with ERROR.

        Raises:
            PlanError: the plan contradicts what is held. After this or any other exception the step did not happen,
                and what is held means nothing until ``reset``.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; at most ``depth`` may be under way. Never waits for the device.

        Raises:
            PlanError: as for ``execute``. Steps under way can still be collected.
        """
        assert self._free, "more steps under way than there are lanes"
        begun = time.perf_counter()
        with torch.inference_mode():
            if len(plan.row_drafts):
                raise PlanError("this executor has no speculation")
            self._moves.check(plan)
            changes = self.state.apply(plan)
            rows = self._rows(plan)
            self.state.num_computed[rows.slots] = rows.starts + rows.counts
            step = Launched(plan, rows, self._samples(plan, rows), self._free.pop(0))
            self._plan_sampling(step)
            updates = self._tables.stage(changes, step.lane.uploads)
            moves = self._moves.stage(plan, step.lane.uploads)
            forward, has_logits = self._forward.plan(step)
            self.state.expect(step.samples.slots[: step.samples.num_draws])
            step.lane.uploads.send()
            if updates is not None:
                self._device.compute.submit(updates)
            step.moves = self._moves.begin(plan, moves, self._written(plan, rows))
            step.prepare_s = time.perf_counter() - begun
            self._compute(step, forward, has_logits)
            return step

    def collect(self, step: Launched) -> StepOutput:
        """Wait for the results of the oldest step under way, and say what came of it."""
        assert step.lane.done is not None, "a step is collected once"
        assert step.clock is not None
        step.lane.done.synchronize()
        restore_s = self._moves.finish(step.moves)
        begun = time.perf_counter()
        for prompt in step.prompts:
            prompt.kept.extend(prompt.scores.read())
        plan, drawn = step.plan, Drawn.of(len(step.plan.sample_slots))
        for part in step.drawn:
            if isinstance(part.draw, BeamDraw):
                self._read_beams(step.samples, part.part, part.draw, drawn)
            else:
                self._read_draws(step.samples, part.part, part.draw, drawn)
        timings = StepTimings(
            prepare_s=step.prepare_s,
            forward_s=step.clock.seconds("forward"),
            sample_s=step.clock.seconds("sample") + time.perf_counter() - begun,
            restore_s=restore_s,
        )
        step.lane.clear()
        self._free.append(step.lane)
        scores = drawn.scores() if drawn.candidates else NO_FLOATS
        result = StepResult(
            plan.term, plan.epoch, plan.step, drawn.counts, drawn.tokens(), drawn.ends, timings=timings, scores=scores
        )
        return StepOutput(result, tuple(drawn.written[i] for i in sorted(drawn.written)))

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

    def _samples(self, plan: StepPlan, rows: Rows) -> Samples:
        """The samples that are drawn; forks get what the row that they are sampled from has computed."""
        first_sample = np.cumsum(plan.row_samples) - plan.row_samples
        samples = plan.row_samples[rows.index]
        # One entry per sample: its place in the plan, its row.
        row_of = np.repeat(np.arange(len(rows.slots)), samples)
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(samples) - samples, samples)
        index = (first_sample[rows.index][row_of] + within).astype(np.intp)
        alive = ~self.state.ended[plan.sample_slots[index]]
        index, row_of = index[alive], row_of[alive]
        slots = plan.sample_slots[index]
        leaders = rows.slots[row_of]
        children = slots != leaders
        if children.any() and np.isin(slots[children], rows.slots).any():
            raise PlanError("a slot is sampled from the row of another one and has a row itself")
        for slot, leader in zip(slots[children].tolist(), leaders[children].tolist(), strict=True):
            self.state.fork(slot, leader)
        return Samples.of(self.state, index, row_of, slots)

    def _plan_sampling(self, step: Launched) -> None:
        rows, samples, most = step.rows, step.samples, self._model.max_logits
        self._plan_prompt_scores(step)
        for part in samples.parts(most):
            slots = samples.slots[part]
            kind = self._sampler.draw if part.start < samples.num_draws else self._sampler.beams
            hidden = self._forward.hidden(rows.query_start[1:][samples.row_of[part]] - 1, step.lane)
            step.drawn.append(SamplePart(part, hidden, kind(slots, step.lane)))

    def _plan_prompt_scores(self, step: Launched) -> None:
        """Every prompt token whose predecessor is computed in this step."""
        state, rows = self.state, step.rows
        for i in np.flatnonzero(state.prompt_logprobs[rows.slots] >= 0).tolist():
            slot, start = int(rows.slots[i]), int(rows.starts[i])
            kept = state.sequence(slot).prompt_logprobs
            if kept is None:
                continue
            scored = min(start + int(rows.counts[i]), int(state.output_start[slot]) - 1) - start
            for done in range(0, scored, self._model.max_logits):
                n = min(self._model.max_logits, scored - done)
                first = int(rows.query_start[i]) + done
                hidden = self._forward.hidden(np.arange(first, first + n, dtype=np.int32), step.lane)
                target = state.tokens[slot, start + done + 1 : start + done + 1 + n]
                wanted = np.full(n, state.prompt_logprobs[slot], np.int32)
                scores = self._sampler.scores(wanted, step.lane)
                step.prompts.append(PromptPart(hidden, step.lane.uploads.put(target), scores, kept))

    def _score(self, prompt: PromptPart) -> Work:
        return lambda: prompt.scores.run(self._model.last_logits(len(prompt.hidden.rows)), prompt.target)

    def _draw(self, part: SamplePart) -> Work:
        return lambda: part.draw.run(self._model.last_logits(len(part.hidden.rows)))

    def _written(self, plan: StepPlan, rows: Rows) -> Ints:
        """The pages that rows write, if anyone asks."""
        if not len(rows.slots) or not (len(plan.copy_out) or self._moves.saving):
            return NO_INTS
        block = self._cache.block_size
        first, last = rows.starts // block, (rows.starts + rows.counts - 1) // block
        counts = last - first + 1
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        pages: Ints = self.state.tables[np.repeat(rows.slots, counts), np.repeat(first, counts) + within]
        return pages

    def _compute(self, step: Launched, forward: Work | None, has_logits: bool) -> None:
        """Enqueue layers, logits, sampling, and the way of the results to the host."""
        compute, fetch = self._device.compute, self._device.fetch
        step.clock = clock = StreamClock(compute)
        if forward is not None:
            compute.submit(forward)
        for prompt in step.prompts:
            compute.submit(self._forward.logits(prompt.hidden))
            clock.mark("forward")
            compute.submit(self._score(prompt))
            clock.mark("sample")
        for part in step.drawn:
            if not has_logits:
                compute.submit(self._forward.logits(part.hidden))
            clock.mark("forward")
            compute.submit(self._draw(part))
            clock.mark("sample")
        clock.mark("forward")
        fetch.wait(compute.record())
        step.lane.results.bring()
        step.lane.done = fetch.record()

    def _read_draws(self, samples: Samples, part: slice, draw: Draw, drawn: Drawn) -> None:
        """One token for each sample of ``part``; those of sequences that ended meanwhile concern nobody."""
        tokens, statuses, logprobs = draw.read()
        for i, token, status, scored in zip(range(part.start, part.stop), tokens, statuses, logprobs, strict=True):
            if samples.sequences[i].over:
                continue
            row = self._finish(samples, i, token, SampleStatus(status), scored)
            where = int(samples.index[i])
            drawn.written[where] = row
            drawn.ends[where] = row.end
            if row.tokens:
                drawn.counts[where], drawn.token[where] = 1, token

    def _read_beams(self, samples: Samples, part: slice, draw: BeamDraw, drawn: Drawn) -> None:
        """The likeliest tokens of beams; a beam whose row cannot be used has none and ends."""
        for i, found in zip(range(part.start, part.stop), draw.read(), strict=True):
            where, sequence = int(samples.index[i]), samples.sequences[i]
            if sequence.over:
                continue
            if found is None:
                self.state.end(int(samples.slots[i]), sequence)
                drawn.ends[where] = int(EndReason.ERROR)
            else:
                drawn.counts[where] = len(found[0])
                drawn.candidates[where] = found

    def _finish(
        self, samples: Samples, i: int, token: int, status: SampleStatus, logprobs: TokenLogprobs | None
    ) -> OutputRow:
        """A drawn token joins its sequence: whether that ends, and the row that says so."""
        sequence, slot, at = samples.sequences[i], int(samples.slots[i]), int(samples.num_tokens[i])
        position = at - int(samples.output_start[i])
        who = (sequence.request_id, sequence.choice, sequence.attempt, position)
        if status is not SampleStatus.FINE:
            self.state.end(slot, sequence)
            return OutputRow(*who, (), int(EndReason.ERROR), problem=Problem(PROBLEMS[status]))
        self.state.arrive(slot, sequence, at, token)
        end, stop_token = EndReason.NONE, -1
        if token in sequence.stop_ids and at + 1 > samples.min_total[i]:
            end, stop_token = EndReason.STOP, token
        elif at + 1 >= samples.max_total[i]:
            end = EndReason.LENGTH
        if end is not EndReason.NONE:
            self.state.end(slot, sequence)
        own = None if logprobs is None else (logprobs,)
        if position:
            return OutputRow(*who, (token,), int(end), stop_token, own)
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
        cached_tokens = sequence.cached_tokens
        return OutputRow(*who, (token,), int(end), stop_token, own, prompt_logprobs, cached_tokens=cached_tokens)

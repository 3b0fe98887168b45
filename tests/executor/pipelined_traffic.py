"""Traffic for a runner with steps under way: plans made before the results of the last ones are there, as a scheduler makes them.

Requests start, fork, stop at tokens nobody foresaw, are preempted, have their pages saved on the host and come back on restored
ones; slots and pages are reused at the first opportunity. All choices depend on a seed and on what came out.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from plan_maker import MAX_SEQS, PlanMaker, Running, ints, moves
from tiny_models import random_tokens

from octavo_executor.runner import Runner
from octavo_executor.step_work import Launched
from octavo_shared.plan import StepOutput, StepPlan
from octavo_shared.records import SamplingParams

# So few that pages are reused at once.
PAGES = 26
HOST_PAGES = 7


@dataclass
class Resumable:
    """A preempted sequence. ``saved`` host pages hold its first blocks; ``pages`` are where they are being restored to."""

    sequence: Running
    prompt: list[int]
    sampling: SamplingParams
    serial_tokens: list[int]
    after: int  # the last plan that names it, or that restores its pages
    saved: list[int] = field(default_factory=list)
    pages: list[int] | None = None


class Traffic:
    """Runs until ``steps`` plans were made, then everything to its end. Keeps all plans, and the outputs in their order."""

    def __init__(self, runner: Runner, seed: int, steps: int = 60) -> None:
        self.maker = PlanMaker(runner)
        self.maker.free = self.maker.free[:PAGES]
        self.plans: list[StepPlan] = []
        self.outputs: list[StepOutput] = []
        self._runner, self._random, self._steps = runner, random.Random(seed), steps
        self._under_way: deque[tuple[StepPlan, Launched]] = deque()
        self._by_serial: dict[int, Running] = {}
        self._requests: dict[int, tuple[list[int], SamplingParams, list[int]]] = {}
        self._resumable: list[Resumable] = []
        self._host_free = list(range(HOST_PAGES))
        self._collected = 0

    def run(self) -> list[StepOutput]:
        """All outputs."""
        while len(self.plans) < self._steps or self.maker.running or self._resumable:
            plan = self._plan()
            self.plans.append(plan)
            self._under_way.append((plan, self._runner.launch(plan)))
            while len(self._under_way) >= self._runner.depth or (self._under_way and self._random.random() < 0.2):
                self._collect()
            assert len(self.plans) < 50 * self._steps, "it does not come to an end"
        while self._under_way:
            self._collect()
        self._runner.state.check_integrity()
        return self.outputs

    def _collect(self) -> None:
        plan, launched = self._under_way.popleft()
        output = self._runner.collect(launched)
        self.outputs.append(output)
        self._collected = plan.step
        for row in output.rows:
            sequence = self._by_serial[row.request_id.serial]
            sequence.outputs.append(row)
            sequence.over = row.end != 0

    # --- what a plan does ---

    def _plan(self) -> StepPlan:
        chance = self._random.random
        more: dict[str, object] = {}
        for sequence in list(self.maker.running.values()):
            if sequence.over:
                self.maker.release(sequence)
        if chance() < 0.15 and (victims := [s for s in self.maker.running.values() if s.computed]):
            more |= self._preempt(self._random.choice(victims))
        more |= self._restore()
        self._resume()
        while len(self.plans) < self._steps and len(self.maker.running) < MAX_SEQS and chance() < 0.5:
            self._admit()
        if (leader := self._leader()) is not None:
            return replace(self._fork(leader), **more)
        return self.maker.plan(self._rows(), **more)

    def _leader(self) -> Running | None:
        """One that can compute the rest of its prompt and have it sampled into another slot too."""
        if len(self.maker.running) == MAX_SEQS or self._random.random() < 0.7:
            return None
        for sequence in self.maker.running.values():
            prompt, _, drawn = self._requests[sequence.serial]
            if (
                sequence.known == len(prompt) > sequence.computed
                and not drawn
                and self._pages(sequence, 100) < len(self.maker.free)
            ):
                return sequence
        return None

    def _fork(self, leader: Running) -> StepPlan:
        """What a choice of the same request draws, it draws from the same row; both then write behind shared pages."""
        prompt, sampling, _ = self._requests[leader.serial]
        plan, (child,) = self.maker.fork(leader, [(sampling, self._random.randrange(1000))])
        self._by_serial[child.serial] = child
        self._requests[child.serial] = (prompt, sampling, [])
        return plan

    def _pages(self, sequence: Running, count: int) -> int:
        """What the next plan takes for ``count`` tokens: new pages, and a copy of a shared one."""
        at, count = sequence.computed // self.maker.block, min(count, sequence.known - sequence.computed)
        shared = at < len(sequence.table) and self.maker.holders[sequence.table[at]] > 1
        return -(-(sequence.computed + count) // self.maker.block) - len(sequence.table) + shared

    def _admit(self) -> None:
        prompt = random_tokens(self._random.choice([1, 3, 15, 16, 17, 40]), self._random.randrange(10**6))
        random_row = self._random.random() < 0.7
        sampling = SamplingParams(
            temperature=1.0 if random_row else 0.0,
            top_p=self._random.choice([1.0, 0.9]),
            frequency_penalty=0.7,
            repetition_penalty=1.2,
            seed=self._random.randrange(1000),
            max_tokens=self._random.choice([1, 2, 9, 30]),
            ignore_eos=True,
            stop_token_ids=tuple(range(100, 110)),
            min_tokens=self._random.choice([0, 3]),
            logprobs=self._random.choice([None, None, 2]),
            prompt_logprobs=self._random.choice([None, None, 1]),
        )
        self._start(prompt, sampling, [], [], 0)

    def _start(
        self, prompt: list[int], sampling: SamplingParams, drawn: list[int], pages: list[int], computed: int
    ) -> None:
        maker = self.maker
        fields = {"output_start": len(prompt), "num_computed": computed, "block_table": ints(*pages)}
        sequence = maker.admit(prompt + drawn, sampling, **fields)
        self._by_serial[sequence.serial] = sequence
        self._requests[sequence.serial] = (prompt, sampling, drawn)

    def _planned_outputs(self, sequence: Running) -> int:
        return sequence.known - len(self._requests[sequence.serial][0])

    def _rows(self) -> list[tuple[Running, int]]:
        rows, budget = [], 100
        for sequence in self._random.sample(
            sorted(self.maker.running.values(), key=lambda s: s.slot), len(self.maker.running)
        ):
            wanted = sequence.known - sequence.computed
            # Rule R6: nothing is planned past the length. Once in a while it is, and comes to nothing.
            full = self._planned_outputs(sequence) >= self._requests[sequence.serial][1].max_tokens
            if not wanted or sequence.over or (full and self._random.random() < 0.8):
                continue
            count = min(wanted, self._random.choice([wanted, 7, 16]), budget)
            pages = self._pages(sequence, count)
            if count and pages <= len(self.maker.free) and self._random.random() < 0.9:
                rows.append((sequence, count))
                budget -= count
                # What ``plan`` will take.
                reserved = [self.maker.free.pop() for _ in range(max(pages, 0))]
                self._reserve(reserved)
        self._give_back()
        if not rows and not any(s.computed < s.known for s in self.maker.running.values() if not s.over):
            return []
        return rows

    def _reserve(self, pages: list[int]) -> None:
        self._reserved = [*getattr(self, "_reserved", []), *pages]

    def _give_back(self) -> None:
        self.maker.free += reversed(getattr(self, "_reserved", []))
        self._reserved = []

    # --- preemption and the host tier ---

    def _preempt(self, sequence: Running) -> dict[str, object]:
        """Let go of it; its full pages go to the host while others already write into them."""
        prompt, sampling, drawn = self._requests[sequence.serial]
        full = min(sequence.computed // self.maker.block, len(self._host_free))
        saved = [self._host_free.pop() for _ in range(full)]
        out = moves(*zip(sequence.table[:full], saved, strict=True))
        self.maker.release(sequence)
        self._resumable.append(Resumable(sequence, prompt, sampling, drawn, len(self.plans) + 1, saved))
        return {"copy_out": out} if full else {}

    def _restore(self) -> dict[str, object]:
        """Bring one's pages back, on pages that were just given up if there are any."""
        for one in self._resumable:
            if (
                one.saved
                and one.pages is None
                and one.after <= self._collected
                and len(self.maker.free) >= len(one.saved)
            ):
                one.pages = [self.maker.free.pop() for _ in one.saved]
                one.after = len(self.plans) + 1
                return {"restores": moves(*zip(one.saved, one.pages, strict=True))}
        return {}

    def _resume(self) -> None:
        for one in list(self._resumable):
            if one.after > self._collected or (one.saved and one.pages is None):
                continue
            over = one.sequence.over
            if len(self.maker.running) >= MAX_SEQS and not over:
                continue
            self._resumable.remove(one)
            self._host_free += one.saved
            pages = one.pages or []
            if over:
                self.maker.free += pages
                continue
            drawn = one.serial_tokens + one.sequence.tokens
            self._start(one.prompt, one.sampling, drawn, pages, len(pages) * self.maker.block)

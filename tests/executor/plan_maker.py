"""A bare-handed scheduler: gives sequences slots and pages and writes plans for a runner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo_executor.device import Device
from octavo_executor.host_pages import HostPages
from octavo_executor.kv_cache import KvCache, choose_page_dtype
from octavo_executor.model import Transformer
from octavo_executor.runner import Runner
from octavo_executor.spec import read_spec
from octavo_executor.weights import choose_dtypes, load_weights
from octavo_kernels import Kernels, choose_kernels
from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, OutputRow, PageMoves, StepOutput, StepPlan
from octavo_shared.records import SamplingParams

MAX_MODEL_LEN = 200
MAX_SEQS = 6


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def moves(*pairs: tuple[int, int]) -> PageMoves:
    """Page moves (source, destination)."""
    return PageMoves(ints(*(a for a, _ in pairs)), ints(*(b for _, b in pairs)), np.zeros(len(pairs), np.uint32))


def make_runner(
    folder: Path,
    backend: str = "cpu",
    block_size: int = 16,
    max_logits: int = 5,
    *,
    dtype: str = "float32",
    host_pages: int = 0,
    device: Device | None = None,
    graph_sizes: tuple[int, ...] = (),
    page_dtype: str = "auto",
    kernels: Kernels | None = None,
) -> Runner:
    """A runner over the tiny model in ``folder``; few logits at once, so that chunks of them are exercised."""
    spec = read_spec(folder)
    kernels = kernels or make_kernels(backend, spec.head_dim, block_size)
    dtypes = choose_dtypes(dtype, spec.checkpoint_dtype, kernels)
    cache = KvCache(spec, 80, block_size, choose_page_dtype(page_dtype, dtypes.kv, spec, block_size, kernels), kernels)
    spoil(cache)
    model = Transformer(
        spec,
        load_weights(folder, spec, kernels, dtypes),
        kernels,
        cache,
        dtypes,
        max_model_len=MAX_MODEL_LEN,
        max_tokens=128,
        max_seqs=MAX_SEQS,
        max_logits=max_logits,
        device=device,
    )
    tier = HostPages(cache, kernels, host_pages, device)
    runner = Runner(model, kernels, cache, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_SEQS, host=tier)
    runner.capture_graphs(graph_sizes)
    return runner


def make_kernels(backend: str, head_dim: int, block_size: int) -> Kernels:
    return choose_kernels(
        backend, head_dim=head_dim, block_size=block_size, threads=2, max_tokens=128, max_seqs=MAX_SEQS
    )


def spoil(cache: KvCache) -> None:
    """Fill all pages with what must never be used."""
    for pages in (cache.k, cache.v):
        if pages.dtype.is_floating_point:
            pages.fill_(float("nan"))
        else:
            pages.fill_(127)


@dataclass
class Running:
    slot: int
    serial: int
    known: int  # tokens the scheduler counts, those in flight included
    computed: int
    table: list[int]
    outputs: list[OutputRow] = field(default_factory=list)
    over: bool = False

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.outputs for token in row.tokens]

    @property
    def end(self) -> int:
        return self.outputs[-1].end if self.outputs else 0


class PlanMaker:
    """Runs sequences; rows are (sequence, tokens to compute). ``check_integrity`` follows every step.

    A page that several sequences hold is copied before one of them writes into it; the last one writes in place.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block = runner.state.block_size
        self.free = np.random.default_rng(0).permutation(runner.state.num_blocks).tolist()
        self.holders: Counter[int] = Counter()
        self.copied = 0
        self.running: dict[int, Running] = {}
        self._step = 0
        self._serial = 0
        self._tokens: dict[int, list[int]] = {}
        self._released: list[int] = []
        self._admitted: list[NewSequence] = []

    def admit(
        self, tokens: list[int], sampling: SamplingParams, *, output_start: int | None = None, **fields: Any
    ) -> Running:
        """Give a sequence a slot in the next plan."""
        slot = min(set(range(MAX_SEQS)) - set(self.running))
        start = len(tokens) if output_start is None else output_start
        self._serial += 1
        given = {"num_computed": 0, "block_table": ints(), "seed": sampling.seed, **fields}
        limit = min(start + sampling.max_tokens, MAX_MODEL_LEN)
        new = NewSequence(
            slot=slot,
            request_id=RequestId("log", self._serial),
            choice=0,
            attempt=3,
            tokens=ints(*tokens),
            output_start=start,
            sampling=sampling,
            max_total_tokens=limit,
            **given,
        )
        self._admitted.append(new)
        self._tokens[self._serial] = list(tokens)
        table = given["block_table"].tolist()
        self.holders.update(table)
        self.running[slot] = Running(slot, self._serial, len(tokens), given["num_computed"], table)
        return self.running[slot]

    def release(self, sequence: Running) -> None:
        """Give its slot and pages up in the next plan."""
        del self.running[sequence.slot]
        self._released.append(sequence.slot)
        for page in sequence.table:
            self._let_go(page)

    def _let_go(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)

    def _take(self) -> int:
        page: int = self.free.pop()
        self.holders[page] = 1
        return page

    def fork(self, leader: Running, children: list[tuple[SamplingParams, int]]) -> tuple[StepPlan, list[Running]]:
        """The plan that computes the rest of a leader's tokens and samples them into children (sampling, seed) too."""
        start, tokens = leader.computed, self._tokens[leader.serial]
        plan = self.plan([(leader, leader.known - start)])
        family = [
            self.admit(tokens, sampling, seed=seed, num_computed=start, block_table=ints(*leader.table))
            for sampling, seed in children
        ]
        for child in family:
            child.computed, child.known = leader.computed, leader.known
        plan = replace(
            plan,
            admit=(*plan.admit, *self._admitted),
            row_samples=ints(1 + len(family)),
            sample_slots=ints(leader.slot, *(child.slot for child in family)),
        )
        self._admitted = []
        return plan, family

    def plan(self, rows: list[tuple[Running, int]], **fields: Any) -> StepPlan:
        """The next plan; a row that reaches the end of its tokens samples one more."""
        grow: list[tuple[int, int]] = []
        starts, samples, swaps, copies = [], [], [], []
        for sequence, count in rows:
            starts.append(sequence.computed)
            index = sequence.computed // self.block
            if index < len(sequence.table) and self.holders[sequence.table[index]] > 1:
                shared, sequence.table[index] = sequence.table[index], self._take()
                self._let_go(shared)
                copies.append((shared, sequence.table[index]))
                swaps.append((sequence.slot, index, sequence.table[index]))
            sequence.computed += count
            while len(sequence.table) * self.block < sequence.computed:
                sequence.table.append(self._take())
                grow.append((sequence.slot, sequence.table[-1]))
            samples.append(int(sequence.computed == sequence.known))
            sequence.known += samples[-1]
        self._step += 1
        self.copied += len(copies)
        fields = {"copies": moves(*copies)} | fields
        if swaps:
            names = ("swap_slots", "swap_indices", "swap_blocks")
            fields |= {name: ints(*column) for name, column in zip(names, zip(*swaps, strict=True), strict=True)}
        plan = StepPlan(
            1,
            1,
            self._step,
            release=ints(*self._released),
            admit=tuple(self._admitted),
            grow_slots=ints(*(slot for slot, _ in grow)),
            grow_blocks=ints(*(block for _, block in grow)),
            row_slots=ints(*(sequence.slot for sequence, _ in rows)),
            row_starts=ints(*starts),
            row_tokens=ints(*(count for _, count in rows)),
            row_samples=ints(*samples),
            sample_slots=ints(*(s.slot for (s, _), n in zip(rows, samples, strict=True) if n)),
            **fields,
        )
        self._released, self._admitted = [], []
        return plan

    def run(self, plan: StepPlan) -> StepOutput:
        """Execute and hand the outputs to their sequences."""
        output = self.runner.execute(plan)
        self.runner.state.check_integrity()
        by_serial = {sequence.serial: sequence for sequence in self.running.values()}
        for row in output.rows:
            sequence = by_serial[row.request_id.serial]
            sequence.outputs.append(row)
            sequence.over = row.end != 0
        result = output.result
        assert len(result.sample_counts) == len(result.ends) == len(plan.sample_slots)
        # The tokens of beams are candidates, which nobody is told of.
        drawn = np.repeat(self.runner.state.beam_width[plan.sample_slots] == 0, result.sample_counts)
        assert result.tokens[drawn].tolist() == [token for row in output.rows for token in row.tokens]
        assert len(result.scores) == (~drawn).sum()
        return output

    def step(self, *rows: tuple[Running, int], **fields: Any) -> StepOutput:
        return self.run(self.plan(list(rows), **fields))

    def finish(self, *sequences: Running, chunk: int = 1000) -> None:
        """Run these sequences to their ends, prompts in chunks."""
        while active := [s for s in sequences if not s.over]:
            self.step(*((s, min(chunk, s.known - s.computed)) for s in active))

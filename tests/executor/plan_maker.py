"""A bare-handed scheduler: gives sequences slots and pages and writes plans for a runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.runner import Runner
from octavo_executor.spec import read_spec
from octavo_executor.weights import choose_dtypes, load_weights
from octavo_kernels import choose_kernels
from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, OutputRow, StepOutput, StepPlan
from octavo_shared.records import SamplingParams

MAX_MODEL_LEN = 200
MAX_SEQS = 6


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_runner(folder: Path, backend: str = "cpu", block_size: int = 16, max_logits: int = 5) -> Runner:
    """A runner over the tiny model in ``folder``; few logits at once, so that chunks of them are exercised."""
    spec = read_spec(folder)
    kernels = choose_kernels(backend, head_dim=spec.head_dim, block_size=block_size, threads=2)
    dtypes = choose_dtypes("float32", spec.checkpoint_dtype, kernels)
    cache = KvCache(spec, 80, block_size, dtypes.kv, kernels.empty)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
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
    )
    return Runner(model, kernels, cache, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_SEQS)


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
    """Runs sequences; rows are (sequence, tokens to compute). ``check_integrity`` follows every step."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block = runner.state.block_size
        self.free = np.random.default_rng(0).permutation(runner.state.num_blocks).tolist()
        self.running: dict[int, Running] = {}
        self._step = 0
        self._serial = 0
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
        table = given["block_table"].tolist()
        self.running[slot] = Running(slot, self._serial, len(tokens), given["num_computed"], table)
        return self.running[slot]

    def release(self, sequence: Running) -> None:
        """Give its slot and pages up in the next plan."""
        del self.running[sequence.slot]
        self._released.append(sequence.slot)
        self.free.extend(sequence.table)

    def plan(self, rows: list[tuple[Running, int]], **fields: Any) -> StepPlan:
        """The next plan; a row that reaches the end of its tokens samples one more."""
        grow: list[tuple[int, int]] = []
        starts, samples = [], []
        for sequence, count in rows:
            starts.append(sequence.computed)
            sequence.computed += count
            while len(sequence.table) * self.block < sequence.computed:
                sequence.table.append(self.free.pop())
                grow.append((sequence.slot, sequence.table[-1]))
            samples.append(int(sequence.computed == sequence.known))
            sequence.known += samples[-1]
        self._step += 1
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
        assert result.tokens.tolist() == [token for row in output.rows for token in row.tokens]
        return output

    def step(self, *rows: tuple[Running, int], **fields: Any) -> StepOutput:
        return self.run(self.plan(list(rows), **fields))

    def finish(self, *sequences: Running, chunk: int = 1000) -> None:
        """Run these sequences to their ends, prompts in chunks."""
        while active := [s for s in sequences if not s.over]:
            self.step(*((s, min(chunk, s.known - s.computed)) for s in active))

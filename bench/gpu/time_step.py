"""A decode step beside the sum of its parts: every kernel of it timed alone, with the weights and pages it has in the step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import QWEN3_06B, Engine, add, build, even_workload, serve, warm
from stage import Stage, Table

from octavo_executor.step_work import Launched

COLUMNS = ["seqs", "graphs", "part", "calls", "us", "ratio_to_parts", "host_us_per_call"]
# Kernels of a step besides those that record themselves as calls.
RECORDED = (
    *("prepare_inputs", "embed", "rms_norm", "add_rms_norm", "gather_add_rms_norm", "act_and_mul", "linear"),
    *("rope_kv", "attention", "sample", "put_tokens"),
)

Call = Callable[[], object]


class Recording:
    """Notes what is called of the kernels while it is on, and how long the host takes for it."""

    def __init__(self, kernels: Any) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.host_s = 0.0
        self._kernels = kernels
        self._plain = {name: getattr(kernels, name) for name in RECORDED}

    def __enter__(self) -> Recording:
        for name, call in self._plain.items():
            setattr(self._kernels, name, self._noting(name, call))
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._plain:
            delattr(self._kernels, name)

    def _noting(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: Any, **kwargs: Any) -> object:
            self.calls[name].append(lambda: call(*args, **kwargs))
            begun = time.perf_counter()
            result = call(*args, **kwargs)
            self.host_s += time.perf_counter() - begun
            return result

        return noted


def recorded_step(engine: Engine, seqs: int, length: int) -> Recording:
    """The calls of one decode step without graphs, of ``seqs`` sequences of ``length`` tokens."""
    core, runner = engine.core(), engine.runner
    add(core, even_workload(seqs, length, 8, engine.spec.vocab_size, 0.6))
    recording = Recording(engine.kernels)
    for _ in range(1000):
        plan = core.schedule()
        assert plan is not None
        decodes = len(plan.row_tokens) == seqs and int(plan.row_tokens.max()) == 1
        if not decodes:
            core.commit(runner.execute(plan).result)
            core.drain_events()
            continue
        with recording:
            step: Launched = runner.launch(plan)
        runner.collect(step)
        return recording
    raise RuntimeError("no step of decodes came")


def measure(stage: Stage, table: Table, with_graphs: Engine, without: Engine, seqs: int) -> None:
    """The rows of one batch size."""
    length, outputs = stage.pick((1024, 64), (9, 3))
    recording = recorded_step(without, seqs, length)
    total = 0.0
    with torch.inference_mode():
        for name, calls in recording.calls.items():

            def work(calls: list[Call] = calls, name: str = name) -> None:
                if name == "attention":
                    without.kernels.start_step()
                for call in calls:
                    call()

            seconds = stage.time(work, 10).median_s
            total += seconds
            table.add(seqs=seqs, part=name, calls=len(calls), us=1e6 * seconds)
    count = sum(map(len, recording.calls.values()))
    per_call = 1e6 * recording.host_s / count
    table.add(seqs=seqs, part="sum", calls=count, us=1e6 * total, ratio_to_parts=1.0, host_us_per_call=per_call)
    for engine, graphs in ((with_graphs, "on"), (without, "off")):
        load = serve(engine, even_workload(seqs, length, outputs, engine.spec.vocab_size, 0.6))
        _, seconds, host_s = load.typical()
        table.add(
            seqs=seqs,
            graphs=graphs,
            part="step",
            us=1e6 * seconds,
            ratio_to_parts=seconds / total,
            host_us_per_call=1e6 * host_s / count,
        )


def run(stage: Stage, path: Path) -> int:
    """The section."""
    table = Table(path, COLUMNS)
    without = build(stage, QWEN3_06B, graphs=False, seq_tokens=1152)
    with_graphs = build(stage, QWEN3_06B, graphs=True, weights=without.weights, seq_tokens=1152)
    for engine in (without, with_graphs):
        warm(engine, stage)
    for seqs in stage.pick((256, 32, 1), (2,)):
        measure(stage, table, with_graphs, without, seqs)
    return 0

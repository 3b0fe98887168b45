"""An executor times a few steps before it attaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from late_device import LateDevice
from plan_maker import PlanMaker, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_executor import measure
from octavo_executor.load import load_model
from octavo_executor.measure import measure_steps
from octavo_executor.runner import Runner
from octavo_shared.plan import MeasuredStep, StepOutput, StepPlan
from octavo_shared.records import SamplingParams
from octavo_shared.settings import ExecutorSettings, load_settings

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    save_tiny_model("llama", path)
    return path


class Clock:
    """Time that passes only in steps: so much in each, for rows, tokens and pages before them, and more in some by their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float, extra_s: dict[int, float] | None = None) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now_s)
        execute = Runner.execute

        def timed(runner: Runner, plan: StepPlan) -> StepOutput:
            output = execute(runner, plan)
            self.plans.append(plan)
            self.now_s += self.true_s(step_s, plan) + (extra_s or {}).get(len(self.plans), 0.0)
            assert all(row.problem is None for row in output.rows)
            return output

        monkeypatch.setattr(Runner, "execute", timed)

    @staticmethod
    def true_s(step_s: float, plan: StepPlan) -> float:
        pages = plan.row_starts // 16
        return step_s * (1 + 0.1 * len(plan.row_slots) + 0.2 * int((plan.row_tokens * (1 + pages)).sum()))


def expected(step_s: float, prompt_tokens: int, sequences: int, pages: int = 0) -> MeasuredStep:
    seconds = step_s * (1 + 0.1 * sequences + 0.2 * (prompt_tokens or sequences) * (1 + pages))
    return MeasuredStep(prompt_tokens, sequences, pytest.approx(seconds), 16 * pages)  # type: ignore[arg-type]


def test_steps_of_every_kind_are_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    Clock(monkeypatch, 0.001)
    kinds = ((0, 6), (0, 1), (16, 1), (128, 1), (16, 1, 11))
    assert measure_steps(runner, 128) == tuple(expected(0.001, *kind) for kind in kinds)


def test_what_happens_once_or_comes_between_is_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    clock = Clock(monkeypatch, 0.001, {1: 60.0, 3: 1.0, 7: 1.0})
    assert measure_steps(runner, 128)[:4] == tuple(
        expected(0.001, *kind) for kind in ((0, 6), (0, 1), (16, 1), (128, 1))
    )
    assert len(clock.plans) == 11


def test_where_steps_are_long_few_are_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    clock = Clock(monkeypatch, 10.0)
    kinds = ((0, 6), (0, 1), (16, 1), (32, 1), (16, 1, 11))
    assert measure_steps(runner, 128) == tuple(expected(10.0, *kind) for kind in kinds)
    assert len(clock.plans) == 6


@pytest.mark.parametrize("device", [None, LateDevice(2)])
def test_nothing_of_it_is_left(folder: Path, device: LateDevice | None) -> None:
    drawn = []
    for measured in (True, False):
        runner = make_runner(folder, device=device if measured else None)
        if measured:
            assert len(measure_steps(runner, 128)) == 5
            assert not runner.state.live.any()
        maker = PlanMaker(runner)
        sequence = maker.admit(random_tokens(40, 3), GREEDY)
        maker.finish(sequence)
        drawn.append(sequence.tokens)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ({"max_model_len": 64, "max_num_seqs": 3}, [(0, 3), (0, 1), (16, 1), (60, 1), (16, 1, 32)]),
        ({"max_model_len": 64, "max_num_seqs": 1}, [(0, 1), (16, 1), (60, 1), (16, 1, 32)]),
        ({"max_model_len": 20, "num_gpu_blocks_override": 2}, [(0, 8), (0, 1), (16, 1)]),
        ({"max_model_len": 36, "num_gpu_blocks_override": 4, "block_size": 64}, [(0, 8), (0, 1), (16, 1), (32, 1)]),
        (
            {"max_model_len": 99, "max_num_batched_tokens": 40, "max_num_seqs": 2},
            [(0, 2), (0, 1), (16, 1), (40, 1), (16, 1, 64)],
        ),
        ({"max_model_len": 19, "num_gpu_blocks_override": 2}, []),
        ({"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 15}, []),
    ],
)
def test_an_executor_says_what_it_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], kinds: list[tuple[int, ...]]
) -> None:
    Clock(monkeypatch, 0.0005)
    info = load_model(load_settings(ExecutorSettings, model=str(folder), device="cpu", **flags), "e").info
    said = dict.fromkeys((step.prompt_tokens, step.sequences, step.context_tokens) for step in info.measured)
    assert list(said) == [(*kind, 0)[:3] for kind in kinds]

"""bench/gpu.sh: rehearsed on the CPU, its launches compiled ahead of time, and what it makes of what it measures."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench" / "gpu"), str(ROOT / "tests" / "executor")]

import stage as gpu_stage  # noqa: E402
import summary  # noqa: E402 - a folder of scripts
import time_prefill  # noqa: E402
from late_device import LateDevice  # noqa: E402 - tests of the executor have it
from models import QWEN3_06B, answers, build, even_workload, nano_vllm_workload  # noqa: E402 - a folder of scripts
from sections import SECTIONS, Job, Outcome, Process  # noqa: E402
from stage import Finding, Stage, Table, run_checks, run_timings  # noqa: E402


def run(folder: Path, *options: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bench/gpu.sh", str(folder), "--workers", "2", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.timeout(900)
def test_a_rehearsal_of_all_sections(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny", "--limit", "800", timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "summary.md").read_text()
    assert "| ✓ | kernels against float64 | no case fails | 0 of" in page
    for section in SECTIONS:
        assert f"| {section.name} | passed |" in page
    timed = {row["section"] for name in ("attention", "serving", "step") for row in rows_of(tmp_path / f"{name}.csv")}
    assert timed == {section.name.removesuffix("-large") for section in SECTIONS if section.kind == "times"}
    rows = rows_of(tmp_path / "checks.csv")
    assert {row["section"] for row in rows} == {section.name for section in SECTIONS if section.kind == "checks"}
    assert all(row["passed"] == "True" and float(row["error"]) <= float(row["limit"]) * 4 for row in rows)
    # A machine that is lent may bring back only few files.
    assert len(list(tmp_path.iterdir())) <= 8


def test_what_finds_no_time_is_told_and_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny", "--limit", "1", "--only", "layers,decode")
    assert done.returncode == 1
    page = (tmp_path / "summary.md").read_text()
    assert "| layers | not run |" in page
    assert "| decode | not run |" in page


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    job = Job(SECTIONS[0], 0)
    process = Process(job, ["--tiny"], tmp_path, 0.2)
    while (outcome := process.outcome()) is None:
        time.sleep(0.05)
    assert outcome.status == "too long"
    assert outcome.seconds < 20


def test_a_crash_is_told(tmp_path: Path) -> None:
    process = Process(Job(SECTIONS[0], 0), ["--no-such-option"], tmp_path, 60.0)
    while (outcome := process.outcome()) is None:
        time.sleep(0.05)
    assert outcome.status == "crashed"
    assert "no-such-option" in (tmp_path / f"{outcome.job}.log").read_text()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "decodes")
    assert "no section decodes; there are attention" in done.stderr
    if not torch.cuda.is_available():
        done = run(tmp_path)
        assert done.returncode == 1
        assert "torch finds no GPU" in done.stderr


@pytest.mark.timeout(900)
def test_launches_compile(tmp_path: Path) -> None:
    compile_sections(tmp_path, "decode")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("only", [section.name for section in SECTIONS if not section.host])
def test_every_launch_compiles(tmp_path: Path, only: str) -> None:
    compile_sections(tmp_path, only)


def compile_sections(folder: Path, only: str) -> None:
    done = run(folder, "--compile", "sm_90", "--only", only, "--limit", "3500", timeout=3600)
    logs = (folder / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + logs[-3000:]
    assert "_kernel x" in logs
    assert "TOO MUCH" not in logs


def test_the_requests_are_nano_vllm_s() -> None:
    records = nano_vllm_workload()
    assert len(records) == 256
    # As its README says.
    assert sum(record.sampling.max_tokens for record in records) == 133_966
    assert sum(len(record.prompt) for record in records) == 142_827


def test_with_results_that_come_late_the_answers_are_the_same() -> None:
    """As on a GPU two steps are under way at once."""
    stage = Stage("tiny")
    plain = build(stage, QWEN3_06B, graphs=False)
    late = build(stage, QWEN3_06B, graphs=True, weights=plain.weights, device=LateDevice(5))
    assert late.runner.depth == 2
    records = even_workload(2, 5, 3, 90, 0.6)
    load, tokens = answers(late, records)
    assert tokens == answers(plain, records)[1]
    assert (load.input_tokens, load.output_tokens) == (10, 6)
    assert load.steps == 3  # where lengths alone end sequences, none is planned in vain


class PretendedEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, after: PretendedEvent) -> float:
        return 1e3 * (after.at_s - self.at_s)


class PretendedStream:
    def wait_stream(self, other: object) -> None:
        assert isinstance(other, PretendedStream)


class PretendedGraph:
    captured: ClassVar[list[PretendedGraph]] = []

    def replay(self) -> None:
        self.replays = getattr(self, "replays", 0) + 1


@contextlib.contextmanager
def pretended_capture(graph: PretendedGraph) -> Iterator[None]:
    PretendedGraph.captured.append(graph)
    yield


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage that takes the CPU for a GPU: what only a GPU runs is carried out, if with nothing behind it."""
    pretended_cuda: dict[str, Any] = {
        "Event": PretendedEvent,
        "Stream": PretendedStream,
        "CUDAGraph": PretendedGraph,
        "graph": pretended_capture,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": PretendedStream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, value in pretended_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_stage, "FLUSH_BYTES", 1 << 12)
    PretendedGraph.captured.clear()
    stage = Stage("tiny")
    stage.mode = "gpu"
    return stage


def test_timing_on_a_gpu(pretended: Stage) -> None:
    calls = []
    timing = pretended.time(lambda: calls.append(1), 5)
    assert len(calls) == 3  # twice before the capture, once in it
    assert [graph.replays for graph in PretendedGraph.captured] == [7]
    assert 0 <= timing.low_s <= timing.median_s <= timing.high_s
    pretended.time(lambda: calls.append(1), 5, graph=False, cold=False)
    assert len(calls) == 10
    pretended.wait()


def test_torch_s_own_attention(pretended: Stage) -> None:
    """A CPU has a flash attention too; where a way does not work, another one is taken, and at last none."""
    for queries in (8, 24):
        seconds = time_prefill.torchs(pretended, time_prefill.Case(1, queries, 24, (2, 1), dim=64), "flash")
        assert seconds > 0
    assert math.isnan(time_prefill.torchs(pretended, time_prefill.Case(1, 24, 24, (2, 1), dim=64), "cudnn"))
    assert math.isnan(time_prefill.torchs(pretended, time_prefill.Case(1, 24, 24, (2, 1), dim=64, window=8), "flash"))


def test_nothing_is_needed_that_comes_with_an_installation(tmp_path: Path) -> None:
    """The machine has torch, Triton, numpy and transformers; of what else this project needs, nothing."""
    code = """
import importlib.abc, sys
ABSENT = {"grpc", "redis", "hiredis", "pydantic", "pydantic_settings", "opentelemetry", "prometheus_client", "psutil",
          "google", "uvloop", "rich", "fastapi", "matplotlib", "octavo_executor.serve"}
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ABSENT or name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, "bench/gpu")
import sections, importlib
for section in sections.SECTIONS:
    importlib.import_module(section.module)
import summary, stage
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failing_check_costs_only_itself(tmp_path: Path) -> None:
    stage = Stage("tiny")
    right, wrong = torch.ones(3, 4), torch.ones(3, 4)
    wrong[1, 2] = 1.1

    def breaks(stage: Stage) -> Any:
        yield stage.close("a", "before", right, lambda: right, 1e-6, 4)
        raise RuntimeError("broken\nat length")

    def differs(stage: Stage) -> Any:
        yield stage.close("b", "", wrong, lambda: right, 1e-3, 4)
        yield stage.equal("c", "", wrong, lambda: right)
        yield stage.close("d", "NaN", torch.full((3, 4), math.nan), lambda: right, 1e-3, 4)
        yield stage.measured("e", "", lambda: math.nan, 1.0)
        yield stage.equal("f", "", right, lambda: right.clone())

    checks: Any = [("first", breaks), ("second", differs)]
    assert run_checks(stage, tmp_path / "x.csv", checks) == 1
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [row["passed"] for row in rows] == ["True", "False", "False", "False", "False", "False", "True"]
    assert rows[1]["note"] == "RuntimeError: broken"
    assert float(rows[2]["error"]) == pytest.approx(0.05)  # one of four numbers is 0.1 off, the row is 2 long
    assert run_checks(stage, tmp_path / "y.csv", [("f", lambda stage: [Finding("f", "", 0.0, 1.0, True)])]) == 0

    def measure(case: int) -> dict[str, object]:
        return {"a": 1 / case}

    assert run_timings(stage, Table(tmp_path / "z.csv", ["a"]), [1, 0, 2], measure) == 1
    assert [row["a"] for row in csv.DictReader((tmp_path / "z.csv").open())] == ["1", "0.5"]


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({key for row in rows for key in row}))
        writer.writeheader()
        writer.writerows(rows)


def decode(seqs: int, share: float, heads: str = "64/8") -> dict[str, object]:
    common = {"kind": "decode", "heads": heads, "pages": "bf16", "block": 16, "keys": "4096"}
    return {**common, "seqs": seqs, "share_of_copy": share}


def prefill(queries: int, share: float, ratio: float) -> dict[str, object]:
    common = {"kind": "whole", "heads": "32/8 of 128", "pages": "bf16 of 16", "seqs": 1, "keys": queries}
    return {**common, "queries": queries, "share_of_matmul": share, "ratio_to_flash": ratio}


def test_goals(tmp_path: Path) -> None:
    assert {goal.met for goal in summary.goals(tmp_path)} == {None}
    write(tmp_path / "attention-0.csv", [{"passed": "True"}])
    write(tmp_path / "attention-1.csv", [{"passed": "False", "check": "attention", "case": "decodes, bf16"}])
    write(tmp_path / "decode.csv", [decode(64, 0.95), decode(256, 0.91), decode(16, 0.5), decode(64, 0.2, "32/8")])
    write(tmp_path / "prefill.csv", [prefill(4096, 0.7, 1.3), prefill(8192, 0.65, math.nan), prefill(512, 0.1, 9.0)])
    goals = summary.goals(tmp_path)
    assert [goal.met for goal in goals] == [False, True, True, False, None]
    assert goals[0].measured == "1 of 2 fail"
    assert goals[1].measured == "worst 0.910, median 0.950 of 2"
    page = summary.page(tmp_path, [Outcome("decode", "decode", "crashed", 3.0)], 5.0, "Title", ["a note"])
    assert "| ✗ | the same: time over torch's flash attention | ≤ 1.2 | worst 1.300" in page
    assert "decodes, bf16" in page
    assert "| decode | crashed | 3.0 |" in page


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert summary.plot(tmp_path, tmp_path / "gpu.png") == "no picture: matplotlib is not installed"

"""bench/gpu.sh: rehearsed on the CPU, its launches compiled ahead of time, and what it makes of what it measures."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "gpu"))

import summary  # noqa: E402 - a folder of scripts
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


def test_a_rehearsal_of_all_sections(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "summary.md").read_text()
    assert "| ✓ | kernels against float64 | no case fails | 0 of" in page
    for section in SECTIONS:
        assert f"| {section.name} | passed |" in page
    timed = {row["section"] for name in ("attention",) for row in rows_of(tmp_path / f"{name}.csv")}
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


@pytest.mark.parametrize("only", ["sampling,layers"])
def test_launches_compile(tmp_path: Path, only: str) -> None:
    compile_sections(tmp_path, only)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("only", [section.name for section in SECTIONS])
def test_every_launch_compiles(tmp_path: Path, only: str) -> None:
    compile_sections(tmp_path, only)


def compile_sections(folder: Path, only: str) -> None:
    done = run(folder, "--compile", "sm_90", "--only", only, "--limit", "3500", timeout=3600)
    logs = (folder / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + logs[-3000:]
    assert "_kernel x" in logs
    assert "TOO MUCH" not in logs


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
    assert [goal.met for goal in goals] == [False, True, True, False]
    assert goals[0].measured == "1 of 2 fail"
    assert goals[1].measured == "worst 0.910, median 0.950 of 2"
    page = summary.page(tmp_path, [Outcome("decode", "decode", "crashed", 3.0)], 5.0, "Title", ["a note"])
    assert "| ✗ | the same: time over torch's flash attention | ≤ 1.2 | worst 1.300" in page
    assert "decodes, bf16" in page
    assert "| decode | crashed | 3.0 |" in page


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert summary.plot(tmp_path, tmp_path / "gpu.png") == "no picture: matplotlib is not installed"

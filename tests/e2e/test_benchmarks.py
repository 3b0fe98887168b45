"""The benchmarks that docs/benchmarks.md names run and print what the page shows; their figures are nobody's test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, f"bench/{script}", *flags], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cost_of_the_split() -> None:
    printed = run("split_cost.py", "--rounds", "1", "--concurrency", "2", "--input-len", "8", "--output-len", "4")
    assert re.search(
        r"in process [\d.]+ tok/s, full stack [\d.]+ tok/s: ratio \d+\.\d{3} \([\d.]+ to [\d.]+\)$", printed
    )


def test_serving() -> None:
    printed = run("serving.py", "--input-len", "4", "--output-len", "2")
    rows = re.findall(r"^\| (\d+) \| .*\|$", printed, re.MULTILINE)
    assert rows == ["1", "8", "32"] * 2, "one table of rates and one of where a step's time goes"

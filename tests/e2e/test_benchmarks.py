"""The benchmarks that docs/benchmarks.md names run and print what the page shows; their figures are nobody's test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(script: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, f"bench/{script}", *flags], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cost_of_the_split(small_model: Any) -> None:
    printed = run(
        "split_cost.py",
        str(small_model.folder),
        "--rounds",
        "1",
        "--concurrency",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "4",
    )
    assert re.search(
        r"in process [\d.]+ tok/s, full stack [\d.]+ tok/s: ratio \d+\.\d{3} \([\d.]+ to [\d.]+\)$", printed
    )


def test_serving(small_model: Any) -> None:
    printed = run("serving.py", str(small_model.folder), "--input-len", "4", "--output-len", "2")
    rows = re.findall(r"^\| (\d+) \| .*\|$", printed, re.MULTILINE)
    assert rows == ["1", "8", "32"] * 2, "one table of rates and one of where a step's time goes"


def test_the_cost_of_the_core() -> None:
    printed = run("scheduler", "--steps", "20", "--blocks", "2000")
    rows = re.findall(r"^ +(256|1024) +(0|100000) +\d+ +\d+ +[\d.]+ +\d+$", printed, re.MULTILINE)
    assert rows == [("256", "0"), ("256", "100000"), ("1024", "0"), ("1024", "100000")]
    assert len(re.findall(r"\(goal [\d.]+(?: to 1.10)?: (?:met|missed)", printed)) == 6
    assert re.search(r"^2,000 blocks, all findable: \d+ MB resident", printed, re.MULTILINE)


def test_the_worth_of_the_host_tier() -> None:
    """Its times are simulated, so its figures are those of every machine."""
    printed = run("host_tier.py", "--requests", "16")
    rows = re.findall(
        r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| .* (\d+) % \| (\d+) % \| \d+ \| \d+ \|$", printed, re.MULTILINE
    )
    assert len(rows) == 12
    for name, ratio, gain, without, having in rows:
        assert int(without) > (5 if name == "preemption" else 100)
        if float(ratio) < 1:
            # The cheaper a restore, the more it is worth, and hardly anything is computed again.
            assert float(gain) > 1
            assert int(having) < int(without) / 3
        else:
            # Where computing is cheaper it is computed, once that is known.
            assert float(gain) > 0.9


def test_overload(small_model: Any) -> None:
    printed = run(
        *(
            "overload.py",
            str(small_model.folder),
            *("--unloaded", "3", "--calibrate", "1", "--settle", "1", "--seconds", "2", "--ramp", "1", "--factor", "2"),
        ),
        *("--", "--num-threads", "1", "--max-model-len", "1024", "--num-gpu-blocks-override", "512"),
    )
    for name in ("unloaded", "refusals"):
        assert re.search(rf"^{name} +(.*p50 \d+ ms, p99 \d+ ms|none)", printed, re.MULTILINE)
    whole, later = printed.split("from the first second:")[1].split("after 1 s:")
    for part in (whole, later):
        assert re.search(r"^  came +[1-9]\d*, admitted [1-9]\d*, other than 200 and 429 0$", part, re.MULTILINE)
        assert re.search(r"^  admitted +p50 \d+ ms, p99 \d+ ms, at most \d+ ms", part, re.MULTILINE)
        assert re.search(r"^  goodput +[\d.]+ of what 8 clients get$", part, re.MULTILINE)


def test_idle_streams() -> None:
    printed = run("idle_streams.py", "--streams", "30")
    names = re.findall(r"^(\w+) +-?[\d.]+ KiB per stream .* [\d.]+% of a core idle$", printed, re.MULTILINE)
    assert names == ["gateway", "scheduler", "Redis"]
    assert re.search(r"^all ended after +[\d.]+ s, 30 whole$", printed, re.MULTILINE)


def test_the_cost_of_a_refusal() -> None:
    printed = run("refusal.py", "--requests", "40")
    assert re.findall(r"^ +(\d+) words +\d+ us per refusal$", printed, re.MULTILINE) == ["10", "100", "2000"]

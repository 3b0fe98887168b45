"""A short run of `make chaos`: the promise is kept, and what the report says can be told from its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chaos(folder: Path, *flags: str, timeout_s: float = 280) -> str:
    done = subprocess.run(
        [sys.executable, "bench/chaos", *flags, "--keep", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    logs = "\n".join(
        f"{path.name}: {line.rstrip()}" for path in folder.glob("*.log") for line in path.open() if " ERROR " in line
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "the promise was kept" in done.stdout
    counts = dict(re.findall(r"^(lost|ends|different|leaks): (\d+)$", done.stdout, re.MULTILINE))
    assert counts == {"lost": "0", "ends": "0", "different": "0", "leaks": "0"}
    return done.stdout


def test_nothing_is_lost_while_everything_fails(tmp_path: Path) -> None:
    printed = chaos(tmp_path, "--requests", "60", "--faults", "12", "--every", "0.7", "--seed", "11")
    assert re.search(r"^under faults: .* 12 faults$", printed, re.MULTILINE)
    assert re.search(r"^  all +\d+ times  p50 ", printed, re.MULTILINE), "it says how long recovering took"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        ("--only", "stop"),
        ("--fsync", "everysec", "--only", "lose-redis", "--only", "restart-redis", "--only", "kill"),
        ("--only", "pause", "--only", "freeze", "--only", "half-open", "--only", "repeat", "--only", "garbage"),
    ],
    ids=["rolling restart", "Redis forgets", "silence"],
)
def test_nothing_is_lost(tmp_path: Path, flags: tuple[str, ...]) -> None:
    printed = chaos(tmp_path, "--requests", "300", "--faults", "60", "--seed", "12", *flags, timeout_s=850)
    if "stop" in flags:
        assert "of which 0 could only begin again" in printed, "who is told to stop finishes what it has begun"

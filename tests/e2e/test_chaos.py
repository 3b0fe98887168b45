"""A short run of `make chaos`: the promise is kept, and what the report says can be told from its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_while_everything_fails(tmp_path: Path) -> None:
    flags = ["--requests", "150", "--faults", "20", "--every", "0.7", "--seed", "11", "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "bench/chaos", *flags], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    logs = "\n".join(
        f"{path.name}: {line}" for path in tmp_path.glob("*.log") for line in path.open() if " ERROR " in line
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "the promise was kept" in done.stdout
    counts = dict(re.findall(r"^(lost|ends|different|leaks): (\d+)$", done.stdout, re.MULTILINE))
    assert counts == {"lost": "0", "ends": "0", "different": "0", "leaks": "0"}
    assert int(re.search(r"under faults: .* (\d+) faults", done.stdout)[1]) >= 3

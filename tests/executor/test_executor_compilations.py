"""Once warmed up, a GPU's kernels are compiled for whatever size a step has: seconds in which every client would wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

pytest.importorskip("triton")


def test_no_step_after_a_warm_up_compiles_anything(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_hidden_layers=1)
    script = Path(__file__).with_name("noted_launches.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(script.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    noted = json.loads(done.stdout)
    assert noted["late"] == []
    # One for tiles of few rows and one for others; drawing and listing; everything else once.
    counts = {name: noted["warm"].count(name) for name in noted["warm"]}
    several = {name: count for name, count in counts.items() if count > 1}
    assert several == {
        "attention_kernel": 2, "collect_kernel": 2, "list_kernel": 2, "process_kernel": 2, "survey_kernel": 3,
    }  # fmt: skip
    assert len(counts) >= 20
    assert noted["launches"] > 1000

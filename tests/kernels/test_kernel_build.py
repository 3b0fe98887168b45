"""Building, caching and falling back."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_kernels import UnsupportedShapeError, choose_kernels
from octavo_kernels.cpu import build


def test_a_second_build_reuses_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # a tenth of the time; all other tests run the real one
    first = build.build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_other_flags_name_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path(build.compiler(), tmp_path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library_path(build.compiler(), tmp_path) != before


def test_without_a_compiler_the_reference_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("auto", head_dim=64, block_size=16).name == "reference"
    assert "no-such-compiler" in caplog.text
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        choose_kernels("cpu", head_dim=64, block_size=16)


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shapes_the_compiled_kernels_cannot_take(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_kernels("auto", head_dim=20, block_size=16).name == "reference"
    assert "multiples of 8" in caplog.text
    with pytest.raises(UnsupportedShapeError):
        choose_kernels("cpu", head_dim=64, block_size=12)
    with pytest.raises(ValueError, match="no kernel backend 'gpu'"):
        choose_kernels("gpu", head_dim=64, block_size=16)


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    code = """
import torch
from octavo_kernels import choose_kernels
kernels = choose_kernels("cpu", head_dim=64, block_size=16)
x = torch.randn(64, 64); x @ x
kernels.rms_norm(x, torch.ones(64), 1e-6, x)
lines = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"

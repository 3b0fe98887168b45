"""A wrong setting is one line and exit status 2, whichever service reads it."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["gateway", "scheduler", "executor"])
@pytest.mark.parametrize(("flags", "environment"), [(["--log-level", "loud"], {}), ([], {"OCTAVO_LOG_LEVEL": "loud"})])
def test_a_wrong_setting_is_one_line(service: str, flags: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", f"octavo_{service}", *flags]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --log-level (OCTAVO_LOG_LEVEL): ")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_setting_is_told_at_once() -> None:
    """Before torch, which takes seconds to import."""
    code = """
import runpy, sys
sys.argv = ["octavo_executor", "--log-level", "loud"]
try:
    runpy.run_module("octavo_executor", run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "False"

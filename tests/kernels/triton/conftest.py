"""The GPU kernels under Triton's interpreter, against the reference. Shapes are small: a program takes some 10 ms."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is off: these tests need the interpreter", allow_module_level=True)

import quick_interpreter  # noqa: E402 - it imports triton

quick_interpreter.install()

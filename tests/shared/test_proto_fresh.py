"""The generated code in the tree is what the .proto files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import octavo_shared.proto

FOLDER = Path(octavo_shared.proto.__file__).parent
ROOT = FOLDER.parent.parent
NAMES = ("request", "log", "executor")
GENERATED = sorted(
    path.name
    for path in FOLDER.iterdir()
    if path.name.endswith(("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"))
)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``make proto`` would write, made anew."""
    out = tmp_path_factory.mktemp("proto")
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT)]
    sources = [str(FOLDER / f"{name}.proto") for name in NAMES]
    messages = [f"--plugin=protoc-gen-mypy={plugin}", f"--python_out={out}", f"--mypy_out=quiet:{out}"]
    subprocess.run([*protoc, *messages, *sources], check=True)
    subprocess.run([*protoc, f"--grpc_python_out={out}", str(FOLDER / "executor.proto")], check=True)
    return out / FOLDER.relative_to(ROOT)


def test_every_generated_file_is_known(regenerated: Path) -> None:
    assert sorted(path.name for path in regenerated.iterdir()) == GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_is_fresh(regenerated: Path, name: str) -> None:
    assert (FOLDER / name).read_text() == (regenerated / name).read_text(), "run `make proto`"

"""Every command shown in README.md and on some pages of docs/ works as shown."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.main import main
from octavo.stack import KINDS

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/chaos.md", "docs/models.md")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language on all pages."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shell_commands() -> list[str]:
    """Every command of the shell blocks, continuation lines joined."""
    return [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_kind_of_command_is_covered_here() -> None:
    # curl and Python run against a live server, in test_stack.py.
    kinds = {command.split()[0] for command in shell_commands()}
    assert kinds == {"make", "curl", "octavo"}
    assert all(
        command.split()[1] in ("pull", "convert") for command in shell_commands() if command.startswith("octavo")
    )
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("command", [c for c in shell_commands() if c.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    if shutil.which("make") is None:
        pytest.fail("make is needed to run the project")
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_serve_is_octavo_serve() -> None:
    dry = subprocess.run(["make", "serve", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert dry.stdout.rstrip().endswith(".venv/bin/octavo serve")
    assert subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.count("\n") > 8


def test_model_commands(
    default_folder: Path,
    tiny_gguf: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / default_folder.name).symlink_to(default_folder)
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_gguf, "tiny.gguf")
    assert main(["convert", "tiny.gguf"]) == 0
    Path("my-model").symlink_to(capsys.readouterr().out.strip())
    commands = [command for command in shell_commands() if command.startswith("octavo ")]
    assert commands
    for command in commands:
        assert main(command.split()[1:]) == 0, command
        assert (Path(capsys.readouterr().out.strip()) / "model.safetensors").is_file()


# --- what pages speak of ----------------------------------------------------------------------------------------------

ALL_PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("services/*/README.md"))]
SETTINGS = {name for kind in KINDS for name in kind.model_fields}
# Of docker, pip and the like.
FOREIGN_FLAGS = {"detach", "wait", "scale", "volumes"}


@pytest.fixture(scope="module")
def sources() -> str:
    """All there is besides pages and tests."""
    rooms = ("services", "shared", "kernels", "cli", "bench", "tools")
    suffixes = {".py", ".sh", ".c", ".h", ".proto"}
    found = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in suffixes]
    found += [ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("compose*.yaml")]
    return "\n".join(path.read_text(encoding="utf-8") for path in found)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_speaks_of_is_there(page: Path, sources: str) -> None:
    """Flags, environment variables, metrics, files and other pages."""
    text = page.read_text(encoding="utf-8")
    for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text)) - FOREIGN_FLAGS:
        setting = flag.replace("-", "_")
        assert setting.removeprefix("no_") in SETTINGS or setting in SETTINGS or f'"--{flag}"' in sources, f"--{flag}"
    for variable in re.findall(r"\bOCTAVO_[A-Z_]*[A-Z]", text):
        assert variable.removeprefix("OCTAVO_").lower() in SETTINGS or variable in sources, variable
    for metric in re.findall(r"\b(?:octavo|vllm):([a-z_]*[a-z])", text):
        assert re.sub(r"_(total|bucket|sum|count)$", "", metric) in sources, metric
    for name in re.findall(r"`([\w/.-]+\.(?:py|sh|c|h|proto|md|toml|yaml))[`: ]", text):
        assert (ROOT / name).exists() or any(ROOT.glob(f"[a-z]*/**/{name}")) or f'"{name}"' in sources, name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link

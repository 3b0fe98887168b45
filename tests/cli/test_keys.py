"""`octavo keys`: the key is shown once, its hash is kept, and gateways know it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from octavo.main import main
from octavo_gateway.keys import KeyRing
from octavo_shared.keyfile import digest_of, read_key_file


def test_keys_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    flags = ["--requests-per-minute", "60", "--tokens-per-minute", "1000", "--priority-ceiling", "0", "--weight", "2"]
    assert main(["keys", str(path), "acme", *flags]) == 0
    assert main(["keys", str(path), "acme", "--weight", "2"]) == 0
    assert main(["keys", str(path), "boss", "--admin"]) == 0
    keys = capsys.readouterr().out.split()
    assert len(set(keys)) == 3
    text = path.read_text()
    assert not any(key in text for key in keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    records = read_key_file(path)
    assert [record.sha256 for record in records] == [digest_of(key.encode()) for key in keys]
    first = records[0]
    assert (first.requests_per_minute, first.tokens_per_minute, first.priority_ceiling, first.weight) == (
        60,
        1000,
        0,
        2,
    )
    ring = KeyRing([], [], path)

    def tenant(key: str) -> tuple[str, bool]:
        caller = ring.caller({"headers": [(b"authorization", f"Bearer {key}".encode())]})
        return caller.tenant, caller.admin

    assert [tenant(key) for key in keys] == [("acme", False), ("acme", False), ("boss", True)]


def test_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'# ours\n[[key]]\ntenant = "a"\nsha256 = "{"0" * 64}"')
    path.chmod(0o640)
    assert main(["keys", str(path), "b"]) == 0
    assert path.read_text().startswith("# ours\n")
    assert [record.tenant for record in read_key_file(path)] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bad name"], "tenant must be"),
        (["a", "--tokens-per-minute", "-1"], "tokens_per_minute must be"),
        (["a", "--weight", "3"], "weight 1: all must have the same"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\ntenant = "a"\nsha256 = "{"0" * 64}"\n')
    before = path.read_bytes()
    assert main(["keys", str(path), *words]) == 1
    assert said in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_broken_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("nonsense")
    assert main(["keys", str(path), "a"]) == 1
    assert "no TOML" in capsys.readouterr().err
    assert main(["keys", str(tmp_path / "no" / "keys.toml"), "a"]) == 1
    assert "cannot be written" in capsys.readouterr().err

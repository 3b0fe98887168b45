"""The `octavo` command line: help, flags, precedence, messages."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.flags import add_settings, dashed, environment_of, given_flags, only_of
from octavo.main import COMMANDS, main
from octavo.models import served_name
from octavo.stack import KINDS, Address, accepts, http_ok
from octavo_shared.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, load_settings


def _octavo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _flags(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_settings(parser, KINDS)
    return given_flags(parser.parse_args(dashed(words)), KINDS)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    done = _octavo("--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    code = (
        "import sys; from octavo.main import main; main(['--help']);"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--help"] if name == "bench" else [name, "--help"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert f"usage: octavo {' '.join(words[:-1])}" in capsys.readouterr().out


def test_serve_help_groups_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    groups = [f"\n{heading}:\n" for heading in ("model", "HTTP", "scheduler", "cache", "log", "observability")]
    assert all(heading in text for heading in groups)
    assert [text.index(heading) for heading in groups] == sorted(text.index(heading) for heading in groups)
    for kind in KINDS:
        for name in kind.model_fields:
            assert f"--{name.replace('_', '-')} " in text.replace(",", " ").replace("\n", " "), name


def test_flag_wins_over_environment_wins_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(GatewaySettings, **only_of(GatewaySettings, _flags())).port == 8000
    monkeypatch.setenv("OCTAVO_PORT", "9000")
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    flags = _flags("--port", "9001")
    assert load_settings(GatewaySettings, **only_of(GatewaySettings, flags)).port == 9001
    assert load_settings(SchedulerSettings, **only_of(SchedulerSettings, flags)).max_num_seqs == 7


def test_a_service_reads_back_what_was_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = _flags(
        *[
            "--max_num_batched_tokens",
            "4k",
            "--no-enable-prefix-caching",
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k1,k2",
            "--api-key",
            "k3",
        ],
        *["--gpu-memory-utilization=0.5", "--dtype", "bfloat16", "--scheduling-policy", "priority"],
    )
    for name, value in environment_of(flags).items():
        monkeypatch.setenv(name, value)
    scheduler, gateway, executor = (load_settings(k) for k in (SchedulerSettings, GatewaySettings, ExecutorSettings))
    assert (scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching) == (4000, False)
    assert (gateway.served_model_name, gateway.api_key) == (["a", "b"], ["k1", "k2", "k3"])
    assert (executor.gpu_memory_utilization, executor.dtype, scheduler.scheduling_policy) == (
        0.5,
        "bfloat16",
        "priority",
    )


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["serve", "--port", "99999"], {}, "--port (OCTAVO_PORT)"),
        (["serve"], {"OCTAVO_BLOCK_SIZE": "x"}, "--block-size (OCTAVO_BLOCK_SIZE)"),
        (["serve", "./no/such"], {}, "no such model: ./no/such"),
        (["scheduler", "--max-num-seqs", "0"], {}, "--max-num-seqs (OCTAVO_MAX_NUM_SEQS)"),
        (["serve", "--redis-url", "http://x"], {}, "--redis-url (OCTAVO_REDIS_URL)"),
        (["serve", "--api-key", " "], {}, "--api-key (OCTAVO_API_KEY)"),
        (["serve"], {"OCTAVO_HOME": "/dev/null/x"}, "OCTAVO_HOME: /dev/null/x cannot be used"),
        (["pull"], {"OCTAVO_HOME": "/proc/no"}, "OCTAVO_HOME: /proc/no cannot be used"),
        (["convert", "missing.gguf"], {}, "no such file: missing.gguf"),
        (["pull", "./no/such.gguf"], {}, "no such model"),
    ],
)
def test_wrong_settings_are_one_line(words: list[str], environment: dict[str, str], message: str) -> None:
    done = _octavo(*words, **{"OCTAVO_PORT": "0", **environment})
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_said_before_anything_starts(home: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = _octavo("serve", "--port", str(port))
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert not home.exists()
        assert accepts(f"127.0.0.1:{port}")
    assert not accepts(f"127.0.0.1:{port}")
    assert not accepts("unix:/nonexistent")
    assert not http_ok(Address("127.0.0.1", port), "/health")


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["bogus"]) == 2
    assert main(["bench"]) == 2
    assert "no command 'bogus'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["serve", "a", "--model", "b"])
    assert ended.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo 0.")


def test_pull_and_convert_print_the_folder(tiny_gguf: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tiny_gguf)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == home / "models"
    assert main(["pull", str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder


def test_services_agree_on_a_models_name(tmp_path: Path) -> None:
    assert served_name("") == served_name(None) == "SmolLM2-135M-Instruct"
    assert served_name(str(tmp_path)) == served_name(f"{tmp_path}/") == tmp_path.name
    assert served_name("/not/on/this/machine") == "machine"
    assert served_name("organisation/name") == "organisation/name"
    assert served_name("~/x/tiny.Q4.gguf") == "tiny.Q4"

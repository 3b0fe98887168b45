"""MODEL becomes a local Hugging Face folder: a folder, a GGUF, a hub id or the default."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from octavo import default_model
from octavo.default_model import DEFAULT_MODEL
from octavo.errors import ModelError
from octavo.models import resolve_model

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def default_tokenizer(default_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_folder / "tokenizer.json"))


def test_default_model_is_a_complete_folder(default_folder: Path) -> None:
    config = json.loads((default_folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    weights = load_file(default_folder / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied: stored once
    assert {str(tensor.dtype) for tensor in weights.values()} == {"float32"}
    assert "<|im_start|>" in json.loads((default_folder / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((default_folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_default_model_needs_no_network_once_converted(default_folder: Path, run_python: RunPython) -> None:
    # With pip unable to reach anything, only the converted folder can answer.
    done = run_python(
        "from octavo.models import resolve_model; print(resolve_model(None).path)",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        HF_HUB_OFFLINE="1",
    )
    assert done.stdout.strip() == str(default_folder), done.stderr


def test_default_model_leaves_no_download_behind(default_folder: Path) -> None:
    assert not (default_folder.parent.parent / "downloads").exists()
    assert [path.name for path in default_folder.parent.iterdir() if path.name.startswith(f".{DEFAULT_MODEL}")] == []


# Ids of the original SmolLM2 tokenizer, which splits every digit off before anything else; without
# that step the third and fourth come out differently.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("abc 12345 2026 hi", [25276, 216, 33, 34, 35, 36, 37, 216, 34, 32, 34, 38, 15876]),
        ("1st 2nd 100,000", [33, 302, 216, 34, 268, 216, 33, 32, 32, 28, 32, 32, 32]),
        ("  1\n\n 2", [256, 33, 8866, 34]),
        ("½ ²", [16738, 216, 19133]),
        ("<|im_start|>user\n12<|im_end|>", [1, 4093, 198, 33, 34, 2]),
    ],
)
def test_default_tokenizer_splits_digits_like_the_original(
    default_tokenizer: Tokenizer, text: str, ids: list[int]
) -> None:
    assert default_tokenizer.encode(text).ids == ids


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from(" \n0123456789.,x%-"), st.characters(codec="utf-8")), max_size=40))
def test_every_digit_is_a_token_of_its_own(default_tokenizer: Tokenizer, text: str) -> None:
    tokens = default_tokenizer.encode(text).tokens
    assert [t for t in tokens if any(c in "0123456789" for c in t)] == [c for c in text if c in "0123456789"]


def test_transformers_reads_the_folder_as_we_do(default_folder: Path, default_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(default_folder)
    text = "In 2026, 3.14 × 10²³ cafés\n\n  served 42 naïve users 😀"
    assert reference(text).input_ids == default_tokenizer.encode(text).ids
    chat = reference.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_any_gguf_is_converted_exactly_and_once(tiny_gguf: Path, home: Path) -> None:
    model = resolve_model(str(tiny_gguf))
    assert (model.name, model.source) == ("tiny-llama", "gguf")
    assert model.path.parent == home / "models"
    weights = load_file(model.path / "model.safetensors")
    for tensor in gguf.GGUFReader(tiny_gguf).tensors:
        if tensor.name == "token_embd.weight":
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert (weights["model.embed_tokens.weight"] == expected).all()
    before = (model.path / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tiny_gguf)).path == model.path
    assert (model.path / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in (home / "models").iterdir()] == [model.path.name]


def test_gguf_tokenizer_keeps_bos_and_digits(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert tokenizer.encode("ab 12").tokens == ["<|end|>", "ab", "\u0120", "1", "2"]


def test_two_processes_convert_once(tiny_gguf: Path, home: Path) -> None:
    code = f"from octavo.models import resolve_model; print(resolve_model({str(tiny_gguf)!r}).path)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum(errors.count("Converting") for _, errors in outputs) == 1
    assert len(list((home / "models").iterdir())) == 1  # no lock, no partial folder


def test_a_killed_conversion_is_taken_up_again(tiny_gguf: Path, home: Path) -> None:
    code = f"from octavo.models import resolve_model; resolve_model({str(tiny_gguf)!r})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((home / "models").glob(".*.partial-*")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [path for path in (home / "models").iterdir() if not path.name.startswith(".")] == []
    model = resolve_model(str(tiny_gguf))
    assert [path.name for path in (home / "models").iterdir()] == [model.path.name]


def test_a_broken_gguf_is_refused_with_its_name(tmp_path: Path, home: Path) -> None:
    empty = tmp_path / "notes.gguf"
    empty.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"notes\.gguf is not a GGUF file"):
        resolve_model(str(empty))
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ModelError, match=r"could not convert cut\.gguf"):
        resolve_model(str(truncated))
    assert list((home / "models").iterdir()) == []


def test_folders_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no \\*\\.safetensors weights"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="no tokenizer"):
        resolve_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    model = resolve_model(str(tmp_path))
    assert (model.path, model.name, model.source) == (tmp_path.resolve(), tmp_path.name, "folder")
    with pytest.raises(ModelError, match="no such model"):
        resolve_model("./missing/folder")


def test_a_wrong_model_file_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = home / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF tampered")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    # The file with the wrong sum is not used; it is fetched anew, which here fails with a way out.
    with pytest.raises(ModelError, match="could not download the default model") as error:
        resolve_model(DEFAULT_MODEL)
    assert "octavo serve FOLDER" in str(error.value)
    assert not (home / "models" / DEFAULT_MODEL).exists()


def test_the_default_models_sum_is_pinned() -> None:
    assert len(bytes.fromhex(default_model._GGUF_SHA256)) == hashlib.sha256().digest_size


_HUB_TREE = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "onnx/model.json": b"not wanted",
    "consolidated.safetensors": b"not wanted",
}


@pytest.fixture
def hub() -> Iterator[str]:
    """A model hub that knows one repository, over real HTTP."""
    commit = "a" * 40

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            name = self.path.split(f"/resolve/{commit}/")[-1]
            if self.path.startswith("/api/models/octavo/tiny/revision/") or "/tree/" in self.path:
                siblings = [{"rfilename": path} for path in _HUB_TREE]
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in _HUB_TREE.items()
                ]
                body: object = (
                    tree if "/tree/" in self.path else {"id": "octavo/tiny", "sha": commit, "siblings": siblings}
                )
                self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            elif name in _HUB_TREE:
                data = _HUB_TREE[name]
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
                self._send(200, data, headers)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD = _answer

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


_RESOLVE = "from octavo.models import resolve_model; print(resolve_model({!r}).path)"


def test_hub_id_is_fetched_then_works_offline(hub: str, tmp_path: Path, run_python: RunPython) -> None:
    hf_home = str(tmp_path / "hf")
    online = run_python(_RESOLVE.format("octavo/tiny"), HF_ENDPOINT=hub, HF_HOME=hf_home)
    assert online.returncode == 0, online.stderr
    folder = Path(online.stdout.strip())
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    offline = run_python(_RESOLVE.format("octavo/tiny"), HF_HUB_OFFLINE="1", HF_HOME=hf_home)
    assert offline.stdout == online.stdout, offline.stderr


@pytest.mark.parametrize(
    ("repo", "environment", "message"),
    [
        ("octavo/tiny", {"HF_HUB_OFFLINE": "1"}, "octavo/tiny is not on this machine and HF_HUB_OFFLINE is set"),
        ("octavo/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the model hub cannot be reached"),
        ("octavo/unknown", {}, "the model hub knows no octavo/unknown"),
    ],
)
def test_hub_failures_say_what_to_do(
    hub: str, tmp_path: Path, run_python: RunPython, repo: str, environment: dict[str, str], message: str
) -> None:
    done = run_python(_RESOLVE.format(repo), **{"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), **environment})
    assert done.returncode != 0
    assert message in done.stderr

"""Fixtures of the command's tests: a private OCTAVO_HOME and a tiny GGUF made on the spot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.models import resolve_model
from octavo_kernels.cpu.build import build, octavo_home

# Looked up before any test has an OCTAVO_HOME of its own.
_DEVELOPERS_KERNELS = octavo_home() / "kernels"
_LAYERS, _HIDDEN, _FFN, _HEADS, _KV_HEADS = 2, 64, 96, 4, 2


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder in the developer's own OCTAVO_HOME (of session scope: made before `home` applies)."""
    return resolve_model(None).path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty OCTAVO_HOME of this test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("OCTAVO_HOME", str(folder))
    return folder


@pytest.fixture
def built_kernels(home: Path) -> None:
    """The CPU kernels lie in this test's `home` already: compiling them takes longer than all else at a start."""
    home.mkdir()
    (home / "kernels").symlink_to(_DEVELOPERS_KERNELS)
    build(_DEVELOPERS_KERNELS)


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python snippet in a fresh process; keyword arguments are added to its environment."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a byte-level vocabulary, SmolLM's pre-tokeniser and one merge across a digit border."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-llama.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def tiny_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny GGUF, converted once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(tmp_path_factory.mktemp("tiny-home")))
        return resolve_model(str(tiny_gguf)).path


def write_tiny_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = _byte_alphabet()
    # "12" and "Ġ1" are what the merges would build if digits were not split off first.
    tokens = ["<|end|>", *alphabet, "12", "\u01201", "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["1 2", "\u0120 1", "a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    _add_tensors(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, vocab: int) -> None:
    rng = np.random.default_rng(7)
    kv = _HIDDEN // _HEADS * _KV_HEADS

    def quantised(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    quantised("token_embd.weight", vocab, _HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, dtype=np.float32))
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}."
        quantised(prefix + "attn_q.weight", _HIDDEN, _HIDDEN)
        quantised(prefix + "attn_k.weight", kv, _HIDDEN)
        quantised(prefix + "attn_v.weight", kv, _HIDDEN)
        quantised(prefix + "attn_output.weight", _HIDDEN, _HIDDEN)
        quantised(prefix + "ffn_gate.weight", _FFN, _HIDDEN)
        quantised(prefix + "ffn_up.weight", _FFN, _HIDDEN)
        quantised(prefix + "ffn_down.weight", _HIDDEN, _FFN)
        writer.add_tensor(prefix + "attn_norm.weight", np.ones(_HIDDEN, dtype=np.float32))
        writer.add_tensor(prefix + "ffn_norm.weight", np.ones(_HIDDEN, dtype=np.float32))


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, byte-level BPE)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + index) for index in range(len(others))]

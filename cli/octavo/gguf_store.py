"""Converted GGUF files: each becomes a Hugging Face folder under `OCTAVO_HOME/models`, once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.errors import ModelError
from octavo.home import file_lock, octavo_home
from octavo.procs import die_with_parent
from octavo.progress import FractionCallback, console, stage

GGUF_MAGIC = b"GGUF"
# The loader reads the header and builds the model before and after it unpacks tensors; the weights
# given to each stage only shape the bar.
_STAGE_START = {"import": 0.0, "weights": 0.15, "save": 0.7, "tokenizer": 0.85, "done": 1.0}
_STAGE_SPAN = {"weights": 0.5}


def models_dir() -> Path:
    return octavo_home() / "models"


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a finished conversion. Folders appear under their name only when finished."""
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def convert_once(name: str, dtype: str, fetch: Callable[[], Path]) -> Path:
    """The folder `OCTAVO_HOME/models/<name>`, made from the GGUF that `fetch` returns if it is not there.

    Safe to call from several processes at once: one converts, the others wait for it. An
    interrupted conversion leaves nothing under the final name. Raises ModelError.
    """
    target = models_dir() / name
    if is_complete(target):
        return target

    def waiting() -> None:
        console.print(f"Another process is preparing {name}; waiting for it", highlight=False)

    with file_lock(models_dir() / f".{name}.lock", waiting):
        if is_complete(target):
            return target
        _remove_leftovers(name)
        source = fetch()
        with _scratch_folder(name) as scratch:
            with stage(f"Converting {name} to safetensors ({dtype}); this is done once") as report:
                _run_converter(source, scratch, dtype, report)
            if not is_complete(scratch):
                raise ModelError(f"converting {source.name} gave an incomplete folder")
            _sync_tree(scratch)
            if target.exists():  # only a broken one can be here: is_complete() said no
                shutil.rmtree(target)
            scratch.rename(target)
        return target


def convert_gguf_file(source: Path, dtype: str = "float32") -> Path:
    """The folder made from `source`, converted now unless this very file was before.

    A file is known by its resolved path, size and modification time: hashing tens of gigabytes at
    every start would cost more than the conversion that a moved file repeats.
    """
    source = source.resolve()
    with source.open("rb") as file:
        if file.read(4) != GGUF_MAGIC:
            raise ModelError(f"{source} is not a GGUF file")
    stat = source.stat()
    identity = f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}\0{dtype}"
    key = hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()
    return convert_once(f"{source.stem}-{key}", dtype, lambda: source)


def _remove_leftovers(name: str) -> None:
    for leftover in models_dir().glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _scratch_folder(name: str) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=models_dir()))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        if scratch.exists():
            shutil.rmtree(scratch, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """Flush to disk before the rename: a power cut must not leave a complete-looking folder of zeros."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            path.chmod(0o644)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _run_converter(source: Path, destination: Path, dtype: str, report: FractionCallback) -> None:
    command = [sys.executable, "-m", "octavo.gguf_convert", str(source), str(destination), "--dtype", dtype]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=die_with_parent()
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                report(_fraction_of(line))
            code = child.wait()
        except BaseException:
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise
        if code != 0:
            errors.seek(0)
            raise ModelError(f"could not convert {source.name}: {_last_words(errors.read(), code)}")


def _fraction_of(line: str) -> float:
    try:
        update = json.loads(line)
        name = update["stage"]
        return _STAGE_START[name] + _STAGE_SPAN.get(name, 0.0) * float(update["fraction"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def _last_words(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"the converter ended with status {code}"

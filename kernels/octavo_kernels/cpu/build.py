"""Compiles the C sources once and keeps the library, named by all that shaped it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = ("linear.c", "layers.c", "attention.c", "sampling.c", "program.c")
HEADERS = ("common.h",)
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


def octavo_home() -> Path:
    """``OCTAVO_HOME``, by default ``~/.cache/octavo``."""
    return Path(os.environ.get("OCTAVO_HOME") or Path.home() / ".cache" / "octavo")


def compiler() -> str:
    """Path of the C compiler: ``CC`` or gcc.

    Raises:
        BuildError: there is none.
    """
    name = os.environ.get("CC") or "gcc"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C compiler: {name!r} is not on PATH")
    return path


def _cpu_features() -> str:
    """What -march=native may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(" :") in wanted}))


def library_path(cc: str, directory: Path) -> Path:
    """Where the library for these sources, this compiler and this CPU lies."""
    digest = hashlib.blake2b(digest_size=10)
    here = Path(__file__).parent
    for name in HEADERS + SOURCES:
        digest.update((here / name).read_bytes())
    version = subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join((*FLAGS, version, platform.machine(), _cpu_features())).encode())
    return directory / f"kernels-{digest.hexdigest()}.so"


def build(directory: Path | None = None) -> Path:
    """Compile unless that was done before; several processes may do so at once.

    Raises:
        BuildError: no compiler, or it failed, or the cache directory cannot be written.
    """
    directory = directory or octavo_home() / "kernels"
    cc = compiler()
    target = library_path(cc, directory)
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as work:
            here = Path(__file__).parent
            objects = [str(Path(work) / f"{name}.o") for name in SOURCES]
            for name, output in zip(SOURCES, objects, strict=True):
                _run([cc, *FLAGS, "-c", str(here / name), "-o", output])
            # Linked without -fopenmp: the OpenMP symbols come from the runtime torch has loaded, so that both use
            # one pool of threads.
            shared = Path(work) / "kernels.so"
            _run([cc, "-shared", *objects, "-lm", "-o", str(shared)])
            os.replace(shared, target)
    except OSError as error:
        raise BuildError(f"cannot write {directory}: {error}") from error
    log.info("compiled the CPU kernels into %s", target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def load(directory: Path | None = None) -> ctypes.CDLL:
    """Build if need be and load, on torch's own OpenMP runtime.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    import torch

    path = build(directory)
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error

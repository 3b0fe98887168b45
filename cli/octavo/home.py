"""Where Octavo keeps its files (`OCTAVO_HOME`) and the lock that lets processes share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def octavo_home() -> Path:
    """`OCTAVO_HOME`, or `~/.cache/octavo`. Not created here."""
    configured = os.environ.get("OCTAVO_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "octavo"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock named by `path`; `on_wait` is called once if somebody else holds it.

    The kernel drops the lock when its holder dies, so a leftover file never blocks anyone.
    The file is removed on release.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _acquire(path, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _acquire(path: Path, on_wait: Callable[[], None] | None) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                    on_wait = None
                fcntl.flock(fd, fcntl.LOCK_EX)
            # The previous holder unlinks the file before it lets go: a lock on the unlinked file
            # would exclude nobody, so take the one that is there now.
            if _same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        on_disk = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (on_disk.st_dev, on_disk.st_ino)

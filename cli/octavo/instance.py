"""The private folder of one running `octavo serve`: sockets, the log's data, gone when it stops."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from octavo.home import octavo_home

# sockaddr_un.sun_path holds 108 bytes on Linux and 104 on macOS, with a closing zero.
_MAX_SOCKET_PATH_BYTES = 100
_LONGEST_SOCKET_NAME_BYTES = 24


class InstanceDir:
    """`OCTAVO_HOME/run/<instance>`, readable by its owner only and locked while its process lives.

    Folders whose process died without cleaning up are removed by the next one created.
    """

    def __init__(self) -> None:
        run = octavo_home() / "run"
        run.mkdir(parents=True, exist_ok=True)
        _sweep(run)
        self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=run))
        self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._short_link: Path | None = None

    def socket_path(self, name: str) -> Path:
        """A path for a Unix socket in this folder, through a short link where the folder's own is too long."""
        folder = self.path
        if len(os.fsencode(folder)) + 1 + _LONGEST_SOCKET_NAME_BYTES > _MAX_SOCKET_PATH_BYTES:
            if self._short_link is None:
                self._short_link = Path(tempfile.mkdtemp(prefix="octavo-")) / "run"
                self._short_link.symlink_to(self.path, target_is_directory=True)
            folder = self._short_link
        return folder / name

    def remove(self) -> None:
        """Delete the folder and everything in it. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._short_link is not None:
            shutil.rmtree(self._short_link.parent, ignore_errors=True)
            self._short_link = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _sweep(run: Path) -> None:
    for folder in run.iterdir():
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _owner_alive(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)


def _owner_alive(folder: Path) -> bool:
    """Guards the moment between a folder's creation and its lock."""
    pid, _, _ = folder.name.partition("-")
    return pid.isdigit() and Path(f"/proc/{pid}").exists()

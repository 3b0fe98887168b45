"""What a machine that loses power takes from Redis: the end of the append-only file that had not been written to disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from pathlib import Path

LOOK_S = 0.05


class AppendOnlyFile:
    """Knows how long the file was in the last seconds, and cuts it to what it was at one of them.

    A killed process alone loses nothing: what it has written is the kernel's. With ``appendfsync everysec`` the kernel may
    not have brought the last second to the disk, so this is what is cut off.
    """

    def __init__(self, folder: Path, keep_s: float = 2.0) -> None:
        self._folder = folder
        self._sizes: deque[tuple[float, Path, int]] = deque(maxlen=int(keep_s / LOOK_S))

    async def watch(self) -> None:
        """Look at the file until cancelled."""
        while True:
            path = self._newest()
            if path is not None:
                with contextlib.suppress(OSError):
                    self._sizes.append((time.monotonic(), path, path.stat().st_size))
            await asyncio.sleep(LOOK_S)

    def forget(self, seconds: float) -> int:
        """Cut off what was written in the last so many seconds; the number of bytes."""
        now_s, path = time.monotonic(), self._newest()
        sizes = [size for at_s, of, size in self._sizes if of == path and now_s - at_s >= seconds]
        if path is None or not sizes:
            return 0
        lost = path.stat().st_size - sizes[-1]
        with path.open("r+b") as file:
            file.truncate(sizes[-1])
        return lost

    def _newest(self) -> Path | None:
        return max(self._folder.glob("*.incr.aof"), default=None, key=lambda path: int(path.name.split(".")[-3]))

"""A disk that takes its time: a small library preloaded into Redis delays every flush of the append-only file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class SlowDisk:
    """Built where there is a C compiler; without one ``environment`` is empty and flushes take what they take."""

    def __init__(self, folder: Path) -> None:
        self._delay = folder / "fsync_delay_us"
        self._library = folder / "slow_fsync.so"
        self.usable = shutil.which("gcc") is not None
        if self.usable:
            folder.mkdir(parents=True, exist_ok=True)
            source = Path(__file__).with_name("slow_fsync.c")
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source), "-ldl"], check=True
            )
        self.set(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """For the process whose disk it is."""
        if not self.usable:
            return {}
        return {"LD_PRELOAD": str(self._library), "CHAOS_FSYNC_DELAY": str(self._delay)}

    def set(self, delay_s: float) -> None:
        """From now on every flush takes so much longer."""
        if self.usable:
            # Replaced, not written over: a reader sees the old text or the new one.
            fresh = self._delay.with_suffix(".new")
            fresh.write_text(str(round(1e6 * delay_s)))
            fresh.replace(self._delay)

"""What `octavo serve` shows: the children's lines under their names, a loading bar, the ready line."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from octavo.progress import console

# A service tells how far it is with a line of its own: this, then {"stage": str, "fraction": float}.
PROGRESS_PREFIX = "@progress "
_COLOURS = {"redis": "red", "scheduler": "yellow", "executor": "magenta", "gateway": "cyan"}


class StackConsole:
    """Log lines go to standard error; only the ready line goes to standard output."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stages_told: set[str] = set()
        self._is_ready = False

    def __enter__(self) -> StackConsole:
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task("Starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_bar()

    def line(self, name: str, text: str) -> None:
        """Show one line of a child's output, or what the supervisor has to say about it."""
        console.print(f"{name:>9} | ", style=_COLOURS.get(name), end="", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, text: str) -> bool:
        """Take a child's line if it is a progress line."""
        if not text.startswith(PROGRESS_PREFIX):
            return False
        try:
            update: dict[str, Any] = json.loads(text[len(PROGRESS_PREFIX) :])
            stage, fraction = str(update["stage"]), float(update["fraction"])
        except (ValueError, KeyError, TypeError):
            return False
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=stage, completed=fraction)
        elif stage not in self._stages_told:
            self._stages_told.add(stage)
            console.print(stage, markup=False, highlight=False)
        return True

    def ready(self, text: str) -> None:
        """Everything is up: the bar makes way for the ready line, which is shown once."""
        self._stop_bar()
        print(text, file=sys.stdout, flush=True)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

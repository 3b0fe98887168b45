"""What `octavo serve` shows: the children's lines under their names, a loading bar, the ready line."""

from __future__ import annotations

import re
import sys

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from octavo.progress import console

# How an executor's log tells how far it is.
_LOADING = re.compile(r"loading weights:\s+(\d+) %")
_COLOURS = {"redis": "red", "scheduler": "yellow", "executor": "magenta", "gateway": "cyan"}


class StackConsole:
    """Log lines go to standard error; only the ready line goes to standard output."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

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
        """Move the bar if a child's line says how far loading is; without a bar the line itself is shown."""
        found = _LOADING.search(text)
        if found is None or self._bar is None or self._task is None:
            return False
        self._bar.update(self._task, description="Loading weights", completed=int(found[1]) / 100)
        return True

    def ready(self, text: str) -> None:
        """Everything is up: the bar makes way for the ready line, which is shown once."""
        self._stop_bar()
        print(text, file=sys.stdout, flush=True)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

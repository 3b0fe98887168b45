"""Progress for people: a bar on a terminal, one line per stage anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Standard output belongs to results; progress must not end up in a pipe.
console = Console(stderr=True)

# Called with the done fraction in [0, 1].
FractionCallback = Callable[[float], None]


@contextmanager
def stage(title: str) -> Iterator[FractionCallback]:
    """Show `title` with a bar while the body runs; the body reports fractions as it goes."""
    if not console.is_terminal:
        console.print(title, highlight=False)
        yield lambda fraction: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda fraction: bar.update(task, completed=min(max(fraction, 0.0), 1.0))
        bar.update(task, completed=1.0)

"""From the sections' CSV files to goals, a page and exit status. Knows neither torch nor a device."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sections import Outcome

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Goal:
    """``met`` is None where nothing was measured."""

    name: str
    wanted: str
    measured: str
    met: bool | None

    @property
    def mark(self) -> str:
        """For the page."""
        return {True: "✓", False: "✗", None: "–"}[self.met]


def read(folder: Path, name: str) -> list[Row]:
    """Rows of all processes of a section."""
    rows: list[Row] = []
    for path in sorted(folder.glob(f"{name}.csv")) + sorted(folder.glob(f"{name}-*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


def number(row: Row, column: str) -> float:
    """NaN where there is none."""
    try:
        return float(row.get(column) or "nan")
    except ValueError:
        return math.nan


def bound(name: str, rows: Iterable[Row], column: str, wanted: float, *, least: bool) -> Goal:
    """Every row's figure is to be at least (or at most) ``wanted``; the worst is shown."""
    values = [value for row in rows if not math.isnan(value := number(row, column))]
    sign = "≥" if least else "≤"
    if not values:
        return Goal(name, f"{sign} {wanted:g}", "not measured", None)
    worst = min(values) if least else max(values)
    met = worst >= wanted if least else worst <= wanted
    middle = sorted(values)[len(values) // 2]
    return Goal(name, f"{sign} {wanted:g}", f"worst {worst:.3f}, median {middle:.3f} of {len(values)}", met)


def correctness(folder: Path, sections: Sequence[str]) -> Goal:
    """All cases of all kernels."""
    rows = [row for name in sections for row in read(folder, name)]
    failed = [row for row in rows if row["passed"] != "True"]
    if not rows:
        return Goal("kernels against float64", "no case fails", "not run", None)
    return Goal("kernels against float64", "no case fails", f"{len(failed)} of {len(rows)} fail", not failed)


def goals(folder: Path) -> list[Goal]:
    """What was promised, and what became of it."""
    decode = [row for row in read(folder, "decode") if row["kind"] == "decode"]
    main = [r for r in decode if r["heads"] == "64/8" and r["pages"] == "bf16" and r["block"] == "16"]
    many = [row for row in main if number(row, "seqs") >= 64]
    prefill = [row for row in read(folder, "prefill") if row["kind"] in ("whole", "chunk")]
    plain = [r for r in prefill if r["pages"] == "bf16 of 16" and r["heads"].endswith("of 128")]
    long = [row for row in plain if number(row, "queries") >= 2048]
    return [
        correctness(folder, CHECKED),
        bound("decodes, 64 and more of 1k to 8k: share of copy bandwidth", many, "share_of_copy", 0.9, least=True),
        bound("prompts and chunks of 2k and more: share of matmul rate", long, "share_of_matmul", 0.6, least=True),
        bound("the same: time over torch's flash attention", long, "ratio_to_flash", 1.2, least=False),
    ]


CHECKED = ("attention", "cache", "sampling", "layers")


def markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """A table."""
    if not rows:
        return "nothing measured"
    names = list(columns or rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(row.get(name) or '' for name in names)} |" for row in rows)])


def page(folder: Path, outcomes: Sequence[Outcome], seconds: float, title: str, notes: Sequence[str]) -> str:
    """summary.md."""
    lines = [f"# {title}", "", *(f"- {note}" for note in notes), f"- took {seconds:.0f} s", "", "## Goals", ""]
    lines += ["| | goal | wanted | measured |", "|---|---|---|---|"]
    lines += [f"| {goal.mark} | {goal.name} | {goal.wanted} | {goal.measured} |" for goal in goals(folder)]
    lines += ["", "## Sections", "", "| process | ended | seconds |", "|---|---|---|"]
    lines += [f"| {outcome.job} | {outcome.status} | {outcome.seconds:.1f} |" for outcome in outcomes]
    bad = [row for name in CHECKED for row in read(folder, name) if row["passed"] != "True"]
    if bad:
        lines += ["", "## Cases that fail", "", markdown(bad)]
    for name, text in TABLES:
        lines += ["", f"## {text}", "", markdown(read(folder, name))]
    return "\n".join([*lines, ""])


TABLES = (("decode", "Attention of decodes"), ("prefill", "Attention of prompts"))


def plot(folder: Path) -> str:
    """PNG files of what was timed; says what was done."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no pictures: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [name for name, draw in PICTURES.items() if _draw(folder, name, draw, pyplot)]
    return f"pictures: {', '.join(drawn) or 'none, nothing was timed'}"


def _draw(folder: Path, name: str, draw: Callable[[Path, object], bool], pyplot: object) -> bool:
    figure, axes = pyplot.subplots(figsize=(7, 4.5))  # type: ignore[attr-defined]
    drawn = draw(folder, axes)
    if drawn:
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=120)
    pyplot.close(figure)  # type: ignore[attr-defined]
    return drawn


def _decode_picture(folder: Path, axes: object) -> bool:
    rows = [
        r for r in read(folder, "decode") if r["kind"] == "decode" and r["heads"] == "64/8" and r["pages"] == "bf16"
    ]
    for keys in sorted({row["keys"] for row in rows}):
        points = sorted((number(r, "seqs"), number(r, "share_of_copy")) for r in rows if r["keys"] == keys)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{keys} keys")  # type: ignore[attr-defined]
    _finish(axes, "sequences", "share of copy bandwidth", "Decodes, bfloat16, 64/8 heads of 128", 0.9)
    return bool(rows)


def _prefill_picture(folder: Path, axes: object) -> bool:
    rows = [
        r for r in read(folder, "prefill") if r["kind"] == "whole" and r["seqs"] == "1" and r["heads"] == "32/8 of 128"
    ]
    for pages in sorted({row["pages"] for row in rows}):
        points = sorted((number(r, "keys"), number(r, "share_of_matmul")) for r in rows if r["pages"] == pages)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"pages {pages}")  # type: ignore[attr-defined]
    _finish(axes, "tokens", "share of matmul rate", "Whole prompts, 32/8 heads of 128", 0.6)
    return bool(rows)


def _finish(axes: object, x: str, y: str, title: str, goal: float) -> None:
    axes.axhline(goal, linestyle="--", color="grey")  # type: ignore[attr-defined]
    axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))  # type: ignore[attr-defined]
    axes.set_xscale("log", base=2)  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]


PICTURES: dict[str, Callable[[Path, object], bool]] = {"decode": _decode_picture, "prefill": _prefill_picture}

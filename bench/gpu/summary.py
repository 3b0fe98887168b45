"""From the sections' CSV files to goals, a page and exit status. Knows neither torch nor a device."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    steps = [row for row in read(folder, "step") if row["part"] == "step" and row["graphs"] == "on"]
    return [
        correctness(folder, CHECKED),
        bound("decodes, 64 and more of 1k to 8k: share of copy bandwidth", many, "share_of_copy", 0.9, least=True),
        bound("prompts and chunks of 2k and more: share of matmul rate", long, "share_of_matmul", 0.6, least=True),
        bound("the same: time over torch's flash attention", long, "ratio_to_flash", 1.2, least=False),
        bound("step with graphs: time over the sum of its parts", steps, "ratio_to_parts", 1.1, least=False),
    ]


CHECKED = ("attention", "cache", "sampling", "layers", "weights")


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
        if name == "serving":
            lines += ["", NANO_VLLM]
    return "\n".join([*lines, ""])


TABLES = (
    ("decode", "Attention of decodes"),
    ("prefill", "Attention of prompts"),
    ("serving", "Serving: models of random weights, nano-vllm's requests"),
    ("step", "A decode step of Qwen3-0.6B's shape and its parts"),
    ("reference", "Beside transformers, Qwen3-0.6B's shape"),
)
NANO_VLLM = (
    "For orientation, not a ratio: on an RTX 4070 Laptop with the trained Qwen3-0.6B and these requests, nano-vllm's README "
    "(github.com/GeeeekExplorer/nano-vllm) gives 1434 tokens/s for itself and 1362 for vLLM."
)
# Few, since a machine that is lent may bring back only few.
FILES = {"attention": ("decode", "prefill"), "serving": ("serving", "reference"), "step": ("step",)}


def publish(parts: Path, folder: Path, text: str) -> None:
    """Few files: the page, one table of all checks, one per section that was timed, all logs in one."""
    (folder / "summary.md").write_text(text, encoding="utf-8")
    _write(folder / "checks.csv", [{"section": name, **row} for name in CHECKED for row in read(parts, name)])
    for name, sections in FILES.items():
        _write(
            folder / f"{name}.csv",
            [{"section": section, **row} for section in sections for row in read(parts, section)],
        )
    logs = [
        f"== {path.stem}\n{path.read_text(encoding='utf-8', errors='replace')}" for path in sorted(parts.glob("*.log"))
    ]
    (folder / "log.txt").write_text("\n".join(logs), encoding="utf-8")


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Nothing for no rows, so that what was not run this time is not mistaken for it."""
    path.unlink(missing_ok=True)
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)


def plot(parts: Path, path: Path) -> str:
    """A picture of what was timed; says what was done."""
    path.unlink(missing_ok=True)
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PICTURES), figsize=(6.5 * len(PICTURES), 4.5))
    drawn = [draw(parts, each) for draw, each in zip(PICTURES, axes, strict=True)]
    if any(drawn):
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"pictures in {path.name}" if any(drawn) else "no picture: nothing was timed"


def _decode_picture(parts: Path, axes: Any) -> bool:
    rows = [r for r in read(parts, "decode") if r["kind"] == "decode" and r["heads"] == "64/8" and r["pages"] == "bf16"]
    for keys in sorted({row["keys"] for row in rows}):
        points = sorted((number(r, "seqs"), number(r, "share_of_copy")) for r in rows if r["keys"] == keys)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{keys} keys")
    _finish(axes, "sequences", "share of copy bandwidth", "Decodes, bfloat16, 64/8 heads of 128", 0.9)
    return bool(rows)


def _prefill_picture(parts: Path, axes: Any) -> bool:
    rows = [
        r for r in read(parts, "prefill") if r["kind"] == "whole" and r["seqs"] == "1" and r["heads"] == "32/8 of 128"
    ]
    for pages in sorted({row["pages"] for row in rows}):
        points = sorted((number(r, "keys"), number(r, "share_of_matmul")) for r in rows if r["pages"] == pages)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"pages {pages}")
    _finish(axes, "tokens", "share of matmul rate", "Whole prompts, 32/8 heads of 128", 0.6)
    return bool(rows)


def _finish(axes: Any, x: str, y: str, title: str, goal: float) -> None:
    axes.axhline(goal, linestyle="--", color="grey")
    axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))
    axes.set_xscale("log", base=2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


PICTURES: tuple[Callable[[Path, Any], bool], ...] = (_decode_picture, _prefill_picture)

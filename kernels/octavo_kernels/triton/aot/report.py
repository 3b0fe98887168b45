"""The table of compiled kernels, for the terminal and for docs/kernels.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from octavo_kernels.triton.aot.targets import H100_BYTES_PER_S, TARGETS

BEGIN, END = "<!-- made by `make kernels-aot`: begin -->", "<!-- made by `make kernels-aot`: end -->"


@dataclass(frozen=True, slots=True)
class Result:
    """One case compiled for one target; times in seconds on the target and on an H100."""

    group: str
    variant: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    blocks: int
    matrix: str
    async_loads: int
    instructions: int
    loop_instructions: int
    issue_share: float | None
    bytes_: float
    flops: float
    floor_s: float
    floor_h100_s: float
    bound: str
    faults: tuple[str, ...]

    def line(self) -> str:
        """For the terminal."""
        share = "" if self.issue_share is None else f"issue {self.issue_share:.2f}"
        verdict = "; ".join(self.faults) or "ok"
        return (
            f"{self.target:7} {self.group:20} {self.variant:34} {self.registers:4} registers {self.spilled_bytes:4} B spilled "
            f"{self.shared_bytes / 1024:6.1f} KiB shared {self.blocks:2} blocks {self.matrix:12} {share:10} {verdict}"
        )


def _needs(result: Result | None) -> str:
    if result is None:
        return "–"
    spilled = f", **{result.spilled_bytes} B spilled**" if result.spilled_bytes else ""
    return f"{result.registers}, {result.shared_bytes / 1024:.0f} K, {result.blocks}{spilled}"


def table(results: Iterable[Result]) -> str:
    """Markdown: one row per case, the targets side by side."""
    by_case: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        by_case.setdefault((result.group, result.variant), {})[result.target] = result
    names = [f"{name} ({target.name})" for name, target in TARGETS.items()]
    lines = [
        f"| Kernel | Case | {' | '.join(names)} | Matrix units | Loop | Issue | Moves | Computes | H100 | H200 | Bound by |",
        "|---|---|" + "---|" * (len(TARGETS) + 8),
    ]
    for (group, variant), of in by_case.items():
        shown = of.get("sm_90") or next(iter(of.values()))
        share = "–" if shown.issue_share is None else f"{shown.issue_share:.2f}"
        matrix = ", ".join(dict.fromkeys(result.matrix for result in of.values() if result.matrix)) or "–"
        lines.append(
            f"| {group} | {variant} | {' | '.join(_needs(of.get(name)) for name in TARGETS)} | {matrix} "
            f"| {shown.loop_instructions or '–'} | {share} | {shown.bytes_ / 1e6:.1f} MB | {shown.flops / 1e9:.1f} GFLOP "
            f"| {shown.floor_h100_s * 1e6:.1f} µs | {shown.floor_s * 1e6:.1f} µs | {shown.bound} |"
        )
    return "\n".join(lines)


def representative(results: Iterable[Result]) -> list[Result]:
    """Those that a reader wants to see: of head sizes 128, of float16 nothing (its code is bfloat16's)."""
    return [
        result
        for result in results
        if ("head" not in result.variant or "head 128" in result.variant) and not result.variant.startswith("fp16")
    ]


def write(path: Path, results: Sequence[Result]) -> None:
    """Put the table of representative cases between its marks in a document, and all cases into a CSV beside it.

    Raises:
        ValueError: the document has no such marks.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no marks for the table: {BEGIN}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{table(representative(results))}\n\n{END}{after}")
    with path.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(field.name for field in fields(Result))
        rows.writerows(
            ["; ".join(value) if isinstance(value, tuple) else value for value in astuple(result)] for result in results
        )


def read_rows(path: Path) -> list[Result]:
    """What the CSV beside a document holds; nothing if there is none."""
    path = path.with_suffix(".csv")
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: dict[str, str]) -> Result:
    values: dict[str, Any] = dict(row)
    for name in (
        "registers",
        "spilled_bytes",
        "shared_bytes",
        "blocks",
        "async_loads",
        "instructions",
        "loop_instructions",
    ):
        values[name] = int(row[name])
    for name in ("bytes_", "flops", "floor_s", "floor_h100_s"):
        values[name] = float(row[name])
    values["issue_share"] = float(row["issue_share"]) if row["issue_share"] else None
    values["faults"] = tuple(row["faults"].split("; ")) if row["faults"] else ()
    return Result(**values)


def merged(new: Iterable[Result], old: Iterable[Result], pairs: Iterable[tuple[str, str, str]]) -> list[Result]:
    """Results of ``pairs`` (group, variant, target) in their order: the ``new`` one, or else the ``old`` one, if any."""
    found = {(result.group, result.variant, result.target): result for result in (*old, *new)}
    return [found[pair] for pair in pairs if pair in found]


def floor_on_h100(bytes_: float, flops: float) -> float:
    """Seconds that no version can beat on an H100."""
    return max(bytes_ / H100_BYTES_PER_S, flops / TARGETS["sm_90"].matrix_flops_per_s)

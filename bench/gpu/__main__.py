"""Everything worth knowing of the GPU kernels and the executor on a real GPU, in under eight minutes.

    bench/gpu.sh OUTDIR [--only attention,decode] [--tiny] [--compile sm_90]

Correctness of every kernel against float64, the bandwidth of decodes, the arithmetic of prompts. Every section is a process of
its own with a time limit: one that crashes costs only itself. What comes of it goes to OUTDIR: summary.md, gpu.png, log.txt and CSV files. The exit
status is 1 if a case fails or a section does not end well; a goal that is missed is not a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import summary
from sections import SECTIONS, Outcome, Schedule, Section, carry_out

LIMIT_S = 450.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the results go; made if need be")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes on the CPU by Triton's interpreter: a rehearsal"
    )
    parser.add_argument(
        "--compile", default="", metavar="ARCH", help="compile every launch for sm_80, sm_90 or sm_100; run none"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--workers", type=int, default=0, help="sections of checks side by side")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def environment(tiny: bool) -> None:
    """For the processes of the sections. Kernels that a run compiled serve the next one."""
    os.environ["TRITON_INTERPRET"] = "1" if tiny else "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"octavo-gpu-{os.getuid()}"))


def chosen(only: str) -> list[Section]:
    """Raises SystemExit: there is no section of that name."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        sys.exit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SECTIONS)}")
    return [section for section in SECTIONS if not names or section.name in names]


def device_notes(options: argparse.Namespace) -> list[str]:
    """What ran where.

    Raises:
        SystemExit: a GPU is needed and there is none.
    """
    missing = [name for name in ("numpy", "torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; PYTHON=... names another Python")
    import torch
    import triton

    notes = [f"Python {sys.version.split()[0]}, torch {torch.__version__}, Triton {triton.__version__}"]
    if options.tiny:
        return [*notes, "a rehearsal on the CPU: no figure means anything"]
    if options.compile:
        return [*notes, f"launches compiled for {options.compile}, none run"]
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --tiny rehearses on the CPU, --compile sm_90 compiles every launch")
    found = torch.cuda.get_device_properties(0)
    memory = found.total_memory / 2**30
    return [*notes, f"{found.name}, {found.multi_processor_count} multiprocessors, {memory:.0f} GiB"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    begun = time.monotonic()
    options = parse(arguments)
    mode = "tiny" if options.tiny else "compile" if options.compile else "gpu"
    if options.job:
        name, shard, shards = options.job.split(":")
        section = next(section for section in SECTIONS if section.name == name)
        section = replace(section, shards=int(shards))
        return carry_out(section, int(shard), mode, options.compile, options.folder)
    sections = chosen(options.only)
    if options.compile:
        sections = [section for section in sections if not section.host]
    if options.tiny:
        sections = [replace(section, shards=1) for section in sections]
    if options.compile or options.tiny:
        sections = [replace(section, timeout_s=options.limit) for section in sections]
    environment(options.tiny)
    options.folder.mkdir(parents=True, exist_ok=True)
    notes = device_notes(options)
    print("\n".join(notes), flush=True)
    workers = options.workers or max(1, min(14, (os.cpu_count() or 1) - 2))
    flags = ["--tiny"] * options.tiny + (["--compile", options.compile] if options.compile else [])
    with tempfile.TemporaryDirectory(prefix="octavo-gpu-") as name:
        parts = Path(name)

        def publish(outcomes: Sequence[Outcome]) -> None:
            """After every section, so that what ends all of this early leaves what is known by then."""
            seconds = time.monotonic() - begun
            summary.publish(parts, options.folder, summary.page(parts, outcomes, seconds, "The GPU, measured", notes))

        outcomes = Schedule(flags, parts, begun + options.limit, workers, publish).run(sections)
        if mode != "compile":
            notes.append(summary.plot(parts, options.folder / "gpu.png"))
        publish(outcomes)
    print(f"\n{(options.folder / 'summary.md').read_text(encoding='utf-8')}")
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

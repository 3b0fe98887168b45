"""Compiles every case for every target and says what falls short.

Triton keeps what it compiled (``~/.triton/cache``, or ``TRITON_CACHE_DIR``) by source, types and constants: after an
interruption, or a change of some kernels, only what is new takes its time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from octavo_kernels.triton.aot.attention_cases import attention_cases
from octavo_kernels.triton.aot.batch_cases import batch_cases
from octavo_kernels.triton.aot.case import Case, faults
from octavo_kernels.triton.aot.compile import compiling
from octavo_kernels.triton.aot.estimate import blocks_per_multiprocessor, floor_s, issue_share
from octavo_kernels.triton.aot.layer_cases import layer_cases
from octavo_kernels.triton.aot.machine_code import read
from octavo_kernels.triton.aot.report import Result, floor_on_h100, merged, read_rows, write
from octavo_kernels.triton.aot.targets import TARGETS
from octavo_kernels.triton.aot.weight_cases import weight_cases


def all_cases() -> list[Case]:
    """Every kernel with every type and size it is meant for."""
    return [*attention_cases(), *batch_cases(), *layer_cases(), *weight_cases()]


def check(case: Case, target_name: str) -> Result:
    """Compile one case for one target and read what came out.

    Raises:
        RuntimeError: its launcher does not launch the kernel it is about, or it does not compile.
    """
    target = TARGETS[target_name]
    with compiling(target.compiler) as launches:
        case.launch(target.gpu)
    found = [launch for launch in launches if launch.name == case.kernel]
    if not found:
        raise RuntimeError(f"{case.group}, {case.variant}: {case.kernel} is not launched")
    compiled = found[0]
    code = read(compiled, target)
    seconds, bound = floor_s(case.work, target, target.memory_bytes_per_s)
    return Result(
        case.group,
        case.variant,
        target_name,
        code.registers,
        code.spilled_bytes,
        compiled.shared_bytes,
        blocks_per_multiprocessor(compiled, code, target),
        code.matrix,
        code.async_loads,
        code.instructions,
        code.loop.total(),
        issue_share(compiled, code, target),
        float(case.work.bytes_),
        float(case.work.flops),
        seconds,
        floor_on_h100(case.work.bytes_, case.work.flops),
        bound,
        tuple(faults(case, compiled, code, target)),
    )


def _check_numbered(job: tuple[int, str]) -> Result:
    """In a process of its own: cases hold functions, numbers travel better."""
    index, target = job
    return check(all_cases()[index], target)


def run(jobs: Iterable[tuple[int, str]], workers: int) -> Iterator[Result]:
    """Results in the order of ``jobs`` (number of the case, target), each printed when it is there."""
    # Nothing has run a thread yet, and to import torch and Triton takes longer than to compile a case.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for result in pool.map(_check_numbered, jobs):
            print(result.line(), flush=True)
            yield result


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if something falls short."""
    parser = argparse.ArgumentParser(prog="python -m octavo_kernels.triton.aot", description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, separated by commas")
    parser.add_argument("--only", default="", help="cases whose row contains this text")
    parser.add_argument("--chosen", action="store_true", help="a few cases that stand for the others")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write", type=Path, help="document whose table is filled in; rows of other cases stay")
    options = parser.parse_args(arguments)
    cases = all_cases()
    wanted = [
        i
        for i, case in enumerate(cases)
        if options.only in f"{case.group} {case.variant}" and (case.chosen or not options.chosen)
    ]
    results: list[Result] = []
    try:
        results.extend(run([(i, target) for i in wanted for target in options.targets.split(",")], options.jobs))
    finally:
        if options.write is not None:
            pairs = [(case.group, case.variant, target) for case in cases for target in TARGETS]
            write(options.write, merged(results, read_rows(options.write), pairs))
    bad = [result for result in results if result.faults]
    print(f"{len(results)} compiled, {len(bad)} fall short")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

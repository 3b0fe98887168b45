"""What the split into services costs: the same batch in one process (no log, no wire, no HTTP) and through the full stack.

    python bench/split_cost.py [MODEL] [--concurrency 32] [--input-len 128] [--output-len 64] [--rounds 3]

Rounds alternate between the two, so that a noisy machine hits both; the printed ratio is full stack over in-process, of
output tokens per second: the median over the rounds, since the machine's speed drifts between them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from stack import server

from octavo.in_process import InProcess
from octavo.models import resolve_model
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord, SamplingParams
from octavo_shared.settings import ExecutorSettings, SchedulerSettings, load_settings


class InProcessSide:
    """The core and the runner in a process of their own, which reads rounds from its standard input."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", str(folder), "--concurrency", str(args.concurrency)]
        command += ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def round(self, seed: int) -> float:
        """Output tokens per second of one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seed, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def work(args: argparse.Namespace) -> None:
    """The in-process side: one line of output tokens per second for every seed read."""
    from octavo_executor.serve import load_model
    from octavo_scheduler.core.scheduler import Scheduler
    from octavo_scheduler.engine import core_config

    model = load_model(load_settings(ExecutorSettings, model=args.worker), "bench")
    config = core_config(model.info, load_settings(SchedulerSettings, model=args.worker))
    print("ready", flush=True)
    for line in sys.stdin:
        rng = np.random.default_rng(int(line))
        records = [
            RequestRecord(
                RequestId("bench", serial),
                0,
                rng.integers(1000, model.info.vocab_size, args.input_len).astype(np.int32),
                SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True),
            )
            for serial in range(args.concurrency)
        ]
        model.runner.reset()
        stack = InProcess(Scheduler(config), model.runner)
        start = time.perf_counter()
        outputs = stack.run(records)
        seconds = time.perf_counter() - start
        print(sum(len(fold.tokens) for fold in outputs.values()) / seconds, flush=True)


def stack_round(url: str, folder: Path, args: argparse.Namespace, seed: int) -> float:
    """Output tokens per second of one batch, as `octavo bench serve` measures it."""
    with tempfile.TemporaryDirectory() as results:
        name = os.path.join(results, "result.json")
        command = [sys.executable, "-m", "octavo", "bench", "serve", "--base-url", url, "--model", folder.name]
        command += ["--dataset-name", "random", "--random-input-len", str(args.input_len), "--ignore-eos"]
        command += ["--random-output-len", str(args.output_len), "--num-prompts", str(args.concurrency)]
        command += [
            "--max-concurrency",
            str(args.concurrency),
            "--seed",
            str(seed),
            "--temperature",
            "0",
            "--disable-tqdm",
        ]
        command += ["--save-result", "--result-filename", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(Path(name).read_text())["output_throughput"])


def main() -> None:
    """Alternate rounds and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as of octavo serve")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    folder = resolve_model(args.model).path
    inside, through = [], []
    side = InProcessSide(folder, args)
    with server(str(folder)) as url:
        for seed in range(args.rounds + 1):
            inside.append(side.round(seed))
            through.append(stack_round(url, folder, args, seed))
            label = "warm-up" if seed == 0 else f"round {seed}"
            print(f"{label}: in process {inside[-1]:.1f} tok/s, full stack {through[-1]:.1f} tok/s", flush=True)
    side.close()
    ratios = [full / alone for full, alone in zip(through[1:], inside[1:], strict=True)]
    print(
        f"in process {median(inside[1:]):.1f} tok/s, full stack {median(through[1:]):.1f} tok/s: "
        f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()

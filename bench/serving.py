"""Serve a model and measure it: 128 random tokens in, 64 out, at concurrency 1, 8 and 32.

    python bench/serving.py [MODEL] [-- flags of octavo serve]

Server and client share this machine, as they do on a laptop; the client's own share of the processor is
part of its report. Every run's figures go to bench/results/serving-c<concurrency>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from stack import server, step_seconds

# In the order in which a step meets them; publish and plan run beside the forward pass of the step before.
PHASES = ("plan", "wire", "idle", "prepare", "forward", "sample", "publish")
RESULTS = Path(__file__).parent / "results"
# Concurrency and how many requests make a run of about half a minute on two cores.
RUNS = ((1, 16), (8, 64), (32, 160))
COLUMNS = (
    ("output tok/s", "output_throughput", 1),
    ("req/s", "request_throughput", 2),
    ("TTFT p50 ms", "p50_ttft_ms", 1),
    ("TTFT p99 ms", "p99_ttft_ms", 1),
    ("ITL p50 ms", "p50_itl_ms", 1),
    ("ITL p99 ms", "p99_itl_ms", 1),
    ("E2E p50 ms", "p50_e2el_ms", 0),
    ("E2E p99 ms", "p99_e2el_ms", 0),
)


def measure(url: str, concurrency: int, prompts: int, input_tokens: int, output_tokens: int) -> dict[str, float]:
    """One run of `octavo bench serve`; its figures."""
    name = f"serving-c{concurrency}.json"
    command = [sys.executable, "-m", "octavo", "bench", "serve", "--base-url", url, "--dataset-name", "random"]
    command += ["--random-input-len", str(input_tokens), "--random-output-len", str(output_tokens), "--ignore-eos"]
    command += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--num-warmups", "2"]
    # Each run has prompts of its own: the prefix cache must not know them from the run before.
    command += ["--seed", str(concurrency), "--save-result", "--result-dir", str(RESULTS), "--result-filename", name]
    subprocess.run(command, check=True)
    figures: dict[str, float] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return figures


Steps = dict[str, tuple[float, int]]


def settled_steps(url: str) -> Steps:
    """The step times once the server has published those of the last step (it does so when it falls idle)."""
    time.sleep(1.5)
    return step_seconds(url)


def mean_ms(before: Steps, after: Steps, phase: str) -> float:
    """Milliseconds per step between two readings."""
    seconds, count = before.get(phase, (0.0, 0))
    return 1e3 * (after[phase][0] - seconds) / (after[phase][1] - count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="*", help="MODEL of octavo serve, then `--` and its flags")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    rows, steps = [], []
    with server(*args.model, *words[split + 1 :]) as url:
        for concurrency, prompts in RUNS:
            before = settled_steps(url)
            rows.append((concurrency, measure(url, concurrency, prompts, args.input_len, args.output_len)))
            after = settled_steps(url)
            steps.append((concurrency, {phase: mean_ms(before, after, phase) for phase in PHASES}))
    print("\n| concurrency | " + " | ".join(title for title, _, _ in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for concurrency, figures in rows:
        print(f"| {concurrency} | " + " | ".join(f"{figures[key]:.{digits}f}" for _, key, digits in COLUMNS) + " |")

    print("\nMilliseconds per step, mean:\n")
    print("| concurrency | " + " | ".join(PHASES) + " |")
    print("|---" * (len(PHASES) + 1) + "|")
    for concurrency, phases in steps:
        print(f"| {concurrency} | " + " | ".join(f"{phases[phase]:.2f}" for phase in PHASES) + " |")


if __name__ == "__main__":
    main()

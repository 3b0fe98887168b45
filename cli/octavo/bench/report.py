"""From outcomes to figures, as a table for people and JSON for everything else (keys as vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from octavo.bench.load import Outcome

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def samples_ms(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """Per metric, its samples in milliseconds over the requests that succeeded."""
    good = [o for o in outcomes if not o.error]
    return {
        "ttft": 1e3 * np.array([o.first_token_s - o.started_s for o in good]),
        "tpot": 1e3
        * np.array([(o.last_token_s - o.first_token_s) / (o.output_tokens - 1) for o in good if o.output_tokens > 1]),
        "itl": 1e3 * np.array([gap for o in good for gap in o.gaps_s]),
        "e2el": 1e3 * np.array([o.ended_s - o.started_s for o in good]),
    }


def summarise(
    outcomes: Sequence[Outcome], duration_s: float, client_cpu_s: float, percentiles: Sequence[float]
) -> dict[str, object]:
    """All figures of a run."""
    good = [o for o in outcomes if not o.error]
    input_tokens = sum(o.input_tokens for o in good)
    output_tokens = sum(o.output_tokens for o in good)
    events = sum(o.events for o in outcomes)
    result: dict[str, object] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "max_concurrent_requests": peak_concurrency(outcomes),
        "client_cpu_us_per_event": 1e6 * client_cpu_s / events if events else 0.0,
    }
    for name, values in samples_ms(outcomes).items():
        result[f"mean_{name}_ms"] = float(values.mean()) if values.size else 0.0
        result[f"median_{name}_ms"] = float(np.median(values)) if values.size else 0.0
        result[f"std_{name}_ms"] = float(values.std()) if values.size else 0.0
        for percentile in percentiles:
            key = f"p{percentile:g}_{name}_ms"
            result[key] = float(np.percentile(values, percentile)) if values.size else 0.0
    return result


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at one moment."""
    edges = sorted([(o.started_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    peak = current = 0
    for _, step in edges:
        current += step
        peak = max(peak, current)
    return peak


def details(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Every request's own figures, in the order sent (seconds)."""
    return {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [max(0.0, o.first_token_s - o.started_s) if not o.error else 0.0 for o in outcomes],
        "itls": [o.gaps_s for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def print_report(
    console: Console, result: dict[str, object], metrics: Sequence[str], percentiles: Sequence[float]
) -> None:
    """The table a person reads at the end."""
    totals = Table(title="Serving benchmark", show_header=False, title_style="bold")
    totals.add_column()
    totals.add_column(justify="right")
    for label, key, form in (
        ("Successful requests", "completed", "d"),
        ("Failed requests", "failed", "d"),
        ("Duration (s)", "duration", ".2f"),
        ("Input tokens", "total_input_tokens", "d"),
        ("Output tokens", "total_output_tokens", "d"),
        ("Request throughput (req/s)", "request_throughput", ".2f"),
        ("Output throughput (tok/s)", "output_throughput", ".2f"),
        ("Total throughput (tok/s)", "total_token_throughput", ".2f"),
        ("Peak concurrent requests", "max_concurrent_requests", "d"),
        ("Client CPU per event (us)", "client_cpu_us_per_event", ".1f"),
    ):
        totals.add_row(label, format(result[key], form))
    console.print(totals)
    latencies = Table("Milliseconds", title_style="bold")
    for heading in ("mean", *(f"p{p:g}" for p in percentiles)):
        latencies.add_column(heading, justify="right")
    for name in metrics:
        keys = (f"mean_{name}_ms", *(f"p{p:g}_{name}_ms" for p in percentiles))
        latencies.add_row(METRICS[name], *(format(result[key], ".2f") for key in keys))
    console.print(latencies)

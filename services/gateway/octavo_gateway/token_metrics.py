"""The two metrics that move with every token, cheap enough for that: plain numbers, made into samples when asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")


class TokenMetrics(Collector):
    """Counts output tokens and the time between them. Used from one thread only."""

    def __init__(self, labels: Sequence[str], buckets_s: Sequence[float]) -> None:
        self._labels = list(labels)
        self._bounds = list(buckets_s)
        self._counts = [0] * (len(buckets_s) + 1)
        self._sum_s = 0.0
        self._tokens = 0

    def add_tokens(self, count: int) -> None:
        """More output tokens."""
        self._tokens += count

    def observe_gap(self, gap_s: float, count: int) -> None:
        """``count`` tokens came ``gap_s`` seconds apart."""
        self._counts[bisect_left(self._bounds, gap_s)] += count
        self._sum_s += gap_s * count

    def collect(self) -> Iterable[Metric]:
        """The current samples."""
        tokens = CounterMetricFamily("vllm:generation_tokens", "Output tokens.", labels=LABELS)
        tokens.add_metric(self._labels, self._tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", labels=LABELS
        )
        total, buckets = 0, []
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        gaps.add_metric(self._labels, buckets, self._sum_s)
        yield gaps

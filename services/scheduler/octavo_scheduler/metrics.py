"""The scheduler's own metrics, under vLLM's names. Gateways serve them beside theirs."""

from __future__ import annotations

from collections.abc import Sequence as Items

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from octavo_scheduler.engine import Engine
from octavo_shared.plan import StepTimings
from octavo_shared.records import ModelLimits

_TIME_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_BUCKETS = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LABELS = ("model_name", "engine")


class SchedulerMetrics:
    """Gauges are read off the engines when published; counters follow the cores' totals."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model, "0")
        self._make_vllms()
        self._make_our_own()
        self._reported: dict[str, int] = {}

    def _make_vllms(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Sequences that have a slot.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for one.")
        self._waiting_by_reason = self._gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting sequences by reason.", ("reason",)
        )
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV-cache blocks that are referenced, 0 to 1.")
        self._config = self._gauge(
            "vllm:cache_config_info",
            "Sizes of the KV cache.",
            ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"),
        )
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences let go to make room.")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed.")
        self._by_source = self._counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", ("source",)
        )
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed per step.", _ITERATION_BUCKETS
        )
        self._queue_time = self._histogram("vllm:request_queue_time_seconds", "From arrival to a slot.", _TIME_BUCKETS)
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From a slot to the first token.", _TIME_BUCKETS
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _TIME_BUCKETS
        )
        self._inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "From a slot to the end.", _TIME_BUCKETS
        )
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens computed per request.",
            (1, 2, 5, *_decades(10, 1e6)),
        )

    def _make_our_own(self) -> None:
        self._step = self._histogram("octavo:step_seconds", "Where the time of a step goes.", _STEP_BUCKETS, ("phase",))
        self._waste = self._gauge("octavo:kv_blocks_used", "Referenced KV-cache blocks.")
        self._hit_rate = self._gauge("octavo:prefix_cache_hit_rate", "Hit rate over the last 1,000 requests.")
        self._queued = self._gauge("octavo:queued_tokens", "Work owed to requests that have not ended.")
        self._bound = self._gauge("octavo:max_queued_tokens", "Requests that exceed it get 429; 0 = none.")
        self._rate = self._gauge("octavo:tokens_per_second", "Tokens computed or drawn, recently.")
        self._executors = self._gauge("octavo:executors", "Attached executors that make progress.")
        self._breaches = self._counter("octavo:integrity_breaches", "Broken invariants of the core.")
        self._adopted = self._counter("octavo:adopted_blocks", "Cached blocks taken over from an earlier term.")
        self._quarantined = self._counter(
            "octavo:requests_quarantined", "Requests given up because they made executors fail."
        )
        self._let_go = self._counter(
            "octavo:executors_let_go", "Executors that were silent or got nowhere.", ("reason",)
        )
        for reason in ("silent", "stalled"):
            self._let_go.labels(*self._values, reason)

    def _gauge(self, name: str, text: str, labels: Items[str] = ()) -> Gauge:
        return Gauge(name, text, (*_LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, text: str, labels: Items[str] = ()) -> Counter:
        made = Counter(name, text, (*_LABELS, *labels), registry=self.registry)
        if not labels:
            # Shown from the start: a rate over a series that is not there yet misses its first step.
            made.labels(*self._values)
        return made

    def _histogram(self, name: str, text: str, buckets: Items[float], labels: Items[str] = ()) -> Histogram:
        return Histogram(name, text, (*_LABELS, *labels), buckets=buckets, registry=self.registry)

    def observe_lookup(self, num_tokens: int, cached_tokens: int, waited_s: float) -> None:
        """A request got its first slot."""
        self._queue_time.labels(*self._values).observe(max(waited_s, 0.0))
        self._computed.labels(*self._values).observe(num_tokens - cached_tokens)
        self._cached.labels(*self._values).inc(cached_tokens)
        self._by_source.labels(*self._values, "local_cache_hit").inc(cached_tokens)
        self._by_source.labels(*self._values, "local_compute").inc(num_tokens - cached_tokens)

    def observe_prefill(self, seconds: float) -> None:
        """A request's first token was drawn."""
        self._prefill_time.labels(*self._values).observe(seconds)

    def observe_end(self, decode_s: float, inference_s: float) -> None:
        """A request's last token was drawn."""
        self._decode_time.labels(*self._values).observe(decode_s)
        self._inference_time.labels(*self._values).observe(inference_s)

    def count_breach(self) -> None:
        """An invariant of the core does not hold."""
        self._breaches.labels(*self._values).inc()

    def count_quarantined(self) -> None:
        """A request was given up because it made executors fail."""
        self._quarantined.labels(*self._values).inc()

    def count_adopted(self, blocks: int) -> None:
        """Cached blocks of an executor are found again after a takeover."""
        self._adopted.labels(*self._values).inc(blocks)

    def count_let_go(self, reason: str) -> None:
        """An executor was let go because it was ``silent`` or ``stalled``."""
        self._let_go.labels(*self._values, reason).inc()

    def observe_step(self, tokens: int, plan_s: float, round_trip_s: float, timings: StepTimings) -> None:
        """A step is acknowledged. ``round_trip_s`` runs from sending its plan to hearing its result."""
        if tokens:
            self._iteration.labels(*self._values).observe(tokens)
        computing_s = timings.prepare_s + timings.forward_s + timings.sample_s
        phases = {
            "plan": plan_s,
            "wire": max(round_trip_s - timings.queued_s - computing_s, 0.0),
            "idle": timings.wait_s,
            "prepare": timings.prepare_s,
            "forward": timings.forward_s,
            "sample": timings.sample_s,
            "publish": timings.publish_s,
        }
        for phase, seconds in phases.items():
            self._step.labels(*self._values, phase).observe(seconds)

    def exposition(self, engines: list[Engine], lobby: int, limits: ModelLimits) -> bytes:
        """All metrics in Prometheus' text format, as of now. ``lobby``: requests that wait for an executor."""
        cores = [engine.core for engine in engines]
        waiting = sum(core.num_waiting for core in cores)
        self._running.labels(*self._values).set(sum(core.num_running for core in cores))
        self._waiting.labels(*self._values).set(waiting + lobby)
        self._waiting_by_reason.labels(*self._values, "capacity").set(waiting)
        self._waiting_by_reason.labels(*self._values, "deferred").set(lobby)
        used, total = sum(core.pool.num_used for core in cores), sum(core.pool.num_blocks for core in cores)
        self._usage.labels(*self._values).set(used / total if total else 0.0)
        self._waste.labels(*self._values).set(used)
        self._executors.labels(*self._values).set(limits.executors)
        self._queued.labels(*self._values).set(limits.queued_tokens)
        self._bound.labels(*self._values).set(limits.max_queued_tokens)
        self._rate.labels(*self._values).set(limits.tokens_per_s)
        for engine in engines:
            config = engine.core.config
            caching = str(config.enable_prefix_caching)
            labels = (str(config.block_size), str(config.num_blocks), caching, engine.info.kv_dtype)
            self._config.labels(*self._values, *labels).set(1)
        self._follow(self._queries, "queries", sum(core.stats.prefix_queries for core in cores))
        self._follow(self._hits, "hits", sum(core.stats.prefix_hits for core in cores))
        self._follow(self._preemptions, "preemptions", sum(core.stats.preemptions for core in cores))
        self._hit_rate.labels(*self._values).set(cores[0].stats.window.rate if cores else 0.0)
        return generate_latest(self.registry)

    def _follow(self, counter: Counter, name: str, total: int) -> None:
        """Raise a counter to a total that starts again when an executor leaves."""
        before = self._reported.get(name, 0)
        counter.labels(*self._values).inc(total - before if total >= before else total)
        self._reported[name] = total


def _decades(start: float, stop: float) -> list[float]:
    """1-2-5 series from ``start`` to ``stop``."""
    values: list[float] = []
    while start <= stop:
        values += [start, 2 * start, 5 * start]
        start *= 10
    return values

"""Prometheus metrics under vLLM's names: those a gateway can know. The scheduler publishes the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from octavo_gateway.choice_view import ChoiceView
from octavo_gateway.token_metrics import TokenMetrics
from octavo_shared.records import RequestRecord

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition", "timeout")
ENGINE = "0"


def token_buckets(longest_tokens: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to ``longest_tokens``."""
    buckets = []
    decade = 1
    while decade <= longest_tokens:
        buckets += [mantissa * decade for mantissa in (1, 2, 5) if mantissa * decade <= longest_tokens]
        decade *= 10
    return tuple(buckets)


class GatewayMetrics:
    """The registry and everything in it."""

    def __init__(self, model_name: str, longest_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, ENGINE)
        lengths = token_buckets(longest_tokens)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun.")
        self._tokens = TokenMetrics(self._labels, TOKEN_BUCKETS_S)
        self.registry.register(self._tokens)
        self._success = Counter(
            "vllm:request_success", "Choices that ended, by why.", ["model_name", "engine", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._by_reason = {reason: self._success.labels(*self._labels, reason) for reason in FINISH_REASONS}
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a choice's tokens.", TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS_S)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._request_generation = self._histogram("request_generation_tokens", "Output tokens per choice.", lengths)
        self._max_generation = self._histogram(
            "request_max_num_generation_tokens", "Longest output among a request's choices.", lengths
        )
        self._params_n = self._histogram("request_params_n", "n of requests.", N_BUCKETS)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of requests.", lengths)
        self.refused = Counter(
            "octavo:requests_refused", "Requests answered with 429 because too much work is queued.",
            ["model_name", "engine"], registry=self.registry,
        ).labels(*self._labels)  # fmt: skip
        self.rate_limited = Counter(
            "octavo:requests_rate_limited", "Requests answered with 429 because their key has spent its rates.",
            registry=self.registry,
        )  # fmt: skip
        self._http = Counter(
            "http_requests", "HTTP requests by route, method and class of status.", ["handler", "method", "status"],
            registry=self.registry,
        )  # fmt: skip

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"vllm:{name}", text, ["model_name", "engine"], registry=self.registry)
        return metric.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, ["model_name", "engine"], registry=self.registry, buckets=buckets)
        return metric.labels(*self._labels)

    def http_request(self, handler: str, method: str, status: int) -> None:
        """An HTTP request has been answered."""
        self._http.labels(handler, method, f"{status // 100}xx").inc()

    def request_began(self, record: RequestRecord) -> None:
        """The first token or end of a request has come."""
        self._prompt_tokens.inc(len(record.prompt))

    def tokens_came(self, view: ChoiceView, count: int, arrival_s: float, now_s: float) -> None:
        """``count`` > 0 more tokens of a choice have come together; times are of the monotonic clock."""
        self._tokens.add_tokens(count)
        if view.first_token_s:
            self._tokens.observe_gap((now_s - view.last_token_s) / count, count)
        else:
            self._ttft.observe(now_s - arrival_s)
            if count > 1:
                self._tokens.observe_gap(0.0, count - 1)
        view.tokens_came(now_s)

    def choice_ended(self, view: ChoiceView, arrival_s: float, now_s: float) -> None:
        """A choice has ended, or its client has left (finish_reason "abort")."""
        self._by_reason[view.finish_reason or "abort"].inc()
        self._e2e.observe(now_s - arrival_s)
        self._request_generation.observe(view.tokens)
        if view.tokens > 1:
            self._per_token.observe((view.last_token_s - view.first_token_s) / (view.tokens - 1))

    def request_ended(self, record: RequestRecord, views: Iterable[ChoiceView], returned: int) -> None:
        """Every choice of a request has ended; ``returned`` of them were asked for."""
        self._request_prompt.observe(len(record.prompt))
        self._params_n.observe(returned)
        self._params_max_tokens.observe(record.sampling.max_tokens)
        self._max_generation.observe(max(view.tokens for view in views))

    def exposition(self, others: Mapping[bytes, bytes]) -> bytes:
        """Own metrics, then those of the other services, in Prometheus' text format."""
        parts = [generate_latest(self.registry), *(others[name] for name in sorted(others))]
        return b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in parts)

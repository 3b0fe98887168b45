"""Counts the core keeps about itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class HitRateWindow:
    """Prefix-cache hit rate over about the last ``max_requests`` requests (vLLM's caching metrics)."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._entries: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, requests: int, queries: int, hits: int) -> None:
        """Count ``hits`` tokens found of ``queries`` looked for by ``requests`` requests; the oldest entries leave."""
        self._entries.append((requests, queries, hits))
        self._requests += requests
        self._queries += queries
        self._hits += hits
        while len(self._entries) > 1 and self._requests > self._max_requests:
            old_requests, old_queries, old_hits = self._entries.popleft()
            self._requests -= old_requests
            self._queries -= old_queries
            self._hits -= old_hits

    @property
    def rate(self) -> float:
        """Share of tokens found, 0 … 1."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass(slots=True)
class CoreStats:
    """Totals since the start; all counts are tokens unless the name says otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    # Of sequences that came back after a preemption; not part of the two above.
    resumed_queries: int = 0
    resumed_hits: int = 0
    preemptions: int = 0
    # Computed, and lost by a preemption, and computed again.
    recomputed_tokens: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    window: HitRateWindow = field(default_factory=HitRateWindow)

    def count_lookup(self, num_tokens: int, cached_tokens: int, *, resumed: bool) -> None:
        """One sequence was admitted and ``cached_tokens`` of its tokens were found."""
        if resumed:
            self.resumed_queries += num_tokens
            self.resumed_hits += cached_tokens
        else:
            self.prefix_queries += num_tokens
            self.prefix_hits += cached_tokens
            self.window.observe(1, num_tokens, cached_tokens)

"""Spans and request times, from the core's events: queued → each prefill chunk → decode, with preemptions between."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span

from octavo_scheduler.core.events import Admitted, BeamFailed, BeamStep, Chunk, Ended, Event, Preempted
from octavo_scheduler.core.sequence import Sequence
from octavo_scheduler.metrics import SchedulerMetrics
from octavo_shared.records import EndReason
from octavo_shared.telemetry import Tracing


@dataclass(slots=True)
class _Story:
    """Where one sequence stands. Times are Unix seconds; 0 = not yet."""

    context: Context | None
    waiting: Span | None = None
    decode: Span | None = None
    chunk: Span | None = None
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    preempted: bool = False


class Observer:
    """Turns events into spans and metrics. Every span is a child of the request's HTTP server span."""

    def __init__(self, tracing: Tracing, metrics: SchedulerMetrics) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self._stories: dict[Sequence, _Story] = {}
        # Prefill chunks in flight, by the epoch and step that compute them.
        self._chunks: dict[tuple[int, int], list[Chunk]] = defaultdict(list)

    def arrived(self, sequence: Sequence) -> None:
        """A sequence was put into the queue."""
        record = sequence.record
        context = None
        if self._tracing.enabled and record.traceparent:
            context = Tracing.extract(record.traceparent, record.tracestate)
        story = self._stories[sequence] = _Story(context)
        story.waiting = self._span(story, sequence, "queued", record.arrival_us * 1000)

    def happened(self, events: list[Event], epoch: int) -> None:
        """What a plan decided, or a result brought, in an epoch."""
        for event in events:
            if isinstance(event, BeamStep | BeamFailed):
                continue
            story = self._stories.get(event.sequence)
            if story is None:
                continue
            if isinstance(event, Admitted):
                self._admitted(event, story)
            elif isinstance(event, Chunk):
                attributes: dict[str, str | int] = {
                    "octavo.step": event.step,
                    "octavo.start": event.start,
                    "octavo.tokens": event.count,
                }
                self._end_chunk(story)
                story.chunk = self._span(story, event.sequence, "prefill", time.time_ns(), attributes)
                self._chunks[epoch, event.step].append(event)
            elif isinstance(event, Preempted):
                self._preempted(event, story)
            elif isinstance(event, Ended):
                self.left(event.sequence, event.reason)

    def acknowledged(self, epoch: int, step: int) -> None:
        """Prefill chunks of ``step`` have been computed."""
        for chunk in self._chunks.pop((epoch, step), ()):
            story = self._stories.get(chunk.sequence)
            if story is None:
                continue
            self._end_chunk(story)
            if chunk.last:
                self._first_token(chunk.sequence, story)

    def epoch_over(self, epoch: int) -> None:
        """Nothing more will be heard of an epoch."""
        for key in [key for key in self._chunks if key[0] == epoch]:
            del self._chunks[key]

    @staticmethod
    def _end_chunk(story: _Story) -> None:
        if story.chunk is not None:
            story.chunk.end()
            story.chunk = None

    def left(self, sequence: Sequence, reason: EndReason) -> None:
        """A sequence ended, or leaves this attempt."""
        story = self._stories.pop(sequence, None)
        if story is None:
            return
        now = time.time()
        if story.first_token_s:
            self._metrics.observe_end(now - story.first_token_s, now - story.admitted_s)
        self._end_chunk(story)
        for span in (story.waiting, story.decode):
            if span is not None:
                span.set_attribute("gen_ai.response.finish_reasons", [reason.finish_reason or "resumed"])
                span.set_attribute("gen_ai.usage.output_tokens", max(len(sequence.tokens) - sequence.output_start, 0))
                span.end()

    def _admitted(self, event: Admitted, story: _Story) -> None:
        now = time.time()
        if story.waiting is not None:
            story.waiting.set_attribute("gen_ai.usage.cache_read.input_tokens", event.cached_tokens)
            story.waiting.end()
            story.waiting = None
        if story.preempted:
            if story.decode is not None:
                story.decode.add_event("resumed", {"octavo.step": event.step, "octavo.cached": event.cached_tokens})
        else:
            story.admitted_s = now
            waited_s = now - event.sequence.record.arrival_us / 1e6
            self._metrics.observe_lookup(event.num_tokens, event.cached_tokens, waited_s)

    def _preempted(self, event: Preempted, story: _Story) -> None:
        story.preempted = True
        if story.decode is not None:
            story.decode.add_event("preempted", {"octavo.step": event.step})
        story.waiting = self._span(story, event.sequence, "preempted", time.time_ns())

    def _first_token(self, sequence: Sequence, story: _Story) -> None:
        if story.first_token_s:
            return
        story.first_token_s = time.time()
        self._metrics.observe_prefill(story.first_token_s - story.admitted_s)
        story.decode = self._span(story, sequence, "decode", time.time_ns())

    def _span(
        self,
        story: _Story,
        sequence: Sequence,
        name: str,
        start_ns: int,
        attributes: dict[str, str | int] | None = None,
    ) -> Span | None:
        if story.context is None:
            return None
        common: dict[str, str | int] = {"gen_ai.request.id": str(sequence.request_id), "octavo.choice": sequence.choice}
        return self._tracing.tracer.start_span(
            name, context=story.context, start_time=start_ns, attributes=common | (attributes or {})
        )

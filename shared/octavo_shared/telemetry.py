"""Logging and tracing set-up, the same in every service."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()


def setup_logging(service: str, level: str) -> None:
    """One line per event on standard error: time, level, service, message."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {service} %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


class Tracing:
    """The spans of one service. Without an endpoint every span is a no-op that costs next to nothing."""

    def __init__(self, service: str, endpoint: str | None, instance: str = "") -> None:
        self.enabled = endpoint is not None
        self._provider: TracerProvider | None = None
        self.tracer: trace.Tracer = trace.NoOpTracer()
        if endpoint is not None:
            self._provider = _provider(service, endpoint, instance)
            self.tracer = self._provider.get_tracer("octavo")

    @staticmethod
    def extract(traceparent: str, tracestate: str = "") -> Context:
        """The context that W3C headers describe."""
        return _PROPAGATOR.extract({"traceparent": traceparent, "tracestate": tracestate})

    @staticmethod
    def inject(context: Context) -> Mapping[str, str]:
        """The W3C headers ("traceparent", "tracestate") that describe a context."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context)
        return carrier

    def shutdown(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(service: str, endpoint: str, instance: str) -> TracerProvider:
    # Most run without traces, and a twentieth of a scheduler's start is the exporter's import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": f"octavo-{service}", "service.instance.id": instance})
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    return provider

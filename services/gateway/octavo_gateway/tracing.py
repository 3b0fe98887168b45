"""The gateway's spans and their attributes. Nothing here runs unless an OTLP endpoint is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, set_span_in_context

from octavo_shared.telemetry import Tracing


class GatewayTracing:
    """Spans of the gateway."""

    def __init__(self, endpoint: str | None, instance: str) -> None:
        self._tracing = Tracing("gateway", endpoint, instance)
        self.enabled = self._tracing.enabled

    def server_span(self, method: str, path: str, traceparent: str, tracestate: str) -> Span:
        """The span of an HTTP request, child of the client's if it sent one."""
        return self._tracing.tracer.start_span(
            f"{method} {path}",
            context=self._tracing.extract(traceparent, tracestate),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )

    def child(self, name: str, parent: Span) -> Span:
        """A span within the gateway."""
        return self._tracing.tracer.start_span(name, context=set_span_in_context(parent))

    def headers_of(self, span: Span) -> tuple[str, str]:
        """``traceparent`` and ``tracestate`` that make others children of a span."""
        carrier = self._tracing.inject(set_span_in_context(span))
        return carrier.get("traceparent", ""), carrier.get("tracestate", "")

    def shutdown(self) -> None:
        """Send what is left."""
        self._tracing.shutdown()


def describe_answer(span: Span, answer: Mapping[str, Any]) -> None:
    """OpenTelemetry's GenAI attributes, under their current names and those vLLM uses."""
    sampling, usage = answer["sampling"], answer["usage"]
    operation = "chat" if answer["kind"] == "chat" else "text_completion"
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": answer["model"],
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": answer["finish_reasons"],
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": answer["n"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.latency.e2e": answer["e2e_s"],
    }
    if answer["first_token_s"] is not None:
        attributes["gen_ai.latency.time_to_first_token"] = answer["first_token_s"]
    span.set_attributes(attributes)

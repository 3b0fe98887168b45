"""Spans as an OTLP collector receives them, and trace context on its way into the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest
from gateway_stage import Stage
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

MakeStage = Callable[..., AbstractContextManager[Stage]]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps the spans it is sent."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self._arrived = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._arrived:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans |= {span.name: span for span in scope.spans}
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, *names: str) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.spans.keys() >= set(names), timeout=20), self.spans.keys()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    values = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


def test_spans_of_a_stream(make_stage: MakeStage, collector: tuple[Collector, str]) -> None:
    received, endpoint = collector
    with make_stage(otlp_traces_endpoint=endpoint) as stage:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "temperature": 0.5}
        stage.client.post(
            "/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        )
        stage.client.get("/health")
        received.wait_for("POST /v1/chat/completions", "detokenize/stream")
        record = stage.engine.records[-1]
        server, child = received.spans["POST /v1/chat/completions"], received.spans["detokenize/stream"]
        _, trace_id, parent, _ = TRACEPARENT.split("-")
        assert (server.trace_id.hex(), server.parent_span_id.hex()) == (trace_id, parent)
        assert (child.trace_id, child.parent_span_id) == (server.trace_id, server.span_id)
        # What the scheduler and the executor add hangs below the server's span.
        assert record.traceparent == f"00-{trace_id}-{server.span_id.hex()}-01"
        assert record.tracestate == "vendor=1"
        found = attributes(server)
        prompt = len(record.prompt)
        assert found["http.response.status_code"] == 200
        assert found["gen_ai.operation.name"] == "chat"
        assert found["gen_ai.provider.name"] == "octavo"
        assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == stage.settings.model_name
        assert found["gen_ai.response.id"] == found["gen_ai.request.id"] == f"chatcmpl-{record.id}"
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        assert found["gen_ai.usage.input_tokens"] == found["gen_ai.usage.prompt_tokens"] == prompt
        assert found["gen_ai.usage.output_tokens"] == found["gen_ai.usage.completion_tokens"] == 4
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 4)
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert "GET /health" not in received.spans


def test_without_an_endpoint_context_passes_through(stage: Stage) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    stage.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    record = stage.engine.records[-1]
    assert (record.traceparent, record.tracestate) == (TRACEPARENT, "vendor=1")

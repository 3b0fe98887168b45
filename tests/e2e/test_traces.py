"""One trace covers a request through all services, with the right parents, a chunked prefill and a preemption."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest
from e2e_stack import Stack
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps every span with the name of its service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.arrived = threading.Condition()
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self.arrived:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                self.spans += [(names["service.name"], s) for scope in resource.scope_spans for s in scope.spans]
            self.arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, what: Callable[[list[tuple[str, Any]]], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: what(self.spans), 20), [(s, x.name) for s, x in self.spans]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.stop(0)


def test_one_trace_covers_a_request(start_small: Callable[..., Stack], receiver: Receiver) -> None:
    # 100 blocks of 16 tokens: two sequences of 700 + 160 tokens cannot both grow to the end.
    stack = start_small(
        *("--otlp-traces-endpoint", f"http://127.0.0.1:{receiver.port}"),
        *("--max-model-len", "1500", "--num-gpu-blocks-override", "100", "--max-num-batched-tokens", "256"),
    )

    def ask(trace_id: str, first_token: int) -> None:
        body = {"model": "m", "prompt": [first_token] * 700, "max_tokens": 160, "ignore_eos": True, "temperature": 0}
        headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
        httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120).raise_for_status()

    # Outputs are short, as far as the scheduler has seen: so it takes both of what follows in.
    for _ in range(60):
        httpx.post(f"{stack.url}/v1/completions", json={"model": "m", "prompt": [7], "max_tokens": 1}, timeout=60)
    traces = [TRACE_ID, TRACE_ID[::-1]]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, traces, (5, 6)))
    stack.stop()

    def of(trace_id: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in receiver.spans if span.trace_id.hex() == trace_id]

    receiver.wait_for(lambda spans: any(span.name == "preempted" for _, span in spans))
    preempted = next(span.trace_id.hex() for _, span in receiver.spans if span.name == "preempted")
    for trace_id in traces:
        spans = of(trace_id)
        names = [span.name for _, span in spans]
        root = next(span for _, span in spans if span.name == "POST /v1/completions")
        assert root.parent_span_id.hex() == CLIENT_SPAN
        assert names.count("queued") == 1
        assert names.count("prefill") >= 3, "700 tokens at 256 a step are at least three chunks"
        assert names.count("decode") == 1
        assert {service for service, _ in spans} == {"octavo-gateway", "octavo-scheduler"}
        assert all(span.parent_span_id == root.span_id for _, span in spans if span is not root)
        assert all(span.end_time_unix_nano >= span.start_time_unix_nano for _, span in spans)
    decode = next(span for _, span in of(preempted) if span.name == "decode")
    assert [event.name for event in decode.events] == ["preempted", "resumed"]

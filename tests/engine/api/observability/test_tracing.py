"""Traces: W3C headers in and out, OTLP spans to a collector, and no failure without one."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quire_common.logs import log_handler
from quire_engine.api.otlp import OtlpTracing, with_path
from quire_engine.api.tracing import TraceContext, read_context
from quire_engine.errors import Unavailable

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


# --- W3C's headers ---


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (TRACEPARENT, True),
        (f" {TRACEPARENT} ", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-02", False),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_traceparent_is_read(traceparent: str, sampled: bool) -> None:
    context = read_context(traceparent, "vendor=1")
    assert context == TraceContext(trace_id=TRACE, span_id=PARENT, sampled=sampled, state="vendor=1")
    assert context.traceparent == f"00-{TRACE}-{PARENT}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "00-1",
        TRACEPARENT.upper(),
        f"{TRACEPARENT}-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-1",
    ],
)
def test_invalid_traceparent_is_ignored(traceparent: str | None) -> None:
    assert read_context(traceparent, "vendor=1") is None


@given(st.text(max_size=70), st.text(max_size=600))
def test_trace_headers_never_raise(traceparent: str, tracestate: str) -> None:
    context = read_context(traceparent, tracestate)
    assert context is None or len(context.state) <= 512


async def test_trace_without_collector_is_propagated_and_logged(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    json_lines = logging.Handler()
    json_lines.emit = lambda record: lines.append(log_handler("json").format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("quire_engine.api.middleware")
    logger.addHandler(json_lines)
    try:
        async with serving("ok", log_requests=True) as server:
            with caplog.at_level(logging.INFO, logger="quire_engine"):
                headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "q7"}
                server.http.headers.update(headers)
                answer = await server.complete()
    finally:
        logger.removeHandler(json_lines)
    assert {name: answer.headers[name] for name in headers} == headers
    entry = json.loads(lines[0])
    assert (entry["request_id"], entry["trace_id"]) == ("q7", TRACE)


# --- spans ---


class Collector:
    """A collector that accepts OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    outer.services |= {
                        pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
                    }
                    outer.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in span.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


async def test_a_request_is_one_span_with_its_times_and_tokens(
    serving: Serving, collector: Collector, token_ids: TokenIds
) -> None:
    tracing = OtlpTracing(collector.endpoint)
    before = time.time_ns()
    async with serving(tracing=tracing) as server:
        server.http.headers.update({"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "q7"})
        asking = asyncio.create_task(server.chat(n=2, max_tokens=9, temperature=0.5, top_p=0.75, stream=True))
        first, second = await server.engine.stream(0), await server.engine.stream(1)
        for stream in (first, second):
            stream.starts()
            stream.draw(token_ids("Hel"))
            stream.draw(token_ids("lo"), "length")
        answer = await asking
        for path in ("/livez", "/readyz", "/metrics"):
            await server.http.get(path)
    await asyncio.to_thread(tracing.close)
    (span,) = collector.spans
    assert collector.services == {"quire-engine"}
    assert (span.name, span.kind, span.trace_state) == ("llm_request", Span.SPAN_KIND_SERVER, "vendor=1")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    told = attributes(span)
    prompt = len(first.prompt)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "q7",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }
    assert {name: told[name] for name in expected} == expected
    queue, first_token = told["gen_ai.latency.time_in_queue"], told["gen_ai.latency.time_to_first_token"]
    assert 0 <= queue <= first_token <= told["gen_ai.latency.e2e"] < 20
    inference = told["gen_ai.latency.time_in_model_prefill"] + told["gen_ai.latency.time_in_model_decode"]
    assert told["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference)
    events = [(event.name, event.time_unix_nano) for event in span.events]
    assert [name for name, _ in events] == ["first_scheduled", "first_token"]
    assert span.start_time_unix_nano <= events[0][1] <= events[1][1] <= span.end_time_unix_nano


async def test_spans_report_failures_without_prompts(serving: Serving, collector: Collector) -> None:
    tracing = OtlpTracing(collector.endpoint)
    async with serving(tracing=tracing) as server:
        server.engine.refuses = Unavailable("the engine is being restarted")
        answer = await server.complete(prompt="marker of the prompt")
        assert answer.headers["traceparent"].startswith("00-")
        server.engine.refuses = None
        asking = asyncio.create_task(server.complete(prompt="marker of the prompt"))
        (await server.engine.stream()).breaks(Unavailable("the engine stopped"))
        await asking
        await server.complete(prompt="marker of the prompt", colour="marker of a field")
        await server.http.get("/marker-of-a-path")
    await asyncio.to_thread(tracing.close)
    statuses = [attributes(span)["http.response.status_code"] for span in collector.spans]
    assert statuses == [503, 503, 400, 404]
    assert [span.status.code == Status.STATUS_CODE_ERROR for span in collector.spans] == [True, True, False, False]
    assert [span.name for span in collector.spans] == ["llm_request"] * 3 + ["GET"]
    assert attributes(collector.spans[1])["gen_ai.response.finish_reasons"] == ["error"]
    assert len({span.trace_id for span in collector.spans}) == 4
    assert "marker of" not in "".join(map(str, collector.spans))


async def test_spans_of_unsampled_traces_are_not_exported(serving: Serving, collector: Collector) -> None:
    tracing = OtlpTracing(collector.endpoint)
    async with serving("ok", tracing=tracing) as server:
        answer = await server.http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert answer.headers["traceparent"].startswith(f"00-{TRACE}-") and answer.headers["traceparent"][-2:] == "00"
    await asyncio.to_thread(tracing.close)
    assert collector.spans == []


async def test_unreachable_collector_does_not_delay_requests(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        tracing = OtlpTracing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with serving("ok", tracing=tracing) as server:
            began = time.monotonic()
            for _ in range(20):
                assert (await server.complete(max_tokens=2)).status_code == 200
            assert time.monotonic() - began < 15, "each waited for an export, which takes a second to fail"
    closing = threading.Thread(target=tracing.close, daemon=True)  # as the server does
    closing.start()
    await asyncio.to_thread(closing.join, 15)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/own/path", "https://c/own/path"),
    ],
)
def test_collector_address_without_a_path_gets_the_default(given: str, used: str) -> None:
    assert with_path(given) == used


async def test_repeated_header_fields_are_joined(serving: Serving) -> None:
    async with serving("ok") as server:
        states = [("tracestate", "a=1"), ("tracestate", "b=2")]
        answer = await server.http.get("/v1/models", headers=[("traceparent", TRACEPARENT), *states])
        assert answer.headers["tracestate"] == "a=1,b=2"
        twice = [("traceparent", TRACEPARENT), ("traceparent", f"00-{'1' * 32}-{PARENT}-01")]
        answer = await server.http.get("/v1/models", headers=twice)
        assert "traceparent" not in answer.headers  # it is unknown which of the two is valid

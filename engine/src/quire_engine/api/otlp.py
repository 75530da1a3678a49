"""Spans of OpenTelemetry's SDK, sent in the background as OTLP over HTTP. Only imported where an endpoint is set.

A collector that is slow or gone does not delay requests: spans wait in a bounded queue, and those that do not fit are
lost. The SDK's own variables apply, such as OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and
OTEL_EXPORTER_OTLP_HEADERS.
"""

import os
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, TraceState

from quire_engine import __version__
from quire_engine.api.tracing import TraceContext, Value

_TRACES_PATH = "/v1/traces"


class OtlpTracing:
    """A sender of spans to one collector. ``close`` sends the queued spans in the calling thread."""

    def __init__(self, endpoint: str) -> None:
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "quire-engine"}
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=with_path(endpoint))))
        self._tracer = self._provider.get_tracer("quire_engine", __version__)

    def begin(self, name: str, parent: TraceContext | None, attributes: Mapping[str, Value]) -> "OtlpSpan":
        """Begin a span."""
        span = self._tracer.start_span(name, context=_remote(parent), kind=SpanKind.SERVER, attributes=dict(attributes))
        return OtlpSpan(span)

    def close(self) -> None:
        """Send the queued spans, and end."""
        self._provider.shutdown()


class OtlpSpan:
    """One span of OpenTelemetry's SDK."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        """The trace context of this span."""
        own = self._span.get_span_context()
        return TraceContext(
            trace_id=trace.format_trace_id(own.trace_id),
            span_id=trace.format_span_id(own.span_id),
            sampled=own.trace_flags.sampled,
            state=own.trace_state.to_header(),
        )

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        """Set attributes of the span."""
        self._span.set_attributes(attributes)

    def event(self, name: str, time: float) -> None:
        """Add an event at a monotonic time, in seconds."""
        self._span.add_event(name, timestamp=_wall_clock(time))

    def end(self, *, failed: bool) -> None:
        """End the span, with an error status if the request failed."""
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def with_path(endpoint: str) -> str:
    """Return the endpoint, with OTLP's usual path where it is a bare address."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH


def _remote(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    context = trace.SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.state]),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


def _wall_clock(monotonic: float) -> int:
    """Return a monotonic time as Unix time, in nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)

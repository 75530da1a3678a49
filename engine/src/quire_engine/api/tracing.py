"""The spans of requests, with the attribute names of OpenTelemetry's GenAI conventions and of vLLM.

``otlp`` sends spans where an endpoint is set; otherwise spans do not exist, and OpenTelemetry is not imported. The edge
begins and ends a span, ``generation`` adds attributes. A span never contains a prompt or an answer.

The trace of a request follows W3C Trace Context, https://www.w3.org/TR/trace-context/: a header that cannot be parsed
is ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_engine.api.metrics import RequestTimes
from quire_engine.core.sampling_params import SamplingParams

Value = str | int | float | bool | Sequence[str]

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
UNTRACED = frozenset({"/livez", "/readyz", "/health", "/metrics"})

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_MAX_STATE_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The trace and the parent span of a request."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""
    """The entries of other tracing systems in tracestate, which are passed on unchanged."""

    @property
    def traceparent(self) -> str:
        """The value of the header traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def read_context(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
    """Return the trace context of the two headers; None where they are missing or cannot be parsed."""
    match = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    state = (tracestate or "").strip()
    return TraceContext(
        trace_id=match["trace"],
        span_id=match["span"],
        sampled=bool(int(match["flags"], 16) & 1),
        state=state if len(state) <= _MAX_STATE_CHARACTERS else "",
    )


class Span(Protocol):
    """The span of one request."""

    @property
    def context(self) -> TraceContext:
        """The trace context of this span."""

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        """Set attributes of the span."""

    def event(self, name: str, time: float) -> None:
        """Add an event at a monotonic time, in seconds."""

    def end(self, *, failed: bool) -> None:
        """End the span, with an error status if the request failed."""


class Tracing(Protocol):
    """A sender of spans."""

    def begin(self, name: str, parent: TraceContext | None, attributes: Mapping[str, Value]) -> Span:
        """Begin a span."""


def span_name(method: str, path: str) -> str:
    """Return vLLM's name for a generation, else the method: clients choose the paths, so their number is unbounded."""
    return "llm_request" if path in OPERATIONS else method


def request_attributes(method: str, path: str, request_id: str) -> dict[str, Value]:
    """Return the attributes of a request that are known when it arrives."""
    attributes: dict[str, Value] = {
        "http.request.method": method,
        "url.path": path[:200],
        "gen_ai.request.id": request_id,
    }
    if operation := OPERATIONS.get(path):
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "quire"}
    return attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """One sequence of a request that has ended."""

    times: RequestTimes
    generated_tokens: int
    finish_reason: str


def generation_attributes(
    model: str, sampling: SamplingParams, sequences: Sequence[SequenceRecord], prompt_tokens: int, now: float
) -> dict[str, Value]:
    """Return the attributes of a whole request, from the first event of any of its sequences to the last."""
    generated = sum(sequence.generated_tokens for sequence in sequences)
    attributes: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": len(sequences),
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.response.finish_reasons": [sequence.finish_reason for sequence in sequences],
    }
    return attributes | _latencies([sequence.times for sequence in sequences], now)


def _latencies(times: Sequence[RequestTimes], now: float) -> dict[str, Value]:
    arrived = times[0].arrived
    latencies: dict[str, Value] = {"gen_ai.latency.e2e": now - arrived}
    scheduled = milestone(times, "first_scheduled")
    first = milestone(times, "first_token")
    if scheduled is not None:
        latencies["gen_ai.latency.time_in_queue"] = scheduled - arrived
    if first is not None:
        latencies["gen_ai.latency.time_to_first_token"] = first - arrived
        last = max(one.last_token for one in times if one.last_token is not None)
        latencies["gen_ai.latency.time_in_model_decode"] = last - first
        if scheduled is not None:
            latencies["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            latencies["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return latencies


def milestone(times: Sequence[RequestTimes], name: str) -> float | None:
    """Return the earliest time at which one of the sequences reached this milestone; None where none has."""
    reached = [time for one in times if (time := getattr(one, name)) is not None]
    return min(reached, default=None)

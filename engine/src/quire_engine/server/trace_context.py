"""W3C Trace Context: to which trace a request belongs, read from its headers and written into ours. Pure.

https://www.w3.org/TR/trace-context/: what cannot be read is as if it had not been sent.
"""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_MAX_STATE_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""
    """What other tracing systems wrote into tracestate; passed on as it is."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def read_context(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
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

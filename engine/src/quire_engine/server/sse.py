"""Server-sent events as OpenAI streams them: ``data: JSON``, a blank line, and ``data: [DONE]`` after success only."""

from typing import Any

import msgspec

from quire_engine.errors import RequestError
from quire_engine.server.problems import error_body

DONE = b"data: [DONE]\n\n"

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the stream before it passes it on
}

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """JSON escapes line breaks, so that one payload is always one data line."""
    return b"data: " + _encode(payload) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"

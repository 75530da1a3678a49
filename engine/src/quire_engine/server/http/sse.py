"""Server-sent events as OpenAI streams them: ``data: JSON``, an empty line, and ``data: [DONE]`` only after success."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire_engine.errors import RequestError
from quire_engine.server.http.problems import error_body

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""A line that clients ignore; proxies see that the connection is alive."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers the stream
}

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """Return one event. JSON escapes line breaks, so a payload is always one data line."""
    return b"data: " + _encode(payload) + b"\n\n"


def comment(start: bytes, payload: Any) -> bytes:
    """Return a comment, which clients ignore."""
    return start + _encode(payload) + b"\n\n"


class TextEvent:
    """An event in which only one text changes from token to token: everything around it is encoded once."""

    def __init__(self, payload_of: Callable[[str], Any]) -> None:
        # No other string in an answer contains such characters: names and ids are printable.
        place = "\x00text\x00"
        self._head, found, self._tail = event(payload_of(place)).partition(_encode(place))
        assert found, "the payload does not contain the text"

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return b"%b%b%b" % (self._head, _encode(text), self._tail)


def error_event(error: RequestError) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"

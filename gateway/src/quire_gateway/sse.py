"""Server-sent events are forwarded as whole events, so that a broken stream can end with an error event.

Under ``proxy``. A chunk from a replica nearly always ends where an event ends and is forwarded at once; only an
incomplete event waits for its rest.
"""

_MAX_EVENT_BYTES = 2**20

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Content-Type": f"{CONTENT_TYPE}; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of a stream that begins before its replica has answered."""
EVENT_END = b"\n\n"
"""The end of an event as engines write it."""
_ERROR = b"event: error\n"


class EventSplitter:
    """A buffer that splits a stream where events end."""

    def __init__(self) -> None:
        self._rest = b""
        self.has_error = False
        """True if an error event has ended the stream: nothing may follow it."""

    def feed(self, chunk: bytes) -> bytes:
        """Return all events that are complete with this chunk."""
        data = self._rest + chunk if self._rest else chunk
        self.has_error |= data.startswith(_ERROR) or b"\n" + _ERROR in data
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self._rest = b""
            return data
        lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        if len(data) - end > _MAX_EVENT_BYTES:
            # No event is that long: this is another kind of stream under the same content type.
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """Return what follows the last complete event, at the regular end of the stream."""
        rest, self._rest = self._rest, b""
        return rest


def error_event(body: bytes) -> bytes:
    """Return the event for an error within a stream; no ``[DONE]`` follows it."""
    return b"event: error\ndata: " + body + b"\n\n"

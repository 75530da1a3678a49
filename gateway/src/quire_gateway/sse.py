"""Server-sent events as they pass through: whole events only, so that a broken stream can end in one of ours.

Under ``proxy``. A chunk from a replica nearly always ends where an event ends and goes out at once; only the start of
an event that is not whole yet waits for its rest.
"""

_MAX_EVENT_BYTES = 2**20

CONTENT_TYPE = "text/event-stream"
_ERROR = b"event: error\n"


class EventSplitter:
    """Cuts a stream where events end."""

    def __init__(self) -> None:
        self._rest = b""
        self.told_error = False
        """Whether an event has said that the stream breaks off: nothing may follow it."""

    def feed(self, chunk: bytes) -> bytes:
        """All events that are whole with this chunk."""
        data = self._rest + chunk if self._rest else chunk
        self.told_error |= data.startswith(_ERROR) or b"\n" + _ERROR in data
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self._rest = b""
            return data
        lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        if len(data) - end > _MAX_EVENT_BYTES:
            # No event is that long: somebody streams something else under this name.
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What came after the last whole event, at the stream's regular end."""
        rest, self._rest = self._rest, b""
        return rest


def error_event(body: bytes) -> bytes:
    """An error in the midst of a stream; no ``[DONE]`` follows it."""
    return b"event: error\ndata: " + body + b"\n\n"

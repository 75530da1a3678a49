"""Server-sent events are forwarded as whole events, so that a broken stream can end with an error event.

Under ``proxy``. A chunk from a replica nearly always ends where an event ends and is forwarded at once; only an
incomplete event waits for its rest.
"""

_MAX_EVENT_BYTES = 2**18
"""The most of an incomplete event that waits for its rest; a longer one is forwarded in pieces."""
_OVERLAP = 3
"""The most bytes of an event's end that an earlier chunk may have brought."""

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Content-Type": f"{CONTENT_TYPE}; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of a stream that begins before its replica has answered."""
EVENT_END = b"\n\n"
"""The end of an event as engines write it."""
_ERROR = b"event: error\n"


class EventSplitter:
    """A buffer that splits a stream where events end."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.error: bytes | None = None
        """The data of the error event that has ended the stream, perhaps without its end; nothing may follow it."""

    def feed(self, chunk: bytes) -> bytes:
        """Return all events that are complete with this chunk."""
        if not self._rest and chunk.endswith((b"\n\n", b"\r\n\r\n")):
            return self._checked(chunk)
        # Only what is new is searched, so that an event in many small chunks costs no more than one in a large chunk.
        new = max(0, len(self._rest) - _OVERLAP)
        self._rest += chunk
        lf, crlf = self._rest.rfind(b"\n\n", new), self._rest.rfind(b"\r\n\r\n", new)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        return self._take(len(self._rest) if len(self._rest) - end > _MAX_EVENT_BYTES else end)

    def flush(self) -> bytes:
        """Return what follows the last complete event, at the regular end of the stream."""
        return self._take(len(self._rest))

    def _take(self, end: int) -> bytes:
        data = bytes(self._rest[:end])
        del self._rest[:end]
        return self._checked(data)

    def _checked(self, data: bytes) -> bytes:
        if data.startswith(_ERROR) or b"\n" + _ERROR in data:
            self.error = data.rpartition(_ERROR)[2].removeprefix(b"data: ")
        return data


def error_event(body: bytes) -> bytes:
    """Return the event for an error within a stream; no ``[DONE]`` follows it."""
    return b"event: error\ndata: " + body + b"\n\n"

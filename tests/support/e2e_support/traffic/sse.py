"""Server-sent events from the chunks of a body. Pure."""

from collections.abc import Iterator


class EventReader:
    """A reader that yields the data of each event at its blank line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Return the data of all events that this chunk completes."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            yield b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])

    @property
    def rest(self) -> bytes:
        """Return the data after the last complete event."""
        return self._rest

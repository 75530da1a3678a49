"""Server-sent events out of the chunks of a body. Pure."""

from collections.abc import Iterator


class EventReader:
    """Gives the data of each event as soon as its blank line is there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of all events that are whole with this chunk."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            yield b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest

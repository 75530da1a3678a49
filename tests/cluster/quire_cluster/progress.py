"""Progress of a long build: a rewritten line on a terminal, or a line at intervals in a log."""

import time
from collections.abc import Callable
from typing import Final, TextIO

LOG_INTERVAL_SECONDS: Final = 30.0
TERMINAL_INTERVAL_SECONDS: Final = 0.2


def minutes_and_seconds(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """A writer to one stream that knows whether it is a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._interval = TERMINAL_INTERVAL_SECONDS if stream.isatty() else LOG_INTERVAL_SECONDS
        self._last_update = clock()
        self._line_open = False

    def say(self, text: str) -> None:
        """Write a permanent line."""
        self._write(f"{self._erase()}{text}\n")
        self._line_open = False

    def update(self, text: str) -> None:
        """Write the progress, unless the previous one was too recent."""
        now = self._clock()
        if now - self._last_update < self._interval:
            return
        self._last_update = now
        if self._stream.isatty():
            self._write(f"{self._erase()}{text}")
            self._line_open = True
        else:
            self._write(f"{text}\n")

    def _erase(self) -> str:
        return "\r\x1b[K" if self._line_open else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

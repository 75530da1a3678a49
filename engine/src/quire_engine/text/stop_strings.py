"""Stop strings in a stream of text: cut exactly there, over any border, and hold back no more than may become one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    text: str
    """What may be shown now."""
    stop: str | None = None
    """The stop string that ended the text."""


class StopStrings:
    """Watches a text that arrives in parts. The result does not depend on where the parts end.

    The text ends where, read character by character, a stop string is first complete; of several that complete at the
    same character the longest counts. ``included`` keeps it in the text.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._included = included
        self._held = ""

    def feed(self, text: str) -> Cut:
        if not text:
            return Cut("")
        buffer = self._held + text
        found = self._first_complete(buffer)
        if found is not None:
            end, stop = found
            self._held = ""
            return Cut(buffer[:end] if self._included else buffer[: end - len(stop)], stop)
        shown = len(buffer) - self._open_length(buffer)
        self._held = buffer[shown:]
        return Cut(buffer[:shown])

    def flush(self) -> str:
        """What was held back, when the text ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so that the longest wins a tie
            limit = len(buffer) if best is None else best[0] - 1
            start = buffer.find(stop, 0, limit)
            if start >= 0:
                best = (start + len(stop), stop)
        return best

    def _open_length(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if stop.startswith(buffer[-length:]):
                    longest = length
                    break
        return longest

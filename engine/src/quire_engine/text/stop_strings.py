"""Stop strings in streamed text: the text is cut exactly there, and only what may become a stop string is held back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Cut:
    """The text that may be shown now, and the stop string if one was completed."""

    text: str
    stop: str | None = None
    """The stop string that ended the text."""


class StopStrings:
    """A search for stop strings in a text that arrives in parts, whose result does not depend on where the parts end.

    The text ends at the first character that completes a stop string; of several that the same character completes,
    the longest counts. ``included`` keeps it in the text.

    The search is that of Knuth, Morris and Pratt (SIAM Journal on Computing 6, 1977): a character costs the same for
    all stop strings, which clients choose.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        # Longest first, so that the longest wins a tie.
        self._stops = [(stop, _borders(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._begin = _one_of("".join(sorted({stop[0] for stop in stops})))
        self._included = included
        self._held = ""
        self._matched = [0] * len(self._stops)
        """For each stop string, the length of its prefix with which the text ends."""

    def feed(self, text: str) -> Cut:
        """Return what of the text so far may be shown now, after ``text`` has arrived."""
        start = 0
        if not self._held:  # no stop string has started, as in nearly all of a text
            found = self._begin.search(text)
            if found is None:
                return Cut(text)
            start = found.start()
        buffer = self._held + text
        for end, character in enumerate(text[start:], start=len(self._held) + start + 1):
            stop = self._step(character)
            if stop is not None:
                self._held = ""
                return Cut(buffer[:end] if self._included else buffer[: end - len(stop)], stop)
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return Cut(buffer[:shown])

    def flush(self) -> str:
        """Return the text that is held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance by one character, and return the stop string that it completes."""
        matched = self._matched
        for index, (stop, borders) in enumerate(self._stops):
            length = matched[index]
            while length and stop[length] != character:
                length = borders[length]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    return stop
            matched[index] = length
        return None


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """Return, for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        if stop[length] == character:
            length += 1
        borders.append(length)
    return tuple(borders)


@lru_cache(maxsize=1024)
def _one_of(characters: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(characters)}]")

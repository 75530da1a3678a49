"""Stop strings in a stream of text: cut exactly there, over any border, and hold back no more than may become one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


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

    By Knuth, Morris and Pratt, so that a character costs the same whatever the stop strings are: clients choose them.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        # Longest first, so that the longest wins a tie.
        self._stops = [(stop, _borders(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._begin = _one_of("".join(sorted({stop[0] for stop in stops})))
        self._included = included
        self._held = ""
        self._matched = [0] * len(self._stops)
        """Of each stop string how much the text ends with."""

    def feed(self, text: str) -> Cut:
        start = 0
        if not self._held:  # nothing is begun: nearly all of a text
            begun = self._begin.search(text)
            if begun is None:
                return Cut(text)
            start = begun.start()
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
        """What was held back, when the text ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """One character further; the stop string that it completes."""
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
    """For each length of a beginning of ``stop`` the longest shorter one that this beginning also ends with."""
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

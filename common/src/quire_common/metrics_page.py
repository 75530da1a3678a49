"""Series of an engine's metrics page, read at a bounded cost: users choose the image that answers.

The gateway, the autoscaler and ``quire top`` use it. A page of an engine has about 32 KB, and 110 KB if its model has a
name of the greatest length. A larger page, or one with too many of the wanted series, is not an engine's.
"""

import re
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

MAX_PAGE_BYTES = 2**18
"""More than twice the largest page of an engine."""
MAX_SERIES = 1024
"""The most wanted series of a page: an engine serves about 120 of those that the autoscaler reads."""
_MAX_LABELS, _MAX_NUMBER = 4096, 64
"""The most characters of the labels and the value of a series."""
_NO_LABELS: Mapping[str, str] = MappingProxyType({})
# Both expressions take a time that is proportional to the length of their text.
_LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="((?:[^"\\]|\\.)*+)"')
_LINE = r"\n{}(?:[ \t]*+{{(.*)}}[ \t]*+|[ \t]++)(\S+)"
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_ESCAPE = re.compile(r'\\[n"\\]')


class Point(NamedTuple):
    """The current value of one series of one replica. It is a tuple because a tick has a hundred thousand of them."""

    name: str
    labels: Mapping[str, str]
    value: float


def points(page: str, names: Iterable[str], labelled: Container[str] | None = None) -> list[Point]:
    """Return the series with these names in a page of Prometheus' text format.

    Return [] if a value is not a number, or if the page exceeds what an engine serves. Only the series in ``labelled``
    get their labels; None means all. Most of a page is not needed, and the client library's parser would take several
    times as long. So this finds the first and the last line of each name and parses only the lines between them with a
    regular expression.
    """
    text = f"\n{page}"
    found: list[Point] = []
    try:
        for name in names:
            start = f"\n{name}"
            first = text.find(start)
            if first < 0:
                continue
            end = text.find("\n", text.rfind(start) + 1)
            needed = labelled is None or name in labelled
            for line in _line(name).finditer(text, first, end if end >= 0 else len(text)):
                labels, value = line.groups("")
                if len(found) == MAX_SERIES or len(labels) > _MAX_LABELS or len(value) > _MAX_NUMBER:
                    return []
                found.append(Point(name, _labels(labels) if labels and needed else _NO_LABELS, float(value)))
    except ValueError:
        return []
    return found


@lru_cache(maxsize=64)
def _line(name: str) -> re.Pattern[str]:
    return re.compile(_LINE.format(re.escape(name)))


@lru_cache(maxsize=1024)
def _labels(text: str) -> Mapping[str, str]:
    found = dict(_LABEL.findall(text))
    if "\\" in text:
        return {name: _ESCAPE.sub(lambda match: _ESCAPES[match[0]], value) for name, value in found.items()}
    return found

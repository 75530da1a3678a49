"""A reader of one answer whose text arrives in pieces, and the events that the formats find in it.

A format is a generator over a ``Reader``: it yields where it needs more text. The reader shows it the same text however
the pieces were cut, so the events, joined, are the same as well. Nothing here knows of HTTP, tokens or clocks.
"""

import json
import math
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire_common.surrogates import repaired

Steps = Generator[None, None, Any]
"""The steps of a generator that pauses until there is more text. Its docstring says what its result is."""


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of tool call number ``index``."""

    index: int
    name: str
    id: str | None = None
    """The id that the model gave to the call, if its format has ids."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments of tool call number ``index``, as JSON."""

    index: int
    text: str


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the arguments of the tools that the client declares, by name."""
NO_SCHEMAS: Schemas = {}

Event = Content | Reasoning | CallStart | Arguments
Sink = Callable[[str], None]


class _Tags:
    """Strings to find in a text, and the question whether the text ends within one of them."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._tags = tags
        # The longest first: of two tags that begin at one place, the longer one is found.
        self._pattern = re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)))
        self._openings = re.compile("[" + "".join(re.escape(tag[0]) for tag in tags) + "]")
        self.longest = max(len(tag) for tag in tags)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def open_at(self, text: str) -> int:
        """Return the place where a tag begins that the text does not complete; the text's length where no tag does."""
        found = self._openings.search(text, max(0, len(text) - self.longest + 1))
        while found is not None:
            rest = text[found.start() :]
            if any(tag.startswith(rest) for tag in self._tags):
                return found.start()
            found = self._openings.search(text, found.end())
        return len(text)


@lru_cache(maxsize=256)
def _tags(tags: tuple[str, ...]) -> _Tags:
    return _Tags(tags)


_MAX_DEPTH = 64
"""The deepest nesting of a value that a call is judged by."""
_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_NAME = re.compile(r"""[^\s<>(){}\[\]"',=]{1,256}""")
"""The name of a tool in a form that writes it between tags."""
_OPEN_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)\Z"
)
"""An escape of JSON, or of a surrogate pair, that the text does not complete."""


class Reader:
    """The text of one answer that is not consumed yet, and the events so far."""

    def __init__(self, schemas: Schemas = NO_SCHEMAS) -> None:
        self.schemas = schemas
        self.text = ""
        self.ended = False
        self.events: list[Event] = []
        self.num_calls = 0
        self.content_ends_at_calls = True
        """As in vLLM, text after a tool call is not part of the content, unless the format says so."""
        self.num_mentions = 0
        """The number of tags of calls that the reasoning mentions, because no call follows them."""
        self._hidden = False
        """True after a tool call whose format ends the content."""
        self._space = ""
        self._escape = ""
        """The start of an escape with which the arguments so far end."""
        self._record: list[str] | None = None

    def content(self, text: str) -> None:
        """Add text of the answer. White space before a tool call is not part of it."""
        if not text or self._hidden:
            return
        self._end_arguments()
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        if end:
            self.events.append(Content(text[:end]))

    def reasoning(self, text: str) -> None:
        """Add text of the model's reasoning."""
        if text:
            self._end_arguments()
            self.events.append(Reasoning(text))

    def mention(self, text: str) -> None:
        """Add the tag of a call that the reasoning mentions."""
        self.num_mentions += 1
        self.reasoning(text)

    def invalid_call(self, text: str) -> None:
        """Add the start of a call that cannot be read, as text: it and what follows are content, also after a call."""
        self._hidden = False
        self.content(text)

    def drop(self, text: str) -> None:
        """Add nothing."""

    def start_call(self, name: str, id: str | None = None) -> None:
        """Begin the next tool call. What was consumed for it stays consumed."""
        self._record = None
        self._end_arguments()
        self._space = ""
        self._hidden = self.content_ends_at_calls
        self.events.append(CallStart(self.num_calls, _without_lone_surrogates(name), id))
        self.num_calls += 1

    def whole_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Add a complete tool call."""
        self.start_call(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was started last, with U+FFFD for escapes of half a surrogate pair."""
        text = self._escape + text
        found = _OPEN_ESCAPE.search(text)
        end = len(text) if found is None else found.start(1)
        self._escape = text[end:]
        self._add_arguments(text[:end])

    def _end_arguments(self) -> None:
        text, self._escape = self._escape, ""
        self._add_arguments(text)

    def _add_arguments(self, text: str) -> None:
        if text:
            whole = repaired(_without_lone_surrogates(text).encode()).decode()
            self.events.append(Arguments(self.num_calls - 1, whole))

    def end(self) -> None:
        """Add the end of arguments that were cut, or the space with which an answer without calls ends."""
        self._end_arguments()
        if self._space:
            self.events.append(Content(self._space))
            self._space = ""

    def take(self, length: int) -> str:
        """Consume this number of characters, which are there."""
        taken, self.text = self.text[:length], self.text[length:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def record(self) -> None:
        """Keep what is consumed from now on, until ``forget``, ``restore`` or the start of a call."""
        self._record = []

    def forget(self) -> None:
        """Keep what was consumed no longer."""
        self._record = None

    def restore(self) -> None:
        """Put back what was consumed since ``record``."""
        if self._record is not None:
            self.text = "".join(self._record) + self.text
            self._record = None

    def attempt(self, tag: str, call: "Format", otherwise: Sink) -> Steps:
        """Read the call that begins with a tag, which was consumed last. The result says whether the text is a call.

        The result of ``call``, which reads the tag as well, says the same. Where the text is no call, the tag is passed
        to ``otherwise``, and the text after the tag is left.
        """
        self.text = tag + self.text
        self.record()
        found = yield from call(self)
        if found:
            self.forget()
        else:
            self.restore()
            otherwise(self.take(len(tag)))
        return found

    def until(self, tags: tuple[str, ...], sink: Sink) -> Steps:
        """Pass the text before the first of the tags to ``sink`` as it arrives, and consume the tag.

        The result is the tag, and "" where the text ends without one.
        """
        if not tags:
            while True:
                sink(self.take(len(self.text)))
                if self.ended:
                    return ""
                yield
        wanted = _tags(tags)
        while True:
            match = wanted.search(self.text)
            if match is not None:
                sink(self.take(match.start()))
                return self.take(len(match[0]))
            sink(self.take(len(self.text) if self.ended else wanted.open_at(self.text)))
            if self.ended:
                return ""
            yield

    def take_until(self, tags: tuple[str, ...]) -> Steps:
        """Consume the text up to the first of the tags, and the tag. The result is both; the tag is "" at the end."""
        wanted = _tags(tags)
        start = 0
        while True:
            match = wanted.search(self.text, start)
            if match is not None:
                return self.take(match.start()), self.take(len(match[0]))
            if self.ended:
                return self.take(len(self.text)), ""
            start = max(0, len(self.text) - wanted.longest + 1)
            yield

    def literal(self, *expected: str) -> Steps:
        """Consume one of these texts if it comes next. The result is that text, "" where none does."""
        while not self.ended and any(len(self.text) < len(each) and each.startswith(self.text) for each in expected):
            yield
        return self.take(len(next(filter(self.text.startswith, expected), "")))

    def space(self) -> Steps:
        """Consume white space. The result is the next character, "" at the end."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return self.text[:1]
            yield

    def name(self) -> Steps:
        """Consume white space and the name of a tool. The result is the name, "" where none comes next."""
        yield from self.space()
        while True:
            match = _NAME.match(self.text)
            if match is None or match.end() < len(self.text) or self.ended:
                return "" if match is None else self.take(match.end())
            yield

    def object_ahead(self) -> Steps:
        """Consume white space. The result says whether a JSON object with a valid beginning comes next."""
        if (yield from self.space()) != "{":
            return False
        while True:
            following = self.text[1:].lstrip()
            if following or self.ended:
                return following[:1] in ('"', "}") and bool(following)
            yield

    def json_value(self, sink: Sink, max_depth: float = math.inf) -> Steps:
        """Pass one JSON value to ``sink`` as it was written. The result says whether it is complete.

        Only strings and brackets are understood, so that a value that is invalid within its brackets is passed as well.
        A value with more than ``max_depth`` brackets in one another is not read to its end.
        """
        first = yield from self.space()
        if first not in ("{", "[", '"'):
            return (yield from self._scalar(sink))
        depth, within, escaped, start = 0, False, False, 0
        while True:
            if escaped and start < len(self.text):
                start, escaped = start + 1, False
            match = None if escaped else (_INSIDE if within else _OUTSIDE).search(self.text, start)
            if match is None:
                sink(self.take(len(self.text)))
                start = 0
                if self.ended:
                    return False
                yield
                continue
            start = match.end()
            match match[0]:
                case "\\":
                    escaped = True
                case '"':
                    within = not within
                case "{" | "[":
                    depth += 1
                case _:
                    depth -= 1
            if depth > max_depth:
                return False
            if not within and not escaped and depth == 0:
                sink(self.take(start))
                return True

    def _scalar(self, sink: Sink) -> Steps:
        while True:
            match = _SCALAR_END.search(self.text)
            if match is not None or self.ended:
                taken = self.take(len(self.text) if match is None else match.start())
                sink(taken)
                return match is not None and bool(taken)
            yield

    def json_text(self) -> Steps:
        """Consume one JSON value. The result is its text, None where it is incomplete, invalid or nested too deeply."""
        parts: list[str] = []
        # A reader that tries every bracket of a text would otherwise read all of it from each of them.
        complete = yield from self.json_value(parts.append, _MAX_DEPTH)
        text = "".join(parts)
        if not complete or decoded(text) is None:
            return None
        return text


@dataclass(frozen=True, slots=True)
class Decoded:
    """A JSON value."""

    value: Any


def _finite(number: str) -> float:
    """Return a number. Raises ValueError for NaN, for Infinity, and for one beyond the range, as JSON has none."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("number out of range")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def decoded(text: str) -> Decoded | None:
    """Return the value of a JSON text, None where it is not valid or contains a number that is not finite."""
    try:
        return Decoded(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def _without_lone_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair.

    A model may write one as an escape in a string. UTF-8, and so an HTTP response, cannot contain it.
    """
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


Format = Callable[[Reader], Steps]
"""The generator of a format, which reads one answer to its end or to the end of what it knows."""


def tagged(tags: tuple[str, ...], call: Format) -> Format:
    """Return the format of answers with calls that begin with a tag; a tag without a valid call is text.

    ``call`` reads one call with its tag, and its result says whether it is one.
    """

    def read(reader: Reader) -> Steps:
        while tag := (yield from reader.until(tags, reader.content)):
            yield from reader.attempt(tag, call, reader.invalid_call)

    return read


_PIECE = 4096
"""Longer texts are fed in pieces, so that what is consumed from them is not copied too often."""


class AnswerParser:
    """The events of one answer. ``feed`` returns those of further text; ``finish`` returns the last."""

    def __init__(self, format: Format, schemas: Schemas = NO_SCHEMAS) -> None:
        self._reader = Reader(schemas)
        self._steps = self._run(format)
        next(self._steps)

    def _run(self, format: Format) -> Steps:
        yield
        yield from format(self._reader)
        yield from self._reader.until((), self._reader.content)

    @property
    def num_mentions(self) -> int:
        """The number of tags of calls so far that the reasoning mentions."""
        return self._reader.num_mentions

    def feed(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        for start in range(0, len(text), _PIECE):
            self._reader.text += text[start : start + _PIECE]
            next(self._steps)
        return self._events()

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, when the answer has ended."""
        self._reader.ended = True
        next(self._steps, None)
        self._reader.end()
        return self._events()

    def _events(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return joined(events)


def joined(events: list[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match event, last:
            case Content(), Content():
                result[-1] = Content(last.text + event.text)
            case Reasoning(), Reasoning():
                result[-1] = Reasoning(last.text + event.text)
            case Arguments(), Arguments() if event.index == last.index:
                result[-1] = Arguments(event.index, last.text + event.text)
            case _:
                result.append(event)
    return result

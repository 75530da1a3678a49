"""The formats of FunctionGemma and Gemma 4: call:name{key:value, …} between tags, with tags in place of quotes."""

import re
from dataclasses import dataclass
from functools import partial

from quire_engine.text.answers.reader import Reader, Steps
from quire_engine.text.answers.typed import ArgumentWriter, schema_of, typed_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The tags of a format."""

    start: str
    end: str
    quote: str
    quoted_is_text: bool
    """False where quoted values may be of any type, as the schema says."""

    @property
    def all(self) -> tuple[str, ...]:
        """All tags."""
        return (self.start, self.end, self.quote)


FUNCTION_GEMMA = Marks(start="<start_function_call>", end="<end_function_call>", quote="<escape>", quoted_is_text=False)
GEMMA4 = Marks(start="<|tool_call>", end="<tool_call|>", quote='<|"|>', quoted_is_text=True)
_NAME = re.compile(r"\s*call:\s*([\w.\-:/]+)\s*\{")
_KEY = r'\s*(?:{quote}(?P<quoted>.*?){quote}|"?(?P<bare>[^\s:"{{}}\[\],]+)"?)\s*:\s*'
"""A key: between the tags that stand for quotes, between quotes, or without any."""
_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64


def _calls(reader: Reader, marks: Marks) -> Steps:
    while (yield from reader.until((marks.start,), reader.content)):
        reader.record()
        text, _ = yield from reader.take_until((marks.end,))
        match = _NAME.match(text)
        if match is None:
            reader.restore()
            reader.content(marks.start)
            continue
        reader.forget()
        values = _Values(text, match.end(), marks)
        pairs = values.members("}")
        arguments = ArgumentWriter(reader, match[1])
        for key, value in pairs:
            # A value without quotes is text; the schema says of what.
            if isinstance(value, _Bare):
                value = typed_value(value.text, schema_of(reader, match[1], key))
            arguments.add_value(key, _plain(value))
        arguments.close()


functiongemma = partial(_calls, marks=FUNCTION_GEMMA)
gemma4 = partial(_calls, marks=GEMMA4)


@dataclass(frozen=True, slots=True)
class _Bare:
    text: str


def _plain(value: object) -> object:
    if isinstance(value, _Bare):
        return typed_value(value.text, None)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class _Values:
    """A reader of values in the text of one call."""

    def __init__(self, text: str, place: int, marks: Marks) -> None:
        self._text = text
        self._place = place
        self._quote = marks.quote
        self._key = re.compile(_KEY.format(quote=re.escape(marks.quote)), re.DOTALL)
        self._quoted_is_text = marks.quoted_is_text

    def members(self, end: str, depth: int = 0) -> list[tuple[str, object]]:
        """Return the pairs of an object whose bracket is open, up to where they are valid."""
        pairs: list[tuple[str, object]] = []
        while True:
            self._skip(",")
            match = self._key.match(self._text, self._place)
            if match is None:
                self._skip(end)
                return pairs
            self._place = match.end()
            quoted, bare = match["quoted"], match["bare"]
            pairs.append((bare.replace(self._quote, "") if quoted is None else quoted, self._value(depth)))

    def _items(self, depth: int) -> list[object]:
        items: list[object] = []
        while True:
            self._skip(",")
            if self._place >= len(self._text) or self._text[self._place] in "]}":
                self._skip("]")
                return items
            items.append(self._value(depth))

    def _value(self, depth: int) -> object:
        text, place = self._text, self._place
        if depth > _MAX_DEPTH:
            self._place = len(text)
            return None
        if text.startswith(self._quote, place):
            start = place + len(self._quote)
            end = text.find(self._quote, start)
            end, self._place = (len(text), len(text)) if end < 0 else (end, end + len(self._quote))
            return text[start:end] if self._quoted_is_text else _Bare(text[start:end])
        if text.startswith("{", place):
            self._place += 1
            return dict(self.members("}", depth + 1))
        if text.startswith("[", place):
            self._place += 1
            return self._items(depth + 1)
        match = _BARE.match(text, place)
        assert match is not None
        # At least one character, so that a bracket out of place ends the loop of its caller.
        self._place = max(match.end(), place + (not match[0]))
        return _Bare(match[0].strip())

    def _skip(self, characters: str) -> None:
        while self._place < len(self._text) and (
            self._text[self._place].isspace() or self._text[self._place] in characters
        ):
            self._place += 1
            if self._text[self._place - 1] in characters and characters != ",":
                return

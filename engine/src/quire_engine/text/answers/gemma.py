"""The formats of FunctionGemma and Gemma 4: call:name{key:value, …} between tags, with tags in place of quotes."""

import re
from dataclasses import dataclass
from functools import partial

from quire_engine.text.answers.reader import Reader, Steps, tagged
from quire_engine.text.answers.typed import ArgumentTypes, ArgumentWriter, Schema


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
_KEY = r'\s*(?:{quote}(?P<quoted>.*?){quote}|"?(?P<bare>[^\s:"{{}}\[\],]+)"?)\s*:\s*'
"""A key: between the tags that stand for quotes, between quotes, or without any."""
_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64


def _call(reader: Reader, marks: Marks) -> Steps:
    """Read a call. The result is False where the text is no call."""
    yield from reader.literal(marks.start)
    yield from reader.space()
    if not (yield from reader.literal("call:")):
        return False
    name = yield from reader.name()
    if not name:
        return False
    yield from reader.space()
    if not (yield from reader.literal("{")):
        return False
    text, _ = yield from reader.take_until((marks.end,))
    arguments = ArgumentWriter(reader, name)
    for key, value in _Values(text, marks).members("}"):
        arguments.add_value(key, _typed(value, arguments.types, arguments.types.members(key)))
    arguments.close()
    return True


call_functiongemma, call_gemma4 = partial(_call, marks=FUNCTION_GEMMA), partial(_call, marks=GEMMA4)
functiongemma, gemma4 = tagged((FUNCTION_GEMMA.start,), call_functiongemma), tagged((GEMMA4.start,), call_gemma4)


@dataclass(frozen=True, slots=True)
class _Bare:
    text: str


def _typed(value: object, types: ArgumentTypes, schemas: list[Schema]) -> object:
    """Return a value whose texts without quotes have the types that the schemas allow."""
    if isinstance(value, _Bare):
        return types.value(value.text, schemas)
    if isinstance(value, dict):
        return {key: _typed(item, types, types.members(key, schemas)) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item, types, types.items(place, schemas)) for place, item in enumerate(value)]
    return value


class _Values:
    """A reader of values in the text of one call."""

    def __init__(self, text: str, marks: Marks) -> None:
        self._text = text
        self._place = 0
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

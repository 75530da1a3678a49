"""The format of Llama 3.2, Llama 4 and ToolACE: a list of calls as Python writes them, [f(a=1), g()]."""

import ast
import json
import re

from quire_engine.text.answers.reader import Reader, Steps
from quire_engine.text.answers.typed import literal_value

START, END = "<|python_start|>", "<|python_end|>"
MARKERS = (START, END)
_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_PREFIX = re.compile(r"\s*[A-Za-z_]?[\w.\-]*\s*\(?\Z")
_MAX_NAME_CHARACTERS = 256
_MAX_CALL_CHARACTERS = 100_000
"""A longer call is not parsed, because Python's parser needs much memory for it."""


def pythonic(reader: Reader) -> Steps:
    """Read an answer that is a list of calls; any other answer is text. A call appears as soon as it is complete.

    A call that cannot be read is text, in its place between the others.
    """
    reader.content_ends_at_calls = False
    reader.record()
    yield from reader.space()
    yield from reader.literal(START)
    yield from reader.space()
    if not (yield from reader.literal("[")) or not (yield from _name_ahead(reader)):
        reader.restore()
        return
    invalid: list[str] = []
    while (text := (yield from _call_text(reader))) is not None:
        call = _call(text)
        if call is None:
            invalid.append(text)
        else:
            reader.content(", ".join(invalid))
            invalid = []
            reader.whole_call(*call)
        yield from reader.space()
        if not (yield from reader.literal(",")):
            break
        if (yield from reader.space()) == "]":
            break
    if not reader.num_calls:
        reader.restore()
        return
    if text is None:
        invalid.append((yield from reader.take_until((END,)))[0])
    reader.content(", ".join(filter(None, invalid)))
    yield from reader.until((), reader.drop)


def _name_ahead(reader: Reader) -> Steps:
    """Return whether a function's name and a bracket come next."""
    while True:
        if _NAME.match(reader.text) is not None:
            return True
        possible = _PREFIX.match(reader.text) is not None and len(reader.text) < _MAX_NAME_CHARACTERS
        if reader.ended or not possible:
            return False
        yield


def _call_text(reader: Reader) -> Steps:
    """Consume one call. The result is its text up to the closing bracket, None where none comes."""
    if not (yield from _name_ahead(reader)):
        return None
    brackets, place = _Brackets(), 0
    while True:
        while place < len(reader.text):
            place += 1
            if brackets.closed_by(reader.text[place - 1]):
                return reader.take(place)
        if reader.ended:
            return None
        yield


class _Brackets:
    """The open brackets and the open quote of a call, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def closed_by(self, character: str) -> bool:
        """Return whether this character closes the outermost bracket."""
        if self._quote:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return self._depth == 0
        return False


_STRING_OR_NAME = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<=[(,\s])(?P<name>[^\W\d][\w.\-]*)(?=\s*=(?!=))""", re.DOTALL
)
_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r"}


def _call(text: str) -> tuple[str, dict[str, object]] | None:
    """Return the name and the arguments of a call; None where it is no call with literal keyword arguments.

    Python would not accept a function's name with dashes, parameters that are named like keywords, and line breaks
    in strings.
    """
    if len(text) > _MAX_CALL_CHARACTERS:
        return None
    names: list[str] = []

    def accepted(match: re.Match[str]) -> str:
        if match["quoted"] is not None:
            return _LINE_BREAK.sub(lambda found: _ESCAPES.get(found[0], found[0]), match["quoted"])
        names.append(match["name"])
        return f"_{len(names) - 1}"

    name, bracket, arguments = text.partition("(")
    try:
        parsed = ast.parse(f"f{_STRING_OR_NAME.sub(accepted, bracket + arguments)}", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            return None
        values = [(keyword.arg, literal_value(keyword.value)) for keyword in parsed.keywords]
        json.dumps(values, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if any(key is None for key, _ in values):
        return None
    return name.strip(), {names[int(key[1:])]: value for key, value in values if key is not None}

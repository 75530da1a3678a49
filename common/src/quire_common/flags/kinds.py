"""The kinds of values that flags take: reading the text, describing what is expected, the JSON Schema.

A kind is a value; the functions here return the kinds that several programs use. A program describes one of its own by
a ``Kind`` with a function that reads the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quire_common.names import is_http_url
from quire_common.quantities import parse_duration_seconds

_BYTES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TOKENS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SECONDS = r"[0-9]{1,12}(\.[0-9]{1,9})?"

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value."""

    metavar: str
    """The value's name in the help."""
    expected: str
    """The expected value, as a noun phrase for messages."""
    parse: Callable[[str], Any]
    """Returns the value of a text, or raises ValueError, with a message where more can be said than ``expected``."""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    """The value's JSON Schema."""
    is_switch: bool = False
    """True if the flag takes no value on a command line."""
    is_negatable: bool = False
    """True if a switch has ``--no-NAME`` too."""
    has_fields: bool = False
    """True if the value is an object whose fields are also flags, such as ``--NAME.field VALUE``."""


def text(metavar: str = "TEXT") -> Kind:
    """Return the kind of any text that is not blank."""
    return Kind(metavar, "text that is not empty", _not_blank, {"type": "string", "minLength": 1})


def pattern(regex: str, expected: str, metavar: str) -> Kind:
    """Return the kind of texts that match a regular expression as a whole."""

    def parse(text: str) -> str:
        if re.fullmatch(regex, text, re.ASCII) is None:
            raise ValueError
        return text

    return Kind(metavar, expected, parse, {"type": "string", "pattern": f"^({regex})$"})


def url(example: str) -> Kind:
    """Return the kind of an address of HTTP or HTTPS."""

    def parse(text: str) -> str:
        if not is_http_url(text.strip()):
            raise ValueError
        return text.strip()

    schema = {"type": "string", "pattern": r"^\s*https?://[^/\s]+\S*\s*$", "examples": [example]}
    return Kind("URL", f"an http or https address such as {example}", parse, schema)


def path(*, readable: bool = False) -> Kind:
    """Return the kind of a path; ``readable`` requires a file that can be read."""

    def parse(text: str) -> Path:
        try:
            path = Path(_not_blank(text)).expanduser()
        except RuntimeError:
            raise ValueError("there is no such home folder") from None
        if readable:
            try:
                path.read_bytes()
            except OSError as error:
                raise ValueError(error.strerror) from error
        return path

    expected = "a file that can be read" if readable else "a path"
    return Kind("PATH", expected, parse, {"type": "string", "minLength": 1})


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """Return the kind of a whole number within bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,19}", text.strip()):
            raise ValueError
        return _within(int(text), minimum, maximum)

    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    upper = {} if maximum is None else {"maximum": maximum}
    return Kind("N", f"a whole number {bounds}", parse, {"type": "integer", "minimum": minimum, **upper})


def number(minimum: float, maximum: float, *, above_minimum: bool = False) -> Kind:
    """Return the kind of a number within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError from None
        return _within(value, minimum, maximum, above=above_minimum)

    expected = f"a number {'above' if above_minimum else 'from'} {minimum:g} and up to {maximum:g}"
    lower = "exclusiveMinimum" if above_minimum else "minimum"
    return Kind("X", expected, parse, {"type": "number", lower: minimum, "maximum": maximum})


def count(minimum: int, word: str) -> Kind:
    """Return the kind of a number of tokens, also with k (thousand) or K (1,024).

    ``word`` and -1 give None: no number of one's own.
    """

    def parse(text: str) -> int | None:
        if text.strip() in (word, "-1"):
            return None
        match = re.fullmatch(r"\s*([0-9]{1,15})(\.[0-9]{1,6})?([kKmM]?)\s*", text)
        if match is None or (match[2] and not match[3]):
            raise ValueError
        unit = _TOKENS[match[3]]
        value = round(float(match[1] + match[2]) * unit) if match[2] else int(match[1]) * unit
        return _within(value, minimum)

    expected = f"a whole number of at least {minimum}, also such as 32k (32000) or 32K (32768), or {word}"
    some = "(?=[0-9.]*[1-9])" if minimum > 0 else ""
    regex = rf"^\s*(-1|{word}|{some}[0-9]{{1,15}}((\.[0-9]{{1,6}})?[kKmM])?)\s*$"
    return Kind("N", expected, parse, {"type": ["integer", "string"], "pattern": regex})


def size(minimum: int = 1, maximum: int | None = None) -> Kind:
    """Return the kind of a number of bytes, with or without a unit."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
        unit = _BYTES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
        if minimum == 0 and float(match[1]) == 0:
            return 0
        return _within(value, max(1, minimum), maximum)

    bounds = f" of at least {minimum}" if minimum > 1 else "" if minimum else ", 0 included"
    bounds += "" if maximum is None else f" and at most {maximum}"
    some = "" if minimum == 0 else "(?=[0-9.]*[1-9])"
    regex = rf"^\s*{some}[0-9]{{1,18}}(\.[0-9]{{1,9}})?\s*([kKmMgGtT]([iI][bB]?|[bB])|[bB])?\s*$"
    schema = {"type": ["integer", "string"], "minimum": minimum, "pattern": regex}
    return Kind("SIZE", f"a number of bytes{bounds}, or one with KiB, MiB, GiB, KB, MB or GB", parse, schema)


def duration(minimum: float = 0.0, *, above_minimum: bool = False, maximum: float | None = None) -> Kind:
    """Return the kind of a time in seconds, or with units such as 250ms, 90s, 2m or 1h30m."""

    def parse(text: str) -> float:
        text = re.sub(r"\s+(?=[a-z])", "", text.strip())
        value = float(text) if re.fullmatch(_SECONDS, text) else parse_duration_seconds(text)
        if value is None:
            raise ValueError
        return _within(value, minimum, maximum, above=above_minimum)

    bounds = f" of {'more than' if above_minimum else 'at least'} {minimum:g} s" if minimum or above_minimum else ""
    bounds += "" if maximum is None else f", at most {maximum:g} s"
    some = "(?=.*[1-9])" if above_minimum and minimum == 0 else ""
    regex = rf"^\s*{some}({_SECONDS}|([0-9]{{1,9}}(\.[0-9]{{1,9}})?\s*(ms|s|m|h))+)\s*$"
    lower = "exclusiveMinimum" if above_minimum else "minimum"
    schema = {"type": ["number", "string"], lower: minimum, "pattern": regex}
    return Kind("TIME", f"a duration{bounds}, in seconds or such as 250ms, 90s, 2m or 1h30m", parse, schema)


def choice(
    *words: str,
    values: Mapping[str, Any] | None = None,
    metavar: str | None = None,
    removed: Mapping[str, str] | None = None,
) -> Kind:
    """Return the kind of one of several words; ``values`` maps each word to its meaning.

    ``metavar`` replaces a list of words that is too long for the help's first column. ``removed`` words of earlier
    versions are refused with what to use instead.
    """
    meanings = dict(zip(words, words, strict=True)) if values is None else values

    def parse(text: str) -> Any:
        if removed is not None and text in removed:
            raise ValueError(f"{text} was removed: {removed[text]}")
        if text not in meanings:
            raise ValueError
        return meanings[text]

    is_integer = all(isinstance(meaning, int) and word == str(meaning) for word, meaning in meanings.items())
    schema = {"enum": list(meanings.values() if is_integer else meanings)}
    return Kind(metavar or "{" + ",".join(meanings) + "}", f"one of {', '.join(meanings)}", parse, schema)


def switch(*, negatable: bool = False) -> Kind:
    """Return the kind of a flag without a value; ``negatable`` adds ``--no-NAME``."""

    def parse(text: str) -> bool:
        word = text.strip().lower()
        if word not in (*_TRUE, *_FALSE):
            raise ValueError
        return word in _TRUE

    return Kind("", "true or false", parse, {"type": "boolean"}, is_switch=True, is_negatable=negatable)


def json_object() -> Kind:
    """Return the kind of a JSON object in one argument."""

    def parse(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(str(error)) from None
        if not isinstance(value, dict):
            raise ValueError
        return value

    schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}
    return Kind("JSON", "a JSON object", parse, schema, has_fields=True)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text


def _within(value: _Number, minimum: float, maximum: float | None = None, *, above: bool = False) -> _Number:
    """Return the value, or raise ValueError if it is outside of the bounds or not a number."""
    is_enough = value > minimum if above else value >= minimum
    if not is_enough or (maximum is not None and value > maximum):
        raise ValueError
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag."""

    name: str
    kind: Kind
    help: str
    default: str | None = None
    """Text, read as a person's would be."""
    unset: str | None = None
    """The help's description of a flag that is not set and has no default."""
    many: bool = False
    """True if it takes several values."""
    required: bool = False

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the flag's value."""
        value: dict[str, Any] = dict(self.kind.schema)
        if self.many:
            value = {"type": "array", "items": value, "minItems": 1}
        if self.default is not None:
            value["default"] = self.kind.parse(self.default)
        return {**value, "description": self.help}

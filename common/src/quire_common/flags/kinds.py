"""The kinds of values that flags take: reading the text, describing what is expected, the JSON Schema."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire_common.names import is_http_url
from quire_common.quantities import parse_duration_seconds

_SIZE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Kind(Protocol):
    """A kind of value. ``parse`` raises ValueError, with a message where more can be said than what is expected."""

    @property
    def metavar(self) -> str:
        """The value's name in the help."""
        ...

    @property
    def expected(self) -> str:
        """The expected value, as a noun phrase for messages."""
        ...

    def parse(self, text: str) -> Any:
        """Return the value that the text stands for."""
        ...

    def schema(self) -> dict[str, Any]:
        """Return the value's JSON Schema."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not blank."""

    metavar: str = "TEXT"
    expected: str = "text that is not empty"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole."""

    pattern: str
    expected: str
    metavar: str

    def parse(self, text: str) -> str:
        if re.fullmatch(self.pattern, text, re.ASCII) is None:
            raise ValueError
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^({self.pattern})$"}


@dataclass(frozen=True, slots=True)
class PathName:
    """A path; ``readable`` requires a file that can be read."""

    readable: bool = False
    metavar: str = "PATH"

    @property
    def expected(self) -> str:
        return "a file that can be read" if self.readable else "a path"

    def parse(self, text: str) -> Path:
        if not text.strip():
            raise ValueError
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise ValueError("there is no such home folder") from None
        if self.readable:
            try:
                path.read_bytes()
            except OSError as error:
                raise ValueError(error.strerror) from error
        return path

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within bounds."""

    minimum: int
    maximum: int | None = None
    metavar: str = "N"

    @property
    def expected(self) -> str:
        if self.maximum is None:
            return f"a whole number of at least {self.minimum}"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,19}", text.strip()):
            raise ValueError
        value = int(text)
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        upper = {} if self.maximum is None else {"maximum": self.maximum}
        return {"type": "integer", "minimum": self.minimum, **upper}


@dataclass(frozen=True, slots=True)
class Count:
    """A number of tokens, also with k (thousand) or K (1,024); ``word`` stands for no number of one's own."""

    minimum: int
    word: str
    metavar: str = "N"

    @property
    def expected(self) -> str:
        return f"a whole number of at least {self.minimum}, also such as 32k (32000) or 32K (32768), or {self.word}"

    def parse(self, text: str) -> int | None:
        text = text.strip()
        if text in (self.word, "-1"):
            return None
        match = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,6})?([kKmM]?)", text)
        if match is None or (match[2] and not match[3]):
            raise ValueError
        units = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
        value = round(float(match[1] + match[2]) * units[match[3]]) if match[2] else int(match[1]) * units[match[3]]
        if value < self.minimum:
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        some = "(?=[0-9.]*[1-9])" if self.minimum > 0 else ""
        pattern = rf"^\s*(-1|{self.word}|{some}[0-9]{{1,15}}((\.[0-9]{{1,6}})?[kKmM])?)\s*$"
        return {"type": ["integer", "string"], "pattern": pattern}


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds."""

    minimum: float
    maximum: float
    above_minimum: bool = False
    metavar: str = "X"

    @property
    def expected(self) -> str:
        return f"a number {'above' if self.above_minimum else 'from'} {self.minimum:g} and up to {self.maximum:g}"

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError from None
        if not self.minimum <= value <= self.maximum or (self.above_minimum and value == self.minimum):
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.above_minimum else "minimum"
        return {"type": "number", lower: self.minimum, "maximum": self.maximum}


class Choice:
    """One of several words; ``integer`` reads them as numbers, and ``values`` maps each word to its meaning.

    ``metavar`` replaces a list of words that is too long for the help's first column. ``removed`` words of earlier
    versions are refused with what to use instead.
    """

    __slots__ = ("integer", "metavar", "options", "removed", "values")

    def __init__(
        self,
        *options: str,
        integer: bool = False,
        values: Mapping[str, Any] | None = None,
        metavar: str | None = None,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.options = tuple(values) if values is not None else options
        self.removed = removed or {}
        self.integer, self.values = integer, values
        self.metavar = metavar or "{" + ",".join(self.options) + "}"

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.options)}"

    def parse(self, text: str) -> Any:
        if text in self.removed:
            raise ValueError(f"{text} was removed: {self.removed[text]}")
        if text not in self.options:
            raise ValueError
        if self.values is not None:
            return self.values[text]
        return int(text) if self.integer else text

    def schema(self) -> dict[str, Any]:
        return {"enum": [int(option) if self.integer else option for option in self.options]}


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag without a value; ``negatable`` adds ``--no-NAME``."""

    negatable: bool = False
    metavar: str = ""
    expected: str = "true or false"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in (*_TRUE, *_FALSE):
            raise ValueError
        return word in _TRUE

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, with or without a unit."""

    minimum: int = 1
    maximum: int | None = None
    metavar: str = "SIZE"

    @property
    def expected(self) -> str:
        bounds = f" of at least {self.minimum}" if self.minimum > 1 else "" if self.minimum else ", 0 included"
        bounds += "" if self.maximum is None else f" and at most {self.maximum}"
        return f"a number of bytes{bounds}, or one with KiB, MiB, GiB, KB, MB or GB"

    def parse(self, text: str) -> int:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
        unit = _SIZE_UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
        if value < max(1, self.minimum) and not (self.minimum == 0 and float(match[1]) == 0):
            raise ValueError
        if self.maximum is not None and value > self.maximum:
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        unit = "([kKmMgGtT]([iI][bB]?|[bB])|[bB])?"
        some = "" if self.minimum == 0 else "(?=[0-9.]*[1-9])"
        pattern = rf"^\s*{some}[0-9]{{1,18}}(\.[0-9]{{1,9}})?\s*{unit}\s*$"
        return {"type": ["integer", "string"], "minimum": self.minimum, "pattern": pattern}


@dataclass(frozen=True, slots=True)
class Duration:
    """A time in seconds, or with units such as 250ms, 90s, 2m or 1h30m."""

    minimum: float = 0.0
    above_minimum: bool = False
    maximum: float | None = None
    metavar: str = "TIME"

    @property
    def expected(self) -> str:
        bounds = f"more than {self.minimum:g}" if self.above_minimum else f"at least {self.minimum:g}"
        bounds = "" if self.minimum == 0.0 and not self.above_minimum else f" of {bounds} s"
        upper = "" if self.maximum is None else f", at most {self.maximum:g} s"
        return f"a duration{bounds}{upper}, in seconds or such as 250ms, 90s, 2m or 1h30m"

    def parse(self, text: str) -> float:
        text = re.sub(r"\s+(?=[a-z])", "", text.strip())
        value = float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text) else parse_duration_seconds(text)
        if value is None or value < self.minimum or (self.above_minimum and value == self.minimum):
            raise ValueError
        if self.maximum is not None and value > self.maximum:
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.above_minimum else "minimum"
        some = "(?=.*[1-9])" if self.above_minimum and self.minimum == 0 else ""
        number = r"[0-9]{1,9}(\.[0-9]{1,9})?"
        pattern = rf"^\s*{some}([0-9]{{1,12}}(\.[0-9]{{1,9}})?|({number}\s*(ms|s|m|h))+)\s*$"
        return {"type": ["number", "string"], lower: self.minimum, "pattern": pattern}


@dataclass(frozen=True, slots=True)
class Url:
    """An address of HTTP or HTTPS."""

    example: str
    metavar: str = "URL"

    @property
    def expected(self) -> str:
        return f"an http or https address such as {self.example}"

    def parse(self, text: str) -> str:
        if not is_http_url(text.strip()):
            raise ValueError
        return text.strip()

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\s*https?://[^/\s]+\S*\s*$", "examples": [self.example]}


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object in one argument."""

    metavar: str = "JSON"
    expected: str = "a JSON object"

    def parse(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(str(error)) from None
        if not isinstance(value, dict):
            raise ValueError
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag."""

    name: str
    kind: Kind
    help: str
    default: str | None = None
    """Text, read as a person's would be."""
    shown_default: str | None = None
    """The help's description of a flag that is not set and has no default."""
    many: bool = False
    """True if it takes several values."""
    required: bool = False

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the flag's value."""
        value = self.kind.schema()
        if self.many:
            value = {"type": "array", "items": value, "minItems": 1}
        if self.default is not None:
            value["default"] = self.kind.parse(self.default)
        return {**value, "description": self.help}

"""What a flag's value may be: how its text is read, and how its JSON Schema says so. Used by the table in ``flags``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

_SIZE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Kind(Protocol):
    """Reads one value; ``parse`` raises ValueError with what was wrong and what would be right."""

    @property
    def metavar(self) -> str: ...

    def parse(self, text: str) -> Any: ...

    def schema(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Text:
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError("is empty")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class PathName:
    metavar: str = "PATH"

    def parse(self, text: str) -> Path:
        if not text.strip():
            raise ValueError("is empty")
        try:
            return Path(text).expanduser()
        except RuntimeError:
            raise ValueError(f"{text!r} begins with a user whose home folder is not known") from None

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Integer:
    minimum: int
    maximum: int | None = None
    metavar: str = "N"

    def parse(self, text: str) -> int:
        bounds = f"of at least {self.minimum}" if self.maximum is None else f"from {self.minimum} to {self.maximum}"
        if not re.fullmatch(r"[+-]?\d{1,19}", text.strip()):
            raise ValueError(f"{text!r} is not a whole number; needed is one {bounds}")
        value = int(text)
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise ValueError(f"{value} is out of range; needed is a whole number {bounds}")
        return value

    def schema(self) -> dict[str, Any]:
        upper = {} if self.maximum is None else {"maximum": self.maximum}
        return {"type": "integer", "minimum": self.minimum, **upper}


@dataclass(frozen=True, slots=True)
class Number:
    minimum: float
    maximum: float
    above_minimum: bool = False
    metavar: str = "X"

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number; needed is one {self._bounds()}") from None
        if not self.minimum <= value <= self.maximum or (self.above_minimum and value == self.minimum):
            raise ValueError(f"{text} is out of range; needed is a number {self._bounds()}")
        return value

    def _bounds(self) -> str:
        return f"{'above' if self.above_minimum else 'from'} {self.minimum:g} and up to {self.maximum:g}"

    def schema(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.above_minimum else "minimum"
        return {"type": "number", lower: self.minimum, "maximum": self.maximum}


class Choice:
    """One of a few words; ``integer`` reads them as numbers."""

    __slots__ = ("integer", "options")

    def __init__(self, *options: str, integer: bool = False) -> None:
        self.options = options
        self.integer = integer

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.options) + "}"

    def parse(self, text: str) -> str | int:
        if text not in self.options:
            raise ValueError(f"{text!r} is not among {', '.join(self.options)}")
        return int(text) if self.integer else text

    def schema(self) -> dict[str, Any]:
        return {"enum": [int(option) if self.integer else option for option in self.options]}


@dataclass(frozen=True, slots=True)
class Switch:
    negatable: bool = False
    metavar: str = ""

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
            raise ValueError(f"{text!r} is neither true nor false")
        return word in {"1", "true", "yes", "on"}

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a number, or one with a unit."""

    zero: bool = False
    """Whether 0 is a size."""
    metavar: str = "SIZE"

    def parse(self, text: str) -> int:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
        unit = _SIZE_UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{text!r} is not a size; needed is bytes or a number with KiB, MiB, GiB, KB, MB or GB")
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
        if value < 1 and not (self.zero and float(match[1]) == 0):
            raise ValueError(f"{text!r} is less than one byte")
        return value

    def schema(self) -> dict[str, Any]:
        unit = "([kKmMgGtT]([iI][bB]?|[bB])|[bB])?"
        some = "" if self.zero else "(?=[0-9.]*[1-9])"
        pattern = rf"^\s*{some}[0-9]{{1,18}}(\.[0-9]{{1,9}})?\s*{unit}\s*$"
        return {"type": ["integer", "string"], "minimum": 0 if self.zero else 1, "pattern": pattern}


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds: a number, or one with a unit."""

    above_zero: bool = False
    metavar: str = "TIME"

    def parse(self, text: str) -> float:
        match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*(ms|s|m|h|)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a time; needed is seconds or a number with ms, s, m or h")
        value = float(match[1]) * _DURATION_UNITS[match[2]]
        if self.above_zero and value == 0.0:
            raise ValueError(f"{text!r} is no time at all; needed is more than 0")
        return value

    def schema(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.above_zero else "minimum"
        some = "(?=[0-9.]*[1-9])" if self.above_zero else ""
        pattern = rf"^\s*{some}[0-9]{{1,12}}(\.[0-9]{{1,9}})?\s*(ms|s|m|h)?\s*$"
        return {"type": ["number", "string"], lower: 0, "pattern": pattern}


@dataclass(frozen=True, slots=True)
class Url:
    """An address of HTTP or HTTPS. Read as it is."""

    metavar: str = "URL"

    def parse(self, text: str) -> str:
        if not _is_http(text):
            raise ValueError(f"{text!r} is not an address such as http://collector:4318/v1/traces")
        return text.strip()

    def schema(self) -> dict[str, Any]:
        pattern = r"^\s*https?://[^/\s]+\S*\s*$"
        return {"type": "string", "pattern": pattern, "examples": ["http://collector:4318/v1/traces"]}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a browser calls a page's origin, or * for any."""

    metavar: str = "ORIGIN"

    def parse(self, text: str) -> str:
        origin = text.strip().removesuffix("/")
        if origin != "*" and (not _is_http(origin) or origin.count("/") != 2):
            raise ValueError(f"{text!r} is not an origin such as https://chat.example.com, nor *")
        return origin

    def schema(self) -> dict[str, Any]:
        pattern = r"^\s*(\*|https?://[^/\s]+)/?\s*$"
        return {"type": "string", "pattern": pattern, "examples": ["https://chat.example.com", "*"]}


def _is_http(text: str) -> bool:
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", text.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. ``default`` is text, read as a person's would be; ``shown_default`` says what unset comes to mean."""

    name: str
    kind: Kind
    help: str
    default: str | None = None
    shown_default: str | None = None
    many: bool = False
    required: bool = False

    def schema(self) -> dict[str, Any]:
        value = self.kind.schema()
        if self.many:
            value = {"type": "array", "items": value, "minItems": 1}
        if self.default is not None:
            value["default"] = self.kind.parse(self.default)
        return {**value, "description": self.help}

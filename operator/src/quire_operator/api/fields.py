"""A reader of documents that collects all problems with their paths instead of raising.

A read that fails adds a Problem and returns the default, so that users see all mistakes at once; the caller uses the
result only without problems. Also reads of untyped objects, and times in RFC 3339.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TypeVar

JSON = Mapping[str, object]


def section_of(body: JSON, *keys: str) -> JSON:
    """Return the object below these keys; empty without one."""
    for key in keys:
        value = body.get(key)
        body = value if isinstance(value, Mapping) else {}
    return body


def items_of(body: JSON, key: str) -> list[JSON]:
    """Return the objects in a list; empty without one."""
    value = body.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def text_of(body: JSON, key: str) -> str:
    """Return a text; empty without one."""
    value = body.get(key)
    return value if isinstance(value, str) else ""


def number_of(body: JSON, key: str) -> int:
    """Return a whole number; 0 without one."""
    value = body.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def clock_time(seconds: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_time(seconds: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: object) -> float | None:
    """Return Unix seconds, or None if the text is not a time."""
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if time is None or time.tzinfo is None else time.timestamp()


T = TypeVar("T")
_MAX_INT32 = 2**31 - 1
_SHOWN = 60
_MAX_LEVELS = 50
"""The limit for mappings that are passed on unread: several times the depth of Kubernetes' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a document: the field's path, and what would be right."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def shown(value: object) -> str:
    """Return a value as messages quote it: short, and in YAML's notation."""
    match value:
        case None:
            return "null"
        case bool() | int() if abs(value) <= 2**63:
            return json.dumps(value)
        case str():
            quoted = json.dumps(value[:_SHOWN], ensure_ascii=False)
            return quoted if len(value) <= _SHOWN else f'{quoted[:-1]}…"'
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case float():
            return str(value)
        case int():
            return "a number beyond 64 bits"
        case _:
            return f"a {type(value).__name__}"


class Fields:
    """A mapping of a document, at ``path``."""

    def __init__(self, body: object, *, path: str, problems: list[Problem]) -> None:
        self.path = path
        self.problems = problems
        self._known: set[str] = set()
        self._is_mapping = body is None or isinstance(body, Mapping)
        if isinstance(body, Mapping):
            self._body: dict[str, object] = {str(key): value for key, value in body.items()}
        else:
            self._body = {}
            if not self._is_mapping:
                problems.append(Problem(path=path, message=f"must be a mapping, got {shown(body)}"))

    def at(self, key: str) -> str:
        """Return the path of a field of this mapping."""
        return f"{self.path}.{key}" if self.path else key

    def problem(self, key: str, message: str) -> None:
        """Note what is wrong with a field, or without a key with the mapping, unless it is not a mapping at all."""
        if self._is_mapping:
            self.problems.append(Problem(path=self.at(key) if key else self.path, message=message))

    def knows(self, *keys: str) -> None:
        """Accept these keys without reading them."""
        self._known.update(keys)

    def has(self, key: str) -> bool:
        """Return True if the field is set; null counts as unset, as in Kubernetes."""
        self._known.add(key)
        return self._body.get(key) is not None

    def raw(self, key: str, default: object = None) -> object:
        """Return the value as it is; the default is that of an absent field only, not of null."""
        self._known.add(key)
        return self._body.get(key, default)

    def done(self) -> None:
        """Report all unread fields, with the known field that was probably meant."""
        for key in sorted(self._body.keys() - self._known):
            near = get_close_matches(key, self._known, n=1, cutoff=0.6)
            fields = ", ".join(sorted(self._known))
            hint = f"did you mean {near[0]}?" if near else f"there are: {fields}"
            self.problem(key[:_SHOWN], f"unknown field; {hint}")

    def section(self, key: str) -> "Fields":
        """Return a nested mapping, which is empty if absent."""
        return Fields(self.raw(key), path=self.at(key), problems=self.problems)

    def sections(self, key: str, *, at_most: int, at_least: int = 0) -> list["Fields"]:
        items = self.items(key, at_most=at_most, at_least=at_least)
        return [Fields(item, path=f"{self.at(key)}[{i}]", problems=self.problems) for i, item in enumerate(items)]

    def mapping(self, key: str) -> dict[str, object]:
        """Return a mapping that is passed on unread."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problem(key, f"must be a mapping, got {shown(value)}")
        elif (reason := _content_problem(value)) is not None:
            self.problem(key, reason)
        else:
            return dict(value)
        return {}

    def text(self, key: str, *, default: T, check: Callable[[str], str | None] | None = None) -> str | T:
        """Return a non-empty string. ``check`` returns the problem of a value, or None."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            self.problem(key, f"must be a non-empty string, got {shown(value)}")
            return default
        reason = check(value) if check else None
        if reason is not None:
            self.problem(key, f"{reason}; got {shown(value)}")
            return default
        return value

    def integer(self, key: str, *, default: T, minimum: int = 0, maximum: int = _MAX_INT32) -> int | T:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.problem(key, f"must be a whole number, got {shown(value)}")
            return default
        if not minimum <= value <= maximum:
            bound = f">= {minimum}" if value < minimum else f"<= {maximum}"
            self.problem(key, f"must be {bound}, got {shown(value)}")
            return default
        return value

    def items(self, key: str, *, at_most: int, at_least: int = 0) -> Sequence[object]:
        value = self.raw(key)
        if value is None:
            return ()
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            if at_least <= len(value) <= at_most:
                return value
            count = f"between {at_least} and {at_most}" if at_least else f"at most {at_most}"
            self.problem(key, f"must have {count} entries, got {len(value)}")
            return ()
        self.problem(key, f"must be a list, got {shown(value)}")
        return ()


def one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def near_word(value: object, words: Sequence[str]) -> str:
    """Return the question whether one of these words was meant, to follow in a sentence; empty if none is similar."""
    if not isinstance(value, str):
        return ""
    folded = {re.sub("[^a-z0-9]", "", word.lower()): word for word in words}
    near = get_close_matches(re.sub("[^a-z0-9]", "", value.lower()), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]}?" if near else ""


def _content_problem(value: object) -> str | None:
    """Return why a value cannot be passed on as JSON, without recursion, since it may be deeper than any stack."""
    layer = [value]
    for _ in range(_MAX_LEVELS + 1):
        inner: list[object] = []
        for item in layer:
            if isinstance(item, Mapping):
                inner += item.values()
                if odd := [name for name in item if not isinstance(name, str)]:
                    return f"must have keys that are strings, got {shown(odd[0])}: write it in quotes"
            elif isinstance(item, list):
                inner += item
            elif not isinstance(item, str | int | float | None):
                return f"must have values of JSON, got {shown(item)}: write it in quotes"
        if not inner:
            return None
        layer = inner
    return f"must be nested at most {_MAX_LEVELS} levels deep"

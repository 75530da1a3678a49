"""The engine's command-line flags, and the validation of ``spec.engine.extraArgs``.

The schema is a committed copy of the output of ``quire-engine --flag-schema``, because the operator runs without an
installed engine. ``make engine-flags`` renews it, and tests/contract compares both.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from quire_operator.api.fields import one_of, shown

RESERVED_FLAGS = frozenset(
    {
        *("host", "port", "flag-schema", "help", "version", "data-parallel-size"),
        *("uds", "ssl-certfile", "ssl-keyfile", "ssl-keyfile-password-file", "ssl-ca-certs", "metrics-key-file"),
    }
)
"""Flags that the operator or ``quire up`` sets: probes, gateway and scrapes use HTTP without a key.
"""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,18}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgProblem:
    """The problem of the argument at ``index``."""

    index: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A flag as it was written: ``--name value …`` or ``--name=value``."""

    index: int
    name: str
    values: tuple[str, ...]


@cache
def _document() -> Mapping[str, Any]:
    """Return the output of ``quire-engine --flag-schema``. It is package data and read once."""
    text = resources.files("quire_operator.api").joinpath("engine_flags.json").read_text()
    document: Mapping[str, Any] = json.loads(text)
    return document


def flag_schema() -> Mapping[str, Mapping[str, object]]:
    """Return the JSON Schema of each flag (without dashes)."""
    properties: Mapping[str, Mapping[str, object]] = _document()["properties"]
    return properties


def extra_args_problems(args: Sequence[str], owned: Mapping[str, str]) -> list[ArgProblem]:
    """Return every reason against these arguments, in their order; ``owned`` flags are set by the field they map to."""
    problems: list[ArgProblem] = []
    seen: set[str] = set()
    for given in _flags(args):
        if isinstance(given, ArgProblem):
            problems.append(given)
            continue
        message = _flag_problem(given, owned)
        if message is None and given.name in seen:
            message = f"--{given.name} is given twice"
        seen.add(given.name)
        if message is not None:
            problems.append(ArgProblem(index=given.index, message=message))
    return problems


def _flags(args: Sequence[str]) -> Iterator[_Given | ArgProblem]:
    index = 0
    while index < len(args):
        start, arg = index, args[index]
        index += 1
        if not arg.startswith("--") or arg == "--":
            yield ArgProblem(index=start, message=f"must be a flag of the engine such as --seed, got {shown(arg)}")
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        values = [value] if equals else []
        most = 0 if equals else _most_values(name)
        while index < len(args) and not args[index].startswith("--") and len(values) < most:
            values.append(args[index])
            index += 1
        yield _Given(index=start, name=name, values=tuple(values))


def _most_values(name: str) -> int:
    match flag_schema().get(name, {}).get("type"):
        case "boolean":
            return 0
        case "array":
            return 1000
        case _:
            return 1


def _flag_problem(given: _Given, owned: Mapping[str, str]) -> str | None:
    if given.name in owned:
        return f"--{given.name} is set by {owned[given.name]}; set it there"
    if given.name in RESERVED_FLAGS:
        return f"--{given.name} is set by quire itself; remove it"
    if (reason := _document()["x-removed"].get(given.name)) is not None:
        return f"--{given.name} was removed: {reason}"
    schema = flag_schema().get(given.name)
    if schema is None:
        allowed = [name for name in flag_schema() if name not in owned and name not in RESERVED_FLAGS]
        near = get_close_matches(given.name, allowed, n=1)
        return f"the engine has no flag {shown('--' + given.name)}" + (f"; did you mean --{near[0]}?" if near else "")
    reason = _values_problem(schema, given.values)
    return None if reason is None else f"--{given.name} {reason}"


def _values_problem(schema: Mapping[str, object], values: tuple[str, ...]) -> str | None:
    if schema.get("type") == "boolean":
        return f"takes no value, got {shown(values[0])}" if values else None
    if not values:
        return "needs a value"
    items = schema.get("items")
    one = items if isinstance(items, Mapping) else schema
    return next((reason for value in values if (reason := _value_problem(one, value)) is not None), None)


def _value_problem(schema: Mapping[str, object], value: str) -> str | None:
    """Return why a value does not satisfy its schema, for the part of JSON Schema that the engine's flags use."""
    words = schema.get("enum")
    if isinstance(words, list):
        known = [str(word) for word in words]
        return None if value in known else f"must be {one_of(known)}, got {shown(value)}"
    kinds = schema.get("type")
    if isinstance(kinds, list):  # a number, or one with a unit
        pattern = schema.get("pattern")
        suits = isinstance(pattern, str) and re.search(pattern, value)
        return None if suits else f"must be a number, or one with a unit, got {shown(value)}"
    if kinds == "integer" and not _INTEGER.fullmatch(value):
        return f"must be a whole number, got {shown(value)}"
    if kinds == "number" and not _NUMBER.fullmatch(value):
        return f"must be a number, got {shown(value)}"
    if kinds in ("integer", "number"):
        return _bounds_problem(schema, float(value), value)
    if not value.strip():
        return "must not be empty"
    if schema.get("contentMediaType") == "application/json" and not _is_json_object(value):
        return f"must be a JSON object, got {shown(value)}"
    pattern, examples = schema.get("pattern"), schema.get("examples")
    if isinstance(pattern, str) and not re.search(pattern, value):
        wanted = f"like {one_of([str(example) for example in examples])}" if isinstance(examples, list) else "otherwise"
        return f"must be {wanted}, got {shown(value)}"
    return None


def _is_json_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _bounds_problem(schema: Mapping[str, object], number: float, value: str) -> str | None:
    match schema.get("minimum"):
        case int() | float() as bound if number < bound:
            return f"must be >= {bound:g}, got {value}"
    match schema.get("exclusiveMinimum"):
        case int() | float() as bound if number <= bound:
            return f"must be > {bound:g}, got {value}"
    match schema.get("maximum"):
        case int() | float() as bound if number > bound:
            return f"must be <= {bound:g}, got {value}"
    return None

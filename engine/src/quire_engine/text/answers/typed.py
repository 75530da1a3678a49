"""Arguments that a format writes as plain text: their JSON values, by the schemas of the tools."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from quire_engine.text.answers.reader import Reader, decoded

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "float": (int, float),
    "object": (dict,),
    "array": (list,),
}
_MAX_DEPTH = 8
_MAX_LITERAL_CHARACTERS = 20_000
"""A longer Python literal stays text, because Python's parser takes long for hostile ones."""


def schema_of(reader: Reader, tool: str, argument: str) -> Mapping[str, Any] | None:
    """Return the schema of an argument; None where the tool or the argument is not declared."""
    properties = reader.schemas.get(tool, {}).get("properties")
    schema = properties.get(argument) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value of an argument: JSON of a type that the schema allows, else the text."""
    types = set() if schema is None else _types(schema)
    if types == {"string"}:
        return text
    value = _literal(text.strip())
    if value is _TEXT:
        return text
    if not types:
        return value
    permitted = tuple(kind for name in types for kind in _TYPES.get(name, ()))
    fits = isinstance(value, permitted) and (not isinstance(value, bool) or bool in permitted)
    return value if fits or "string" not in types else text


_TEXT = object()


def _literal(text: str) -> Any:
    found = decoded(text)
    if found is not None:
        return found.value
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text[:1] in ("{", "[") and len(text) <= _MAX_LITERAL_CHARACTERS:
        return python_literal(text, _TEXT)
    return _TEXT


def python_literal(text: str, otherwise: Any) -> Any:
    """Return the value of a Python literal that JSON can express, else ``otherwise``."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return otherwise
    return value


def _types(schema: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the names of the types that a schema allows; an empty set where it says nothing of types."""
    if depth > _MAX_DEPTH:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        return {_name_of(value) for value in schema["enum"]}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            if isinstance(part, Mapping):
                found |= _types(part, depth + 1)
    return found


def _name_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return next((name for name, kinds in _TYPES.items() if isinstance(value, kinds)), "string")


class ArgumentWriter:
    """The JSON object of a call whose arguments come one after another."""

    def __init__(self, reader: Reader, tool: str) -> None:
        self._reader = reader
        self._tool = tool
        self._empty = True
        reader.start_call(tool)
        reader.arguments("{")

    def add(self, name: str, text: str) -> None:
        """Add an argument that was written as text."""
        self.add_value(name, typed_value(text, schema_of(self._reader, self._tool, name)))

    def add_value(self, name: str, value: Any) -> None:
        """Add an argument."""
        separator = "" if self._empty else ", "
        self._empty = False
        key = json.dumps(name, ensure_ascii=False)
        self._reader.arguments(f"{separator}{key}: {json.dumps(value, ensure_ascii=False)}")

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("}")

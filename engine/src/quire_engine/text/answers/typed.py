"""Arguments that a format writes as plain text: their JSON values, by the schemas of the tools."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from quire_engine.text.answers.reader import Reader, decoded

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "float": (int, float),
    "object": (dict,),
    "array": (list,),
}
_KEYWORDS = {
    "string": ("pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"),
}
"""The keywords that show what a schema without a type is about."""
_NUMERIC_FORMATS = re.compile(r"u?int\d*|float|double")
_MAX_DEPTH = 64
_MAX_LITERAL_CHARACTERS = 20_000
"""A longer Python literal stays text, because Python's parser takes long for hostile ones."""
_TEXT = object()


class ArgumentTypes:
    """The types of the arguments of a tool, by its schema. References within the schema are followed."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}

    def members(self, name: str, schemas: Sequence[Schema] | None = None) -> list[Schema]:
        """Return the schemas of a member of an object with these schemas; by default of an argument."""
        found: list[Any] = []
        for part in self._parts([self._root] if schemas is None else schemas):
            properties, patterns = part.get("properties"), part.get("patternProperties")
            if isinstance(properties, Mapping) and name in properties:
                found.append(properties[name])
            else:
                # A client's pattern may take forever to match, so that any of them counts.
                found += [
                    *(patterns.values() if isinstance(patterns, Mapping) else ()),
                    part.get("additionalProperties"),
                ]
        return _schemas(found)

    def items(self, place: int, schemas: Sequence[Schema]) -> list[Schema]:
        """Return the schemas of the item at this place of an array with these schemas."""
        found: list[Any] = []
        for part in self._parts(schemas):
            first = part.get("prefixItems", part.get("items"))
            found.append(first[place] if isinstance(first, list) and place < len(first) else part.get("items"))
        return _schemas(found)

    def value(self, text: str, schemas: Sequence[Schema]) -> Any:
        """Return the value that a text stands for: JSON of a type that the schemas allow, else the text."""
        types = frozenset[str]().union(*(self._types(schema) for schema in schemas))
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

    def _parts(self, schemas: Sequence[Schema]) -> Iterator[Schema]:
        """Yield the schemas and those that they apply to the same value, each once."""
        waiting, seen = [*schemas], set[int]()
        while waiting:
            part = waiting.pop()
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                waiting += [each for key in ("anyOf", "oneOf", "allOf") for each in _schemas(part.get(key))]
                waiting += _schemas([self._target(part)])

    def _types(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """Return the names of the types that a schema allows; an empty set where it says nothing of types."""
        if id(schema) in self._known or depth > _MAX_DEPTH:
            return self._known.get(id(schema), frozenset())
        self._known[id(schema)] = frozenset()  # what a schema that contains itself learns from itself
        limits = _declared(schema)
        limits += [
            self._types(each, depth + 1) for each in _schemas([self._target(schema), *_list(schema.get("allOf"))])
        ]
        for key in ("anyOf", "oneOf"):
            branches = [self._types(each, depth + 1) for each in _schemas(schema.get(key))]
            limits.append(frozenset[str]().union(*branches))
        known = [each for each in limits if each]
        types = frozenset.intersection(*known) if known else _implied(schema)
        self._known[id(schema)] = types
        return types

    def _target(self, schema: Schema) -> Any:
        """Return the schema that a schema refers to by a JSON pointer; None where it is not found."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        place: Any = self._root
        for escaped in unquote(reference).split("/")[1:]:
            step = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list):
                place = next((item for number, item in enumerate(place) if str(number) == step), None)
            else:
                place = place.get(step) if isinstance(place, Mapping) else None
        return place


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(value: Any) -> list[Schema]:
    return [each for each in _list(value) if isinstance(each, Mapping)]


def _declared(schema: Schema) -> list[frozenset[str]]:
    """Return the types of each of the keywords type, enum and const."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _list(declared)
    types = frozenset(name for name in names if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else []
    return [
        types | {"integer"} if "number" in types else types,
        frozenset(map(_name_of, _list(schema.get("enum")))),
        frozenset(map(_name_of, values)),
    ]


def _implied(schema: Schema) -> frozenset[str]:
    """Return the types that the other keywords of a schema are about."""
    found = {name for name, keywords in _KEYWORDS.items() if any(keyword in schema for keyword in keywords)}
    format = schema.get("format")
    if isinstance(format, str):
        found.add("number" if _NUMERIC_FORMATS.fullmatch(format) else "string")
    return frozenset(found)


def _name_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return next(name for name, kinds in _TYPES.items() if isinstance(value, kinds))


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
        value = literal_value(ast.parse(text, mode="eval").body)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return otherwise
    return value


_JSON_NAMES = {"true": True, "false": False, "null": None}


def literal_value(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may contain the literals of JSON. Raises ValueError or TypeError."""
    match node:
        case ast.Name(id) if id in _JSON_NAMES:
            return _JSON_NAMES[id]
        case ast.List(items) | ast.Tuple(items):
            return [literal_value(item) for item in items]
        case ast.Dict(keys, values):
            return {ast.literal_eval(key or ""): literal_value(item) for key, item in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


class ArgumentWriter:
    """The JSON object of a call whose arguments come one after another."""

    def __init__(self, reader: Reader, tool: str) -> None:
        self.types = ArgumentTypes(reader.schemas.get(tool, {}))
        self._reader = reader
        self._empty = True
        reader.start_call(tool)
        reader.arguments("{")

    def add(self, name: str, text: str) -> None:
        """Add an argument that was written as text."""
        self.add_value(name, self.types.value(text, self.types.members(name)))

    def add_value(self, name: str, value: Any) -> None:
        """Add an argument."""
        separator = "" if self._empty else ", "
        self._empty = False
        key = json.dumps(name, ensure_ascii=False)
        self._reader.arguments(f"{separator}{key}: {json.dumps(value, ensure_ascii=False)}")

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("}")

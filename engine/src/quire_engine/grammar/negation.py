"""Keywords of JSON schema that ``shapes`` does not read, written with those that it reads, where that is exact.

``not`` becomes what it allows: other types, numbers beyond a bound, strings of other lengths, objects without a
property. ``if``, ``then`` and ``else`` become a choice if the negation of ``if`` can be written; so do dependencies on
properties. What cannot be written exactly stays as it is, and ``shapes`` refuses it by
name. Keywords without an effect are left out.

The semantics are those of JSON Schema 2020-12, sections 10.2 and 6: a keyword for one type allows all values of others,
so that its negation allows values of that type alone.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_TYPES = ("null", "boolean", "object", "array", "number", "string")
_ANNOTATIONS = frozenset(
    ("title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly")
)
_OTHER_SIDE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
"""The keyword that allows the numbers that another one does not."""
_SIZES = {
    "minLength": (("string", "Length"), "min"),
    "maxLength": (("string", "Length"), "max"),
    "minItems": (("array", "Items"), "min"),
    "maxItems": (("array", "Items"), "max"),
}
"""Bounds on sizes: the type and the end of the keyword's name, and which bound it is."""
_CONDITIONS = ("if", "then", "else")
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")


class Inexpressible(Exception):
    """A negation that cannot be written."""


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return one schema, without its subschemas, in keywords that ``shapes`` reads, where that is possible.

    What replaces keywords goes into ``allOf``, next to what is there.
    """
    parts: list[Any] = []
    kept = {name: value for name, value in schema.items() if not _has_no_effect(name, schema)}
    whole = dict(kept)
    try:
        if isinstance(kept.get("not"), dict | bool):
            parts.append(negated(kept.pop("not")))
        if "if" in kept:
            condition, then, other = (kept.pop(name, True) for name in _CONDITIONS)
            parts.append({"anyOf": [{"allOf": [condition, then]}, {"allOf": [negated(condition), other]}]})
        for name in _DEPENDENCIES:
            if isinstance(kept.get(name), dict):
                parts += _dependencies(kept.pop(name))
    except Inexpressible:
        return whole
    others = kept.get("allOf", [])
    return {**kept, "allOf": [*others, *parts]} if parts and isinstance(others, list) else kept


def _has_no_effect(name: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword with this value allows all values where it is."""
    value = schema[name]
    match name:
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "uniqueItems":
            return value is False
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or bool(value == {})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "minContains" | "maxContains":
            return True  # ``contains`` decides
        case "contains":
            return bool(schema.get("minContains") == 0) and "maxContains" not in schema
    return False


def negated(schema: Any) -> Any:
    """Return a schema of the values that this one does not allow. Raises Inexpressible."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise Inexpressible
    keywords = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    # An object allows nothing if one of its keywords does not: the negation is a choice of negations.
    choices = [_negated_keyword(name, value) for name, value in keywords.items()]
    return _any_of(choices)


def _negated_keyword(name: str, value: Any) -> Any:
    if name == "not":
        return value
    if name in ("anyOf", "allOf") and isinstance(value, list):
        return {"allOf" if name == "anyOf" else "anyOf": [negated(each) for each in value]}
    if name == "type" and isinstance(value, str | list):
        return _other_types([value] if isinstance(value, str) else value)
    if name in _OTHER_SIDE and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return {"type": "number", _OTHER_SIDE[name]: value}
    if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return _other_size(name, value)
    if name == "required" and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return _any_of([{"type": "object", "properties": {each: False}} for each in value])
    if name == "properties" and isinstance(value, dict):
        return _any_of(
            [{"type": "object", "properties": {key: negated(each)}, "required": [key]} for key, each in value.items()]
        )
    raise Inexpressible


def _other_size(name: str, value: int) -> Any:
    """Return strings or arrays whose length is on the other side of a bound."""
    kind, bound = _SIZES[name]
    if bound == "max":
        return {"type": kind[0], f"min{kind[1]}": value + 1}
    return {"type": kind[0], f"max{kind[1]}": value - 1} if value > 0 else False


def _any_of(choices: list[Any]) -> Any:
    """Return a choice of schemas; no value if there is none."""
    if not choices:
        return False
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _other_types(types: list[Any]) -> Any:
    """Return the types that are not in the list; numbers that are no integers are no type."""
    if not all(isinstance(each, str) for each in types) or ("integer" in types and "number" not in types):
        raise Inexpressible
    others = [each for each in _TYPES if each not in types]
    return {"type": others} if others else False


def _dependencies(value: Mapping[str, Any]) -> list[Any]:
    """Return a choice for each property: it is absent, or what depends on it holds."""
    found = []
    for name, needed in value.items():
        absent = {"properties": {name: False}}
        found.append({"anyOf": [absent, {"required": needed} if isinstance(needed, list) else needed]})
    return found

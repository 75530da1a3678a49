"""Checks that schemas of request bodies share. Their errors name the JSON type that was sent."""

from collections.abc import Callable
from typing import Any

from pydantic import BeforeValidator, WithJsonSchema


def json_type(value: Any) -> str:
    """Return the JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def one_or_list(wrap: Callable[[str], Any], items: str) -> BeforeValidator:
    """Return a check of a field that is one string, which becomes a list with ``wrap`` of it, or a list.

    A union would report the reasons of both forms.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [wrap(value)]
        if not isinstance(value, list):
            raise ValueError(f"should be a string or an array of {items}, not {json_type(value)}")
        return value

    return BeforeValidator(check)


STRING_OR_OBJECTS = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}
)


def known_type(*known: str, of_role: str | None = None) -> BeforeValidator:
    """Return a check that names a ``type`` that is not supported, before the union's own errors.

    An object with a role and without a type has the type ``of_role``, if there is one.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"should be an object, not {json_type(value)}")
        kind = value.get("type")
        if kind is None and of_role is not None and "role" in value:
            return {**value, "type": of_role}
        if not isinstance(kind, str):
            raise ValueError(f"should be an object with a type, which is one of {', '.join(known)}")
        if kind not in known:
            raise ValueError(f"the type {kind[:40]!r} is not supported; supported are {', '.join(known)}")
        return value

    return BeforeValidator(check)

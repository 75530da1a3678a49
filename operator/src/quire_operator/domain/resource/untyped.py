"""Readers of objects that anyone may have written: a field with a value of another type counts as absent."""

from collections.abc import Mapping, Sequence

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

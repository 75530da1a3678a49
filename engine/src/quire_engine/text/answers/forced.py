"""Answers that a grammar forces to be tool calls, in JSON whatever the model's own form is; and their JSON schemas."""

from collections.abc import Mapping
from typing import Any

from quire_engine.grammar.spec import check_depth
from quire_engine.text.answers.json_call import json_calls
from quire_engine.text.answers.reader import Format, Reader, Schemas, Steps

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def named_call_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an answer that is the arguments of one tool."""
    return parameters or _ANY_OBJECT


def required_calls_schema(tools: Schemas, *, several: bool) -> dict[str, Any]:
    """Return the schema of an answer that is an array of calls, of one call unless there may be several.

    Raises GrammarError for parameters that are nested too deeply.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, parameters) in enumerate(tools.items()):
        check_depth(parameters)
        key = f"tool{number}"
        definitions[key] = _moved(parameters, f"#/$defs/{key}") if parameters else _ANY_OBJECT
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return array if several else {**array, "maxItems": 1}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself are valid where it is a part of another one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def named_call(name: str) -> Format:
    """Return the format of an answer that is the arguments of this tool."""

    def read(reader: Reader) -> Steps:
        reader.start_call(name)
        yield from reader.until((), reader.arguments)

    return read


def required_calls(reader: Reader) -> Steps:
    """Read an answer that is an array of calls.

    No part of an array that was cut becomes text, because its JSON is the form of the grammar and not the model's.
    """
    yield from json_calls(reader, ("parameters",), reader.drop)
    yield from reader.until((), reader.drop)

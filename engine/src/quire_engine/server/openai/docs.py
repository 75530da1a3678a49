"""The request bodies in /openapi.json: routes read bodies themselves, so they also say themselves what is in them."""

from typing import Any

from pydantic import BaseModel


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """For ``openapi_extra``: definitions are inlined, for a reference would point into another document."""
    schema = model.model_json_schema(mode="validation")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        rest = {name: value for name, value in node.items() if name != "$ref"}
        return _inlined({**target, **rest}, definitions)
    return {name: _inlined(value, definitions) for name, value in node.items()}

"""The CRD follows the rules of structural schemas and the API conventions, most of which no server enforces."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds" / "llmdeployments.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
_CAMEL = re.compile(r"[a-z][a-zA-Z0-9]*")
_ENUM = re.compile(r"[A-Z][a-zA-Z0-9]*")


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field below a schema with its path; items of lists and values of maps are fields too."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}".lstrip("."), child
        yield from fields(child, f"{path}.{name}".lstrip("."))
    for name, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(name), dict):
            yield f"{path}{mark}", schema[name]
            yield from fields(schema[name], f"{path}{mark}")


FIELDS = dict(fields(SCHEMA))


def broken(rule: Callable[[str, dict[str, Any]], bool]) -> list[str]:
    """Return the fields that do not follow a rule."""
    return [path for path, schema in FIELDS.items() if not rule(path, schema)]


def test_walk_reaches_every_kind_of_field() -> None:
    assert {"spec.model.source", "status.conditions[].type", "spec.resources.limits{}"} <= FIELDS.keys()


def test_fields_are_named_and_typed() -> None:
    """Structural schemas have a type everywhere, except for integers that may be strings."""

    def follows(path: str, schema: dict[str, Any]) -> bool:
        name = re.sub(r"[\[\]{}]", "", path.rpartition(".")[2])
        return bool(_CAMEL.fullmatch(name) and (schema.get("type") or schema.get("x-kubernetes-int-or-string")))

    assert broken(follows) == []


def test_fields_are_described_for_kubectl_explain() -> None:
    def follows(path: str, schema: dict[str, Any]) -> bool:
        is_element = path.endswith(("[]", "{}"))
        return is_element or path == "metadata" or schema["description"].endswith((".", ")"))

    assert broken(follows) == []


def test_sizes_of_fields_are_bounded() -> None:
    """CEL's cost estimate uses these bounds, and no field may fill etcd's limit of an object."""

    def follows(path: str, schema: dict[str, Any]) -> bool:
        if path in ("apiVersion", "kind") or schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        match schema.get("type"):
            case "string":
                return "maxLength" in schema or "enum" in schema or schema.get("format") == "date-time"
            case "array":
                return "maxItems" in schema
            case "object" if "additionalProperties" in schema:
                return "maxProperties" in schema
            case "integer":  # the conventions require signed numbers with a stated width
                return schema.get("format") in ("int32", "int64")
            case kind:  # and forbid floats: use a quantity or an integer
                return kind != "number"

    assert broken(follows) == []


def test_values_of_enumerations_are_camel_case() -> None:
    def follows(path: str, schema: dict[str, Any]) -> bool:
        return all(_ENUM.fullmatch(value) for value in schema.get("enum", []) if isinstance(value, str))

    assert broken(follows) == []


def test_lists_of_objects_declare_their_merge_type() -> None:
    """Server-side apply cannot merge lists that do not say how."""

    def follows(path: str, schema: dict[str, Any]) -> bool:
        if schema.get("type") != "array" or schema["items"].get("type") != "object":
            return True
        items, kind = schema["items"], schema.get("x-kubernetes-list-type")
        keys = schema["x-kubernetes-list-map-keys"] if kind == "map" else ()
        has_keys = all(key in items.get("required", []) or "default" in items["properties"][key] for key in keys)
        return kind in ("map", "atomic") and has_keys

    assert broken(follows) == []


def test_conditions_have_the_fields_of_the_conventions() -> None:
    conditions = FIELDS["status.conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert {"type", "status", "reason", "message", "lastTransitionTime"} <= set(conditions["items"]["required"])
    assert conditions["items"]["properties"].keys() == {
        *("type", "status", "reason", "message", "lastTransitionTime", "observedGeneration")
    }


def test_status_and_scale_are_subresources() -> None:
    assert VERSION["subresources"].keys() == {"status", "scale"}
    for path in VERSION["subresources"]["scale"].values():
        assert path.lstrip(".") in FIELDS


def test_names_follow_from_the_kind() -> None:
    names = CRD["spec"]["names"]
    assert (names["singular"], names["plural"]) == (names["kind"].lower(), f"{names['kind'].lower()}s")
    assert names["listKind"] == f"{names['kind']}List"
    assert CRD["metadata"]["name"] == f"{names['plural']}.{CRD['spec']['group']}"
    assert CRD["spec"].get("preserveUnknownFields", False) is False

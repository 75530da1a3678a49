"""The CRD follows the rules of structural schemas and the API conventions, most of which no server enforces."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
each_field = pytest.mark.parametrize("path", FIELDS)


def test_walk_reaches_every_kind_of_field() -> None:
    assert {"spec.model.source", "status.conditions[].type", "spec.resources.limits{}"} <= FIELDS.keys()


@each_field
def test_field_is_named_and_typed(path: str) -> None:
    """Structural schemas have a type everywhere, except for integers that may be strings."""
    schema, name = FIELDS[path], re.sub(r"[\[\]{}]", "", path.rpartition(".")[2])
    assert _CAMEL.fullmatch(name)
    assert schema.get("type") or schema.get("x-kubernetes-int-or-string")


@each_field
def test_field_is_described(path: str) -> None:
    is_element = path.endswith(("[]", "{}"))
    if not is_element and path not in ("metadata",):
        assert FIELDS[path]["description"].endswith((".", ")")), "kubectl explain shows it"


@each_field
def test_size_of_field_is_bounded(path: str) -> None:
    """CEL's cost estimate uses these bounds, and no field may fill etcd's limit of an object."""
    schema = FIELDS[path]
    if path in ("apiVersion", "kind") or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    match schema.get("type"):
        case "string":
            assert "maxLength" in schema or "enum" in schema or schema.get("format") == "date-time"
        case "array":
            assert "maxItems" in schema
        case "object" if "additionalProperties" in schema:
            assert "maxProperties" in schema
        case "integer":
            # The conventions require signed numbers with a stated width.
            assert schema.get("format") in ("int32", "int64")
        case "number":
            pytest.fail("the API conventions forbid floats: use a quantity or an integer")


@each_field
def test_values_of_enumerations_are_camel_case(path: str) -> None:
    values = FIELDS[path].get("enum", [])
    assert [value for value in values if isinstance(value, str) and not _ENUM.fullmatch(value)] == []


@each_field
def test_lists_of_objects_declare_their_merge_type(path: str) -> None:
    schema = FIELDS[path]
    if schema.get("type") == "array" and schema["items"].get("type") == "object":
        kind = schema.get("x-kubernetes-list-type")
        assert kind in ("map", "atomic"), "server-side apply cannot merge lists that do not say how"
        if kind == "map":
            keys = schema["x-kubernetes-list-map-keys"]
            items = schema["items"]
            assert all(key in items.get("required", []) or "default" in items["properties"][key] for key in keys)


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

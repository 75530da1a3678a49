"""The CRD's schema and the parser of LLMDeployments agree on fields, defaults, words and bounds.

The schema protects the cluster; ``quire up`` has only the parser.
"""

import copy
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from quire_operator.domain.autoscaling.history import Change, ScalingRecord
from quire_operator.domain.autoscaling.rates import Rates
from quire_operator.domain.resource import (
    AccessMode,
    AutoscalingMode,
    DType,
    Invalid,
    MetricsSource,
    PolicyType,
    Preemption,
    PrefixCaching,
    Problem,
    PullPolicy,
    Retention,
    RolloutStrategy,
    SchedulingPolicy,
    SelectPolicy,
    Spec,
    names,
)
from quire_operator.domain.status.scaling_status import scaling_sections

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds" / "llmdeployments.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]
SPEC = ROOT["properties"]["spec"]
STATUS = ROOT["properties"]["status"]


class Node(NamedTuple):
    path: str
    schema: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.schema.get("properties", {})
        return found


def nodes(path: str, schema: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the schema at ``path`` and everything below it; list items as ``path[0]``."""
    yield Node(path, schema)
    for key, child in schema.get("properties", {}).items():
        yield from nodes(f"{path}.{key}", child)
    if "items" in schema:
        yield from nodes(f"{path}[0]", schema["items"])
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield Node(f"{path}.*", schema["additionalProperties"])


SPEC_NODES = list(nodes("spec", SPEC))
ALL_NODES = [*nodes("spec", SPEC), *nodes("status", STATUS)]


def document(path: str = "", value: object = None) -> dict[str, Any]:
    """Return a valid LLMDeployment with ``value`` at ``path`` (such as spec.engine.imagePullSecrets[0].name)."""
    body: dict[str, Any] = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": "file:///models/demo"}},
    }
    if path.startswith("spec.autoscaling"):
        body["spec"]["autoscaling"] = {"maxReplicas": 3}
    if not path:
        return body
    place: Any = body
    *parents, last = path.replace("[0]", ".0").split(".")
    for i, key in enumerate(parents):
        following = (*parents, last)[i + 1]
        if key == "0":
            place.append({})
            place = place[0]
        else:
            place = place.setdefault(key, [] if following == "0" else {})
    if last == "0":
        place.append(value)
    else:
        place[last] = value
    return body


def problems(body: Mapping[str, Any]) -> tuple[Problem, ...]:
    parsed = Spec.parse(body)
    return parsed.problems if isinstance(parsed, Invalid) else ()


def problem_at(path: str, value: object) -> str:
    return " ".join(problem.message for problem in problems(document(path, value)) if problem.path == path)


def with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return ``value`` with the defaults that the API server fills in."""
    if not isinstance(value, dict):
        return value
    for key, child in schema.get("properties", {}).items():
        if key not in value and "default" in child:
            value[key] = copy.deepcopy(child["default"])
        if key in value:
            value[key] = with_defaults(value[key], child)
    return value


def ids(node: Node) -> str:
    return node.path


def test_the_names_are_those_the_operator_uses() -> None:
    spec = CRD["spec"]
    assert (spec["group"], spec["names"]["kind"], spec["names"]["plural"]) == (names.GROUP, names.KIND, names.PLURAL)
    assert VERSION["name"] == names.VERSION
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"


@pytest.mark.parametrize(
    "body",
    [document(), document("spec.autoscaling.maxReplicas", 3), document("spec.engine.maxSequences", 4)],
    ids=["minimal", "autoscaling", "engine"],
)
def test_a_document_means_the_same_with_the_schemas_defaults_filled_in(body: dict[str, Any]) -> None:
    filled = with_defaults(copy.deepcopy(body), ROOT)
    assert filled != body
    assert problems(filled) == ()
    assert Spec.parse(filled) == Spec.parse(body)


@pytest.mark.parametrize("node", [node for node in SPEC_NODES if node.properties], ids=ids)
def test_both_know_the_same_fields(node: Node) -> None:
    """The parser lists all fields when it meets one that is similar to none of them."""
    message = problem_at(f"{node.path}.0xqz", 1)
    assert set(message.removeprefix("unknown field; there are: ").split(", ")) == set(node.properties)


ENUMS: dict[str, type[StrEnum]] = {
    "spec.model.cache.accessMode": AccessMode,
    "spec.model.cache.retain": Retention,
    "spec.engine.dtype": DType,
    "spec.engine.prefixCaching": PrefixCaching,
    "spec.engine.preemption": Preemption,
    "spec.engine.imagePullPolicy": PullPolicy,
    "spec.engine.schedulingPolicy": SchedulingPolicy,
    "spec.autoscaling.mode": AutoscalingMode,
    "spec.autoscaling.metricsSource": MetricsSource,
    "spec.autoscaling.behavior.scaleUp.policies[0].type": PolicyType,
    "spec.autoscaling.behavior.scaleUp.selectPolicy": SelectPolicy,
    "spec.autoscaling.behavior.scaleDown.policies[0].type": PolicyType,
    "spec.autoscaling.behavior.scaleDown.selectPolicy": SelectPolicy,
    "spec.rollout.strategy": RolloutStrategy,
}


def test_both_know_the_same_words() -> None:
    in_schema = {
        node.path: set(node.schema["enum"])
        for node in SPEC_NODES
        if node.schema.get("type") == "string" and "enum" in node.schema
    }
    assert in_schema == {path: {word.value for word in words} for path, words in ENUMS.items()}


INTEGERS = [node for node in SPEC_NODES if node.schema.get("type") == "integer" and "enum" not in node.schema]


@pytest.mark.parametrize("node", INTEGERS, ids=ids)
def test_both_draw_the_same_bounds(node: Node) -> None:
    """Problems of other fields (a minimum above its maximum) do not concern bounds."""
    lowest, highest = node.schema["minimum"], node.schema["maximum"]
    assert node.schema["format"] == "int32"
    assert f"must be <= {highest}, got {highest + 1}" in problem_at(node.path, highest + 1)
    assert "must be <=" not in problem_at(node.path, highest)
    assert "must be >= " in problem_at(node.path, lowest - 1)
    assert f"must be >= {lowest}, got" not in problem_at(node.path, lowest)


@pytest.mark.parametrize(
    "node", [node for node in SPEC_NODES if node.schema.get("type") == "integer" and "enum" in node.schema], ids=ids
)
def test_both_allow_the_same_numbers(node: Node) -> None:
    allowed = {number for number in range(0, 2 * max(node.schema["enum"])) if not problem_at(node.path, number)}
    assert allowed == set(node.schema["enum"])


def test_every_field_is_described_in_a_sentence() -> None:
    """The description of a map covers its entries."""
    fields = [node for node in ALL_NODES if not node.path.endswith(".*")]
    assert [node.path for node in fields if not node.schema.get("description", "").endswith(".")] == []


def test_nothing_is_a_float() -> None:
    types = {node.path: node.schema.get("type", "int-or-string") for node in ALL_NODES}
    assert set(types.values()) == {"object", "array", "string", "integer", "boolean", "int-or-string"}
    untyped = [node for node in ALL_NODES if "type" not in node.schema]
    assert all(node.schema["x-kubernetes-int-or-string"] for node in untyped)


def kind_of(schema: Mapping[str, Any]) -> str:
    if "additionalProperties" in schema:
        return "map"
    return str(schema.get("type", "int-or-string"))


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("string", {"maxLength", "enum", "format"}),
        ("array", {"maxItems"}),
        ("map", {"maxProperties"}),
        ("int-or-string", {"maxLength"}),
    ],
)
def test_whatever_a_person_writes_is_bounded(kind: str, bounds: set[str]) -> None:
    """CEL's cost is estimated from the bounds; without them the server rejects the rules."""
    of_kind = [node for node in ALL_NODES if kind_of(node.schema) == kind]
    assert of_kind
    assert [node.path for node in of_kind if not bounds & set(node.schema)] == []


def test_every_list_says_how_it_is_merged() -> None:
    lists = [node for node in ALL_NODES if node.schema.get("type") == "array"]
    assert lists
    assert [node.path for node in lists if "x-kubernetes-list-type" not in node.schema] == []


def test_words_are_in_pascal_case() -> None:
    words = [word for node in ALL_NODES if node.schema.get("type") == "string" for word in node.schema.get("enum", ())]
    assert words
    assert [word for word in words if not word[0].isupper() or not word.isalnum()] == []


def test_there_are_scale_and_status_and_the_columns_of_the_design() -> None:
    assert VERSION["subresources"]["status"] == {}
    assert VERSION["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    shown = [column["name"] for column in VERSION["additionalPrinterColumns"] if not column.get("priority")]
    assert shown == ["Ready", "Status", "Replicas", "Desired", "Model", "Age"]


def paths(value: object, path: str) -> Iterator[str]:
    """Yield the fields that are set in a document, as in ``Node.path``; entries of maps and lists count as one."""
    yield path
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from paths(child, f"{path}.{key}")
    if isinstance(value, list):
        for child in value:
            yield from paths(child, f"{path}[0]")


def test_what_the_autoscaler_keeps_has_its_place_in_status() -> None:
    """A field without a schema would be dropped silently and lost by a restart."""
    rates = Rates(
        step_seconds=0.0074,
        prefill_seconds_per_token=0.0001,
        decode_seconds_per_token=0.00003,
        mean_prompt_tokens=800.0,
        mean_output_tokens=120.0,
        kv_tokens=65536.0,
    )
    change = Change(time=1.0, from_replicas=1, to_replicas=2, reason="Arrivals", message="two", inputs={"need": 1.5})
    record = ScalingRecord(rates=rates, rates_time=1.0, start_up_seconds=95).with_change(change)
    spec = Spec.parse(document("spec.autoscaling.maxReplicas", 3))
    assert isinstance(spec, Spec)
    known = {node.path for node in ALL_NODES}
    maps = tuple(f"{node.path.removesuffix('*')}" for node in ALL_NODES if node.path.endswith(".*"))
    written = set(paths(scaling_sections(record, spec, now=0.0), "status"))
    assert {path for path in written - known if not path.startswith(maps)} == set()
    assert {node.path for node in nodes("status.capacity", STATUS["properties"]["capacity"])} <= written

"""The CRD has the operator's names, and defaults that mean the same to the API server and to the parser."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from specs import llmdeployment, valid_spec

from quire_common.contract.gateway import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN
from quire_operator.api import Canary, Gate, GateMetric, Spec, names
from quire_operator.autoscaling.history import Change, ScalingRecord
from quire_operator.autoscaling.rates import Rates
from quire_operator.canary.analysis import Answers, Track, Tracks, judge
from quire_operator.canary.progress import Phase, Record, section
from quire_operator.deployment.status import scaling_sections

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds" / "llmdeployments.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]
SPEC = ROOT["properties"]["spec"]
STATUS = ROOT["properties"]["status"]


class Node(NamedTuple):
    path: str
    schema: Mapping[str, Any]


def nodes(path: str, schema: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the schema at ``path`` and everything below it; list items as ``path[0]``."""
    yield Node(path, schema)
    for key, child in schema.get("properties", {}).items():
        yield from nodes(f"{path}.{key}", child)
    if "items" in schema:
        yield from nodes(f"{path}[0]", schema["items"])
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield Node(f"{path}.*", schema["additionalProperties"])


ALL_NODES = [*nodes("spec", SPEC), *nodes("status", STATUS)]


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


def test_crd_names_equal_those_of_the_operator() -> None:
    spec = CRD["spec"]
    assert (spec["group"], spec["names"]["kind"], spec["names"]["plural"]) == (names.GROUP, names.KIND, names.PLURAL)
    assert VERSION["name"] == names.VERSION
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"


@pytest.mark.parametrize(
    "body",
    [llmdeployment(), llmdeployment(autoscaling={"maxReplicas": 3}), llmdeployment(engine={"maxSequences": 4})],
    ids=["minimal", "autoscaling", "engine"],
)
def test_document_means_the_same_with_defaults_filled_in(body: dict[str, Any]) -> None:
    filled = with_defaults(copy.deepcopy(body), ROOT)
    assert filled != body
    parsed = Spec.parse(filled)
    assert isinstance(parsed, Spec) and parsed == Spec.parse(body)


def test_crd_has_scale_status_and_columns() -> None:
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


def test_autoscaler_record_fits_the_status_schema() -> None:
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
    spec = valid_spec(autoscaling={"maxReplicas": 3})
    known = {node.path for node in ALL_NODES}
    maps = tuple(f"{node.path.removesuffix('*')}" for node in ALL_NODES if node.path.endswith(".*"))
    written = set(paths(scaling_sections(record, spec, now=0.0), "status"))
    assert {path for path in written - known if not path.startswith(maps)} == set()
    assert {node.path for node in nodes("status.capacity", STATUS["properties"]["capacity"])} <= written


def test_canary_progress_fits_the_status_schema() -> None:
    """The API server refuses the whole status if it does not know a field."""
    record = Record(
        stable="a", phase=Phase.CANARY, canary="b", rejected="c", weight_percent=5, started=1.0, message="m"
    )
    policy = Canary(gates=tuple(Gate(metric=metric) for metric in GateMetric), min_requests=50)
    latencies = {TIME_TO_FIRST_TOKEN: {20: 100}, INTER_TOKEN_LATENCY: {20: 100}}
    track = Track(requests=100, errors=1, latencies=latencies)
    tracks = Tracks(stable=track, canary=track, answers=Answers(compared=30, different=1))
    results = judge(policy, tracks)
    written = set(paths(section(record, results, compared_percent=10.0), "status.rollout"))
    schema = STATUS["properties"]["rollout"]
    assert written - {node.path for node in nodes("status.rollout", schema)} == set()
    assert {"status.rollout.comparedPerMillion", "status.rollout.gates[0].canary.errors"} <= written
    assert set(schema["properties"]["gates"]["items"]["properties"]["metric"]["enum"]) == set(GateMetric)

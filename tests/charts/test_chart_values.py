"""Values: errors name the path, and all values are known, described and listed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_cluster.errors import HelmFailed
from quire_cluster.helm import Helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "quire"
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
MADE = ("README.md", "values.schema.json")
REMOVED = {"/operator/defaults", "/operator/ociVolumes", "/gateway/wakeByService"}
"""Values of removed features, which templates/removed-values.yaml refuses."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operator": {"replica": 2}}, "at '/operator': additional properties 'replica' not allowed"),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"operator": {"replicas": "two"}}, "at '/operator/replicas': got string, want integer"),
        ({"watchNamespaces": "llm"}, "at '/watchNamespaces': got string, want array"),
        ({"watchNamespaces": ["Team A"]}, "at '/watchNamespaces/0': 'Team A' does not match pattern"),
        ({"operator": {"resync": "ten minutes"}}, "at '/operator/resync'"),
        ({"operator": {"logLevel": "verbose"}}, "at '/operator/logLevel': value must be one of"),
        ({"gateway": {"service": {"port": 0}}}, "at '/gateway/service/port': minimum: got 0, want 1"),
        ({"images": {"operator": {"digest": "latest"}}}, "at '/images/operator/digest'"),
        ({"images": {"registry": "https://registry.example"}}, "at '/images/registry'"),
        ({"gateway": {"podLabels": {"team": 3}}}, "at '/gateway/podLabels/team': got number, want string"),
        ({"gateway": {"autoscaling": {"minReplicas": 0}}}, "at '/gateway/autoscaling/minReplicas': minimum"),
        ({"gateway": {"tls": {"secretName": "My Secret"}}}, "at '/gateway/tls/secretName'"),
        ({"gateway": {"ingress": {"hosts": ["https://x"]}}}, "at '/gateway/ingress/hosts/0'"),
        (
            {"gateway": {"httpRoute": {"parentRefs": [{}]}}},
            "at '/gateway/httpRoute/parentRefs/0': missing property 'name'",
        ),
        ({"networkPolicies": {"metricsFrom": [{}]}}, "at '/networkPolicies/metricsFrom/0'"),
        (
            {"monitoring": {"alerts": {"thresholds": {"queueTime": "5"}}}},
            "at '/monitoring/alerts/thresholds/queueTime'",
        ),
        ({"monitoring": {"alerts": {"thresholds": {"queue": 5}}}}, "additional properties 'queue' not allowed"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs: must name"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
            "gateway.autoscaling.maxReplicas: must be at least minReplicas",
        ),
        ({"monitoring": {"alerts": {"enabled": True, "disabled": ["QuireNoSuch"]}}}, "unknown alert QuireNoSuch"),
        ({"operator": {"defaults": {"engine": {}}}}, "operator.defaults: was removed; set these fields in each"),
        ({"operator": {"ociVolumes": "fetch"}}, "operator.ociVolumes: was removed; the kubelet mounts every oci://"),
        (
            {"gateway": {"wakeByService": True}},
            "gateway.wakeByService: was removed; requests wake a model",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(helm: Helm, values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        helm.template(values)
    assert message in str(refused.value)


def test_removed_values_that_request_nothing_are_accepted(helm: Helm) -> None:
    """``helm upgrade --reuse-values`` passes the old chart's defaults."""
    values = {"operator": {"defaults": {}, "ociVolumes": "auto"}, "gateway": {"wakeByService": False}}
    assert helm.template(values) == helm.template()


def keys(tree: object, path: str = "") -> set[str]:
    if not isinstance(tree, Mapping) or not tree:
        return {path}
    return {path, *(key for name, child in tree.items() for key in keys(child, f"{path}/{name}"))}


def schema_keys(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> set[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    children = schema.get("properties", {}).items()
    return {path, *(key for name, child in children for key in schema_keys(child, definitions, f"{path}/{name}"))}


def test_values_schema_covers_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema_keys(schema, schema["$defs"])
    undefined = {"/global", *(f"/{who}/resources/claims" for who in ("operator", "gateway"))}
    undefined |= {"/gateway/httpRoute/timeouts/backendRequest", *REMOVED}
    free = ("/requests/", "/limits/", "/labels/")
    assert known - undefined == {key for key in keys(DEFAULTS) if not any(part in key for part in free)}


def leaves(tree: object, path: str = "") -> Iterator[str]:
    """Yield the values that users can set, with their names on the command line."""
    if isinstance(tree, Mapping) and tree and not path.endswith((".requests", ".limits", ".labels")):
        for name, child in tree.items():
            yield from leaves(child, f"{path}.{name}".lstrip("."))
    else:
        yield path


def test_the_table_and_the_schemas_descriptions_are_up_to_date(tmp_path: Path) -> None:
    """On failure run make chart-docs."""
    for name in ("values.yaml", *MADE):
        shutil.copy(CHART / name, tmp_path)
    subprocess.run([sys.executable, ROOT / "charts" / "document.py", str(tmp_path)], check=True)
    for name in MADE:
        assert (tmp_path / name).read_text() == (CHART / name).read_text(), "run `make chart-docs`"


def test_each_value_has_a_row_that_describes_it() -> None:
    cells = [line.split(" | ") for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `")]
    rows = {row[0].strip("| `"): (row[1].strip("`"), row[2].rstrip("| ")) for row in cells}
    assert [path for path, (_, text) in rows.items() if not text] == []
    on_one_line = (
        "tokenSecret",
        "caConfigMap",
        "clientCAConfigMap",
        "issuer",
        "resources.requests",
        "resources.limits",
    )
    expected = {
        p if not (part := [x for x in on_one_line if f"{x}." in p]) else p[: p.index(part[0]) + len(part[0])]
        for p in leaves(DEFAULTS)
    }
    assert rows.keys() == expected
    assert rows["gateway.replicas"] == (
        "2",
        "Number of gateway pods. With null or autoscaling.enabled, the chart does not set the number.",
    )

"""Children that depend on cluster features: access to replicas, and the Prometheus operator's objects."""

import re
from typing import Any

import pytest
from rendering import child, rendered
from specs import valid_spec

from quire_operator.api.names import LABEL_DEPLOYMENT
from quire_operator.deployment.desired import OPTIONAL_KINDS, child_refs
from quire_operator.deployment.manifests import ClusterFeatures, Manifests, Monitoring
from quire_operator.deployment.network import SERIES_LABEL

PEERS = ({"podSelector": {}}, {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "gateway"}}})
COMPONENTS = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "engine-canary"]}
BOTH_TRACKS = {"matchLabels": {"quire.dev/llmdeployment": "chat"}, "matchExpressions": [COMPONENTS]}
EVERYTHING = ClusterFeatures(
    network_peers=PEERS,
    monitoring=Monitoring(
        pod_monitor_labels={"release": "prom", "quire.dev/llmdeployment": "not-this"},
        rule_labels={"team": "ml"},
        interval="20s",
    ),
    served_kinds=OPTIONAL_KINDS,
)


def made(features: ClusterFeatures, **spec: Any) -> Manifests:
    return rendered(valid_spec(**spec), features=features)


def rules_of(**autoscaling: Any) -> dict[str, Any]:
    """Return the rules by alert."""
    rule = child(made(EVERYTHING, autoscaling={"maxReplicas": 4} | autoscaling), "PrometheusRule")
    assert rule is not None
    body: Any = rule.body
    (group,) = body["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_policy_admits_only_its_peers_to_the_port() -> None:
    manifest = child(made(EVERYTHING), "NetworkPolicy")
    assert manifest is not None and manifest.ref.name == "chat"
    assert manifest.body["spec"] == {
        "podSelector": BOTH_TRACKS,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": list(PEERS), "ports": [{"port": 8000, "protocol": "TCP"}]}],
    }


def test_network_policy_is_created_before_the_pods() -> None:
    kinds = [manifest.ref.kind for manifest in made(EVERYTHING, autoscaling={"maxReplicas": 2})]
    assert kinds.index("NetworkPolicy") < kinds.index("Deployment")
    assert kinds[-2:] == ["PodMonitor", "PrometheusRule"], "what may fail comes last"


def test_no_policy_and_no_monitor_by_default() -> None:
    assert {m.ref.kind for m in made(ClusterFeatures())}.isdisjoint({"NetworkPolicy", "PodMonitor", "PrometheusRule"})


@pytest.mark.parametrize("features", [ClusterFeatures(), EVERYTHING])
@pytest.mark.parametrize("spec", [{}, {"autoscaling": {"maxReplicas": 2}}])
def test_optional_child_names_are_known_in_advance(features: ClusterFeatures, spec: dict[str, Any]) -> None:
    assert {m.ref for m in made(features, **spec)} == set(child_refs(valid_spec(**spec), features))


def test_replicas_are_scraped_at_their_port_with_their_labels() -> None:
    manifest = child(made(EVERYTHING), "PodMonitor")
    assert manifest is not None
    body: Any = manifest.body
    assert body["spec"] == {
        "selector": BOTH_TRACKS,
        "podTargetLabels": ["quire.dev/llmdeployment"],
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "20s"}],
    }
    assert re.sub(r"\W", "_", LABEL_DEPLOYMENT) == SERIES_LABEL, "as Prometheus names the label in series"
    labels = body["metadata"]["labels"]
    assert labels["release"] == "prom" and labels["quire.dev/llmdeployment"] == "chat", "ours stand above theirs"


@pytest.mark.parametrize("kind", sorted(OPTIONAL_KINDS))
def test_each_kind_is_created_only_if_it_is_served(kind: str) -> None:
    features = ClusterFeatures(monitoring=Monitoring(), served_kinds=frozenset({kind}))
    nodes = 2 if kind == "LeaderWorkerSet" else 1
    shape = {"tensor": nodes, "nodes": nodes}
    kinds = {m.ref.kind for m in made(features, autoscaling={"maxReplicas": 2}, parallelism=shape)}
    assert kinds & OPTIONAL_KINDS == {kind}


def test_no_alert_rules_without_autoscaling() -> None:
    assert child(made(EVERYTHING), "PrometheusRule") is None


def test_alert_expressions_follow_the_spec() -> None:
    rules = rules_of(targets={"timeToFirstToken": {"percentile": 99, "threshold": "500ms"}})
    first, most = rules["QuireTimeToFirstTokenHigh"], rules["QuireAtMaxReplicas"]
    assert first["expr"].startswith("histogram_quantile(0.99, ") and first["expr"].endswith("> 0.5")
    assert most["expr"].endswith(">= 4")
    for rule in (first, most):
        assert 'namespace="prod",quire_dev_llmdeployment="chat"' in rule["expr"]
        assert rule["labels"] == {"severity": "warning", "namespace": "prod", "name": "chat"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
    assert "99 % of the requests" in first["annotations"]["description"]


def test_service_annotation_has_the_creation_time() -> None:
    body: Any = child(rendered(created="2026-01-02T03:04:05Z"), "Service", "chat").body
    assert body["metadata"]["annotations"] == {
        "quire.dev/served-name": "chat",
        "quire.dev/seniority": "2026-01-02T03:04:05Z/uid-1",
    }

"""The chart's settings for children: access to replicas, their scrapes, and unique served names."""

from typing import Any

import pytest
from chart_support.documents import container

from quire_cluster.helm import Helm
from quire_common.served_names import NameScope
from quire_gateway.config import KubernetesSource, parse_config
from quire_operator.app.settings import Settings, parse_settings

RELEASE = {"app.kubernetes.io/name": "quire", "app.kubernetes.io/instance": "quire"}


def told(helm: Helm, values: dict[str, Any] | None = None) -> Settings:
    args = container(helm.template(values or {}), "quire-operator")["args"]
    return parse_settings(args, {})


def peers(helm: Helm, values: dict[str, Any] | None = None) -> Any:
    return told(helm, values).features.network_peers


def test_operator_gateway_namespace_and_prometheus_reach_replicas(helm: Helm) -> None:
    operator, gateway, prometheus, own_namespace = peers(helm)
    for peer, component in ((operator, "operator"), (gateway, "gateway")):
        assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}
        assert peer["podSelector"] == {"matchLabels": RELEASE | {"app.kubernetes.io/component": component}}
    assert own_namespace == {"podSelector": {}}
    assert prometheus["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert prometheus["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}


def test_additional_peers_never_remove_the_gateway(helm: Helm) -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    monitoring = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    replicas = {"from": [block], "prometheusNamespace": ""}
    found = peers(helm, {"networkPolicies": {"replicas": replicas, "metricsFrom": [monitoring]}})
    assert found[2:] == (monitoring, block) and len(found) == 4
    nobody = {"from": [], "prometheusNamespace": ""}
    alone = peers(helm, {"networkPolicies": {"replicas": nobody}, "gateway": {"create": False}})
    assert len(alone) == 1, "the operator, which scrapes them"
    assert peers(helm, {"networkPolicies": {"replicas": {"enabled": False}}}) is None


@pytest.mark.parametrize(
    ("gateway", "scope"),
    [
        ({}, NameScope.CLUSTER),
        ({"servedNames": "Namespaced"}, NameScope.NAMESPACED),
        ({"create": False, "servedNames": "Namespaced"}, None),
    ],
)
def test_operator_and_gateway_agree_on_served_names(
    helm: Helm, gateway: dict[str, Any], scope: NameScope | None
) -> None:
    documents = helm.template({"gateway": gateway})
    assert parse_settings(container(documents, "quire-operator")["args"], {}).features.served_names is scope
    if scope is not None:
        source = parse_config(container(documents, "quire-gateway")["args"], {}).source
        assert isinstance(source, KubernetesSource) and source.scope is scope


def test_monitors_have_the_labels_of_the_chart(helm: Helm) -> None:
    values = {
        "monitoring": {
            "podMonitors": {"labels": {"release": "prom", "team": "ml"}, "interval": "30s"},
            "alerts": {"labels": {"a.example/b": "c"}, "runbookUrl": "https://example.org/r"},
        }
    }
    monitoring = told(helm, values).features.monitoring
    assert monitoring is not None
    assert monitoring.pod_monitor_labels == {"release": "prom", "team": "ml"}
    assert (monitoring.rule_labels, monitoring.interval) == ({"a.example/b": "c"}, "30s")
    assert monitoring.runbook_url == "https://example.org/r"
    assert told(helm, {"monitoring": {"replicas": {"enabled": False}}}).features.monitoring is None

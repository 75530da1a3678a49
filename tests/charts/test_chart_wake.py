"""Services that wake their model: ports, flags, permissions and network policies in the chart."""

from typing import Any

import pytest
from chart_support.documents import Documents, container, of_kind

from quire_cluster.helm import Helm
from quire_gateway.config import parse_config
from quire_operator.app.settings import parse_settings

KEYS = {"auth": {"secretName": "keys"}}
PORTABLE = [{"namespaceSelector": {"matchLabels": {"team": "ml"}}}, {"ipBlock": {"cidr": "10.1.0.0/16"}}]
RELATIVE = [{"podSelector": {}}]


def is_on(documents: Documents) -> bool:
    """Return whether the feature is on, which gateway, operator and permissions must agree about."""
    found = container(documents, "quire-gateway")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    listens = parse_config([a for a in found["args"] if "keys" not in a], {}).wake_port
    settings = parse_settings(container(documents, "quire-operator")["args"], {})
    rules = [
        rule["verbs"]
        for role in of_kind(documents, "ClusterRole")
        if role["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
        for rule in role["rules"]
        if "endpointslices" in rule["resources"]
    ]
    assert ports.get("wake") == listens
    assert settings.gateways.wakes_by_service is bool(listens)
    (verbs,) = rules
    # Routes that an earlier release left are removed in any case: they would lead to a port that is gone.
    assert sorted(verbs) == (["create", "delete", "list", "patch"] if listens else ["delete", "list"])
    return listens is not None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"gateway": {"wakeByService": False}}, False),
        ({"gateway": KEYS}, False),
        ({"gateway": KEYS, "networkPolicies": {"replicas": {"enabled": False}}}, True),
        ({"gateway": KEYS, "networkPolicies": {"replicas": {"from": RELATIVE + PORTABLE}}}, True),
    ],
    ids=["default", "off", "keys and relative peers", "keys and no policies", "keys and portable peers"],
)
def test_services_wake_models_where_access_can_be_kept(helm: Helm, values: dict[str, Any], expected: bool) -> None:
    assert is_on(helm.template(values)) is expected


def test_services_wake_no_model_without_a_gateway(helm: Helm) -> None:
    documents = helm.template({"gateway": {"create": False}})
    assert not parse_settings(container(documents, "quire-operator")["args"], {}).gateways.wakes_by_service
    roles = [role for role in of_kind(documents, "ClusterRole") if "endpointslices" in str(role)]
    assert [rule["verbs"] for role in roles for rule in role["rules"] if "endpointslices" in rule["resources"]] == [
        ["list", "delete"]
    ]


def ingress(documents: Documents) -> list[dict[str, Any]]:
    """Return the rules of the gateway's NetworkPolicy; empty without one."""
    policies = [p for p in of_kind(documents, "NetworkPolicy") if p["metadata"]["name"] == "quire-gateway"]
    return [] if not policies else policies[0]["spec"]["ingress"]


def ports(rule: dict[str, Any]) -> list[str]:
    return [port["port"] for port in rule["ports"]]


def test_without_keys_both_ports_have_the_same_peers(helm: Helm) -> None:
    peer = {"podSelector": {"matchLabels": {"app": "web"}}}
    (rule,) = ingress(helm.template({"networkPolicies": {"enabled": True, "gatewayFrom": [peer]}}))
    assert ports(rule) == ["http", "wake"]
    assert peer in rule["from"]


@pytest.mark.parametrize("enabled", [False, True])
def test_keys_admit_only_probes_without_a_key(helm: Helm, enabled: bool) -> None:
    network = {"enabled": enabled, "gatewayFrom": PORTABLE[:1], "replicas": {"from": RELATIVE + PORTABLE}}
    with_keys, without_keys = ingress(helm.template({"gateway": KEYS, "networkPolicies": network}))
    assert (ports(with_keys), ports(without_keys)) == (["http"], ["wake"])
    assert ("from" in with_keys) is enabled, "a policy for one port must not close the other"
    assert without_keys["from"] == PORTABLE

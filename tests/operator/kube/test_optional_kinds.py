"""PodMonitors and PrometheusRules on a real API server with the Prometheus operator's CRDs: present, removed, restored.

These CRDs belong to the whole server, so they are always removed at the end of this module.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.control_plane import ControlPlane
from quire_cluster.crds import wait_established

CRDS = Path(__file__).parent / "crds"
KINDS = ("podmonitors", "prometheusrules")
PEERS = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "quire-system"}}}]
DISCOVERY = ("--discovery", "1s", "--monitor-labels", "release=prom", "--alert-labels", "team=ml")


def install(server: ControlPlane) -> None:
    for kind in KINDS:
        server.kubectl("apply", "--server-side", "-f", str(CRDS / f"{kind}.yaml"))
    wait_established(server.client(), *(f"{kind}.monitoring.coreos.com" for kind in KINDS))


def remove(server: ControlPlane) -> None:
    names = [f"crd/{kind}.monitoring.coreos.com" for kind in KINDS]
    server.kubectl("delete", "--ignore-not-found", "--timeout=90s", *names)


@pytest.fixture
def server(crd_installed: ControlPlane) -> Iterator[ControlPlane]:
    yield crd_installed
    remove(crd_installed)


@pytest.fixture
def operator(server: ControlPlane, operators: Operators, space: Namespace) -> Iterator[OperatorProcess]:
    process = operators.start(*space.flags(), *DISCOVERY, "--network-policy-from", json.dumps(PEERS))
    space.wait_holder(process.identity)
    yield process
    process.kill()


def both(space: Namespace) -> dict[str, dict[str, Any]]:
    """Return the children by kind; fewer while one does not exist."""
    found = {kind: space.get(kind, "chat") for kind in KINDS}
    return {kind: child for kind, child in found.items() if child is not None}


def wait_for_both(space: Namespace) -> dict[str, dict[str, Any]]:
    until(lambda: len(both(space)) == 2, why=lambda: space.get("llmdeployments", "chat"))
    return both(space)


def faults(process: OperatorProcess) -> list[dict[str, Any]]:
    """Return its own errors; kopf also logs a busy API server as an error and retries."""
    ours = [line for line in process.lines() if line.get("logger", "").startswith("quire_operator")]
    return [line for line in ours if line["level"] in ("error", "critical")]


def test_monitors_follow_the_availability_of_their_kinds(
    server: ControlPlane, space: Namespace, operator: OperatorProcess
) -> None:
    start = server.audit.position()
    space.apply(autoscaling={"maxReplicas": 3}, replicas=1)
    space.wait_settled("chat")
    asked = server.audit.requests(start, user_agent=operator.identity)
    assert not [r for r in asked if r.resource in KINDS], "there is nothing to ask for yet"
    assert space.condition("chat", "Degraded")["reason"] == "AsExpected"

    install(server)
    children = wait_for_both(space)
    owner = (space.get("llmdeployments", "chat") or {})["metadata"]["uid"]
    for child in children.values():
        assert [(o["uid"], o["controller"]) for o in child["metadata"]["ownerReferences"]] == [(owner, True)]
    monitor, rule = children["podmonitors"], children["prometheusrules"]
    assert monitor["metadata"]["labels"]["release"] == "prom" and rule["metadata"]["labels"]["team"] == "ml"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert [entry["alert"] for entry in rule["spec"]["groups"][0]["rules"]] == [
        "QuireTimeToFirstTokenHigh",
        "QuireAtMaxReplicas",
    ]

    # Discovery continues each second: the third list from now shows it, and nothing was written for it.
    start = server.audit.position()

    def looked() -> bool:
        lists = [r for r in server.audit.requests(start, user_agent=operator.identity) if r.resource == "podmonitors"]
        return len(lists) >= 3

    until(looked)
    written = server.audit.mutating_requests(start, user_agent=operator.identity)
    assert [str(request) for request in written if request.resource != "leases"] == []

    space.delete("podmonitors", "chat")
    edited = {"spec": {"groups": [{"name": "quire-chat", "rules": []}]}}
    space.patch("prometheusrules", "chat", edited, manager="meddler")
    until(lambda: space.get("podmonitors", "chat"))
    until(lambda: len((space.get("prometheusrules", "chat") or {})["spec"]["groups"][0].get("rules", [])) == 2)

    remove(server)
    space.apply(autoscaling={"maxReplicas": 4, "minReplicas": 2}, replicas=1)
    until(lambda: (space.get("deployments", "chat") or {})["spec"]["replicas"] == 2)
    assert space.condition("chat", "Degraded")["reason"] == "AsExpected"

    install(server)
    children = wait_for_both(space)
    rules = children["prometheusrules"]["spec"]["groups"][0]["rules"]
    assert rules[1]["expr"].endswith(">= 4")
    assert faults(operator) == []

    space.delete("llmdeployments", "chat")
    until(lambda: not both(space), why=lambda: both(space))


def test_policies_are_repaired_and_removed_when_switched_off(
    space: Namespace, operators: Operators, operator: OperatorProcess
) -> None:
    space.apply()
    space.wait_settled("chat")
    policy = space.get("networkpolicies", "chat")
    assert policy is not None
    assert policy["spec"]["ingress"] == [{"from": PEERS, "ports": [{"port": 8000, "protocol": "TCP"}]}]
    assert policy["spec"]["policyTypes"] == ["Ingress"], "what replicas reach is left open"
    space.patch("networkpolicies", "chat", {"spec": {"ingress": [{}]}}, manager="meddler")
    until(lambda: (space.get("networkpolicies", "chat") or {})["spec"] == policy["spec"])

    operator.terminate()
    untold = operators.start(*space.flags())
    space.wait_holder(untold.identity)
    until(lambda: space.get("networkpolicies", "chat") is None)
    untold.kill()


def test_policy_of_a_deleted_deployment_outlives_its_pods(space: Namespace, operator: OperatorProcess) -> None:
    space.apply()
    space.wait_settled("chat")
    (pod,) = until(lambda: space.pods("chat"))
    uid = (space.get("pods", pod) or {})["metadata"]["uid"]
    space.patch("pods", pod, {"metadata": {"finalizers": ["quire.dev/drains"]}})  # no kubelet drains it here

    space.delete("llmdeployments", "chat")

    def owners() -> list[str]:
        metadata = (space.get("networkpolicies", "chat") or {}).get("metadata", {})
        return [owner["uid"] for owner in metadata.get("ownerReferences", [])]

    until(lambda: space.get("deployments", "chat") is None and owners() == [uid], why=owners)
    operator.kill()  # from here on the garbage collector does it alone
    policy = space.get("networkpolicies", "chat")
    assert policy is not None and policy["spec"]["ingress"][0]["from"] == PEERS

    space.patch("pods", pod, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["quire.dev/drains"]}})
    until(lambda: space.get("pods", pod) is None)
    until(lambda: space.get("networkpolicies", "chat") is None)

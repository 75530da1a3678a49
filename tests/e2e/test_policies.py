"""Permissions: the operator uses only the chart's roles, and replicas have none, in the most restricted namespace.

The scenarios check this from the API server (audit log, access reviews), from inside the containers, and from an
unrelated pod.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e_support.kube import namespaced
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Pod
from e2e_support.probes import LISTENER, PORT, inside, listener, reaches
from e2e_support.refusals import asked_by
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace, Run
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target

RESTRICTED = "pod-security.kubernetes.io/enforce"
ANYBODYS = {"selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews"}
"""The permissions that every user has."""
NEEDED = {
    "watch llmdeployments",
    "patch llmdeployments/status",
    "patch deployments",
    "patch services",
    "patch networkpolicies",
    "update leases",
    "create events",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A replica in a namespace that enforces Pod Security `restricted`."""

    chat: LLMDeployment
    space: Space

    @property
    def pod(self) -> Pod:
        (pod,) = self.chat.serving_pods()
        return pod


@pytest.fixture(scope="module")
def guarded(make_space: MakeSpace, target: Target) -> Iterator[Guarded]:
    with make_space("guarded") as space:
        restrict(space)
        chat = space.apply(small_llmdeployment("chat"))
        chat.wait_ready(replicas=1)
        yield Guarded(chat=chat, space=space)


def restrict(space: Space) -> None:
    space.kube.patch(f"/api/v1/namespaces/{space.name}", {"metadata": {"labels": {RESTRICTED: "restricted"}}})


def test_replicas_start_under_the_restricted_policy(guarded: Guarded, release: Release) -> None:
    """The release's own namespace could enforce it too: the server reports pods that would be rejected there."""
    label = ("label", "--dry-run=server", "--overwrite", "namespace", release.namespace, f"{RESTRICTED}=restricted")
    said = release.kube.run(["kubectl", *label])
    assert said.returncode == 0 and "Warning" not in said.stderr, said.stderr
    said = release.kube.run(["kubectl", *label[:-2], guarded.space.name, label[-1]])
    assert said.returncode == 0 and "Warning" not in said.stderr, said.stderr


def test_containers_are_unprivileged_and_read_only(guarded: Guarded, release: Release) -> None:
    here = Space(release.kube, release.namespace, operator_log=release.operator_log)
    places = [(guarded.space, guarded.pod, "engine")]
    places += [(here, release.operator_pods()[0], "operator"), (here, release.gateway_pods()[0], "gateway")]
    for space, pod, container in places:
        for security in security_of(space, pod):
            assert security["runAsNonRoot"] and security["readOnlyRootFilesystem"], (pod.name, security)
            assert security["allowPrivilegeEscalation"] is False and security["capabilities"]["drop"] == ["ALL"]
        found = inside(space, pod.name, container)
        assert found["user"] != 0, found
        assert found["root"] == found["code"] == "Read-only file system", found
        assert int(found["capabilities"], 16) == 0, found


def security_of(space: Space, pod: Pod) -> list[dict[str, Any]]:
    """Return the security context of each container, merged with that of the pod."""
    spec = space.kube.get(namespaced(space.name, "pods", pod.name))["spec"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    return [spec.get("securityContext", {}) | container.get("securityContext", {}) for container in containers]


def test_a_replica_has_no_token_and_no_permissions(guarded: Guarded) -> None:
    assert inside(guarded.space, guarded.pod.name, "engine")["token"] is False
    spec = guarded.space.kube.get(namespaced(guarded.space.name, "pods", guarded.pod.name))["spec"]
    assert spec["serviceAccountName"] != "default" and spec["automountServiceAccountToken"] is False
    account = f"system:serviceaccount:{guarded.space.name}:{spec['serviceAccountName']}"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": guarded.space.name},
    }
    said = guarded.space.kubectl(
        "create", "--validate=false", "-f", "-", "-o", "json", "--as", account, stdin=json.dumps(review)
    )
    rules = json.loads(said)["status"]["resourceRules"]
    assert rules, "the server tells what it may"
    beyond = [rule for rule in rules if not ANYBODYS.issuperset(rule.get("resources", ()))]
    assert beyond == []


def test_other_pods_are_blocked_if_policies_are_enforced(
    guarded: Guarded, make_space: MakeSpace, target: Target, release: Release, report: Report
) -> None:
    """The scenario finds out whether policies are enforced with its own policy, which admits no peer."""
    policies = namespaced(guarded.space.name, "networkpolicies", group="/apis/networking.k8s.io/v1")
    (policy,) = guarded.space.kube.items(policies)
    assert policy["spec"]["podSelector"]["matchLabels"]["quire.dev/llmdeployment"] == "chat"
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": PORT, "protocol": "TCP"}] and len(rule["from"]) >= 3
    assert policy["spec"]["policyTypes"] == ["Ingress"]

    replica = guarded.pod
    with make_space("stranger") as elsewhere:
        restrict(elsewhere)
        closed = {"metadata": {"name": "closed"}, "spec": {"podSelector": {"matchLabels": {"app": "closed"}}}}
        elsewhere.kube.create(namespaced(elsewhere.name, "networkpolicies", group="/apis/networking.k8s.io/v1"), closed)
        stranger = listener(elsewhere, "closed", image=target.engine_image)
        assert stranger.ip is not None and replica.ip is not None
        enforces = not reaches(guarded.space, replica.name, "engine", stranger.ip)
        let_in = reaches(elsewhere, stranger.name, LISTENER, replica.ip)
    if enforces:
        report.note("the network enforces NetworkPolicies: a stranger was kept out of a replica")
    else:
        report.note("the network of this cluster does not enforce NetworkPolicies: strangers reach replicas")
    assert let_in is not enforces
    # The gateway, whose pods the policy names, gets access in any case.
    friends = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if peer.get("podSelector", {})]
    assert any(labels.get("app.kubernetes.io/component") == "gateway" for labels in friends), rule["from"]


def test_the_operator_logs_no_missing_permission(guarded: Guarded, release: Release, run: Run) -> None:
    assert release.operator_metrics().total("quire_operator_errors_total", reason="Forbidden") == 0
    log = release.operator_log(lines=100_000, since=run.started)
    assert any(f"create Deployment {guarded.chat.name}" in line for line in log), "the log covers this run"
    assert [line for line in log if re.search(r"cannot \w+ resource", line)] == []


@pytest.mark.last
@pytest.mark.needs("machine")
def test_chart_roles_allowed_all_requests_of_this_run(
    target: Target, release: Release, run: Run, report: Report
) -> None:
    """The audit log of the API server contains no denied request, whatever earlier scenarios did.

    The time of its start after an outage is excluded, because it rejects everything until it has loaded the roles.
    """
    assert target.machine is not None
    log = target.machine.state / "audit.log"
    asked = asked_by(log, f"{release.namespace}:", since=run.started, outages=run.outages)
    assert asked.refused == ()
    assert asked.verbs.keys() >= NEEDED, f"it did its work meanwhile: {dict(asked.verbs)}"
    report.note(f"{asked.verbs.total()} requests of operator and gateway, none refused")
    assert not asked_by(log, "e2e-", since=run.started).verbs, "replicas ask it for nothing"

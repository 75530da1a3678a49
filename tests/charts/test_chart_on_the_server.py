"""The chart on a real API server: dry run, install, upgrade, uninstall, and the resulting permissions."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support.values import VARIANTS

from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.errors import KubectlFailed
from quire_cluster.helm import Helm
from quire_cluster.waiting import eventually

CHART = Path(__file__).parents[2] / "charts" / "quire"


class Release:
    """A release in its own namespace with the restricted pod security profile."""

    def __init__(self, helm: Helm, server: ControlPlane, namespace: str) -> None:
        self._helm, self.server, self.namespace = helm, server, namespace
        self.name = f"quire-{uuid.uuid4().hex[:6]}"
        self.server.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def helm(self, verb: str, values: dict[str, Any] | None = None) -> str:
        return self._helm.on_chart(verb, self.name, f"--namespace={self.namespace}", values=values)

    def uninstall(self) -> None:
        self._helm.run("uninstall", self.name, f"--namespace={self.namespace}", "--ignore-not-found")


@pytest.fixture
def release(cluster_helm: Helm, crd_server: ControlPlane, namespace: str) -> Iterator[Release]:
    """Yield a release without the CRD, which exists already, as the chart of another release would have left it."""
    release = Release(cluster_helm, crd_server, namespace)
    yield release
    release.uninstall()


WITHOUT_CRD: dict[str, Any] = {"crds": {"create": False}}


OF_OTHERS = {"HTTPRoute", "PodMonitor", "PrometheusRule", "Certificate", "Issuer"}
"""Kinds from the CRDs of other projects."""


@pytest.mark.parametrize(
    "values",
    # The namespace of the server instead of those of the variant.
    [v | {"watchNamespaces": ["default"] if "watchNamespaces" in v else []} for v in VARIANTS.values()],
    ids=VARIANTS,
)
def test_server_accepts_every_rendered_object(
    cluster_helm: Helm, api_server: ControlPlane, namespace: str, values: dict[str, Any]
) -> None:
    documents = [d for d in cluster_helm.template(values, namespace=namespace) if d["kind"] not in OF_OTHERS]
    applied = api_server.kubectl(
        *("apply", "--dry-run=server", "--server-side", "--validate=strict", "-f", "-"),
        stdin=yaml.safe_dump_all(documents),
    )
    assert len(applied.splitlines()) == len(documents)
    assert applied.count("(server dry run)") == len(documents)


PLACED = {
    "priorityClassName": "system-cluster-critical",
    "tolerations": [{"operator": "Exists"}],
    "nodeSelector": {"kubernetes.io/os": "linux"},
}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "operator": {"prometheus": {"url": "http://p", "tokenSecret": {"name": "t"}, "caConfigMap": {"name": "c"}}},
            "gateway": {"tls": {"secretName": "tls"}, "auth": {"secretName": "keys"}},
            "webhook": {"create": True, "certificate": {"secretName": "webhook"}},
        },
        {"operator": PLACED, "gateway": PLACED},
    ],
    ids=["defaults", "with all that is mounted", "placed"],
)
def test_pods_are_created_under_restricted_pod_security(release: Release, values: dict[str, Any]) -> None:
    """The namespace enforces the restricted profile and rejects other pods."""
    release.helm("install", WITHOUT_CRD | values)
    pods = ("get", "pods", "-n", release.namespace, "-o", "name")
    assert eventually(lambda: len(release.server.kubectl(*pods).split()) == 4)
    assert "violates PodSecurity" not in release.server.kubectl("get", "events", "-n", release.namespace)


def test_restricted_namespace_rejects_unsafe_pods(release: Release) -> None:
    with pytest.raises(KubectlFailed, match="violates PodSecurity"):
        release.server.kubectl("run", "root", "--image=any", "-n", release.namespace)


def test_upgrade_to_some_namespaces_removes_cluster_rights(release: Release) -> None:
    release.helm("install", WITHOUT_CRD)
    account = f"--as=system:serviceaccount:{release.namespace}:{release.name}-operator"
    can_list = ("auth", "can-i", "list", "llmdeployments.quire.dev", account)
    assert release.server.kubectl(*can_list, "-n", "kube-public").strip() == "yes"
    release.helm("upgrade", WITHOUT_CRD | {"watchNamespaces": [release.namespace]})
    assert release.server.kubectl(*can_list, "-n", release.namespace).strip() == "yes"
    with pytest.raises(KubectlFailed):
        release.server.kubectl(*can_list, "-n", "kube-public")


@pytest.mark.parametrize(
    ("account", "verb", "resource", "allowed"),
    [
        ("operator", "watch", "llmdeployments.quire.dev", True),
        ("operator", "patch", "llmdeployments.quire.dev/status", True),
        ("operator", "update", "llmdeployments.quire.dev", False),
        ("operator", "delete", "llmdeployments.quire.dev", False),
        ("operator", "create", "deployments.apps", True),
        ("operator", "patch", "pods", True),
        ("operator", "delete", "pods", False),
        ("operator", "get", "secrets", False),
        ("operator", "get", "pods/log", False),
        ("operator", "create", "rolebindings.rbac.authorization.k8s.io", False),
        ("gateway", "watch", "endpointslices.discovery.k8s.io", True),
        ("gateway", "list", "llmdeployments.quire.dev", True),
        ("gateway", "list", "services", False),
        ("gateway", "get", "secrets", False),
        ("gateway", "list", "pods", False),
        ("gateway", "patch", "llmdeployments.quire.dev", False),
    ],
)
def test_accounts_have_exactly_the_needed_permissions(
    installed: Release, account: str, verb: str, resource: str, allowed: bool
) -> None:
    who = f"system:serviceaccount:{installed.namespace}:{installed.name}-{account}"
    assert may(installed.server, who, verb, resource, namespace="default") is allowed


@pytest.mark.parametrize(
    ("role", "verb", "resource", "allowed"),
    [
        ("view", "list", "llmdeployments.quire.dev", True),
        ("view", "get", "llmdeployments.quire.dev/status", True),
        ("view", "get", "llmdeployments.quire.dev/scale", True),
        ("view", "patch", "llmdeployments.quire.dev/scale", False),
        ("view", "patch", "llmdeployments.quire.dev", False),
        ("edit", "create", "llmdeployments.quire.dev", True),
        ("edit", "get", "llmdeployments.quire.dev/scale", True),
        ("edit", "patch", "llmdeployments.quire.dev/scale", True),
        ("edit", "update", "llmdeployments.quire.dev/scale", True),
        ("edit", "patch", "llmdeployments.quire.dev/status", False),
        ("edit", "deletecollection", "llmdeployments.quire.dev", False),
        ("admin", "create", "llmdeployments.quire.dev", True),
        ("admin", "update", "llmdeployments.quire.dev/scale", True),
        ("admin", "deletecollection", "llmdeployments.quire.dev", True),
        ("admin", "patch", "llmdeployments.quire.dev/status", False),
        ("view", "watch", "llmadapters.quire.dev", True),
        ("view", "create", "llmadapters.quire.dev", False),
        ("edit", "create", "llmadapters.quire.dev", True),
        ("edit", "patch", "llmadapters.quire.dev/status", False),
        ("edit", "deletecollection", "llmadapters.quire.dev", False),
        ("admin", "deletecollection", "llmadapters.quire.dev", True),
    ],
)
def test_kubernetes_own_roles_reach_both_kinds(
    installed: Release, role: str, verb: str, resource: str, allowed: bool
) -> None:
    user, binding = f"{role}-of-{installed.name}", f"{installed.name}-{role}"
    bind = ("create", "rolebinding", binding, f"--clusterrole={role}", f"--user={user}", "-n", installed.namespace)
    if not installed.server.kubectl("get", "rolebinding", binding, "-n", installed.namespace, "--ignore-not-found"):
        installed.server.kubectl(*bind)
    granted = may(installed.server, user, verb, resource, namespace=installed.namespace)
    if allowed:  # aggregation is done by a controller and takes a moment
        granted = eventually(lambda: may(installed.server, user, verb, resource, namespace=installed.namespace))
    assert granted is allowed


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("create", "llmadapters.quire.dev", True),
        ("delete", "llmadapters.quire.dev", True),
        ("get", "llmadapters.quire.dev/status", True),
        ("patch", "llmadapters.quire.dev/status", False),
        ("get", "llmdeployments.quire.dev", True),
        ("patch", "llmdeployments.quire.dev", False),
        ("patch", "llmdeployments.quire.dev/scale", False),
        ("get", "configmaps", False),
        ("get", "secrets", False),
    ],
)
def test_the_role_for_adapters_reaches_nothing_else(
    installed: Release, verb: str, resource: str, allowed: bool
) -> None:
    user, binding = f"adapters-of-{installed.name}", f"{installed.name}-adapters"
    if not installed.server.kubectl("get", "rolebinding", binding, "-n", installed.namespace, "--ignore-not-found"):
        role = f"{installed.name}.{installed.namespace}.adapter-editor"
        assert installed.server.kubectl("get", "clusterrole", role)
        bind = ("create", "rolebinding", binding, f"--clusterrole={role}", f"--user={user}")
        installed.server.kubectl(*bind, "-n", installed.namespace)
        assert eventually(
            lambda: may(installed.server, user, "list", "llmadapters.quire.dev", namespace=installed.namespace)
        )
    assert may(installed.server, user, verb, resource, namespace=installed.namespace) is allowed


def may(server: ControlPlane, user: str, verb: str, resource: str, *, namespace: str) -> bool:
    resource, _, subresource = resource.partition("/")
    name, _, group = resource.partition(".")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
    }
    answer = server.client().post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    assert answer.ok, answer.body
    allowed: bool = answer.body["status"]["allowed"]
    return allowed


@pytest.fixture(scope="module")
def installed(
    cluster_binaries: Binaries, crd_server: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """Yield a release for tests that only read."""
    folder = tmp_path_factory.mktemp("helm")
    helm = Helm(cluster_binaries["helm"], CHART, folder, kubeconfig=crd_server.admin_kubeconfig)
    namespace = f"asked-{uuid.uuid4().hex[:6]}"
    crd_server.kubectl("create", "namespace", namespace)
    release = Release(helm, crd_server, namespace)
    release.helm("install", WITHOUT_CRD)
    yield release
    release.uninstall()
    crd_server.client().delete(f"/api/v1/namespaces/{namespace}")

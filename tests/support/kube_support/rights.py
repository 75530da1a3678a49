"""The operator's permissions as the chart renders them; every operator of these tests runs with them.

Only the permissions are taken from the chart; the rest has its own tests.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from quire_cluster.control_plane import ControlPlane
from quire_cluster.helm import Helm
from quire_cluster.waiting import eventually

CHART: Final = Path(__file__).parents[3] / "charts" / "quire"
RELEASE: Final = "quire"
PLACEHOLDER: Final = "the-namespace"
PATHS: Final = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
}
_rendered: dict[tuple[bool, str], str] = {}


def operator_rights(
    server: ControlPlane, namespace: str, *, everywhere: bool = False, release: str = RELEASE
) -> list[dict[str, Any]]:
    """Return the chart's objects with the operator's permissions in this namespace or everywhere."""
    kind = (everywhere, release)
    if kind not in _rendered:
        values = {"crds": {"create": False}} | ({} if everywhere else {"watchNamespaces": [PLACEHOLDER]})
        with tempfile.TemporaryDirectory() as folder:
            helm = Helm(server.binaries["helm"], CHART, Path(folder))
            documents = helm.template(values, release=release, namespace=PLACEHOLDER)
        ours = [d for d in documents if d["kind"] in PATHS and _component(d) == "operator"]
        _rendered[kind] = json.dumps(ours)
    documents = json.loads(_rendered[kind].replace(PLACEHOLDER, namespace))
    return list(documents)


def _component(document: dict[str, Any]) -> object:
    return document["metadata"].get("labels", {}).get("app.kubernetes.io/component")


def grant(server: ControlPlane, namespace: str, *, everywhere: bool = False, release: str = RELEASE) -> Path:
    """Return a kubeconfig of the ServiceAccount with these permissions."""
    client, account = server.client(), f"{release}-operator"
    for document in operator_rights(server, namespace, everywhere=everywhere, release=release):
        answer = client.post(PATHS[document["kind"]].format(namespace=namespace), document)
        assert answer.status in (201, 409), answer.body
    user = f"system:serviceaccount:{namespace}:{account}"
    assert eventually(lambda: _may_begin(server, namespace, user)), "the API server does not know of the rights"
    return server.service_account_kubeconfig(namespace, account)


def _may_begin(server: ControlPlane, namespace: str, user: str) -> bool:
    """Return True when the authorizer has seen the new binding in its watch."""
    asked = (
        {"group": "quire.dev", "resource": "llmdeployments", "verb": "watch", "namespace": namespace},
        {"group": "coordination.k8s.io", "resource": "leases", "verb": "create", "namespace": namespace},
        {
            "group": "apiextensions.k8s.io",
            "resource": "customresourcedefinitions",
            "verb": "get",
            "name": "llmdeployments.quire.dev",
        },
    )
    return all(_allows(server, user, attributes) for attributes in asked)


def _allows(server: ControlPlane, user: str, attributes: dict[str, str]) -> bool:
    spec = {"user": user, "resourceAttributes": attributes}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = server.client().post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    assert answer.ok, answer.body
    return bool(answer.body["status"]["allowed"])

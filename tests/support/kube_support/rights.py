"""The operator's rights as the chart renders them, and no more: every operator of these tests runs with them.

Only what concerns rights is taken from the chart; what it installs besides has tests of its own.
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
    """The chart's objects that say what the operator of this namespace may do, there or everywhere."""
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
    """A kubeconfig of the ServiceAccount that has them."""
    client, account = server.client(), f"{release}-operator"
    for document in operator_rights(server, namespace, everywhere=everywhere, release=release):
        answer = client.post(PATHS[document["kind"]].format(namespace=namespace), document)
        assert answer.status in (201, 409), answer.body
    user = f"system:serviceaccount:{namespace}:{account}"
    assert eventually(lambda: _may_begin(server, namespace, user)), "the API server does not know of the rights"
    return server.service_account_kubeconfig(namespace, account)


def _may_begin(server: ControlPlane, namespace: str, user: str) -> bool:
    """Its authorizer learns of new bindings by a watch."""
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

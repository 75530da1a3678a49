"""Pod templates that loosen security, checked by the API server's own admission of the restricted profile."""

from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace
from kube_support.pod_security import CASES, SAFE
from specs import valid_spec

from quire_operator.deployment.desired import desired
from quire_operator.deployment.manifests import Manifests
from quire_operator.deployment.pod_rules import EXCEPTIONS
from quire_operator.deployment.pod_template import Images

IMAGES = Images(engine="engine", allowed_exceptions=EXCEPTIONS)


@pytest.fixture(scope="module")
def restricted(shared_space: Namespace) -> Iterator[Namespace]:
    """Yield a namespace that enforces the restricted profile."""
    name = f"{shared_space.name}-restricted"
    client = shared_space.server.client()
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    assert client.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}).ok
    space = Namespace(shared_space.server, name)
    space.create("serviceaccounts", {"metadata": {"name": "chat"}})
    yield space
    client.delete(f"/api/v1/namespaces/{name}")


def admission(space: Namespace, **spec: Any) -> str:
    """Return why the server rejects a replica of this spec; empty if it accepts it."""
    fields = {"model": {"source": "hf://a/b"}, "auth": {"secretName": "keys"}} | spec
    manifests = desired(valid_spec(namespace=space.name, **fields), 1, uid="u", images=IMAGES)
    assert isinstance(manifests, Manifests), str(manifests)
    template: Any = manifests.workload.body["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template["template"]}
    pod["metadata"] = {**pod["metadata"], "name": "chat-0"}
    answer = space.server.client().post(f"{space.path('pods')}?dryRun=All", pod)
    # Some fields are already invalid in combination with the rest of the pod.
    assert answer.ok or answer.status in (403, 422), answer.body
    return "" if answer.ok else str(answer.body["message"])


def test_replicas_run_where_the_restricted_profile_is_enforced(restricted: Namespace) -> None:
    assert admission(restricted) == ""
    sidecar = {"name": "s", "image": "s", "securityContext": SAFE}
    both = {"spec": {"containers": [sidecar], "initContainers": [sidecar | {"name": "i"}]}}
    assert admission(restricted, podTemplate=both) == ""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_standard])
def test_server_and_operator_refuse_the_same_specs(restricted: Namespace, name: str) -> None:
    assert admission(restricted, podTemplate=CASES[name].template)

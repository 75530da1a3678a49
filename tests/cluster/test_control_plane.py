"""A real control plane: an API server that answers, working controllers, an audit log, and recovery from faults."""

import json
import uuid

import pytest

from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.errors import KubectlFailed
from quire_cluster.waiting import eventually

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: registry.invalid/web}]
"""


def test_server_has_the_requested_version(api_server: ControlPlane) -> None:
    version = json.loads(api_server.kubectl("version", "--output=json"))
    assert version["serverVersion"]["gitVersion"].startswith("v1.")


def test_a_deployment_gets_its_replica_set_and_pods(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("apply", "-n", namespace, "-f", "-", stdin=DEPLOYMENT)
    owned = ("get", "replicaset,pod", "-n", namespace, "-l", "app=web", "-o", "name")
    assert eventually(lambda: len(api_server.kubectl(*owned).split()) == 3)


def test_children_are_deleted_with_their_owner(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("apply", "-n", namespace, "-f", "-", stdin=DEPLOYMENT)
    replica_sets = ("get", "replicaset", "-n", namespace, "-o", "name")
    assert eventually(lambda: bool(api_server.kubectl(*replica_sets)))
    api_server.kubectl("delete", "deployment", "web", "-n", namespace)
    assert eventually(lambda: not api_server.kubectl(*replica_sets))


def test_service_account_has_only_its_granted_rights(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    api_server.kubectl("create", "role", "reader", "--verb=get,list", "--resource=configmaps", "-n", namespace)
    account = f"--serviceaccount={namespace}:reader"
    api_server.kubectl("create", "rolebinding", "reader", "--role=reader", account, "-n", namespace)
    reader = api_server.service_account_kubeconfig(namespace, "reader")
    assert "kube-root-ca.crt" in api_server.kubectl("get", "configmaps", "-n", namespace, as_user=reader)
    with pytest.raises(
        KubectlFailed, match=f'User "system:serviceaccount:{namespace}:reader" cannot list resource "secrets"'
    ):
        api_server.kubectl("get", "secrets", "-n", namespace, as_user=reader)


def test_audit_log_names_users_and_their_writes(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("create", "serviceaccount", "writer", "-n", namespace)
    account = f"--serviceaccount={namespace}:writer"
    api_server.kubectl("create", "rolebinding", "writer", "--clusterrole=edit", account, "-n", namespace)
    writer = api_server.service_account_kubeconfig(namespace, "writer")
    before = api_server.audit.position()
    api_server.kubectl("get", "configmaps", "-n", namespace, as_user=writer)
    api_server.kubectl("create", "configmap", "settings", "-n", namespace, "--from-literal=a=b", as_user=writer)
    api_server.kubectl("create", "configmap", "other", "-n", namespace)
    user = f"system:serviceaccount:{namespace}:writer"
    (written,) = api_server.audit.mutating_requests(before, user=user)
    assert (written.verb, written.resource, written.namespace) == ("create", "configmaps", namespace)
    assert "list" in {request.verb for request in api_server.audit.requests(before, user=user)}
    assert eventually(lambda: api_server.audit.mutating_requests(before, user=user)[0].status == 201)
    assert api_server.audit.mutating_requests(before, user=user)[0].body["data"] == {"a": "b"}


def test_a_killed_server_returns_with_its_address_and_data(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("create", "configmap", "kept", "-n", namespace)
    before = api_server.api_server.pid
    api_server.restart_api_server()
    assert api_server.api_server.pid != before
    assert "configmap/kept" in api_server.kubectl("get", "configmap", "-n", namespace, "-o", "name")


def test_a_paused_server_answers_nothing_until_it_is_resumed(api_server: ControlPlane) -> None:
    client = api_server.client()
    api_server.api_server.pause()
    try:
        with pytest.raises(TimeoutError):
            client.request("GET", "/readyz", timeout_seconds=0.5)
    finally:
        api_server.api_server.resume()
    assert client.get("/readyz").ok


def test_stopping_leaves_no_process_and_no_folder(cluster_binaries: Binaries) -> None:
    control_plane = ControlPlane.temporary(cluster_binaries)
    try:
        control_plane.start()
        control_plane.kubectl("create", "configmap", f"data-{uuid.uuid4().hex[:8]}")
    finally:
        control_plane.stop()
    assert [process.pid for process in control_plane.processes] == [None, None, None]
    assert not control_plane.state.exists()
    assert not control_plane.answers()

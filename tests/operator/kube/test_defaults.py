"""Defaults of a namespace on a real API server, with the chart's permissions."""

from typing import Any

from kube_support.operators import Namespace, Operators, until

from quire_cluster.control_plane import ControlPlane


def test_defaults_reach_pods_and_status(crd_installed: ControlPlane, operators: Operators) -> None:
    space = Namespace(crd_installed, "defaulted")
    client = crd_installed.client()
    assert client.post("/api/v1/namespaces", {"metadata": {"name": space.name}}).ok
    text = "engine: {image: registry.example/team:1}\npodTemplate: {spec: {nodeSelector: {pool: team}}}\n"
    space.create("configmaps", {"metadata": {"name": "quire-defaults"}, "data": {"spec": text}})
    operator = operators.start(*space.flags(), identity="defaulted")
    try:
        space.apply("chat", engine={"maxSequences": 8})
        deployment: Any = until(lambda: space.get("deployments", "chat"), why=operator.last_words)
        pod = deployment["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "registry.example/team:1"
        assert pod["nodeSelector"]["pool"] == "team"
        origins = [{"field": name, "configMap": "defaulted/quire-defaults"} for name in ("engine.image", "podTemplate")]
        until(lambda: ((space.get("llmdeployments", "chat") or {}).get("status") or {}).get("defaults") == origins)

        space.patch("configmaps", "quire-defaults", {"data": {"spec": "replicas: 3"}})
        degraded = space.wait_reason("chat", "Degraded", "InvalidDefaults")
        assert "spec.replicas: cannot have a default" in degraded["message"]
    finally:
        operator.kill()
        client.delete(f"/api/v1/namespaces/{space.name}")

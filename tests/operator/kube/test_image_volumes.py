"""oci:// on a real API server: a dry run shows that it supports image volumes, and the operator uses them."""

from kube_support.operators import Namespace, OperatorProcess, until


def test_image_is_a_volume_if_the_api_server_accepts_it(shared_space: Namespace, operator: OperatorProcess) -> None:
    start = shared_space.server.audit.position()
    model = {"source": "oci://registry.example/llama:1/weights", "credentials": {"secretName": "pull"}}
    for name in ("pictured", "pictured-too"):
        shared_space.apply(name, model=model)
        shared_space.wait_settled(name)
    made = until(lambda: shared_space.get("deployments", "pictured-too"))
    pod = made["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
    assert volume["image"]["reference"] == "registry.example/llama:1", "the server kept it"
    assert "initContainers" not in pod and pod["imagePullSecrets"] == [{"name": "pull"}]
    (mount,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "models")
    assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
    probes = [write for write in shared_space.server.audit.mutating_requests(start) if write.is_dry_run]
    assert len(probes) <= 1, "requested once, if nothing had requested it before"

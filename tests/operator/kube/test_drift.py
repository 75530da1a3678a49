"""Changes of other clients to children: ours are restored, breaking ones removed, the rest is reported."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, Operators, until

from quire_cluster.control_plane import ControlPlane

IMAGE = "registry.example/engine:edited"


@pytest.fixture(scope="module")
def drift(crd_installed: ControlPlane, operators: Operators) -> Iterator[Namespace]:
    """Yield a namespace whose operator resyncs only after ten minutes, so that a watch shows everything before."""
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": "drift"}}).ok
    space = Namespace(crd_installed, "drift")
    operator = operators.start(*space.flags(), "--resync", "10m", identity="drift")
    space.apply("drift", replicas=2)
    space.wait_settled("drift")
    yield space
    operator.kill()
    crd_installed.client().delete("/api/v1/namespaces/drift")


def pod_spec(space: Namespace) -> dict[str, Any]:
    deployment = space.get("deployments", "drift")
    assert deployment is not None
    return dict(deployment["spec"]["template"]["spec"])


def in_pod(**fields: Any) -> dict[str, Any]:
    return {"spec": {"template": {"spec": fields}}}


def in_engine(**fields: Any) -> dict[str, Any]:
    return in_pod(containers=[{"name": "engine"} | fields])


def label(child: dict[str, Any]) -> object:
    return child["metadata"]["labels"]["quire.dev/llmdeployment"]


def engine(child: dict[str, Any]) -> Any:
    return child["spec"]["template"]["spec"]["containers"][0]


RELABELLED = {"metadata": {"labels": {"quire.dev/llmdeployment": "other"}}}
UNNAMED = {"metadata": {"annotations": {"quire.dev/served-name": None}}}
RESELECTED = {"spec": {"selector": {"quire.dev/llmdeployment": "other"}}}
EDITS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], object], object]] = [
    ("deployments", in_engine(image=IMAGE), lambda d: engine(d)["image"] == IMAGE, False),
    ("deployments", {"spec": {"replicas": 7}}, lambda d: d["spec"]["replicas"], 2),
    ("deployments", RELABELLED, label, "drift"),
    ("deployments", in_engine(readinessProbe=None), lambda d: "readinessProbe" in engine(d), True),
    ("services", UNNAMED, lambda s: s["metadata"]["annotations"].get("quire.dev/served-name"), "drift"),
    ("services", RESELECTED, lambda s: s["spec"]["selector"]["quire.dev/llmdeployment"], "drift"),
    ("poddisruptionbudgets", {"spec": {"maxUnavailable": 2}}, lambda p: p["spec"]["maxUnavailable"], 1),
    ("serviceaccounts", {"automountServiceAccountToken": True}, lambda s: s["automountServiceAccountToken"], False),
]


def test_edits_of_owned_fields_are_reverted(drift: Namespace) -> None:
    for kind, patch, _, _ in EDITS:
        drift.patch(kind, "drift", patch, manager="kubectl-edit")

    def broken() -> list[object]:
        children = {kind: drift.get(kind, "drift") or {} for kind, *_ in EDITS}
        return [patch for kind, patch, look, wanted in EDITS if look(children[kind]) != wanted]

    until(lambda: not broken(), why=broken)


def test_additions_that_break_a_replica_are_removed(drift: Namespace) -> None:
    drift.patch("deployments", "drift", in_pod(hostPID=True, containers=[{"name": "miner", "image": "x"}]))
    drift.patch("deployments", "drift", in_engine(ports=[{"containerPort": 9999}], securityContext={"runAsUser": 7}))

    def clean() -> bool:
        spec = pod_spec(drift)
        (engine, *others) = spec["containers"]
        return not (
            others or spec.get("hostPID") or len(engine["ports"]) > 1 or "runAsUser" in engine["securityContext"]
        )

    until(clean, why=lambda: pod_spec(drift))


def test_other_additions_stay_and_are_named(drift: Namespace) -> None:
    restarted = {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}
    drift.patch("deployments", "drift", restarted, manager="kubectl-rollout")
    drift.patch("deployments", "drift", in_pod(nodeSelector={"disk": "fast"}), manager="meddler")
    added = drift.wait_reason("drift", "ForeignFields", "FieldsAdded")
    assert added["message"].endswith("spec.template.spec.nodeSelector (set by meddler)"), "and nothing of the restart"
    deployment = drift.get("deployments", "drift")
    assert deployment is not None
    template = deployment["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"disk": "fast"}
    assert template["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] == "now"

    assert drift.condition("drift", "Degraded")["reason"] != "ForeignFields"
    drift.patch("deployments", "drift", in_pod(nodeSelector=None), manager="meddler")
    drift.wait_reason("drift", "ForeignFields", "NoneFound")

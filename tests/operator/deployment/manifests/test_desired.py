"""Each child of an LLMDeployment, field by field where users depend on the field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rendering import child, rendered, workload
from specs import valid_spec

from quire_operator.api import AdapterSpec, Spec
from quire_operator.deployment import engine_contract
from quire_operator.deployment.desired import child_refs
from quire_operator.deployment.manifests import Manifests, selector

EXAMPLES = Path(__file__).parents[4] / "examples"
Children = Callable[..., Manifests]
SELECTOR = {"quire.dev/llmdeployment": "chat", "app.kubernetes.io/component": "engine"}


def test_every_child_has_our_label_and_owner(children: Children) -> None:
    for manifest in children(model={"source": "hf://a/b", "cache": {"size": "1Gi"}}):
        metadata: Any = manifest.body["metadata"]
        assert metadata["namespace"] == "prod"
        assert metadata["labels"]["quire.dev/llmdeployment"] == "chat"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "quire-operator"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "quire.dev/v1alpha1",
                "kind": "LLMDeployment",
                "name": "chat",
                "uid": "uid-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_dependencies_of_pods_precede_the_deployment(children: Children) -> None:
    kinds = [manifest.ref.kind for manifest in children(model={"source": "hf://a/b", "cache": {"size": "1Gi"}})]
    assert kinds[-1] == "Deployment" and kinds[0] == "PersistentVolumeClaim"
    assert kinds.count("Service") == 2 and {"ServiceAccount", "PodDisruptionBudget"} <= set(kinds)


@pytest.mark.parametrize("cache", [{}, {"size": "1Gi"}, {"claimName": "models"}])
def test_child_names_are_known_in_advance(children: Children, cache: dict[str, str]) -> None:
    model = {"source": "hf://a/b"} | ({"cache": cache} if cache else {})
    assert {manifest.ref for manifest in children(model=model)} == set(child_refs(valid_spec(model=model)))


@pytest.mark.parametrize("target", [0, 1, 7])
def test_replicas_are_always_rendered_from_the_target(children: Children, target: int) -> None:
    body: Any = children(target=target, replicas=3).workload.body
    assert body["spec"]["replicas"] == target


def test_selector_contains_no_user_labels(children: Children) -> None:
    template = {"metadata": {"labels": {"team": "a"}}}
    body: Any = children(podTemplate=template).workload.body
    assert body["spec"]["selector"]["matchLabels"] == SELECTOR == selector("chat")
    assert body["spec"]["template"]["metadata"]["labels"]["team"] == "a"


ONE_NODE: dict[str, Any] = {"source": "hf://org/model", "cache": {"size": "1Gi"}}
PINNED = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}}


@pytest.mark.parametrize(
    ("spec", "surge"),
    [
        ({"model": ONE_NODE}, 0),
        ({"model": ONE_NODE, "rollout": {"maxSurge": 1}}, 0),
        ({"model": ONE_NODE, "autoscaling": {"minReplicas": 0, "maxReplicas": 1}}, 0),
        ({"model": ONE_NODE, "podTemplate": PINNED}, 1),
        ({"model": ONE_NODE | {"cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}}, 1),
        ({"model": ONE_NODE | {"cache": {"claimName": "shared"}}}, 1),
        ({"model": {"source": "hf://org/model"}}, 1),
    ],
)
def test_single_replica_is_stopped_before_its_replacement(children: Children, spec: dict[str, Any], surge: int) -> None:
    """A successor on another node could not mount a ReadWriteOnce volume while the old replica runs."""
    body: Any = children(**spec).workload.body
    limits = body["spec"]["strategy"]["rollingUpdate"]
    assert limits == {"maxSurge": surge, "maxUnavailable": 1 - surge}


@pytest.mark.parametrize(
    ("rollout", "strategy"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        (
            {"maxSurge": 0, "maxUnavailable": 1},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        ),
        (
            {"maxSurge": "25%", "maxUnavailable": "10%"},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "10%"}},
        ),
        ({"strategy": "Recreate"}, {"type": "Recreate"}),
    ],
)
def test_rollout_strategy(children: Children, rollout: dict[str, Any], strategy: dict[str, Any]) -> None:
    body: Any = children(rollout=rollout).workload.body
    assert body["spec"]["strategy"] == strategy


def test_a_rollout_has_time_to_load_and_to_download(children: Children) -> None:
    local: Any = children().workload.body
    hub: Any = children(model={"source": "hf://a/b"}).workload.body
    probe = local["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    startup = probe["periodSeconds"] * probe["failureThreshold"]
    assert startup == 1800 < local["spec"]["progressDeadlineSeconds"] < hub["spec"]["progressDeadlineSeconds"]


def test_a_rollout_may_be_given_a_deadline_in_whole_seconds(children: Children) -> None:
    body: Any = children(rollout={"progressDeadline": "90500ms"}).workload.body
    assert body["spec"]["progressDeadlineSeconds"] == 91


def test_service_annotation_has_the_served_name(children: Children) -> None:
    manifest = child(children(model={"source": "file:///m", "servedName": "org/Model:8b"}), "Service", "chat")
    body: Any = manifest.body
    assert manifest.ref.name == "chat"
    assert body["metadata"]["annotations"] == {"quire.dev/served-name": "org/Model:8b"}
    assert body["spec"] == {
        "selector": SELECTOR,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP", "targetPort": "http"}],
    }


def test_headless_service_lists_every_pod_and_no_model(children: Children) -> None:
    manifest = child(children(), "Service", "chat-headless")
    body: Any = manifest.body
    assert manifest.ref.name == "chat-headless"
    assert (body["spec"]["clusterIP"], body["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert body["spec"]["selector"] == SELECTOR
    assert "annotations" not in body["metadata"]


def test_node_drain_evicts_one_ready_replica_at_a_time(children: Children) -> None:
    body: Any = child(children(), "PodDisruptionBudget").body
    assert body["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": {"quire.dev/llmdeployment": "chat"},
            "matchExpressions": [
                {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "engine-canary"]}
            ],
        },
    }


def test_the_service_account_has_no_token(children: Children, pod: Callable[..., Any]) -> None:
    manifest = child(children(), "ServiceAccount")
    assert manifest.body["automountServiceAccountToken"] is False
    assert pod()["serviceAccountName"] == manifest.ref.name
    assert pod()["automountServiceAccountToken"] is False


def test_cache_claim_is_created_if_a_size_is_set(children: Children) -> None:
    cache = {"size": "50Gi", "storageClassName": "fast"}
    claim = child(children(model={"source": "hf://a/b", "cache": cache}), "PersistentVolumeClaim")
    assert claim is not None and claim.ref.name == "chat-models"
    assert claim.body["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(50 * 2**30)}},
        "storageClassName": "fast",
    }
    assert (
        child(children(model={"source": "hf://a/b", "cache": {"claimName": "models"}}), "PersistentVolumeClaim") is None
    )


def test_replicas_on_several_nodes_share_a_claim(children: Children) -> None:
    claim = child(
        children(model={"source": "hf://a/b", "cache": {"size": "50Gi", "accessMode": "ReadWriteMany"}}),
        "PersistentVolumeClaim",
    )
    assert claim is not None and claim.body["spec"]["accessModes"] == ["ReadWriteMany"]


def test_equal_specs_have_equal_digests_and_others_have_not(children: Children) -> None:
    digests = [
        [m.digest for m in children(replicas=r, engine={"maxSequences": s})] for r, s in [(1, 4), (1, 4), (1, 8)]
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


@given(st.integers(0, 1000), st.integers(1, 3600))
def test_a_pod_is_never_killed_before_its_drain_is_over(target: int, seconds: int) -> None:
    spec = valid_spec(drain={"timeout": f"{seconds}s"})
    pod = workload(spec, target=target)["template"]["spec"]
    pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + engine_contract.kill_grace_seconds(spec) >= pause + seconds


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_renders_children(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "LLMAdapter":
            assert isinstance(AdapterSpec.parse(document), AdapterSpec)
            continue
        spec = Spec.parse(document)
        assert isinstance(spec, Spec), str(spec)
        assert rendered(spec)

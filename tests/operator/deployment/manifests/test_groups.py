"""Replicas that are groups of pods: the LeaderWorkerSet and the children around it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rendering import IMAGES, rendered, volumes
from specs import parsed

from quire_operator.api import Invalid, Spec
from quire_operator.deployment.desired import desired, group_secret_name
from quire_operator.deployment.manifests import ClusterFeatures, Manifests
from quire_operator.kube.objects import HELD_PARTITION, Ref

TWO = {"tensor": 4, "nodes": 2}
GROUPS = Ref("LeaderWorkerSet", "chat-group")
PEERS = ({"podSelector": {}},)
Children = Callable[..., Manifests]


def spec_of(name: str = "chat", **spec: Any) -> Spec | Invalid:
    return parsed(name=name, **{"parallelism": TWO} | spec)


def groups_of(manifests: Manifests) -> Any:
    return manifests.workload.body["spec"]


def engine_of(template: Any) -> Any:
    (engine,) = template["spec"]["containers"]
    return engine


def test_group_replaces_the_deployment(children: Children) -> None:
    made = children(parallelism=TWO)
    assert made.workload.ref == GROUPS
    assert "Deployment" not in {manifest.ref.kind for manifest in made}
    assert {m.ref.kind for m in children(parallelism={"tensor": 4})} >= {"Deployment"}


def test_fields_that_lws_would_default_are_rendered(children: Children) -> None:
    spec = groups_of(children(parallelism=TWO, target=3))
    template = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"]) == (3, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert spec["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"partition": 0, "maxSurge": 1, "maxUnavailable": 0},
    }


def test_only_leaders_have_the_label_by_which_replicas_are_selected(children: Children) -> None:
    made = children(parallelism=TWO)
    template = groups_of(made)["leaderWorkerTemplate"]
    components = [
        template[which]["metadata"]["labels"]["app.kubernetes.io/component"]
        for which in ("leaderTemplate", "workerTemplate")
    ]
    assert components == ["engine", "engine-worker"]
    services: list[Any] = [m.body for m in made if m.ref.kind == "Service"]
    for service in services:
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == "engine"


def test_all_pods_run_one_command_that_lws_completes(children: Children) -> None:
    template = groups_of(children(parallelism=TWO))["leaderWorkerTemplate"]
    leader, worker = engine_of(template["leaderTemplate"]), engine_of(template["workerTemplate"])
    assert leader == worker
    args = leader["args"]
    flags = dict(zip(args, args[1:], strict=False))
    assert flags["--tensor-parallel-size"] == "4" and flags["--nnodes"] == "2"
    assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)" and flags["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
    assert flags["--master-port"] == "29501"


@pytest.mark.parametrize(("tensor", "gpus"), [(2, 1), (4, 2)])
def test_each_pod_of_a_group_has_its_gpus(children: Children, tensor: int, gpus: int) -> None:
    """Also with one GPU in each pod, NCCL has shared memory for its connections to other pods."""
    resources = {"limits": {"nvidia.com/gpu": gpus}}
    groups = groups_of(children(parallelism={"tensor": tensor, "nodes": 2}, resources=resources))
    for which in ("leaderTemplate", "workerTemplate"):
        template = groups["leaderWorkerTemplate"][which]
        engine = engine_of(template)
        assert engine["resources"] == {"limits": {"nvidia.com/gpu": str(gpus)}}
        assert engine["args"][engine["args"].index("--device") + 1] == "cuda"
        assert volumes(template["spec"])["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{gpus}Gi"}


def test_secret_is_a_reference_and_changes_with_the_template(children: Children) -> None:
    first, same = children(parallelism=TWO), children(parallelism=TWO, target=5)
    other = children(parallelism=TWO, engine={"maxSequences": 8})
    name = group_secret_name(first)
    assert name is not None and name.startswith("chat-group-")
    assert group_secret_name(same) == name != group_secret_name(other)
    assert group_secret_name(children(parallelism={"tensor": 2})) is None
    env = engine_of(groups_of(first)["leaderWorkerTemplate"]["workerTemplate"])["env"]
    assert env[-1] == {"name": "QUIRE_GROUP_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}}


def test_secret_of_another_llmdeployment_is_never_used() -> None:
    """The operator may not read Secrets, so it cannot see whose an existing one is."""
    spec = spec_of(parallelism={"tensor": 2, "nodes": 2})
    assert isinstance(spec, Spec)
    made = [desired(spec, 1, uid=uid, images=IMAGES) for uid in ("one", "other")]
    one, other = (group_secret_name(each) for each in made if isinstance(each, Manifests))
    assert one != other


def test_pods_of_a_group_are_spread_over_nodes(children: Children) -> None:
    template = groups_of(children(parallelism=TWO))["leaderWorkerTemplate"]["workerTemplate"]
    (of_group,) = template["spec"]["topologySpreadConstraints"]
    assert of_group["labelSelector"] == {"matchLabels": {"quire.dev/llmdeployment": "chat"}}
    assert of_group["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]


@pytest.mark.parametrize(
    ("rollout", "target", "surge", "unavailable"),
    [
        ({}, 2, 1, 0),
        ({"maxSurge": 0, "maxUnavailable": 1}, 2, 0, 1),
        ({"maxSurge": "25%", "maxUnavailable": "25%"}, 4, 1, 1),
        ({"maxSurge": "10%", "maxUnavailable": "10%"}, 3, 1, 0),
        ({"maxSurge": 0, "maxUnavailable": "10%"}, 3, 0, 1),  # LeaderWorkerSets refuse two zeros
        ({"maxSurge": "10%"}, 0, 0, 1),
        ({"strategy": "Recreate"}, 3, 0, 3),
        ({"strategy": "Recreate"}, 0, 0, 1),
    ],
)
def test_rollout_limits_are_numbers(
    children: Children, rollout: dict[str, Any], target: int, surge: int, unavailable: int
) -> None:
    spec = groups_of(children(parallelism=TWO, rollout=rollout, target=target))
    limits = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert (limits["maxSurge"], limits["maxUnavailable"]) == (surge, unavailable)


def test_paused_groups_keep_their_template(children: Children) -> None:
    held = children(parallelism=TWO).held()
    limits = groups_of(held)["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert limits == {"partition": HELD_PARTITION, "maxSurge": 0, "maxUnavailable": 1}
    assert "paused" not in groups_of(held)


def test_budget_counts_all_pods_and_policy_opens_all_their_ports() -> None:
    spec = spec_of(parallelism={"tensor": 2, "pipeline": 3, "nodes": 3})
    assert isinstance(spec, Spec)
    features = ClusterFeatures(network_peers=PEERS)
    bodies: dict[str, Any] = {m.ref.kind: m.body["spec"] for m in rendered(spec, features=features) if "spec" in m.body}
    members = {
        "matchLabels": {"quire.dev/llmdeployment": "chat"},
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "engine-worker"]}
        ],
    }
    assert (bodies["PodDisruptionBudget"]["selector"], bodies["PodDisruptionBudget"]["maxUnavailable"]) == (members, 1)
    policy = bodies["NetworkPolicy"]
    assert policy["podSelector"] == members
    assert policy["ingress"] == [
        {"from": [*PEERS], "ports": [{"port": 8000, "protocol": "TCP"}]},
        {"from": [{"podSelector": members}], "ports": [{"protocol": "TCP"}]},
    ]


def test_trial_is_a_deployment_of_leaders(children: Children) -> None:
    made = children(parallelism=TWO)
    trial: Any = made.trial.body
    assert (made.trial.ref, trial["kind"], trial["spec"]["replicas"]) == (
        Ref("Deployment", "chat-group"),
        "Deployment",
        0,
    )
    assert trial["spec"]["template"] == groups_of(made)["leaderWorkerTemplate"]["leaderTemplate"]
    assert children().trial == children().workload


def test_secret_may_not_be_replaced_by_a_pod_template(problems: Callable[..., dict[str, str]]) -> None:
    env = [{"name": "QUIRE_GROUP_SECRET", "value": "known"}]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    (path,) = problems(parallelism=TWO, podTemplate=template)
    assert path == "spec.podTemplate.spec.containers[name=engine].env[name=QUIRE_GROUP_SECRET]"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"parallelism": {"tensor": 2, "nodes": 3}}, "spec.parallelism.nodes"),
        ({"parallelism": {"nodes": 2}}, "spec.parallelism.nodes"),
        ({"parallelism": {"tensor": 2, "nodes": 0}}, "spec.parallelism.nodes"),
        ({"rollout": {"strategy": "Canary"}}, "spec.rollout.strategy"),
        ({"resources": {"limits": {"cpu": 1}}}, "spec.parallelism.tensor"),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}}, "spec.parallelism.tensor"),
        ({"engine": {"adapters": {}}}, "spec.parallelism.tensor"),
        ({"engine": {"extraArgs": ["--nnodes", "2"]}}, "spec.engine.extraArgs[0]"),
        ({"engine": {"extraArgs": ["--distributed-timeout-seconds", "2"]}}, "spec.engine.extraArgs[0]"),
    ],
)
def test_unsupported_group_settings_are_refused(spec: dict[str, Any], path: str) -> None:
    found = spec_of(**spec)
    assert isinstance(found, Invalid)
    assert [problem.path for problem in found.problems] == [path]


def test_cpus_are_counted_per_pod() -> None:
    assert isinstance(spec_of(resources={"limits": {"cpu": 2}}), Spec), "two of the four ranks are in each pod"


def test_names_leave_room_for_the_labels_of_a_group() -> None:
    longest = "a" * 42
    assert isinstance(spec_of(longest), Spec)
    # A StatefulSet's pods have the label controller-revision-hash with its name and a hash.
    assert len(f"{longest}-group-999-0123456789") == 63
    found = spec_of(f"{longest}a")
    assert isinstance(found, Invalid) and "at most 42 characters" in str(found)
    assert isinstance(spec_of(f"{longest}a", parallelism={"tensor": 2}), Spec)


def test_digest_covers_the_size_and_both_templates(children: Children) -> None:
    digests = {
        children(parallelism=shape).template_digest
        for shape in ({"tensor": 4, "nodes": 2}, {"tensor": 4, "nodes": 4}, {"tensor": 2, "pipeline": 2, "nodes": 2})
    }
    assert len(digests) == 3
    assert replace(children(parallelism=TWO)).template_digest == children(parallelism=TWO, target=7).template_digest

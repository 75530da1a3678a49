"""From the desired and the observed state to actions with reasons."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import status_views
from rendering import IMAGES, rendered
from specs import valid_spec

from quire_operator.api import Invalid
from quire_operator.canary.manifests import canary_manifests
from quire_operator.deployment.desired import CHILDREN, OPTIONAL_KINDS
from quire_operator.deployment.manifests import ClusterFeatures, Manifests, Monitoring
from quire_operator.deployment.plan import (
    Applied,
    Create,
    Delete,
    Plan,
    RemoveFields,
    Update,
    deletion_costs,
    name_conflicts,
    plan,
)
from quire_operator.kube.objects import Child, Owner, Pod, Ref
from quire_operator.kube.ownership import ForeignField

UID = "uid-1"
OWNER = Owner(kind="LLMDeployment", name="chat", uid=UID)
DEPLOYMENT = Ref("Deployment", "chat")
REPLICAS = ("f:spec", "f:replicas")


def manifests(target: int = 1) -> Manifests:
    return rendered(target=target)


def child(ref: Ref, **changes: Any) -> Child:
    fields: dict[str, Any] = {
        "uid": f"uid of {ref}",
        "version": "1",
        "owner": OWNER,
        "deleting": False,
        "fingerprint": "f",
        "foreign": (),
    }
    return Child(ref=ref, **(fields | changes))


SETTLED = {manifest.ref: child(manifest.ref) for manifest in manifests()}
APPLIED = {
    manifest.ref: Applied(uid=SETTLED[manifest.ref].uid, digest=manifest.digest, fingerprint="f")
    for manifest in manifests()
}


def planned(observed: Mapping[Ref, Child], *, target: int = 1, applied: dict[Ref, Applied] = APPLIED) -> Plan:
    return plan(manifests(target), observed, applied, name="chat", uid=UID)


def test_settled_state_gives_an_empty_plan() -> None:
    assert planned(SETTLED) == Plan(actions=(), conflicts=(), additions=())


def test_missing_children_are_created_in_order() -> None:
    actions = planned({}, applied={}).actions
    assert all(isinstance(action, Create) for action in actions)
    assert [a.manifest.ref for a in actions if isinstance(a, Create)] == [manifest.ref for manifest in manifests()]


def test_after_a_restart_each_child_is_applied_once() -> None:
    actions = planned(SETTLED, applied={}).actions
    assert [type(action) for action in actions] == [Update] * len(SETTLED)


def test_new_replica_target_updates_only_the_deployment() -> None:
    (update,) = planned(SETTLED, target=2).actions
    assert isinstance(update, Update) and update.manifest.ref == DEPLOYMENT
    assert update.reason == "the desired state changed"


@pytest.mark.parametrize(
    ("changes", "reason", "drift"),
    [
        ({"fingerprint": "other"}, "other clients changed or removed its fields", 0),
        (
            {"fingerprint": "other", "foreign": (ForeignField(path=REPLICAS, manager="hpa"),)},
            "other clients changed it: spec.replicas (set by hpa)",
            1,
        ),
        ({"uid": "another"}, "this process has not applied it yet", 0),
    ],
)
def test_drift_repair_reports_the_fields(changes: dict[str, Any], reason: str, drift: int) -> None:
    (update,) = planned(SETTLED | {DEPLOYMENT: child(DEPLOYMENT, **changes)}).actions
    assert isinstance(update, Update)
    assert (update.reason, len(update.drift)) == (reason, drift)


def test_breaking_additions_are_removed_others_reported() -> None:
    pod = ("f:spec", "f:template", "f:spec")
    breaking = ForeignField(path=(*pod, "f:hostPID"), manager="m")
    harmless = ForeignField(path=(*pod, "f:nodeSelector"), manager="m")
    changed = child(DEPLOYMENT, foreign=(breaking, harmless), version="7")
    made = planned(SETTLED | {DEPLOYMENT: changed})
    (removal,) = made.actions
    assert isinstance(removal, RemoveFields)
    assert (removal.fields, removal.version) == ((breaking,), "7")
    assert made.additions == (replace(harmless, child="Deployment chat"),)


@pytest.mark.parametrize(
    ("changes", "passing", "words"),
    [
        ({"owner": None, "fingerprint": ""}, False, "was not created by quire"),
        ({"owner": None}, False, "was orphaned when its LLMDeployment was deleted"),
        ({"owner": Owner(kind="Kafka", name="chat", uid="k")}, False, "belongs to Kafka chat"),
        ({"owner": replace(OWNER, name="other", uid="o")}, False, "belongs to LLMDeployment other"),
        ({"owner": replace(OWNER, uid="earlier")}, True, "belongs to an earlier LLMDeployment of this name"),
        ({"deleting": True}, True, "is being deleted"),
    ],
)
def test_foreign_objects_are_never_changed(changes: dict[str, Any], passing: bool, words: str) -> None:
    made = planned(SETTLED | {DEPLOYMENT: child(DEPLOYMENT, **changes)}, applied={})
    (conflict,) = made.conflicts
    assert conflict.passing is passing and words in conflict.message
    touched = [a.manifest.ref for a in made.actions if isinstance(a, Create | Update)]
    assert DEPLOYMENT not in touched and len(touched) == len(SETTLED) - 1


EVERY_FEATURE = ClusterFeatures(
    network_peers=({"podSelector": {}},),
    monitoring=Monitoring(pod_monitor_labels={}, rule_labels={}, interval="20s"),
    served_kinds=OPTIONAL_KINDS,
)
FULL: dict[str, Any] = {
    "model": {"source": "hf://org/m", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}},
    "engine": {"adapters": {"maxRank": 16}},
    "autoscaling": {"maxReplicas": 3},
    "replicas": 1,
}
GROUPS = {
    "parallelism": {"pipeline": 2, "nodes": 2},
    "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
    "model": {"source": "hf://org/m"},
    "engine": {},
}
MONITORING = ("PodMonitor", "PrometheusRule")
CANARY = (Ref("Service", "chat-canary"), Ref("Deployment", "chat-canary"))
CLAIM = Ref("PersistentVolumeClaim", "chat-models")


def every_child(**changes: Any) -> Manifests:
    """Return the children of an LLMDeployment that has all kinds of them, with a canary unless its pods are groups."""
    stable = rendered(valid_spec(**(FULL | changes)), features=EVERY_FEATURE)
    if "parallelism" in changes:
        return stable
    spec = valid_spec(**(FULL | {"rollout": {"strategy": "Canary"}}))
    others = canary_manifests(spec, 1, uid=UID, revision="r2", images=IMAGES, features=EVERY_FEATURE, stable=stable)
    assert not isinstance(others, Invalid)
    return stable.with_others(others)


ALL, ALL_OF_GROUPS = every_child(), every_child(**GROUPS)


def test_the_table_of_conflicts_covers_every_kind_of_child() -> None:
    assert {m.ref.kind for m in (*ALL, *ALL_OF_GROUPS)} == {kind.kind for kind in CHILDREN}


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "serving"])
@pytest.mark.parametrize(
    ("made", "taken"),
    [(made, manifest.ref) for made in (ALL, ALL_OF_GROUPS) for manifest in made],
    ids=lambda value: str(value) if isinstance(value, Ref) else "",
)
def test_foreign_child_withholds_the_workloads_that_would_use_it(made: Manifests, taken: Ref, is_new: bool) -> None:
    """Pods would run with a foreign ServiceAccount, mount a foreign claim, or have no Service."""
    leftover = Ref("Deployment", "chat") if made is ALL_OF_GROUPS else Ref("LeaderWorkerSet", "chat-group")
    foreign = {taken: child(taken, owner=None, fingerprint="")}
    ours = {manifest.ref: child(manifest.ref) for manifest in made} | {leftover: child(leftover)}
    observed = foreign if is_new else ours | foreign
    result = plan(made, observed, {}, name="chat", uid=UID)
    touched = {a.manifest.ref if isinstance(a, Create | Update) else a.ref for a in result.actions}
    resources = {m.ref for m in made if m.ref.kind in ("Deployment", "LeaderWorkerSet", "PersistentVolumeClaim")}
    assert taken not in touched
    if taken.kind in MONITORING:
        assert touched >= resources
    elif taken in CANARY:
        assert touched & resources == resources - set(CANARY), "the stable revision does not need it"
    else:
        assert not touched & {*resources, leftover}, "what serves keeps serving"
    assert touched >= {m.ref for m in made} - resources - {taken}
    blocking, nonblocking = name_conflicts(result.conflicts)
    named = nonblocking if taken.kind in MONITORING else blocking
    assert named is not None and str(taken) in named.message


def test_foreign_canary_child_and_aborted_canary() -> None:
    """An aborted canary goes although the stable revision waits."""
    stable = rendered(valid_spec(**FULL), features=EVERY_FEATURE)
    account = Ref("ServiceAccount", "chat")
    observed = {m.ref: child(m.ref) for m in ALL} | {account: child(account, owner=None, fingerprint="")}
    deletes = {a.ref for a in plan(stable, observed, {}, name="chat", uid=UID).actions if isinstance(a, Delete)}
    assert deletes == set(CANARY)


def test_own_child_that_is_being_deleted_withholds_no_workload() -> None:
    """A claim goes when no pod uses it, so the number of replicas must still change."""
    observed = {m.ref: child(m.ref, deleting=m.ref == CLAIM) for m in ALL}
    touched = {a.manifest.ref for a in plan(ALL, observed, {}, name="chat", uid=UID).actions if isinstance(a, Update)}
    assert touched == {m.ref for m in ALL} - {CLAIM}


@pytest.mark.parametrize(("changes", "goes"), [({}, True), ({"owner": None}, False), ({"deleting": True}, False)])
def test_owned_objects_no_longer_desired_are_deleted(changes: dict[str, Any], goes: bool) -> None:
    claim = Ref("PersistentVolumeClaim", "chat-models")
    actions = planned(SETTLED | {claim: child(claim, **changes)}).actions
    wanted = (Delete(ref=claim, uid=f"uid of {claim}", reason="the spec no longer requires it"),)
    assert actions == (wanted if goes else ())


def test_policy_without_owner_is_owned_by_its_applied_fields() -> None:
    policy = Ref("NetworkPolicy", "chat")
    assert planned(SETTLED | {policy: child(policy, owner=None)}).actions == (
        Delete(ref=policy, uid=f"uid of {policy}", reason="the spec no longer requires it"),
    )
    assert planned(SETTLED | {policy: child(policy, owner=None, fingerprint="")}).actions == ()


def pod(name: str, cost: str = "", *, deleting: bool = False) -> Pod:
    return replace(status_views.pod(ready=True), name=name, deleting=deleting, deletion_cost=cost)


@pytest.mark.parametrize(
    ("pods", "victims", "costs"),
    [
        ([pod("a"), pod("b"), pod("c")], ["c", "a"], {"c": "-1000", "a": "-999"}),
        ([pod("a", "-1000"), pod("b")], ["a"], {}),
        ([pod("a", "-1000"), pod("b")], ["b"], {"a": None, "b": "-1000"}),
        ([pod("a", deleting=True), pod("b")], ["a"], {}),
        ([pod("a")], ["gone"], {}),
    ],
)
def test_deletion_costs_are_set_and_old_ones_removed(
    pods: list[Pod], victims: list[str], costs: dict[str, str | None]
) -> None:
    assert deletion_costs(pods, victims) == costs

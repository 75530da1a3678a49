"""The health of an LLMDeployment for GitOps tools: kstatus (Flux, helm 4) and Argo CD's health check."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lupa import lua51
from specs import valid_spec
from status_views import BROKEN_POD, deployment, view

from quire_operator.deployment.conditions import BlockingCondition, MetricsProblem, MetricsReason, View, conditions
from quire_operator.deployment.status import status
from quire_operator.kube.objects import Condition, Key, Resource

HEALTH_CHECK = Path(__file__).parents[2] / "charts" / "quire" / "argocd" / "health.lua"
GENERATION = 4
LATE = Condition(is_true=False, reason="ProgressDeadlineExceeded", message="no progress")
FROM_ZERO = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
HEALTH = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}


BLOCKED = BlockingCondition(reason="NameConflict", message="taken")
CASES: dict[str, tuple[View, str]] = {
    "serving": (view(), "Current"),
    "no Deployment yet": (view(deployment=None), "InProgress"),
    "loading": (view(deployment=deployment(2, 0)), "InProgress"),
    "rolling out": (view(deployment=deployment(2, 2, replicas=3, updated=1)), "InProgress"),
    "scaling up while enough serve": (
        view(spec=valid_spec(autoscaling={"maxReplicas": 8}), target=5, deployment=deployment(5, 2)),
        "Current",
    ),
    "replicas 0": (view(spec=valid_spec(replicas=0), target=0, deployment=deployment(0, 0)), "Current"),
    "scaled to zero": (view(spec=valid_spec(**FROM_ZERO), target=0, deployment=deployment(0, 0)), "Current"),
    "to zero, not applied yet": (view(target=2, deployment=deployment(0, 0)), "InProgress"),
    "scaled to zero without a gateway": (
        view(
            spec=valid_spec(**FROM_ZERO),
            target=0,
            deployment=deployment(0, 0),
            metrics_problem=MetricsProblem(reason=MetricsReason.GATEWAY_UNAVAILABLE, message="no answer"),
        ),
        "InProgress",
    ),
    "invalid": (view(spec=None, blocking=BlockingCondition.invalid(())), "Failed"),
    "a name is taken": (view(blocking=BLOCKED), "Failed"),
    "a name becomes free": (
        view(blocking=BlockingCondition(reason="NameConflict", message="deleted soon", is_passing=True)),
        "InProgress",
    ),
    "served name conflict": (view(rival="team-a/chat serves it"), "Failed"),
    "broken image": (view(deployment=deployment(2, 0), pods=(BROKEN_POD,)), "InProgress"),
    "deadline of a rollout exceeded": (
        view(deployment=deployment(2, 2, replicas=3, updated=1, progressing=LATE)),
        "Failed",
    ),
    "deadline of the first start exceeded": (view(deployment=deployment(2, 0, progressing=LATE)), "Failed"),
}


def llmdeployment(seen: View, *, generation: int = GENERATION) -> dict[str, Any]:
    resource = Resource(
        key=Key("prod", "chat"), uid="u", version="1", generation=GENERATION, deleting=False, body={}, status={}
    )
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "prod", "generation": generation},
        "spec": {"model": {"source": "file:///m"}},
        "status": status(resource, seen, cluster_domain="cluster.local", now=1_700_000_000.0),
    }


CHANGED = llmdeployment(view(), generation=GENERATION + 1)
NEW = {**CHANGED, "status": {}}


def kstatus(program: Path, objects: list[dict[str, Any]]) -> list[str]:
    lines = "\n".join(json.dumps(body) for body in objects)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def argo_health(body: dict[str, Any]) -> str:
    runtime = lua51.LuaRuntime(unpack_returned_tuples=True)
    runtime.globals().obj = runtime.table_from(body, recursive=True)
    found = runtime.execute(HEALTH_CHECK.read_text())
    assert found["message"]
    return str(found["status"])


@pytest.mark.timeout(600)
def test_kstatus_agrees_with_the_conditions(kstatus_program: Path) -> None:
    objects = [llmdeployment(seen) for seen, _ in CASES.values()]
    found = dict(zip(CASES, kstatus(kstatus_program, objects), strict=True))
    assert found == {name: wanted for name, (_, wanted) in CASES.items()}


def test_kstatus_waits_for_the_operator(kstatus_program: Path) -> None:
    assert kstatus(kstatus_program, [CHANGED]) == ["InProgress"]


@pytest.mark.parametrize("case", CASES)
def test_argo_cd_health_agrees_with_kstatus(case: str) -> None:
    seen, wanted = CASES[case]
    assert argo_health(llmdeployment(seen)) == HEALTH[wanted]


@pytest.mark.parametrize("body", [CHANGED, NEW, {**NEW, "status": None}])
def test_argo_cd_health_waits_for_the_operator(body: dict[str, Any]) -> None:
    assert argo_health({name: value for name, value in body.items() if value is not None}) == "Progressing"


def test_argo_cd_shows_a_paused_deployment_as_suspended() -> None:
    body = llmdeployment(view())
    body["spec"]["paused"] = True
    assert argo_health(body) == "Suspended"


COUNTS = st.integers(0, 3)
VIEWS = st.builds(
    view,
    spec=st.sampled_from([None, valid_spec(replicas=2), valid_spec(replicas=0), valid_spec(**FROM_ZERO)]),
    blocking=st.sampled_from([None, BLOCKED, BlockingCondition(reason="QuotaExceeded", message="x", is_passing=True)]),
    target=st.none() | COUNTS,
    rival=st.sampled_from([None, "team-a/chat serves it"]),
    pods=st.sampled_from([(), (BROKEN_POD,)]),
    deployment=st.none()
    | st.builds(deployment, COUNTS, COUNTS, replicas=COUNTS, updated=COUNTS, progressing=st.sampled_from([None, LATE])),
)


@given(VIEWS)
def test_exactly_one_of_the_three_conditions_is_true(seen: View) -> None:
    found = {condition.type for condition in conditions(seen) if condition.is_true}
    assert len(found & {"Ready", "Reconciling", "Stalled"}) == 1

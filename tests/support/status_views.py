"""The inputs of conditions, built with defaults: a spec, its Deployment, a pod and a view of them."""

from typing import Any

from specs import valid_spec

from quire_operator.deployment.conditions import ConditionState, View, conditions
from quire_operator.kube.objects import ContainerState, DeploymentState, Pod


def deployment(asked: int = 2, ready: int = 2, **changes: Any) -> DeploymentState:
    """Return a Deployment of which as many replicas exist as are requested, all of the newest template."""
    replicas = changes.pop("replicas", asked)
    fields: dict[str, Any] = {
        "replicas_asked": asked,
        "generation": 1,
        "observed_generation": 1,
        "replicas": replicas,
        "updated": replicas,
        "ready": ready,
        "available": ready,
        "revision": "3",
        "progressing": None,
        "failure": None,
    }
    return DeploymentState(**(fields | changes))


def pod(*, ready: bool = False, **state: Any) -> Pod:
    """Return a pod whose engine container is in this state."""
    container = ContainerState(name="engine", init=False, ready=ready, restarts=0, **state)
    return Pod(
        name="chat-1",
        uid="p",
        version="1",
        ip="",
        phase="Running",
        ready=ready,
        deleting=False,
        revision="r",
        created="",
        unschedulable="",
        containers=(container,),
        deletion_cost="",
    )


BROKEN_POD = pod(waiting_reason="ImagePullBackOff", waiting_message="no such image")


def view(**changes: Any) -> View:
    """Return a view of two replicas that serve, with changes."""
    fields: dict[str, Any] = {
        "spec": valid_spec(replicas=2),
        "blocking": None,
        "target": 2,
        "deployment": deployment(2, 2),
        "pods": (pod(ready=True),),
        "additions": (),
        "contested": None,
        "metrics_problem": None,
    }
    return View(**(fields | changes))


def shown(**changes: Any) -> dict[str, ConditionState]:
    """Return the conditions of such a view by type."""
    return {condition.type: condition for condition in conditions(view(**changes))}

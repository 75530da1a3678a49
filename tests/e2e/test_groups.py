"""A replica of two pods on two nodes: it answers, scales by load, and survives a killed worker, a rollout and a drain.

The controller of LeaderWorkerSets runs for this scenario only. Streams of a group that loses a pod go on in the other.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from e2e_support import objects
from e2e_support.faults import drain, kill_for_good, uncordoned_in_the_end
from e2e_support.kube import JSON, namespaced
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Pod
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.timeline.recording import recorded
from e2e_support.traffic import Traffic
from e2e_support.waiting import Stopwatch
from quire_cluster.binaries import ensure
from quire_cluster.group_controller import GroupController
from quire_cluster.progress import Progress

pytestmark = [pytest.mark.needs("machine", "two-nodes"), pytest.mark.timeout(1500)]
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1"
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
DISCOVERY_SECONDS = 90.0
"""Longer than the interval at which the operator looks for optional kinds."""


@pytest.fixture(scope="module")
def controller(target: Target) -> Iterator[GroupController]:
    """Run the controller of LeaderWorkerSets while this module lasts."""
    assert target.machine is not None
    program = ensure(("lws",), Progress(sys.stdout))["lws"]
    controller = GroupController(target.machine.control_plane, program)
    try:
        controller.install()
        yield controller
    finally:
        controller.uninstall()


def pods_by_index(chat: LLMDeployment, index: int) -> list[Pod]:
    path = namespaced(chat.namespace, "pods")
    found = chat.kube.items(path, selector=f"quire.dev/llmdeployment={chat.name},{INDEX}={index}")
    return [objects.pod(body) for body in found]


def groups(chat: LLMDeployment) -> JSON:
    return chat.kube.get(namespaced(chat.namespace, "leaderworkersets", f"{chat.name}-group", group=GROUPS))


def wait_groups(chat: LLMDeployment, number: int, *, without: set[str], seconds: float) -> None:
    """Wait until all pods of as many groups are ready, none of which is among the pods ``without``."""

    def look() -> bool | None:
        pods = [pod for pod in chat.pods() if not pod.is_ending]
        are_ready = len(pods) == 2 * number and all(pod.is_serving for pod in pods)
        return (are_ready and without.isdisjoint(pod.uid for pod in pods)) or None

    chat.until(look, what=f"{number} groups of other pods are ready", seconds=seconds)
    chat.wait_ready(replicas=number, seconds=seconds)


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize("shape", [{"tensor": 2, "nodes": 2}, {"pipeline": 2, "nodes": 2}], ids=["tensor", "pipeline"])
def test_a_group_of_two_pods_answers_from_two_nodes(
    shape: dict[str, int], release: Release, space: Space, gateway_url: str, report: Report
) -> None:
    watch = Stopwatch()
    chat = space.apply(small_llmdeployment("pair", parallelism=shape))
    chat.until(lambda: chat.pods() or None, what="the kind is found", seconds=DISCOVERY_SECONDS)
    chat.wait_ready(replicas=1, seconds=240)
    report.figure("apply to a ready group", watch.seconds)
    assert len({pod.node for pod in chat.pods()}) == 2
    with recorded(Traffic(gateway_url, model=chat.model, concurrency=2, at_least=30), report, chat) as traffic:
        traffic.wait_for_answers(30, "of one group", seconds=120)
    leaders = {pod.replica for pod in pods_by_index(chat, 0)}
    assert {record.replica for record in traffic.result.records} == leaders


@pytest.mark.usefixtures("controller")
def test_groups_scale_and_survive_a_worker_a_rollout_and_a_drain(
    target: Target, release: Release, space: Space, gateway_url: str, report: Report
) -> None:
    spec: dict[str, Any] = {
        "parallelism": {"tensor": 2, "nodes": 2},
        "engine": {"resumable": "Enabled", "maxSequences": 2},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 2, "metricsSource": "Pods", "scaleDown": {"window": "1h"}},
    }
    chat = space.apply(small_llmdeployment("chat", **spec))
    chat.until(lambda: chat.pods() or None, what="the kind is found", seconds=DISCOVERY_SECONDS)
    chat.wait_ready(replicas=1, seconds=240)
    with recorded(Traffic(gateway_url, model=chat.model, concurrency=6), report, chat) as traffic:
        watch = Stopwatch()
        wait_groups(chat, 2, without=set(), seconds=240)
        report.figure("scale-up by load, 1 → 2 groups ready", watch.seconds)
        traffic.set_rate(0.5)  # Groups that never rest take the CPU from those that start.

        (worker, *_) = pods_by_index(chat, 1)
        traffic.mark(f"kill {worker.name}")
        watch = Stopwatch()
        kill_for_good(target, worker, container="engine")
        # The controller recreates the whole group, or does not see the pod end, and its leader takes the next worker.
        wait_groups(chat, 2, without={worker.uid}, seconds=180)
        report.figure("worker killed to its group ready again", watch.seconds)

        before = {pod.uid for pod in chat.pods()}
        traffic.mark("spec.engine.maxSequences: 2 → 3")
        watch = Stopwatch()
        chat.patch(engine={"maxSequences": 3})
        wait_groups(chat, 2, without=before, seconds=600)
        report.figure("rollout of 2 groups", watch.seconds)

        node = next(pod.node for pod in pods_by_index(chat, 1) if pod.node is not None)
        on_node = {pod.uid for pod in chat.pods() if pod.node == node}
        traffic.mark(f"kubectl drain {node}")
        watch = Stopwatch()
        with uncordoned_in_the_end(chat.kube, node):
            drained = drain(chat.kube, node)
            assert drained.returncode == 0, drained.stderr
            report.figure("drain of a node with pods of both groups", watch.seconds)
            wait_groups(chat, 2, without=on_node, seconds=240)
            report.figure("drain to both groups ready on the other node", watch.seconds)
        traffic.wait_for_answers(4, "after the drain")

    assert chat.conditions()["Degraded"].reason == "AsExpected"
    assert groups(chat)["spec"]["replicas"] == 2

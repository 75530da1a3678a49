"""A node is drained under traffic, as before maintenance, and returned to service afterwards.

Two of three replicas run on that node; the budget evicts them one by one. Gateway and operator pods move too.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from subprocess import CompletedProcess
from typing import Any

import pytest

from e2e_support import objects
from e2e_support.faults import drain, evict, uncordoned_in_the_end
from e2e_support.kube import Kube
from e2e_support.long_streams import begin_one_by_one, long_streams, tokens_lasting
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Pod
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.scaling import looks as seen
from e2e_support.scaling.looks import Look, ReplicaWatch
from e2e_support.space import LLMDeployment
from e2e_support.target import Target
from e2e_support.timeline.model import timeline
from e2e_support.timeline.recording import keep
from e2e_support.traffic.client import Patience
from e2e_support.traffic.driver import Traffic
from e2e_support.traffic.result import TrafficResult

REPLICAS = 3
CONCURRENCY, STREAMS, STREAM_SECONDS = 3, 4, 20.0
PATIENCE = Patience(silence_seconds=120.0)
PRE_STOP_SECONDS = 5.0
"""The time from the deletion of a pod to SIGTERM. A stream that lasts longer was protected by the engine itself."""

pytestmark = [pytest.mark.needs("two-nodes"), pytest.mark.timeout(600)]


@dataclass(slots=True, kw_only=True)
class Drained:
    """The recording of a drain. Times are seconds since the start of the traffic."""

    deployment: LLMDeployment
    node: str
    began: float = 0.0
    ended: float = 0.0
    before: list[Pod] = field(default_factory=list)
    """The replicas and their nodes."""
    refused: str = ""
    """The answer to an eviction while one replica was unavailable."""
    kubectl: CompletedProcess[str] | None = None
    left: list[Pod] = field(default_factory=list)
    """The pods on the node when kubectl had finished."""
    after: list[Pod] = field(default_factory=list)
    refused_in_the_end: str | None = None
    """The answer to an eviction when all replicas were ready again."""
    looks: list[Look] = field(default_factory=list)
    traffic: TrafficResult | None = None
    streams: TrafficResult | None = None
    """The long streams."""


@pytest.fixture(scope="module")
def drained(target: Target, release: Release, make_space: MakeSpace, gateway_url: str) -> Iterator[Drained]:
    with make_space("drain") as space:
        chat = space.apply(
            small_llmdeployment(
                "chat",
                replicas=REPLICAS,
                engine={"maxModelLength": None},
                # Of a core: streams last.
                resources={"limits": {"cpu": "400m"}},
                drain={"timeout": "180s"},
            )
        )
        chat.wait_ready(replicas=REPLICAS, seconds=240)
        pods = chat.serving_pods()
        nodes = [pod.node for pod in pods if pod.node is not None]
        record = Drained(deployment=chat, node=max(nodes, key=nodes.count), before=pods)
        with (
            Traffic(gateway_url, model=chat.model, concurrency=CONCURRENCY, patience=PATIENCE) as traffic,
            ReplicaWatch(chat, clock=traffic.now) as watch,
        ):
            try:
                _drain(record, target.kube, watch, traffic, gateway_url)
                release.wait_working()
            finally:
                record.looks, record.traffic = watch.looks, traffic.stop()
                _keep_timeline(record)
        yield record


def _drain(record: Drained, kube: Kube, watch: ReplicaWatch, traffic: Traffic, url: str) -> None:
    chat = record.deployment
    tokens = tokens_lasting(STREAM_SECONDS, url, chat.model)
    streams = long_streams(url, chat.model, beyond=tokens, beside=traffic)
    with streams, uncordoned_in_the_end(kube, record.node), ThreadPoolExecutor(1) as aside:
        begin_one_by_one(streams, STREAMS, on={pod.replica for pod in record.before if pod.node == record.node})
        record.began = traffic.mark(f"kubectl drain {record.node}")
        kubectl = aside.submit(drain, kube, record.node)
        watch.until(lambda look: look.ready < REPLICAS or kubectl.done(), what="a replica is evicted", seconds=60)
        elsewhere = next(pod for pod in record.before if pod.node != record.node)
        record.refused = evict(kube, elsewhere, dry_run=True)
        record.kubectl = kubectl.result()
        assert record.kubectl.returncode == 0, f"kubectl drain {record.node}: {record.kubectl.stderr}"
        record.ended = traffic.mark("drained")
        record.left = _pods_on(kube, record.node)
        chat.wait_ready(replicas=REPLICAS, seconds=120)
        record.after = chat.serving_pods()
        record.refused_in_the_end = evict(kube, elsewhere, dry_run=True)
        record.streams = streams.stop()
    traffic.mark("uncordoned")


def _keep_timeline(record: Drained) -> None:
    replicas, messages = seen.lines(record.looks), seen.reason_changes(record.looks, "Ready")
    keep(timeline("node drain", record.traffic, record.streams, replicas=replicas, messages=messages))


def _pods_on(kube: Kube, node: str) -> list[Pod]:
    """Return the running pods on a node, except those of a DaemonSet."""
    bodies: list[dict[str, Any]] = kube.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")["items"]
    owned = [
        body
        for body in bodies
        if not any(owner["kind"] == "DaemonSet" for owner in body["metadata"].get("ownerReferences", []))
    ]
    return [pod for body in owned if (pod := objects.pod(body)).phase not in ("Succeeded", "Failed")]


def test_no_request_fails_while_a_node_is_drained(drained: Drained, report: Report) -> None:
    assert drained.traffic is not None
    drained.traffic.assert_all_right(at_least=30)
    report.count_requests(len(drained.traffic.records))
    after = [record for record in drained.traffic.records if record.started > drained.ended]
    assert after, "and it goes on"


def test_the_node_is_empty_and_its_replicas_have_moved(drained: Drained, report: Report) -> None:
    assert [pod.replica for pod in drained.left] == []
    assert len({pod.node for pod in drained.before}) == 2, "replicas are spread over nodes"
    assert drained.node not in {pod.node for pod in drained.after} and len(drained.after) == REPLICAS
    report.figure("kubectl drain of a node with two of three replicas", drained.ended - drained.began)


def test_at_most_one_replica_is_unavailable(drained: Drained) -> None:
    assert seen.lowest(seen.ready_steps(drained.looks)) == REPLICAS - 1
    assert all(look.conditions["Available"].is_true for look in drained.looks)
    evicted = [ending for ending in seen.endings(drained.looks) if ending.seen >= drained.began]
    assert len(evicted) == 2


def test_evictions_beyond_the_budget_are_rejected(drained: Drained) -> None:
    """The API rejects them for every client: a drain waits, and other tools must wait as well."""
    assert "disruption budget" in drained.refused
    assert drained.kubectl is not None and "violate the pod's disruption budget" in drained.kubectl.stderr
    assert drained.refused_in_the_end == "", "and granted when all are ready again"


def test_streams_on_evicted_replicas_finish(drained: Drained, report: Report) -> None:
    assert drained.streams is not None
    drained.streams.assert_all_right()
    report.count_requests(len(drained.streams.records))
    evicted = [ending for ending in seen.endings(drained.looks) if ending.seen >= drained.began]
    outlasted = [
        stream
        for ending in evicted
        for stream in drained.streams.records
        if stream.replica == f"{drained.deployment.namespace}/{ending.pod}"
        and stream.started < ending.seen
        and stream.ended > ending.seen + PRE_STOP_SECONDS
    ]
    assert outlasted, "some were under way on them, and went on after SIGTERM"
    longest = max(ending.gone - ending.seen for ending in evicted if ending.gone is not None)
    report.figure("replica evicted to gone, with long streams", longest)


def test_gateway_and_operator_have_moved(drained: Drained, release: Release) -> None:
    """The chart's budgets permit this: one pod of each stays while the other moves."""
    pods = [*release.gateway_pods(), *release.operator_pods()]
    assert len(pods) == 4 and all(pod.is_serving for pod in pods)
    assert drained.node not in {pod.node for pod in pods}
    assert sum(page.total("quire_gateway_broken_streams_total") for page in release.gateway_metrics()) == 0

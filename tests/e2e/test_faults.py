"""Clients of a killed process are disconnected, and all other clients notice nothing.

Two replicas serve all scenarios. The streams are still running when a process is killed, and each is checked.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from e2e_support.faults import (
    assert_only_cut_on,
    cut_on,
    engine_process,
    kill,
    kill_for_good,
    main_process,
    same_pod,
    streams,
    wait_for_streams,
)
from e2e_support.kube import namespaced
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Pod
from e2e_support.refusals import Outage
from e2e_support.release import GATEWAY_PORT, Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace, Run
from e2e_support.space import LLMDeployment
from e2e_support.target import Target
from e2e_support.timeline import keep, timeline
from e2e_support.timeline.recording import recorded
from e2e_support.traffic import CUT, FailureKind, Permit, Traffic
from e2e_support.waiting import until
from quire_cluster.real_cluster import RealCluster

REPLICAS = 2
NOTIFIED_SECONDS = 10.0
"""The time after which all clients of a killed process have been notified."""
BACK_SECONDS = 120.0
"""The limit for giving up. The promised times are shorter and are measured."""
TAKEOVER_SECONDS = 40.0
OUTAGE_SECONDS = 60.0
ENGINE_PORT = 8000

pytestmark = [pytest.mark.needs("machine"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def served(make_space: MakeSpace) -> Iterator[LLMDeployment]:
    with make_space("faults") as space:
        chat = space.apply(small_llmdeployment("chat", replicas=REPLICAS))
        chat.wait_ready(replicas=REPLICAS, seconds=240)
        yield chat


@pytest.fixture
def chat(served: LLMDeployment) -> LLMDeployment:
    """Return the LLMDeployment, repaired after previous scenarios."""
    served.wait_ready(replicas=REPLICAS)
    return served


@pytest.fixture
def machine(target: Target) -> RealCluster:
    assert target.machine is not None
    return target.machine


def test_a_killed_engine_process_is_replaced_within_its_pod(
    chat: LLMDeployment, machine: RealCluster, release: Release, gateway_url: str, report: Report
) -> None:
    pods = chat.serving_pods()
    victim, killed = pods[0], "engine process killed"
    replaced = release.page(victim, ENGINE_PORT).total("quire_engine_restarts_total")
    process = engine_process(machine, victim)
    with recorded(streams(gateway_url, chat), report, chat) as traffic:
        traffic.permit(cut_on(victim, after=killed, within_seconds=NOTIFIED_SECONDS))
        wait_for_streams(traffic, pods)
        traffic.mark(killed)
        kill(process)
        back = _wait_until_it_streams_again(traffic, victim)
    result = traffic.result
    assert_only_cut_on(result, victim, killed)
    report.figure("engine process killed to same replica serving again", back - result.seconds_of(killed))
    report.figure("engine process killed to next answer of another replica", result.served_again_after(killed) or 0.0)
    after = same_pod(chat.pods(), victim)
    assert after.restarts == victim.restarts, "the API process replaces its engine; the container goes on"
    assert release.page(victim, ENGINE_PORT).total("quire_engine_restarts_total") == replaced + 1
    assert chat.wait_ready(replicas=REPLICAS)


def test_a_killed_container_is_restarted_within_its_pod(
    chat: LLMDeployment, machine: RealCluster, release: Release, gateway_url: str, report: Report
) -> None:
    pods = chat.serving_pods()
    victim, killed = pods[-1], "container killed"
    process = main_process(machine, victim, "engine")
    with recorded(streams(gateway_url, chat), report, chat) as traffic:
        traffic.permit(cut_on(victim, after=killed, within_seconds=NOTIFIED_SECONDS))
        wait_for_streams(traffic, pods)
        traffic.mark(killed)
        kill(process)
        back = _wait_until_it_streams_again(traffic, victim)
    result = traffic.result
    assert_only_cut_on(result, victim, killed)
    report.figure("container killed to same replica serving again", back - result.seconds_of(killed))
    assert same_pod(chat.pods(), victim).restarts == victim.restarts + 1
    assert _broken_streams(release, victim) >= 1, "the gateways counted what broke"
    assert [event.reason for event in chat.events() if event.name == victim.name].count("Killing") == 0
    assert chat.wait_ready(replicas=REPLICAS)


def test_a_pod_deleted_by_force_is_replaced(
    chat: LLMDeployment, gateway_url: str, release: Release, report: Report
) -> None:
    pods = chat.serving_pods()
    victim, killed = pods[0], "pod deleted by force"
    with recorded(streams(gateway_url, chat), report, chat) as traffic:
        traffic.permit(cut_on(victim, after=killed, within_seconds=BACK_SECONDS))
        wait_for_streams(traffic, pods)
        at = traffic.mark(killed)
        chat.kube.delete(namespaced(victim.namespace, "pods", victim.name), grace_seconds=0)
        newcomers = chat.until(lambda: chat.newcomers(pods), what="a new replica is ready", seconds=BACK_SECONDS)
        report.figure("pod deleted by force to replaced and ready", traffic.mark("replaced") - at)
        wait_for_streams(traffic, newcomers)
    result = traffic.result
    others = [record for record in result.records if record.replica != victim.replica]
    assert others and all(record.ok for record in others)
    late = [one for one in result.by_replica()[victim.replica] if one.started > at + NOTIFIED_SECONDS]
    assert not late, "the gateways know that it is gone"
    assert chat.wait_ready(replicas=REPLICAS)
    assert any(event.reason == "SuccessfulCreate" or event.name == newcomers[0].name for event in chat.events())


def test_a_killed_gateway_disconnects_only_its_own_clients(
    chat: LLMDeployment, machine: RealCluster, target: Target, release: Release, gateway_url: str, report: Report
) -> None:
    victim, other = _two_gateways(release)
    killed, process = "gateway killed", main_process(machine, victim, "gateway")
    cut = Permit(why="they came through it", kinds=CUT, after=killed, within_seconds=NOTIFIED_SECONDS)
    away = Permit(
        why="it is away, or the Service still leads to it",
        kinds=frozenset({FailureKind.UNREACHABLE, FailureKind.BROKEN}),
        after=killed,
        within_seconds=30.0,
    )
    of_victim = streams(target.pod_url(victim, GATEWAY_PORT), chat, concurrency=2)
    of_other = streams(target.pod_url(other, GATEWAY_PORT), chat, concurrency=2)
    with recorded(Traffic(gateway_url, model=chat.model, concurrency=2), report, chat) as traffic, of_victim, of_other:
        for one in (traffic, of_victim):
            one.permit(cut)
            one.permit(away)
        for one in (of_other, of_victim):
            one.wait_for(lambda live: sum(live.streams.values()) >= 2, 60, "two streams through each gateway")
        for one in (traffic, of_victim, of_other):
            one.mark(killed)
        kill(process)
        of_victim.wait_for(
            lambda live: of_victim.so_far().served_again_after(killed) is not None,
            BACK_SECONDS,
            "answers through it again",
        )
    assert all(record.ok for record in of_other.result.records), "who came through the other gateway noticed nothing"
    at = of_victim.result.seconds_of(killed)
    # Both may have ended together just before, so that those after them have no answer yet.
    running = [record for record in of_victim.result.records if record.started <= at < record.ended]
    assert any(not record.ok for record in running), "the kill cut none"
    report.count_requests(len(of_victim.result.records) + len(of_other.result.records))
    report.figure("gateway killed to next answer through the Service", traffic.result.served_again_after(killed) or 0.0)
    report.figure(
        "gateway killed to next answer through the same gateway", of_victim.result.served_again_after(killed) or 0.0
    )
    keep(timeline(f"{report.scenario}, gateway by gateway", of_victim.result, of_other.result))
    # It answers at its own address before its kubelet reports the restart.
    until(
        lambda: same_pod(release.gateway_pods(), victim).restarts == victim.restarts + 1,
        what="its container was restarted once",
        seconds=60,
    )
    until(lambda: all(pod.is_serving for pod in release.gateway_pods()), what="both gateways are ready", seconds=60)


def test_a_killed_operator_is_replaced_without_other_changes(
    chat: LLMDeployment, target: Target, release: Release, gateway_url: str, report: Report
) -> None:
    before = chat.pods()
    generation = _deployment_generation(chat)
    leader = release.wait_leader()
    with recorded(streams(gateway_url, chat), report, chat) as traffic:
        wait_for_streams(traffic, before)
        at = traffic.mark("leading operator killed")
        kill_for_good(target, leader, container="operator")
        successor = release.wait_leader(after=leader, seconds=TAKEOVER_SECONDS)
        report.figure("leading operator killed to another leading", traffic.mark("another operator leads") - at)
        time.sleep(NOTIFIED_SECONDS)  # in which a successor that misread things would act
    assert all(record.ok for record in traffic.result.records)
    assert [(pod.uid, pod.restarts) for pod in chat.pods()] == [(pod.uid, pod.restarts) for pod in before]
    assert _deployment_generation(chat) == generation, "the successor had nothing to correct"
    assert chat.status()["desiredReplicas"] == REPLICAS
    page = release.page(successor, 8080)
    about = {"namespace": chat.namespace, "name": chat.name}
    assert page.values("quire_operator_llmdeployment_replicas", **about, state="ready") == [REPLICAS]
    release.wait_working()


@pytest.mark.last
def test_serving_continues_while_the_api_server_is_down(
    chat: LLMDeployment, machine: RealCluster, release: Release, gateway_url: str, run: Run, report: Report
) -> None:
    before = {pod.uid: pod.restarts for pod in [*chat.pods(), *release.gateway_pods()]}
    control_plane = machine.control_plane
    with recorded(Traffic(gateway_url, model=chat.model, concurrency=3), report, chat) as traffic:
        traffic.wait_for_answers(6, "before")
        down = traffic.mark("API server killed")
        killed = datetime.now(UTC)
        control_plane.api_server.kill()
        try:
            time.sleep(OUTAGE_SECONDS)
        finally:
            control_plane.api_server.start()
        control_plane.wait_for_api_server()
        up = traffic.mark("API server answers again")
        since = datetime.now(UTC)
        run.outages.append(Outage(begun=killed, ended=since))
        # What stands in the cluster is from before: only a Lease renewed since says that an operator is back.
        until(lambda: _renewed(release) > since, what="an operator renewed its Lease", seconds=TAKEOVER_SECONDS)
        leads = traffic.mark("an operator leads")
        # Where nodes that could not renew their Leases count as lost, so do their pods until the kubelets speak again.
        release.wait_working()
        chat.wait_ready(replicas=REPLICAS)
        back = traffic.mark("all pods count as ready")
        traffic.wait_for_answers(4, "after")
    result = traffic.result
    assert result.between(down, up), "nothing was asked meanwhile"
    report.figure("API server down", up - down)
    report.figure("longest time between answers while it was down", result.longest_gap(down, up))
    report.figure("API server back to operator leading", leads - up)
    report.figure("API server back to all pods ready", back - up)
    after = {pod.uid: pod.restarts for pod in [*chat.pods(), *release.gateway_pods()]}
    assert after == before, "neither replicas nor gateways were restarted or replaced"


def _wait_until_it_streams_again(traffic: Traffic, victim: Pod) -> float:
    """Return the time at which a stream that started after the kill has its first token."""
    name = victim.replica
    traffic.wait_for(lambda live: live.streams.get(name, 0) == 0, NOTIFIED_SECONDS, "all its clients are disconnected")
    traffic.wait_for(lambda live: live.streams.get(name, 0) > 0, BACK_SECONDS, f"{name} streams again")
    return traffic.mark("it streams again")


def _two_gateways(release: Release) -> tuple[Pod, Pod]:
    serving = [pod for pod in release.gateway_pods() if pod.is_serving]
    assert len(serving) >= 2, "the chart's default is two gateways"
    return serving[0], serving[1]


def _renewed(release: Release) -> datetime:
    path = namespaced(release.namespace, "leases", "quire-operator", group="/apis/coordination.k8s.io/v1")
    return datetime.fromisoformat(release.kube.get(path)["spec"]["renewTime"])


def _broken_streams(release: Release, pod: Pod) -> float:
    pages = release.gateway_metrics()
    return sum(page.total("quire_gateway_broken_streams_total", backend=pod.replica) for page in pages)


def _deployment_generation(chat: LLMDeployment) -> int:
    path = namespaced(chat.namespace, "deployments", chat.name, group="/apis/apps/v1")
    generation: int = chat.kube.get(path)["metadata"]["generation"]
    return generation

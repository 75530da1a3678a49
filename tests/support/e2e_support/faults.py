"""Faults and evictions, each of which leaves the machine as it was, and the streams that they cut or must not cut."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from subprocess import CompletedProcess
from typing import Final

from e2e_support.errors import ApiError
from e2e_support.kube import Kube, namespaced
from e2e_support.long_streams import long_streams
from e2e_support.objects import Pod
from e2e_support.space import LLMDeployment
from e2e_support.target import Target
from e2e_support.traffic import CUT, Live, Permit, Traffic, TrafficResult
from quire_cluster.nodes.teardown import HostProcess
from quire_cluster.real_cluster import RealCluster

ENGINE_LOOP: Final = "quire_engine.ipc.loop"
"""A word in the command of the process that computes; the other process of an engine serves HTTP."""
STREAMS: Final = 6
BEYOND: Final = 1500
"""Additional tokens after the known ones, so that a kill interrupts running streams also on a fast machine. With prompt
and known tokens, they fit in the context of the scenarios' LLMDeployment, 2,048 tokens.
"""
BEGIN_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 320.0


def streams(url: str, chat: LLMDeployment, *, concurrency: int = STREAMS) -> Traffic:
    """Return traffic with this number of concurrent streams."""
    return long_streams(url, chat.model, beyond=BEYOND, concurrency=concurrency)


def wait_for_streams(traffic: Traffic, pods: list[Pod]) -> None:
    """Wait until each of these replicas has a stream that has started to answer."""

    def all_stream(live: Live) -> bool:
        return all(live.streams.get(pod.replica, 0) > 0 for pod in pods)

    traffic.wait_for(all_stream, BEGIN_SECONDS, f"a stream on each of {', '.join(pod.name for pod in pods)}")


def cut_on(pod: Pod, *, after: str, within_seconds: float) -> Permit:
    """Permit that requests on the victim end with an error or a broken connection, and no other failure."""
    return Permit(
        why="its stream ran where the kill hit",
        kinds=CUT,
        replica=pod.replica,
        after=after,
        within_seconds=within_seconds,
        at_most=STREAMS,
    )


def assert_only_cut_on(result: TrafficResult, victim: Pod, mark: str) -> None:
    """Check that streams elsewhere finished correctly and that some on the victim did not."""
    running = result.streams_during(result.seconds_of(mark))
    elsewhere = [record for name, records in running.items() if name != victim.replica for record in records]
    assert elsewhere, f"no stream ran elsewhere when it was said: {mark}"
    assert all(record.ok for record in elsewhere)
    there = running.get(victim.replica, ())
    assert any(not record.ok for record in there), f"the kill cut none of {len(there)} streams"


def kill(process: HostProcess) -> None:
    """Kill a process with SIGKILL, as the kernel does if memory runs out."""
    os.kill(process.pid, signal.SIGKILL)


def engine_process(machine: RealCluster, pod: Pod) -> HostProcess:
    """Return the process that computes."""
    return next(
        process
        for process in machine.pod_processes(pod.namespace, pod.name, "engine")
        if ENGINE_LOOP in process.command
    )


def main_process(machine: RealCluster, pod: Pod, container: str) -> HostProcess:
    """Return the first process of a container, which ends all others with it."""
    return machine.pod_processes(pod.namespace, pod.name, container)[0]


def same_pod(pods: list[Pod], before: Pod) -> Pod:
    """Return the current state of the same pod. Fail if it is gone."""
    return next(pod for pod in pods if pod.uid == before.uid)


def kill_for_good(target: Target, pod: Pod, *, container: str) -> None:
    """End a pod without a shutdown, so that it does not restart as the same pod.

    On our own machine, SIGKILL is used. On a user's cluster, the pod is deleted and may still shut down in order.
    """
    if target.machine is not None:
        for process in target.machine.pod_processes(pod.namespace, pod.name, container):
            with suppress(ProcessLookupError):  # its parent took it along
                os.kill(process.pid, signal.SIGKILL)
    # A restarted container would continue under the name of the pod.
    target.kube.delete(namespaced(pod.namespace, "pods", pod.name), grace_seconds=0)


@contextmanager
def without_prometheus(machine: RealCluster) -> Iterator[None]:
    """Kill Prometheus, and start it again with its data afterwards."""
    machine.prometheus.kill()
    try:
        yield
    finally:
        machine.prometheus.start()


def drain(kube: Kube, node: str) -> CompletedProcess[str]:
    """Run `kubectl drain` as before maintenance."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    return kube.run(["kubectl", "drain", node, *options], seconds=DRAIN_SECONDS)


@contextmanager
def uncordoned_in_the_end(kube: Kube, node: str) -> Iterator[None]:
    try:
        yield
    finally:
        kube.kubectl("uncordon", node)


def evict(kube: Kube, pod: Pod, *, dry_run: bool = False) -> str:
    """Request an eviction; with ``dry_run`` only check it. Return the reason of a refusal, or an empty string."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}, **({"dryRun": ["All"]} if dry_run else {})},
    }
    try:
        kube.create(f"{namespaced(pod.namespace, 'pods', pod.name)}/eviction", body)
    except ApiError as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            return str(error)
        raise
    return ""

"""Faults that kubectl cannot cause; each leaves the machine as it was."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from e2e_support.kube import namespaced
from e2e_support.objects import Pod
from e2e_support.target import Target
from quire_cluster.real_cluster import RealCluster


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

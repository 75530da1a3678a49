"""Ways to hurt what runs that kubectl has none for; each leaves the machine as it was."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from e2e_support.kube import namespaced
from e2e_support.objects import Pod
from e2e_support.target import Target
from quire_cluster.real_cluster import RealCluster


def kill_for_good(target: Target, pod: Pod, *, container: str) -> None:
    """End a pod so that it says nothing any more, and does not come back as itself.

    On our own machine by SIGKILL. On somebody else's cluster it is told to end: there it may still say goodbye.
    """
    if target.machine is not None:
        for process in target.machine.pod_processes(pod.namespace, pod.name, container):
            with suppress(ProcessLookupError):  # its parent took it along
                os.kill(process.pid, signal.SIGKILL)
    # A container that is started anew would go on where it was, under the pod's name.
    target.kube.delete(namespaced(pod.namespace, "pods", pod.name), grace_seconds=0)


@contextmanager
def without_prometheus(machine: RealCluster) -> Iterator[None]:
    """It is killed, and started again over its data."""
    machine.prometheus.kill()
    try:
        yield
    finally:
        machine.prometheus.start()

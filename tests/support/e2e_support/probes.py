"""Checks from inside: the permissions of a container, and the addresses that a pod can reach.

They run with the Python in every quire image, in pods that comply with the strictest Pod Security Standard.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from e2e_support import objects
from e2e_support.kube import namespaced
from e2e_support.manifests import restricted_pod
from e2e_support.objects import Pod
from e2e_support.space import Space
from e2e_support.waiting import until

PYTHON: Final = "/opt/quire/bin/python"
STARTED_SECONDS: Final = 90.0
PORT: Final = 8000
LISTENER: Final = "listener"
"""The name of the container."""
_INSIDE: Final = """
import json, os, pathlib
def refusal(path):
    try:
        pathlib.Path(path).write_text("x")
    except OSError as error:
        return os.strerror(error.errno)
print(json.dumps({
    "user": os.getuid(),
    "root": refusal("/x"),
    "code": refusal("/opt/quire/x"),
    "token": os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount"),
    "capabilities": next(l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")),
}))
"""
_SERVE_TMP: Final = (PYTHON, "-m", "http.server", str(PORT), "--directory", "/tmp")
_CONNECT: Final = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 4).close()
except OSError:
    print("false")
else:
    print("true")
"""


def inside(space: Space, pod: str, container: str) -> dict[str, Any]:
    """Return user, write errors, service account token and capabilities as seen by a process in the container."""
    found: dict[str, Any] = json.loads(space.kubectl("exec", pod, "-c", container, "--", PYTHON, "-c", _INSIDE))
    return found


def reaches(space: Space, pod: str, container: str, address: str) -> bool:
    """Return True if a process in this container can connect to the address."""
    output = space.kubectl("exec", pod, "-c", container, "--", PYTHON, "-c", _CONNECT, address, str(PORT))
    return bool(json.loads(output))


def listener(space: Space, name: str, *, image: str, command: Sequence[str] = _SERVE_TMP) -> Pod:
    """Return a pod whose command accepts connections at PORT, when it does."""
    path = namespaced(space.name, "pods")
    container = {
        "name": LISTENER,
        "image": image,
        "command": list(command),
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    space.kube.create(path, restricted_pod(name, container, {"terminationGracePeriodSeconds": 0}))

    def look() -> Pod | None:
        pod = objects.pod(space.kube.get(f"{path}/{name}"))
        return pod if pod.is_ready else None

    def explain() -> str:
        return space.kubectl("describe", "pod", name)

    return until(look, what=f"pod {space.name}/{name}", seconds=STARTED_SECONDS, explain=explain)

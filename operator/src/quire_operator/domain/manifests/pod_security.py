"""What ``spec.podTemplate`` may not loosen: pods run as nobody, unprivileged, apart from their node and each other.

Called by ``pod_contract``. Stricter than Kubernetes' restricted profile only for the containers that are ours.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

JSON = Mapping[str, object]


class Loosened(NamedTuple):
    """Where below the pod's spec, and why not."""

    path: str
    message: str


_HOST = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_FORBIDDEN: tuple[tuple[str, object], ...] = (
    ("privileged", True),
    ("allowPrivilegeEscalation", True),
    ("runAsNonRoot", False),
    ("runAsUser", 0),
    ("procMount", "Unmasked"),
)
_KEPT = ("allowPrivilegeEscalation", "readOnlyRootFilesystem")
_SECCOMP = ("RuntimeDefault", "Localhost")


def loosened_pod(before: JSON, after: JSON) -> Iterator[Loosened]:
    """In fields of the pod itself."""
    for field in _HOST:
        if after.get(field):
            yield Loosened(field, "must not be true: it breaks the isolation of the pods")
    account = before["serviceAccountName"]
    for field in ("serviceAccountName", "serviceAccount"):
        if after.get(field, account) != account:
            yield Loosened(field, f"may not be changed: annotate the ServiceAccount {account} with what it is to be")
    if after.get("automountServiceAccountToken") is not False:
        yield Loosened("automountServiceAccountToken", "must stay false: nothing in the pod talks to the API server")
    yield from _loosened_context(after, "securityContext")
    context = _map(after, "securityContext")
    if context.get("runAsNonRoot") is None:
        yield Loosened("securityContext.runAsNonRoot", "may not be removed: pods run unprivileged")
    if _map(context, "seccompProfile").get("type") is None:
        yield Loosened("securityContext.seccompProfile", "may not be removed: pods run unprivileged")


def loosened_container(after: JSON) -> Iterator[Loosened]:
    """In any container."""
    yield from _loosened_context(after, "securityContext")
    if _map(_map(after, "securityContext"), "capabilities").get("add"):
        yield Loosened("securityContext.capabilities.add", "may not be set: pods run without capabilities")
    ports = after.get("ports")
    if isinstance(ports, list) and any(isinstance(port, Mapping) and port.get("hostPort") for port in ports):
        yield Loosened("ports", "may have no hostPort: replicas are reached by their Service and the gateway")


def loosened_own_container(before: JSON, after: JSON) -> Iterator[Loosened]:
    """In a container of ours, beside what no container may."""
    ours, theirs = _map(before, "securityContext"), _map(after, "securityContext")
    for field in _KEPT:
        if theirs.get(field) != ours[field] and (field, theirs.get(field)) not in _FORBIDDEN:
            yield Loosened(f"securityContext.{field}", f"must stay {_shown(ours[field])}: pods run unprivileged")
    drop = _map(theirs, "capabilities").get("drop")
    if not isinstance(drop, list) or "ALL" not in drop:
        yield Loosened("securityContext.capabilities.drop", "must stay [ALL]: pods run without capabilities")


def _loosened_context(holder: JSON, where: str) -> Iterator[Loosened]:
    context = _map(holder, "securityContext")
    for field, refused in _FORBIDDEN:
        if field in context and context[field] == refused:
            yield Loosened(f"{where}.{field}", f"must not be {_shown(refused)}: pods run unprivileged")
    seccomp = _map(context, "seccompProfile").get("type")
    if seccomp is not None and seccomp not in _SECCOMP:
        yield Loosened(f"{where}.seccompProfile.type", f"must be {' or '.join(_SECCOMP)}: pods run unprivileged")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}

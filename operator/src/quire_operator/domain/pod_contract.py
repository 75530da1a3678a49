"""What ``spec.podTemplate`` may not change: what the gateway, the probes, the drain and the promised security rely on.

Called by ``pod_template`` with the pod before and after the merge. Everything else is the user's to change.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire_operator.domain.fields import Problem

JSON = Mapping[str, object]

ENGINE = "engine"
_HOST = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_FIXED = {
    "image": "set spec.engine.image instead",
    "command": "the operator sets it",
    "args": "set the fields of spec.engine, or spec.engine.extraArgs",
    "ports": "the gateway and the probes use it",
    "lifecycle": "draining relies on it",
}
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_CONTAINER_LISTS = ("containers", "initContainers")
_FORBIDDEN = {"privileged": True, "allowPrivilegeEscalation": True, "runAsNonRoot": False, "runAsUser": 0}


def contract_problems(before: JSON, after: JSON, *, selector: Mapping[str, str]) -> Iterator[Problem]:
    """Why the merged pod template ``after`` is refused; nothing if it is fine."""
    labels = _map(_map(after, "metadata"), "labels")
    for name, value in selector.items():
        if labels.get(name) != value:
            yield _problem(f"metadata.labels[{name}]", "may not be changed: replicas are found by it")
    pod_before, pod_after = _map(before, "spec"), _map(after, "spec")
    yield from _pod_problems(pod_before, pod_after)
    for field in _CONTAINER_LISTS:
        names_after = _by_name(pod_after, field)
        for name in _by_name(pod_before, field).keys() - names_after.keys():
            yield _problem(f"spec.{field}[name={name}]", "may not be removed")
        for name, container in names_after.items():
            yield from _security_problems(container, f"spec.{field}[name={name}].securityContext")
    engine_before = _by_name(pod_before, "containers")[ENGINE]
    engine_after = _by_name(pod_after, "containers").get(ENGINE)
    if engine_after is not None:
        yield from _engine_problems(engine_before, engine_after)


def _pod_problems(before: JSON, after: JSON) -> Iterator[Problem]:
    for field in _HOST:
        if after.get(field):
            yield _problem(f"spec.{field}", "must not be true: it breaks the isolation of the pods")
    grace, least = after.get("terminationGracePeriodSeconds"), before["terminationGracePeriodSeconds"]
    if not isinstance(grace, int) or not isinstance(least, int) or grace < least:
        yield _problem(
            "spec.terminationGracePeriodSeconds", f"must be >= {least}, so that spec.drain.timeout can be kept"
        )
    yield from _security_problems(after, "spec.securityContext")


def _engine_problems(before: JSON, after: JSON) -> Iterator[Problem]:
    where = f"spec.containers[name={ENGINE}]"
    for field, instead in _FIXED.items():
        if after.get(field) != before.get(field):
            yield _problem(f"{where}.{field}", f"may not be changed: {instead}")
    for probe in _PROBES:
        if _map(after, probe).get("httpGet") != _map(before, probe).get("httpGet"):
            yield _problem(f"{where}.{probe}", "may change its times and thresholds only, not what it asks")
    mounts = {mount.get("mountPath"): mount for mount in _items(after, "volumeMounts")}
    for mount in _items(before, "volumeMounts"):
        if mounts.get(mount["mountPath"]) != mount:
            yield _problem(f"{where}.volumeMounts[mountPath={mount['mountPath']}]", "may not be changed")


def _security_problems(holder: JSON, where: str) -> Iterator[Problem]:
    context = _map(holder, "securityContext")
    for field, refused in _FORBIDDEN.items():
        if field in context and context[field] == refused:
            yield _problem(f"{where}.{field}", f"must not be {str(refused).lower()}: pods run unprivileged")


def _problem(path: str, message: str) -> Problem:
    return Problem(path=f"spec.podTemplate.{path}", message=message)


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _items(body: JSON, key: str) -> Sequence[JSON]:
    value = body.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _by_name(pod: JSON, field: str) -> dict[str, JSON]:
    return {str(item.get("name")): item for item in _items(pod, field)}

"""The fields that ``spec.podTemplate`` may not change because gateway, probes, drain and status depend on them.

``pod_template`` calls it with the pod before and after the merge; ``pod_security`` has the rules that isolate pods.
Users may change all other fields.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from quire_common.contract import engine
from quire_common.contract.engine import ENVIRONMENT_PREFIX, FLAGS_ONLY_VARIABLE, GROUP_SECRET_VARIABLE
from quire_operator.domain.manifests.pod_security import (
    Loosened,
    loosened_annotations,
    loosened_container,
    loosened_own_container,
    loosened_pod,
)
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.untyped import JSON, items_of, section_of

ENGINE = "engine"
_FIXED = {
    "image": "set spec.engine.image instead",
    "command": "the operator sets it",
    "args": "set the fields of spec.engine, or spec.engine.extraArgs",
    "ports": "the gateway and the probes use it",
    "lifecycle": "draining relies on it",
    "terminationMessagePolicy": "status reads the cause of an exit from it",
    "terminationMessagePath": "status reads the cause of an exit from it",
}
_FIXED_IN_INIT = {field: "the operator sets it" for field in ("image", "command", "args", "restartPolicy")}
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_AMOUNTS = ("limits", "requests")
_CONTAINER_LISTS = ("containers", "initContainers")
_SCRATCH = "cache"
"""The only volume of ours that may become any other type: its contents are a cache."""


def contract_problems(
    before: JSON, after: JSON, *, selector: Mapping[str, str], allowed: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield why the merged pod template ``after`` is rejected.

    ``allowed`` are the rules of ``pod_security`` that the administrator lifted. Messages name the rule in few words,
    because a condition lists all problems.
    """
    yield from _security_problems(loosened_annotations(section_of(after, "metadata", "annotations")), "", allowed)
    labels = section_of(after, "metadata", "labels")
    for name, value in selector.items():
        if labels.get(name) != value:
            yield _problem(f"metadata.labels[{name}]", "may not be changed: it selects the replicas")
    pod_before, pod_after = section_of(before, "spec"), section_of(after, "spec")
    yield from _security_problems(loosened_pod(pod_before, pod_after), "spec.", allowed)
    yield from _pod_problems(pod_before, pod_after)
    yield from _volume_problems(pod_before, pod_after)
    for field in _CONTAINER_LISTS:
        yield from _container_problems(_by_name(pod_before, field), _by_name(pod_after, field), field, allowed)
    engine_before = _by_name(pod_before, "containers")[ENGINE]
    engine_after = _by_name(pod_after, "containers").get(ENGINE)
    if engine_after is not None:
        yield from _engine_problems(engine_before, engine_after)


def _security_problems(found: Iterable[Loosened], prefix: str, allowed: Collection[str]) -> Iterator[Problem]:
    for path, message, rule in found:
        if rule is None:
            yield _problem(f"{prefix}{path}", message)
        elif rule not in allowed:
            yield _problem(f"{prefix}{path}", f"{message} (exception: {rule})")


def _pod_problems(before: JSON, after: JSON) -> Iterator[Problem]:
    if after.get("enableServiceLinks") is not False:
        yield _problem(
            "spec.enableServiceLinks", "must stay false: variables of Services would change the engine's settings"
        )
    if after.get("nodeName"):
        yield _problem("spec.nodeName", "may not be set: replicas need the scheduler; use nodeSelector or affinity")
    grace, least = after.get("terminationGracePeriodSeconds"), before["terminationGracePeriodSeconds"]
    if not isinstance(grace, int) or not isinstance(least, int) or grace < least:
        yield _problem(
            "spec.terminationGracePeriodSeconds", f"must be >= {least}, so that spec.drain.timeout can be kept"
        )


def _volume_problems(before: JSON, after: JSON) -> Iterator[Problem]:
    volumes = _by_name(after, "volumes")
    for name, ours in _by_name(before, "volumes").items():
        theirs, where = volumes.get(name), f"spec.volumes[name={name}]"
        if theirs is None:
            yield _problem(where, "may not be removed: the operator's containers use it")
        elif name != _SCRATCH and "emptyDir" in ours and theirs.keys() != ours.keys():
            yield _problem(where, "belongs to the operator: only the size and medium of its emptyDir may be changed")
        elif name != _SCRATCH and "emptyDir" not in ours and theirs != ours:
            yield _problem(where, "belongs to the operator: choose another name for a volume of your own")


def _container_problems(
    before: Mapping[str, JSON], after: Mapping[str, JSON], field: str, allowed: Collection[str]
) -> Iterator[Problem]:
    for name in before.keys() - after.keys():
        yield _problem(f"spec.{field}[name={name}]", "may not be removed")
    for name, container in after.items():
        where = f"spec.{field}[name={name}]"
        yield from _security_problems(loosened_container(container), f"{where}.", allowed)
        if name in before:
            yield from _security_problems(loosened_own_container(before[name], container), f"{where}.", allowed)
            if field == "initContainers":
                yield from _changed(before[name], container, where, _FIXED_IN_INIT)
        else:
            yield from _port_problems(container, where)


def _port_problems(container: JSON, where: str) -> Iterator[Problem]:
    """Yield conflicts with the engine's port: containers of a pod share ports, and a Service finds its port by name."""
    for port in items_of(container, "ports"):
        if port.get("containerPort") == engine.HTTP_PORT:
            yield _problem(f"{where}.ports", f"may not have {engine.HTTP_PORT}: the engine listens there")
        if port.get("name") == engine.HTTP_PORT_NAME:
            yield _problem(
                f"{where}.ports", f"may not be called {engine.HTTP_PORT_NAME}: the engine's port has this name"
            )


def _engine_problems(before: JSON, after: JSON) -> Iterator[Problem]:
    where = f"spec.containers[name={ENGINE}]"
    yield from _changed(before, after, where, _FIXED)
    for probe in _PROBES:
        if _action(section_of(after, probe)) != _action(section_of(before, probe)):
            yield _problem(f"{where}.{probe}", "only its times and thresholds may be changed")
    for amounts in _AMOUNTS:
        if section_of(after, "resources").get(amounts) != section_of(before, "resources").get(amounts):
            yield _problem(
                f"{where}.resources.{amounts}", f"set spec.resources.{amounts} instead, which the capacity check reads"
            )
    yield from _environment_problems(before, after, where)
    mounts = {mount.get("mountPath"): mount for mount in items_of(after, "volumeMounts")}
    for mount in items_of(before, "volumeMounts"):
        if mounts.get(mount["mountPath"]) != mount:
            yield _problem(f"{where}.volumeMounts[mountPath={mount['mountPath']}]", "may not be changed")


def _environment_problems(before: JSON, after: JSON, where: str) -> Iterator[Problem]:
    for variable in items_of(after, "env"):
        if str(variable.get("name")).startswith(ENVIRONMENT_PREFIX):
            yield _problem(f"{where}.env[name={variable['name']}]", _FIXED["args"])
    for name in (GROUP_SECRET_VARIABLE, FLAGS_ONLY_VARIABLE):
        if _variable(after, name) != _variable(before, name):
            yield _problem(f"{where}.env[name={name}]", "may not be changed: the operator sets it")
    for index, source in enumerate(items_of(after, "envFrom")):
        if str(source.get("prefix", "")).startswith(ENVIRONMENT_PREFIX):
            yield _problem(f"{where}.envFrom[{index}].prefix", _FIXED["args"])


def _variable(container: JSON, name: str) -> JSON | None:
    return next((variable for variable in items_of(container, "env") if variable.get("name") == name), None)


def _action(probe: JSON) -> dict[str, object]:
    return {field: value for field, value in probe.items() if field in ("httpGet", "exec", "tcpSocket", "grpc")}


def _changed(before: JSON, after: JSON, where: str, fixed: Mapping[str, str]) -> Iterator[Problem]:
    for field, instead in fixed.items():
        if after.get(field) != before.get(field):
            yield _problem(f"{where}.{field}", f"may not be changed: {instead}")


def _problem(path: str, message: str) -> Problem:
    return Problem(path=f"spec.podTemplate.{path}", message=message)


def _by_name(pod: JSON, field: str) -> dict[str, JSON]:
    return {str(item.get("name")): item for item in items_of(pod, field)}

"""The rules for pods: those that isolate them, and the fields that ``spec.podTemplate`` may not change. Pure.

Gateway, probes, drain and status depend on the protected fields; users may change all others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from quire_common.contract import engine
from quire_common.contract.engine import ENVIRONMENT_PREFIX, FLAGS_ONLY_VARIABLE, GROUP_SECRET_VARIABLE
from quire_operator.api.fields import JSON, Problem, items_of, section_of

ALLOWED_VOLUMES = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
        "secret",
    }
)
"""The volume types of the restricted profile. Every other type, known or not, is rejected."""
OTHER_VOLUMES = frozenset(
    {
        *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flexVolume", "flocker"),
        *("gcePersistentDisk", "gitRepo", "glusterfs", "hostPath", "iscsi", "nfs", "photonPersistentDisk"),
        *("portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
    }
)
RULES = frozenset(
    {
        *("appArmorProfile", "capabilities", "hostIPC", "hostNetwork", "hostPID", "hostPort", "hostProbe"),
        *("privilegeEscalation", "privileged", "procMount", "rootGroup", "rootUser", "seLinuxOptions"),
        *("seccompProfile", "serviceAccountToken", "shareProcessNamespace", "sysctls", "systemPriority"),
        "windowsOptions",
    }
)
EXCEPTIONS = OTHER_VOLUMES | RULES
"""All names that ``operator.podTemplate.allow`` accepts."""


class Loosened(NamedTuple):
    """A field below the pod's spec that loosens its security."""

    path: str
    message: str
    rule: str | None
    """The name by which an administrator can allow it; None if it cannot be allowed."""


_HOST = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_SECCOMP = ("RuntimeDefault", "Localhost")
_KNOWN_CONTEXT = frozenset(
    {
        *("allowPrivilegeEscalation", "appArmorProfile", "capabilities", "fsGroup", "fsGroupChangePolicy"),
        *("privileged", "procMount", "readOnlyRootFilesystem", "runAsGroup", "runAsNonRoot", "runAsUser"),
        *("seLinuxChangePolicy", "seLinuxOptions", "seccompProfile", "supplementalGroups"),
        *("supplementalGroupsPolicy", "sysctls", "windowsOptions"),
    }
)
_APP_ARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HOOKS = ("postStart", "preStop")
_UNPRIVILEGED = "pods run unprivileged"


def loosened_pod(before: JSON, after: JSON) -> Iterator[Loosened]:
    """Yield the fields of the pod itself that loosen its security."""
    for field in _HOST:
        if after.get(field):
            yield Loosened(field, "must not be true: it breaks the isolation of the pods", field)
    account = before["serviceAccountName"]
    for field in ("serviceAccountName", "serviceAccount"):
        if after.get(field, account) != account:
            instead = f"annotate the ServiceAccount {account} with what it is to be"
            yield Loosened(field, f"may not be changed: {instead}", None)
    if after.get("automountServiceAccountToken") is not False:
        message = "must stay false: nothing in the pod talks to the API server"
        yield Loosened("automountServiceAccountToken", message, "serviceAccountToken")
    priority = after.get("priorityClassName")
    if isinstance(priority, str) and priority.startswith("system-"):
        yield Loosened(
            "priorityClassName",
            "must not be a system class: replicas may not evict the node's own pods",
            "systemPriority",
        )
    yield from _loosened_context(after)
    context = section_of(after, "securityContext")
    if context.get("runAsNonRoot") is not True and context.get("runAsNonRoot") is not False:
        yield Loosened("securityContext.runAsNonRoot", f"may not be removed: {_UNPRIVILEGED}", "rootUser")
    if section_of(context, "seccompProfile").get("type") is None:
        yield Loosened("securityContext.seccompProfile", f"may not be removed: {_UNPRIVILEGED}", "seccompProfile")
    yield from _loosened_volumes(after)


def loosened_annotations(annotations: JSON) -> Iterator[Loosened]:
    """Yield the annotations of the pod by which older clusters choose its AppArmor profile."""
    for name, value in annotations.items():
        is_confined = value == "runtime/default" or (isinstance(value, str) and value.startswith("localhost/"))
        if name.startswith(_APP_ARMOR_ANNOTATION) and not is_confined:
            message = f"must be runtime/default or localhost/PROFILE: {_UNPRIVILEGED}"
            yield Loosened(f"metadata.annotations[{name}]", message, "appArmorProfile")


def loosened_container(after: JSON) -> Iterator[Loosened]:
    """Yield the fields of any container, ours or added, that loosen its security."""
    yield from _loosened_context(after)
    context = section_of(after, "securityContext")
    capabilities = section_of(context, "capabilities")
    if capabilities.get("add"):
        message = "may not be set: pods run without capabilities"
        yield Loosened("securityContext.capabilities.add", message, "capabilities")
    drop = capabilities.get("drop")
    if not isinstance(drop, list) or "ALL" not in drop:
        message = "must be [ALL]: pods run without capabilities"
        yield Loosened("securityContext.capabilities.drop", message, "capabilities")
    if context.get("allowPrivilegeEscalation") is not False:
        message = f"must be false: {_UNPRIVILEGED}"
        yield Loosened("securityContext.allowPrivilegeEscalation", message, "privilegeEscalation")
    if any(port.get("hostPort") for port in items_of(after, "ports")):
        yield Loosened(
            "ports", "may have no hostPort: replicas are reached by their Service and the gateway", "hostPort"
        )
    for where, action in _actions(after):
        for kind in ("httpGet", "tcpSocket"):
            if section_of(action, kind).get("host"):
                message = "may not be set: the kubelet would connect to an address of the pod's choice"
                yield Loosened(f"{where}.{kind}.host", message, "hostProbe")


def loosened_own_container(before: JSON, after: JSON) -> Iterator[Loosened]:
    """Yield additional fields that a container of ours may not loosen."""
    field = "readOnlyRootFilesystem"
    if section_of(after, "securityContext").get(field) != section_of(before, "securityContext")[field]:
        yield Loosened(f"securityContext.{field}", f"must stay true: {_UNPRIVILEGED}", None)


def _actions(container: JSON) -> Iterator[tuple[str, JSON]]:
    """Yield the probes and hooks of a container, which may name a host."""
    for probe in _PROBES:
        yield probe, section_of(container, probe)
    for hook in _HOOKS:
        yield f"lifecycle.{hook}", section_of(container, "lifecycle", hook)


def _loosened_context(holder: JSON) -> Iterator[Loosened]:
    """Yield the fields of a security context, of a pod or a container, that loosen security."""
    context = section_of(holder, "securityContext")
    for field in sorted(context.keys() - _KNOWN_CONTEXT):
        yield _in_context(field, "is not known to this version of quire, which therefore cannot allow it", None)
    if context.get("privileged"):
        yield _in_context("privileged", f"must not be true: {_UNPRIVILEGED}", "privileged")
    if context.get("runAsNonRoot") is False:
        yield _in_context("runAsNonRoot", f"must not be false: {_UNPRIVILEGED}", "rootUser")
    if context.get("runAsUser") == 0:
        yield _in_context("runAsUser", f"must not be 0: {_UNPRIVILEGED}", "rootUser")
    yield from _root_groups(context)
    if context.get("procMount") not in (None, "Default"):
        yield _in_context("procMount", f"must be Default: {_UNPRIVILEGED}", "procMount")
    for field in ("seccompProfile", "appArmorProfile"):
        kind = section_of(context, field).get("type")
        if kind is not None and kind not in _SECCOMP:
            yield _in_context(f"{field}.type", f"must be {' or '.join(_SECCOMP)}: {_UNPRIVILEGED}", field)
    for field in ("seLinuxOptions", "sysctls", "windowsOptions"):
        if context.get(field):
            yield _in_context(field, "may not be set: it changes the isolation of the pods", field)


def _root_groups(context: JSON) -> Iterator[Loosened]:
    for field in ("runAsGroup", "fsGroup"):
        if context.get(field) == 0:
            yield _in_context(field, "must not be 0: root's group may write to sockets of the node", "rootGroup")
    groups = context.get("supplementalGroups")
    if isinstance(groups, list) and 0 in groups:
        message = "must not contain 0: root's group may write to sockets of the node"
        yield _in_context("supplementalGroups", message, "rootGroup")


def _in_context(field: str, message: str, rule: str | None) -> Loosened:
    return Loosened(f"securityContext.{field}", message, rule)


def _loosened_volumes(pod: JSON) -> Iterator[Loosened]:
    for volume in items_of(pod, "volumes"):
        where = f"volumes[name={volume.get('name')}]"
        for kind in sorted(volume.keys() - ALLOWED_VOLUMES - {"name"}):
            if volume[kind] is None:
                continue
            message = f"may not be a volume of a replica; there are: {', '.join(sorted(ALLOWED_VOLUMES))}"
            yield Loosened(f"{where}.{kind}", message, kind if kind in OTHER_VOLUMES else None)
        for number, source in enumerate(items_of(section_of(volume, "projected"), "sources")):
            if source.get("serviceAccountToken") is not None:
                yield Loosened(
                    f"{where}.projected.sources[{number}].serviceAccountToken",
                    "may not be projected: nothing in the pod talks to the API server",
                    "serviceAccountToken",
                )


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

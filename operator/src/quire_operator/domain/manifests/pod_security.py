"""The security that ``spec.podTemplate`` may not loosen: pods run unprivileged and isolated from nodes and other pods.

``pod_contract`` calls it. The rules are those of the Pod Security Standards' *restricted* profile, for all containers.
In addition, groups are not 0, and pods have no token of the API server, no sysctls, no SELinux options and no system
priority. Each rule has a name by which the operator's administrator can lift it (``--pod-template-allow``).
"""

from collections.abc import Iterator
from typing import NamedTuple

from quire_operator.domain.resource.untyped import JSON, items_of, section_of

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

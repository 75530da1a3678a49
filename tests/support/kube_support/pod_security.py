"""Pod templates that loosen the security of pods, one field each.

They cover every field of the Pod Security Standards' restricted profile, and those that quire restricts in addition.
"""

from dataclasses import dataclass
from typing import Any, Final

from quire_operator.deployment.pod_rules import OTHER_VOLUMES

SAFE: Final[dict[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
"""The security context that the restricted profile requires of a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pod template, the field for which it is rejected, and the rule by which it can be allowed."""

    template: dict[str, Any]
    path: str
    rule: str | None
    is_standard: bool = True
    """True if the API server rejects it under the restricted profile."""


def _pod(rule: str | None, path: str, *, standard: bool = True, **fields: Any) -> Case:
    return Case(template={"spec": fields}, path=f"spec.{path}", rule=rule, is_standard=standard)


def _context(rule: str | None, path: str, value: Any, *, standard: bool = True) -> Case:
    field = path.partition(".")[0]
    return _pod(rule, f"securityContext.{path}", standard=standard, securityContext={field: value})


def _container(
    rule: str | None, path: str, *, init: bool = False, standard: bool = True, security: Any = None, **fields: Any
) -> Case:
    where = "initContainers" if init else "containers"
    container = {"name": "s", "image": "s", "securityContext": SAFE | (security or {})} | fields
    return _pod(rule, f"{where}[name=s].{path}", standard=standard, **{where: [container]})


def _security(rule: str | None, path: str, value: Any, *, init: bool = False, standard: bool = True) -> Case:
    field = path.partition(".")[0]
    return _container(rule, f"securityContext.{path}", init=init, standard=standard, security={field: value})


def _volume(kind: str) -> Case:
    source = {"hostPath": {"path": "/run/containerd"}, "nfs": {"server": "s", "path": "/"}}.get(kind, {})
    path = f"volumes[name=v].{kind}"
    return _pod(kind, path, standard=kind in ("hostPath", "nfs"), volumes=[{"name": "v", kind: source}])


_TOKEN: Final = {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/engine"

CASES: Final[dict[str, Case]] = {
    **{field: _pod(field, field, **{field: True}) for field in ("hostNetwork", "hostPID", "hostIPC")},
    "shareProcessNamespace": _pod(
        "shareProcessNamespace", "shareProcessNamespace", standard=False, shareProcessNamespace=True
    ),
    "windowsOptions of the pod": _context("windowsOptions", "windowsOptions", {"hostProcess": True}),
    "windowsOptions of a container": _security("windowsOptions", "windowsOptions", {"hostProcess": True}),
    "privileged": _security("privileged", "privileged", True),
    "privileged before the start": _security("privileged", "privileged", True, init=True),
    "added capability": _security("capabilities", "capabilities.add", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "added network capability": _security(
        "capabilities", "capabilities.add", {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}, standard=False
    ),
    "kept capabilities": _security("capabilities", "capabilities.drop", {}),
    "kept capabilities before the start": _security("capabilities", "capabilities.drop", None, init=True),
    **{kind: _volume(kind) for kind in sorted(OTHER_VOLUMES)},
    "unknown volume": _pod(
        None, "volumes[name=v].newKind", standard=False, volumes=[{"name": "v", "newKind": {"a": "b"}}]
    ),
    "hostPort": _container("hostPort", "ports", ports=[{"containerPort": 1, "hostPort": 1}]),
    "host of a probe": _container(
        "hostProbe", "livenessProbe.httpGet.host", livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}
    ),
    "host of a hook": _container(
        "hostProbe",
        "lifecycle.postStart.tcpSocket.host",
        lifecycle={"postStart": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}},
    ),
    "appArmorProfile of the pod": _context("appArmorProfile", "appArmorProfile.type", {"type": "Unconfined"}),
    "appArmorProfile of a container": _security("appArmorProfile", "appArmorProfile.type", {"type": "Unconfined"}),
    "appArmor annotation": Case(
        template={"metadata": {"annotations": {_ANNOTATION: "unconfined"}}},
        path=f"metadata.annotations[{_ANNOTATION}]",
        rule="appArmorProfile",
    ),
    "seLinuxOptions of the pod": _context("seLinuxOptions", "seLinuxOptions", {"type": "spc_t"}),
    "seLinuxOptions of a container": _security("seLinuxOptions", "seLinuxOptions", {"user": "system_u"}),
    "level of seLinuxOptions": _context("seLinuxOptions", "seLinuxOptions", {"level": "s0:c1,c2"}, standard=False),
    "procMount": _security("procMount", "procMount", "Unmasked"),
    "seccompProfile of the pod": _context("seccompProfile", "seccompProfile.type", {"type": "Unconfined"}),
    "seccompProfile of a container": _security("seccompProfile", "seccompProfile.type", {"type": "Unconfined"}),
    "removed seccompProfile": _context("seccompProfile", "seccompProfile", None),
    "sysctls": _context("sysctls", "sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    "privilegeEscalation": _security("privilegeEscalation", "allowPrivilegeEscalation", True),
    "unset privilegeEscalation": _security("privilegeEscalation", "allowPrivilegeEscalation", None, init=True),
    "runAsNonRoot of the pod": _context("rootUser", "runAsNonRoot", False),
    "removed runAsNonRoot": _context("rootUser", "runAsNonRoot", None),
    "runAsNonRoot of a container": _security("rootUser", "runAsNonRoot", False),
    "root user of the pod": _context("rootUser", "runAsUser", 0),
    "root user of a container": _security("rootUser", "runAsUser", 0, init=True),
    "root group of the pod": _context("rootGroup", "runAsGroup", 0, standard=False),
    "root group of a container": _security("rootGroup", "runAsGroup", 0, standard=False),
    "root group of volumes": _context("rootGroup", "fsGroup", 0, standard=False),
    "supplemental root group": _context("rootGroup", "supplementalGroups", [1000, 0], standard=False),
    "token of the API server": _pod(
        "serviceAccountToken", "automountServiceAccountToken", standard=False, automountServiceAccountToken=True
    ),
    "projected token": _pod(
        "serviceAccountToken",
        "volumes[name=v].projected.sources[0].serviceAccountToken",
        standard=False,
        volumes=[_TOKEN],
    ),
    "system priority": _pod(
        "systemPriority", "priorityClassName", standard=False, priorityClassName="system-node-critical"
    ),
    "unknown field": _context(None, "newField", True, standard=False),
}

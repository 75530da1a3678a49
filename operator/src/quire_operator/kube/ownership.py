"""The owners of an object's fields: Kubernetes' ``managedFields``, read to find drift and fields of other clients.

A path is a tuple of FieldsV1 elements: ``f:name`` (a field), ``k:{"name":"engine"}`` (a list item by its keys), ``v:…``
(a set item).
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_common.contract.engine import ENVIRONMENT_PREFIX
from quire_operator.api.fields import items_of, section_of
from quire_operator.api.names import FIELD_MANAGER

Path = tuple[str, ...]
Tree = Mapping[str, "Tree"]

_NOTHING = object()
_ENGINE = 'k:{"name":"engine"}'
_POD_SPECS: tuple[Path, ...] = (
    ("f:spec", "f:template", "f:spec"),
    ("f:spec", "f:leaderWorkerTemplate", "f:leaderTemplate", "f:spec"),
    ("f:spec", "f:leaderWorkerTemplate", "f:workerTemplate", "f:spec"),
)
# A field of Services with which replicas would get requests before they are ready.
_UNREADY_ADDRESSES: Path = ("f:spec", "f:publishNotReadyAddresses")
# Paths below the pod spec. A field that another client adds here or below changes how the gateway, the probes or the
# security rules see a replica.
_OF_PODS = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "nodeName", "securityContext")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_OF_ENGINES = ("ports", "command", "args", "lifecycle", "securityContext", *_PROBES)
_CONTRACT: tuple[Path, ...] = (
    *((f"f:{name}",) for name in _OF_PODS),
    *(("f:containers", _ENGINE, f"f:{name}") for name in _OF_ENGINES),
)
_ENGINE_SETTINGS = ("f:containers", _ENGINE, "f:env")
_ENGINE_SETTING = f'k:{{"name":"{ENVIRONMENT_PREFIX}'
_CONTAINER_LISTS = ("f:containers", "f:initContainers", "f:ephemeralContainers")
# Many clients write here side by side, so their entries are distinguished even if none is ours.
_MAPS_OF_STRANGERS = ("f:metadata", "f:annotations", "f:labels")
# `kubectl rollout restart` writes this field, and may.
_RESTARTED_AT: Path = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:kubectl.kubernetes.io/restartedAt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignField:
    """The topmost field of ``spec`` that another client set and that contains no field of ours."""

    path: Path
    manager: str
    child: str = ""
    """The object that contains the field, if messages need it."""

    def __str__(self) -> str:
        where = f"to the {self.child}: " if self.child else ""
        return f"{where}{path_text(self.path)} (set by {self.manager})"


def fingerprint(body: Mapping[str, object]) -> str:
    """Return a hash that changes exactly when one of our fields was changed or removed.

    It covers the names and the values of our fields. The values count because a second operator writes as the same
    manager, and the entry's time has a resolution of a second. It is "" if no field is ours.
    """
    for entry in managed_fields(body):
        if _is_ours(entry):
            ours = _values(_tree(entry), body)
            text = json.dumps([entry.get("fieldsV1"), ours], sort_keys=True, separators=(",", ":"), default=str)
            return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return ""


def own_entry_time(body: Mapping[str, object]) -> str:
    """Return the time at which we last changed a field of an object; empty if no field is ours."""
    return next((str(entry.get("time", "")) for entry in managed_fields(body) if _is_ours(entry)), "")


def managed_fields(body: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    return items_of(section_of(body, "metadata"), "managedFields")


def _values(tree: Tree, here: object) -> object:
    """Return the object's values at the leaves of a tree of fields."""
    below = {element: further for element, further in tree.items() if element != "."}
    if not below:
        return here
    found: dict[str, object] = {}
    for element, further in below.items():
        kind, _, text = element.partition(":")
        if kind == "f" and isinstance(here, Mapping):
            found[element] = _values(further, here.get(text))
        elif kind == "k" and isinstance(here, list):
            found[element] = _values(further, _item(here, json.loads(text)))
    return found


def foreign_fields(managed_fields: Sequence[Mapping[str, object]]) -> tuple[ForeignField, ...]:
    """Return the fields that other clients set in ``spec``."""
    ours: Tree = next((_tree(entry) for entry in managed_fields if _is_ours(entry)), {})
    found: dict[Path, ForeignField] = {}
    for entry in managed_fields:
        if _is_ours(entry) or entry.get("subresource") == "status":
            continue
        manager = str(entry.get("manager", "an unknown client"))
        for path in _not_in(_tree(entry).get("f:spec", {}), ours.get("f:spec", {}), ("f:spec",)):
            found.setdefault(path, ForeignField(path=path, manager=manager))
    found.pop(_RESTARTED_AT, None)
    return tuple(found[path] for path in sorted(found))


def breaks_contract(path: Path) -> bool:
    """Return True if an added field changes how the gateway, the probes or the security rules see a replica."""
    if path == _UNREADY_ADDRESSES:
        return True
    prefix = next((prefix for prefix in _POD_SPECS if path[: len(prefix)] == prefix), None)
    if prefix is None:
        return False
    below = path[len(prefix) :]
    if below[:1] and below[0] in _CONTAINER_LISTS and len(below) <= 2:
        return True
    if below[:3] == _ENGINE_SETTINGS and below[3:] and below[3].startswith(_ENGINE_SETTING):
        return True
    return any(below[: len(guarded)] == guarded for guarded in _CONTRACT)


def exists_in(body: Mapping[str, object], path: Path) -> bool:
    here: object = body
    for element in path:
        here = _step(here, element, default=_NOTHING)
    return here is not _NOTHING


def without(body: Mapping[str, object], paths: Sequence[Path]) -> dict[str, object]:
    """Return a JSON merge patch that removes these fields of an object; it repeats the rest of lists that have them."""
    patch: dict[str, object] = {}
    changed = copy.deepcopy(dict(body))
    for path in paths:
        _delete(changed, path)
        fields = tuple(itertools.takewhile(lambda element: element.startswith("f:"), path))
        here, left = patch, changed
        for element in fields[:-1]:
            name = element.removeprefix("f:")
            here, left = here.setdefault(name, {}), left.get(name, {})  # type: ignore[assignment]
        last = fields[-1].removeprefix("f:")
        here[last] = left.get(last)
    return patch


def _delete(here: object, path: Path) -> None:
    """Remove the field or list item at a path from a copy of an object."""
    for element in path[:-1]:
        here = _step(here, element, default=None)
    kind, _, text = path[-1].partition(":")
    if kind == "f" and isinstance(here, dict):
        here.pop(text, None)
    elif kind == "k" and isinstance(here, list):
        item = _item(here, json.loads(text))
        here[:] = [each for each in here if each is not item]


def path_text(path: Path) -> str:
    """Return the path as text, such as ``spec.template.spec.containers[name=engine].image``."""
    text = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "k":
            text += "[" + ",".join(f"{key}={value}" for key, value in json.loads(rest).items()) + "]"
        elif kind == "f":
            text += f".{rest}" if text else rest
        else:
            text += f"[{rest}]"
    return text


def _is_ours(entry: Mapping[str, object]) -> bool:
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource")


def _tree(entry: Mapping[str, object]) -> Tree:
    tree = entry.get("fieldsV1")
    return tree if isinstance(tree, Mapping) else {}


def _not_in(theirs: Tree, ours: Tree, prefix: Path) -> Iterator[Path]:
    for element, below in theirs.items():
        if element == ".":
            continue
        if below and (element in ours or element in _MAPS_OF_STRANGERS):
            yield from _not_in(below, ours.get(element, {}), (*prefix, element))
        elif element not in ours:
            yield (*prefix, element)


def _step(here: object, element: str, *, default: object) -> object:
    """Return the value of a field, or the item of a list, with these keys."""
    kind, _, text = element.partition(":")
    if kind == "f" and isinstance(here, Mapping):
        return here.get(text, default)
    item = _item(here, json.loads(text)) if kind == "k" and isinstance(here, list) else None
    return default if item is None else item


def _item(items: list[object], keys: Mapping[str, object]) -> Mapping[str, object] | None:
    for item in items:
        # A key that we leave to its default (a port's protocol) is absent from what we render.
        if isinstance(item, Mapping) and all(item.get(key, value) == value for key, value in keys.items()):
            return item
    return None

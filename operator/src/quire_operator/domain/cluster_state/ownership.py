"""Who set which field of an object: Kubernetes' ``managedFields``, read for drift and for what others added.

Used when an object is trimmed (``observed``) and when it is compared with what we want (``plan``). A path is a tuple of
FieldsV1 elements: ``f:name`` (a field), ``k:{"name":"engine"}`` (an item of a list by its keys), ``v:…`` (of a set).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_common.contract.engine import ENVIRONMENT_PREFIX
from quire_operator.domain.resource.names import FIELD_MANAGER

Path = tuple[str, ...]
Tree = Mapping[str, "Tree"]

_ENGINE = 'k:{"name":"engine"}'
_POD_SPEC: Path = ("f:spec", "f:template", "f:spec")
# Of a Service: replicas would get requests before they are ready.
_UNREADY_ADDRESSES: Path = ("f:spec", "f:publishNotReadyAddresses")
# Below the pod spec. What anybody else adds here changes what a replica is to the gateway, to the probes or to the
# security promised for it; whatever lies beneath breaks the contract as well.
_CONTRACT: tuple[Path, ...] = (
    ("f:hostNetwork",),
    ("f:hostPID",),
    ("f:hostIPC",),
    ("f:shareProcessNamespace",),
    ("f:nodeName",),
    ("f:securityContext",),
    ("f:containers", _ENGINE, "f:ports"),
    ("f:containers", _ENGINE, "f:command"),
    ("f:containers", _ENGINE, "f:args"),
    ("f:containers", _ENGINE, "f:lifecycle"),
    ("f:containers", _ENGINE, "f:securityContext"),
    ("f:containers", _ENGINE, "f:livenessProbe"),
    ("f:containers", _ENGINE, "f:readinessProbe"),
    ("f:containers", _ENGINE, "f:startupProbe"),
)
_ENGINE_SETTINGS = ("f:containers", _ENGINE, "f:env")
_ENGINE_SETTING = f'k:{{"name":"{ENVIRONMENT_PREFIX}'
_CONTAINER_LISTS = ("f:containers", "f:initContainers", "f:ephemeralContainers")
# Many write here side by side, so their entries are told apart even where none is ours.
_MAPS_OF_STRANGERS = ("f:metadata", "f:annotations", "f:labels")
# `kubectl rollout restart` writes this one, and is meant to.
_RESTARTED_AT: Path = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:kubectl.kubernetes.io/restartedAt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignField:
    """A field of ``spec`` that somebody else set and we did not, as high up as nothing beneath it is ours."""

    path: Path
    manager: str
    child: str = ""
    """Which object it is in, where that is to be told."""

    def __str__(self) -> str:
        where = f"to the {self.child}: " if self.child else ""
        return f"{where}{path_text(self.path)} (set by {self.manager})"


def fingerprint(body: Mapping[str, object]) -> str:
    """Changes exactly when a field of ours was changed or removed: of which fields are ours, and of what they hold.

    The values count: a second operator writes as the same manager, and the entry's time tells only seconds apart.
    Empty where nothing of the object is ours.
    """
    for entry in managed_fields(body):
        if _is_ours(entry):
            ours = _values(_tree(entry), body)
            text = json.dumps([entry.get("fieldsV1"), ours], sort_keys=True, separators=(",", ":"), default=str)
            return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return ""


def managed_fields(body: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """Who set what of an object."""
    metadata = body.get("metadata")
    entries = metadata.get("managedFields") if isinstance(metadata, Mapping) else None
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _values(tree: Tree, here: object) -> object:
    """What an object has at the leaves of a tree of fields."""
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
    """What others set in ``spec``."""
    ours: Tree = next((_tree(entry) for entry in managed_fields if _is_ours(entry)), {})
    found: dict[Path, ForeignField] = {}
    for entry in managed_fields:
        if _is_ours(entry) or entry.get("subresource") == "status":
            continue
        manager = str(entry.get("manager", "somebody"))
        for path in _not_in(_tree(entry).get("f:spec", {}), ours.get("f:spec", {}), ("f:spec",)):
            found.setdefault(path, ForeignField(path=path, manager=manager))
    found.pop(_RESTARTED_AT, None)
    return tuple(found[path] for path in sorted(found))


def breaks_contract(path: Path) -> bool:
    """Whether an added field changes what a replica is to the gateway, the probes, or the security promised for it."""
    if path == _UNREADY_ADDRESSES:
        return True
    if path[: len(_POD_SPEC)] != _POD_SPEC:
        return False
    below = path[len(_POD_SPEC) :]
    if below[:1] and below[0] in _CONTAINER_LISTS and len(below) <= 2:
        return True
    if below[:3] == _ENGINE_SETTINGS and below[3:] and below[3].startswith(_ENGINE_SETTING):
        return True
    return any(below[: len(guarded)] == guarded for guarded in _CONTRACT)


def exists_in(body: Mapping[str, object], path: Path) -> bool:
    """Whether an object has something at this path."""
    here: object = body
    for element in path:
        kind, _, text = element.partition(":")
        if kind == "f" and isinstance(here, Mapping) and text in here:
            here = here[text]
        elif kind == "k" and isinstance(here, list):
            item = _item(here, json.loads(text))
            if item is None:
                return False
            here = item
        else:
            return False
    return True


def removal_patch(paths: Sequence[Path]) -> dict[str, object]:
    """A strategic merge patch that removes these fields and touches nothing else."""
    patch: dict[str, object] = {}
    for path in paths:
        _remove(patch, path)
    return patch


def path_text(path: Path) -> str:
    """``spec.template.spec.containers[name=engine].image``."""
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


def _item(items: list[object], keys: Mapping[str, object]) -> Mapping[str, object] | None:
    for item in items:
        # A key that we leave to its default (a port's protocol) is absent from what we render.
        if isinstance(item, Mapping) and all(item.get(key, value) == value for key, value in keys.items()):
            return item
    return None


def _remove(patch: dict[str, object], path: Path) -> None:
    here: dict[str, object] = patch
    for element, following in zip(path, (*path[1:], None), strict=True):
        kind, _, text = element.partition(":")
        if kind == "k":
            continue  # handled with the field that holds the list
        if following is None:
            here[text] = None
        elif following.startswith("k:"):
            keys = json.loads(following.removeprefix("k:"))
            items = here.setdefault(text, [])
            assert isinstance(items, list)
            item = next((known for known in items if all(known.get(k) == v for k, v in keys.items())), None)
            if item is None:
                item = dict(keys)
                items.append(item)
            here = item
        else:
            below = here.setdefault(text, {})
            if not isinstance(below, dict):
                return  # the whole of it goes already
            here = below
    if path[-1].startswith("k:"):
        here["$patch"] = "delete"

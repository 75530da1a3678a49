"""Strategic merge of a pod template: maps merge by key and lists of named items by item; other values are replaced.

``pod_template`` uses it for ``spec.podTemplate``. It follows
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/ : ``null`` removes a field,
``$patch: delete`` removes an item, ``$patch: replace`` replaces instead of merging. Other directives are problems.
"""

from collections.abc import Mapping, Sequence

from quire_operator.domain.resource.fields import Problem, shown

JSON = Mapping[str, object]

_PATCH = "$patch"
# The merge keys of a pod spec's lists. A list without one has no identity to merge by and is replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}


def merge(base: JSON, patch: JSON, *, path: str, problems: list[Problem]) -> dict[str, object]:
    """Return ``base`` with ``patch`` merged in. The patch's errors are added to ``problems``."""
    if patch.get(_PATCH) == "replace":
        return {key: value for key, value in patch.items() if key != _PATCH and value is not None}
    merged = dict(base)
    for key, value in patch.items():
        where = f"{path}.{key}"
        if key.startswith("$"):
            _note_directive(key, value, where, problems)
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = _merge_map(merged.get(key), value, where, problems)
        elif isinstance(value, list):
            merged[key] = _merge_list(key, merged.get(key), value, where, problems)
        else:
            merged[key] = value
    return merged


def _note_directive(key: str, value: object, where: str, problems: list[Problem]) -> None:
    if key == _PATCH:
        message = f'must be "replace" here, or "delete" on an item of a list; got {shown(value)}'
    else:
        message = "is not supported; write the whole list, or use $patch: delete on an item"
    problems.append(Problem(path=where, message=message))


def _merge_map(base: object, patch: JSON, where: str, problems: list[Problem]) -> dict[str, object]:
    return merge(base if isinstance(base, Mapping) else {}, patch, path=where, problems=problems)


def _merge_list(field: str, base: object, patch: Sequence[object], where: str, problems: list[Problem]) -> list[object]:
    key = _MERGE_KEYS.get(field)
    if key is None:
        return list(patch)
    items = list(base) if isinstance(base, list) else []
    for number, item in enumerate(patch):
        at = f"{where}[{number}]"
        if not isinstance(item, Mapping):
            problems.append(Problem(path=at, message=f"must be a mapping, got {shown(item)}"))
        elif key not in item:
            problems.append(Problem(path=f"{at}.{key}", message="is required: items are merged by it"))
        else:
            _merge_item(items, item, key, at, problems)
    return items


def _merge_item(items: list[object], item: JSON, key: str, at: str, problems: list[Problem]) -> None:
    same = (i for i, known in enumerate(items) if isinstance(known, Mapping) and known.get(key) == item[key])
    index = next(same, None)
    if item.get(_PATCH) == "delete":
        if index is not None:
            del items[index]
    elif index is None:
        items.append(merge({}, item, path=at, problems=problems))
    else:
        items[index] = _merge_map(items[index], item, at, problems)

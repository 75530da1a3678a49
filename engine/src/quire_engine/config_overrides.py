"""Values that replace those of config.json (--hf-overrides), under the names of transformers 4 or of transformers 5.

A rotation has two forms: ``rope_theta`` and ``rope_scaling`` (4), or all in ``rope_parameters``, by kind of layer where
layers differ (5). An override applies in either form, whichever one the file has. This module needs no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from quire_common.model_memory import FULL, SLIDING

_ROPES = ("rope_parameters", "rope_scaling")
_OF_ROTATION = (*_ROPES, "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_KEPT = ("rope_theta", "partial_rotary_factor")
"""The fields of a rotation that are not its scaling."""
_ORIGINAL = "original_max_position_embeddings"


def rotation_field(config: Mapping[str, Any]) -> str:
    """Return the field that contains the rotation; transformers 5 prefers the older name if both are present."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def is_by_kind(rope: Any) -> bool:
    """Return whether a rotation is given by kind of layer."""
    return isinstance(rope, Mapping) and (FULL in rope or SLIDING in rope)


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with overrides; objects within objects are merged field by field."""
    merged, changes = dict(config), dict(overrides)
    rotation = {name: changes.pop(name) for name in _OF_ROTATION if name in changes}
    if rotation:
        _override_rotation(merged, rotation)
    for name, other in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        if name in changes and other not in changes:
            merged.pop(other, None)
    for name, value in changes.items():
        present = merged.get(name)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            value = with_overrides(present, value)
        merged[name] = value
    return merged


def override_paths(overrides: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return the path of each value that overrides set."""
    for name, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from ((name, *path) for path in override_paths(value))
        else:
            yield (name,)


def replaced(overrides: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the overrides with another value at a path."""
    name, *others = path
    return {**overrides, name: replaced(overrides[name], tuple(others), value) if others else value}


def _override_rotation(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change the rotation of ``config``, in the form that it has."""
    objects = [*(changes.get(name) for name in _ROPES), *(config.get(name) for name in _ROPES)]
    if not all(value is None or isinstance(value, Mapping) for value in objects):
        config |= changes  # the reader of the configuration names what is wrong
        return
    for value in (changes.get(name) or {} for name in _ROPES):
        # Phi-3 has the original length at the top level, where it takes precedence.
        if _ORIGINAL in value and config.get(_ORIGINAL) is not None:
            config[_ORIGINAL] = value[_ORIGINAL]
    if is_by_kind(config.get("rope_parameters")) or is_by_kind(changes.get("rope_parameters")):
        _override_by_kind(config, changes)
        return
    # Without a rotation, the older field is the one that all families read in the same way.
    field = rotation_field(config) if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(field) or {})
    for name in (name for name in _ROPES if name in changes):
        rope = _changed(rope, changes[name])
    for name in (name for name in changes if name not in _ROPES):
        rope.pop(name, None)
        config[name] = changes[name]
    for name in _ROPES:
        config.pop(name, None)
    config[field] = rope


def _override_by_kind(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change a rotation by kind of layer; what is given without a kind is that of full attention, as before 5."""
    given, scaling = (config.pop(name, None) or {} for name in _ROPES)
    kinds = {kind: dict(given.get(kind) or {}) for kind in (FULL, SLIDING)}
    if not is_by_kind(given):
        kinds[FULL] = dict(given)
    kinds[FULL] |= scaling
    of_kinds = ((FULL, "rope_theta", "rope_theta"), (SLIDING, "rope_local_base_freq", "rope_theta"))
    for kind, before, name in of_kinds:
        if (theta := config.pop(before, None)) is not None:
            kinds[kind].setdefault(name, theta)
    for value in (changes[name] for name in _ROPES if name in changes):
        if is_by_kind(value):
            kinds |= {kind: _changed(kinds[kind], value[kind]) for kind in (FULL, SLIDING) if kind in value}
        else:
            kinds[FULL] = _changed(kinds[FULL], value)
    for kind, before, name in of_kinds:
        if before in changes:
            kinds[kind][name] = changes[before]
    if "partial_rotary_factor" in changes:
        config["partial_rotary_factor"] = changes["partial_rotary_factor"]
    config["rope_parameters"] = kinds


def _changed(rope: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a rotation with changes; None removes its scaling."""
    if changes is None:
        return {name: rope[name] for name in _KEPT if name in rope}
    renamed = dict(changes)
    if "type" in renamed:
        renamed.setdefault("rope_type", renamed.pop("type"))
    return {**rope, **renamed}

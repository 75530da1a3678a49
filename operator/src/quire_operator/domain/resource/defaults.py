"""Defaults for LLMDeployments of a namespace or of the cluster: which fields may have one, and how they are applied.

A platform team writes them in a ConfigMap, in the shape of ``spec``. A field of an LLMDeployment wins over the default
of its namespace, which wins over that of the cluster, which wins over the built-in one. A default gives a tenant
nothing that the tenant could not write, because the whole spec is checked after the defaults were applied. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_operator.domain.resource import names
from quire_operator.domain.resource.deployment import Invalid, Spec
from quire_operator.domain.resource.fields import Problem, shown

JSON = Mapping[str, object]
CONFIG_MAP, KEY = "quire-defaults", "spec"
"""The name of the ConfigMap, and the key of its data that contains the defaults in YAML."""
_MOST_PROBLEMS = 8


def _always(spec: JSON) -> bool:
    return True


def _has(*path: str) -> Callable[[JSON], bool]:
    return lambda spec: _at(spec, path) is not None


def _surges(spec: JSON) -> bool:
    """Return whether maxSurge and maxUnavailable are used, and a person set neither of them."""
    strategy = _at(spec, ("rollout", "strategy"))
    own = _at(spec, ("rollout", "maxSurge")), _at(spec, ("rollout", "maxUnavailable"))
    return strategy != "Recreate" and own == (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaultable:
    """A field of the spec that may have a default."""

    path: tuple[str, ...]
    applies: Callable[[JSON], bool] = _always
    """Return whether an LLMDeployment with this spec uses the field."""
    is_merged: bool = False
    """True if the default and the own value are merged key by key; lists and other values are never merged."""
    needs: JSON = field(default_factory=dict)
    """The rest of a spec in which the field is valid."""
    partner: tuple[str, ...] = ()
    """The field whose default decides whether this one is valid."""

    @property
    def text(self) -> str:
        return ".".join(self.path)


def _fields() -> tuple[Defaultable, ...]:
    created, scaled = {"model": {"cache": {"size": "1Gi"}}}, {"autoscaling": {"maxReplicas": 1}}
    cache = [
        Defaultable(path=("model", "cache", name), applies=_has("model", "cache", "size"), needs=created)
        for name in ("storageClassName", "accessMode", "retain")
    ]
    targets = [
        Defaultable(path=("autoscaling", "targets", name), applies=_has("autoscaling"), needs=scaled)
        for name in ("queueDepth", "kvUsagePercent", "firstTokenWait", "totalTimeToFirstToken", "interTokenLatency")
    ]
    to_zero = [
        Defaultable(path=("autoscaling", "scaleToZero", name), applies=_has("autoscaling"), needs=scaled)
        for name in ("after", "holdTimeout", "maxHeld")
    ]
    surge, unavailable = ("rollout", "maxSurge"), ("rollout", "maxUnavailable")
    limits = [
        Defaultable(path=path, applies=_surges, partner=partner)
        for path, partner in ((surge, unavailable), (unavailable, surge))
    ]
    engine = ("image", "imagePullPolicy", "imagePullSecrets", "maxModelLength", "kvCache")
    return (
        Defaultable(path=("model", "credentials")),
        *cache,
        *(Defaultable(path=("engine", name)) for name in engine),
        Defaultable(path=("resources",), is_merged=True),
        Defaultable(path=("autoscaling", "metricsSource"), applies=_has("autoscaling"), needs=scaled),
        *targets,
        *to_zero,
        *limits,
        *(Defaultable(path=("rollout", name)) for name in ("progressDeadline", "windows")),
        Defaultable(path=("auth",)),
        Defaultable(path=("podTemplate",), is_merged=True),
    )


FIELDS = _fields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The valid defaults of one ConfigMap, and what is wrong with the others."""

    source: str
    """The ConfigMap, as NAMESPACE/NAME."""
    values: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    """The defaults by the path of their field."""
    problems: tuple[Problem, ...] = ()

    @property
    def complaint(self) -> str:
        """All problems as one message; empty without any."""
        told = "; ".join(str(problem) for problem in self.problems[:_MOST_PROBLEMS])
        return f"ConfigMap {self.source}: {told}" if told else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultedSpec:
    """A spec with defaults, and where each default comes from."""

    spec: JSON
    origins: tuple[tuple[str, str], ...] = ()
    """Pairs of a field and the ConfigMap that its default comes from."""


def read_defaults(document: object, *, source: str) -> Defaults:
    """Return the defaults in a document. Each invalid one is a problem, and the others apply."""
    if not isinstance(document, Mapping):
        problem = Problem(path=f"data.{KEY}", message=f"must be a mapping in the shape of spec, got {shown(document)}")
        return Defaults(source=source, problems=(problem,))
    values: dict[tuple[str, ...], object] = {}
    problems = [_unknown(path) for path in _paths(document) if not _is_known(path)]
    for each in FIELDS:
        value = _at(document, each.path)
        if value is None:
            continue
        found = _problems(each, value, _at(document, each.partner) if each.partner else None)
        problems += [problem for problem in found if problem not in problems]
        if not found:
            values[each.path] = value
    return Defaults(source=source, values=values, problems=tuple(problems))


def apply_defaults(spec: JSON, layers: Sequence[Defaults]) -> DefaultedSpec:
    """Return a spec with the defaults of these layers, of which earlier ones win."""
    result, origins = dict(spec), []
    for each in FIELDS:
        given = [(layer.source, layer.values[each.path]) for layer in layers if each.path in layer.values]
        if not given or not each.applies(spec):
            continue
        own = _at(spec, each.path)
        if each.is_merged and (own is None or isinstance(own, Mapping)):
            value: object = {} if own is None else own
            for source, default in given:
                merged = _merged(default, value)
                if merged != value:
                    origins.append((each.text, source))
                value = merged
            result = _with(result, each.path, value)
        elif own is None:
            source, default = given[0]
            origins.append((each.text, source))
            result = _with(result, each.path, default)
    return DefaultedSpec(spec=result, origins=tuple(origins))


def _problems(each: Defaultable, value: object, partner: object) -> list[Problem]:
    """Return the problems of a default, which is read as a part of a minimal LLMDeployment with its partner."""
    base = _merged({"model": {"source": "hf://default/model"}}, each.needs)
    assert isinstance(base, Mapping)
    if partner is not None:
        base = _with(dict(base), each.partner, partner)
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "default", "namespace": "default"},
        "spec": _with(dict(base), each.path, value),
    }
    parsed = Spec.parse(body)
    found = parsed.problems if isinstance(parsed, Invalid) else ()
    return [Problem(path=f"data.{KEY}: {problem.path}", message=problem.message) for problem in found]


def _unknown(path: tuple[str, ...]) -> Problem:
    known = ", ".join(each.text for each in FIELDS)
    return Problem(
        path=f"data.{KEY}: spec.{'.'.join(path)}",
        message=f"cannot have a default: set it in each LLMDeployment. Fields that can: {known}",
    )


def _is_known(path: tuple[str, ...]) -> bool:
    return any(path[: len(each.path)] == each.path for each in FIELDS)


def _paths(document: JSON, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of a document, as deep as those of fields with a default."""
    found: list[tuple[str, ...]] = []
    for key, value in document.items():
        path = (*above, str(key))
        is_above_a_field = any(len(path) < len(each.path) and each.path[: len(path)] == path for each in FIELDS)
        if is_above_a_field and isinstance(value, Mapping):
            found += _paths(value, path)
        elif value is not None:
            found.append(path)
    return found


def _at(document: JSON, path: Sequence[str]) -> object:
    value: object = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _with(document: dict[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """Return a copy of a document with this value; what is in its way and is no mapping stays."""
    key, *rest = path
    if not rest:
        return {**document, key: value}
    inner = document.get(key)
    if inner is not None and not isinstance(inner, Mapping):
        return document
    return {**document, key: _with(dict(inner or {}), rest, value)}


def _merged(default: object, own: object) -> object:
    """Return the own value with what it lacks of the default."""
    if not isinstance(default, Mapping) or not isinstance(own, Mapping):
        return default if own is None else own
    keys = [*own, *(key for key in default if key not in own)]
    return {key: _merged(default.get(key), own.get(key)) for key in keys}
